"""A run's report for people."""

from rich.console import Console
from rich.table import Table

from ..plans.units import format_bytes
from .report import RunReport


def print_report(report: RunReport, console: Console) -> None:
    """Print predicted against observed, axis by axis, and what each component took."""
    axes = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("axis", "predicted peak", "weights", "all tensors"):
        axes.add_column(name, justify="left" if name == "axis" else "right")
    for axis in report.axes:
        axes.add_row(axis.axis, _size(axis.predicted_bytes), format_bytes(axis.weights_bytes), _size(axis.peak_bytes))
    console.print(axes)
    console.print()
    components = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("component", "computes on", "home/hold", "homes verified", "forward"):
        components.add_column(name)
    for component in report.components:
        components.add_row(
            component.component,
            component.compute_device,
            ", ".join(component.homes),
            "yes" if component.homes_verified else "not on this platform",
            "no sample inputs" if component.forward_s is None else f"{component.forward_s:.3f} s",
        )
    console.print(components)
    console.print(f"\nloaded in {report.load_s:.2f} s")
    for component in report.components:
        read = [f"{way} {format_bytes(count)}" for way, count in component.read_bytes.items() if count]
        if read:
            console.print(f"{component.component}: reader {component.reader}; read {', '.join(read)}")
        if component.page_locked_bytes:
            console.print(f"{component.component}: page-locked {format_bytes(component.page_locked_bytes)}")
        for note in component.notes:
            console.print(f"note: {component.component}: {note}")
        if component.reader_broke:
            console.print(f"note: {component.component}: fetching ahead failed, so layers waited for their weights")
        for what, names in (
            ("stored but not used", component.unused),
            ("in no file, left as built", component.as_built),
        ):
            if names:
                console.print(f"note: {component.component}: {what}: {', '.join(names[:5])}", style="dim")


def _size(count: int | None) -> str:
    return "not counted" if count is None else format_bytes(count)
