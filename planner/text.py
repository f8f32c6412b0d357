"""What the planner found beyond the plan, for people: worths and the frontier, as tables and a picture."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..plans.picture import new_figure, save_figure
from ..plans.units import GIB, format_bytes
from .frontier import Point
from .worth import Worth


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


def _cost(point: Point) -> tuple[float, str]:
    """The best known figure of a machine, and what it is."""
    if point.seconds is not None:
        return point.seconds, "seconds per request"
    if point.transfer_s is not None:
        return point.transfer_s, "seconds of moving weights per request"
    return (point.moved_bytes or 0) / GIB, "GiB moved per request"


def _cell(point: Point) -> str:
    if not point.fits:
        return "refused"
    if point.seconds is not None:
        return f"{point.seconds:.2f} s"
    if point.transfer_s is not None:
        return f"{point.transfer_s:.2f} s + compute"
    return f"{format_bytes(point.moved_bytes or 0)} moved"
