"""What the planner found beyond the plan, for people: worths, the frontier and many hosts, as tables and a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..plans.document import Fits, Plan
from ..plans.picture import new_figure, save_figure
from ..plans.readings import reading_text
from ..plans.units import GIB, format_bytes
from .frontier import Point
from .worth import Worth, moved_bytes, request_seconds, transfer_seconds

_MOST_NAMES = 3
"""Of hosts with one plan so many are named."""


def print_worths(worths: Sequence[Worth], console: Console) -> None:
    """Print what more of each axis would save."""
    console.print(Text("\nWhat a change would buy, per request", style="bold"))
    for worth in worths:
        more = f"  +{format_bytes(worth.more_bytes)} of {worth.axis}: "
        if worth.saves_s is not None:
            console.print(f"{more}{worth.saves_s:.3f} s less")
        elif worth.saves_moved_bytes > 0:
            console.print(f"{more}{format_bytes(worth.saves_moved_bytes)} less are moved")
        else:
            console.print(f"{more}nothing")


def print_frontier(points: Sequence[Point], console: Console) -> None:
    """Print the grid: a row per device size, a column per host size."""
    hosts = sorted({point.host_bytes for point in points})
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    table.add_column("device memory", justify="right")
    for host in hosts:
        table.add_column(f"host {format_bytes(host)}", justify="right")
    by_place = {(point.device_bytes, point.host_bytes): point for point in points}
    for device in sorted({point.device_bytes for point in points}, key=lambda size: size or 0):
        cells = [_cell(by_place[device, host]) for host in hosts]
        table.add_row("none" if device is None else format_bytes(device), *cells)
    console.print(table)


def print_hosts(plans: Mapping[str, Plan], console: Console) -> None:
    """Print a row for each plan: the hosts that it is for, what they have, what a request costs, what is least left."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    for name in ("hosts", "host memory", "accelerators", "a request", "least left", "verdict"):
        table.add_column(name, justify="right" if name in ("host memory", "a request") else "left", overflow="fold")
    names: dict[str, list[str]] = {}
    for name, plan in plans.items():
        names.setdefault(plan.digest, []).append(name)
    for hosts in names.values():
        plan = plans[hosts[0]]
        table.add_row(
            _some(hosts),
            reading_text(plan.machine.host.available),
            ", ".join(f"{each.device} {reading_text(each.free)}" for each in plan.machine.accelerators) or "none",
            *_outcome(plan),
        )
    console.print(table)
    fit = sum(isinstance(plan.verdict, Fits) for plan in plans.values())
    console.print(f"{len(plans)} hosts, {len(names)} plans; it fits on {fit}")


def draw_frontier(points: Sequence[Point], path: Path, *, title: str) -> None:
    """Draw the grid as lines, one per host size: cost over device memory. Needs matplotlib.

    Raises:
        InputError: matplotlib is not installed, or the file cannot be written.
    """
    figure = new_figure(8, 5)
    axes = figure.add_subplot()
    label = "GiB moved per request"
    for host in sorted({point.host_bytes for point in points}):
        line = [(point.device_bytes or 0, *_cost(point)) for point in points if point.host_bytes == host and point.fits]
        label = line[0][2] if line else label
        sizes, costs = [device / GIB for device, _, _ in line], [cost for _, cost, _ in line]
        axes.plot(sizes, costs, marker="o", label=f"host {format_bytes(host)}")
    axes.set(xlabel="device memory, GiB", ylabel=label, title=title)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(figure, path)


def _some(names: Sequence[str]) -> str:
    """The first names, and how many more there are."""
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _outcome(plan: Plan) -> tuple[str, str, str]:
    """Cost of a request, what is least left of an axis, and the verdict."""
    if not isinstance(plan.verdict, Fits):
        short = ", ".join(sorted({each.axis for each in plan.verdict.short} | {b.rule for b in plan.verdict.broken}))
        return "", "", f"refused: {short}"
    left = {axis: margin for axis, margin in plan.verdict.margin_bytes.items() if margin is not None}
    least = min(left, key=lambda axis: (left[axis], axis), default=None)
    cost = _figure(request_seconds(plan), transfer_seconds(plan), moved_bytes(plan))
    return cost, "unknown" if least is None else f"{format_bytes(left[least])} of {least}", "fits"


def _cost(point: Point) -> tuple[float, str]:
    """The best known figure of a machine, and what it is."""
    if point.seconds is not None:
        return point.seconds, "seconds per request"
    if point.transfer_s is not None:
        return point.transfer_s, "seconds of moving weights per request"
    return (point.moved_bytes or 0) / GIB, "GiB moved per request"


def _cell(point: Point) -> str:
    return _figure(point.seconds, point.transfer_s, point.moved_bytes) if point.fits else "refused"


def _figure(seconds: float | None, transfer_s: float | None, moved: int | None) -> str:
    if seconds is not None:
        return f"{seconds:.2f} s"
    if transfer_s is not None:
        return f"{transfer_s:.2f} s + compute"
    return f"{format_bytes(moved or 0)} moved"
