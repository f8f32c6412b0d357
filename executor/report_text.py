"""A run's report for people."""

from rich.console import Console
from rich.table import Table

from ..plans.units import format_bytes
from .report import ComponentReport, RunReport, SegmentReport


def print_report(report: RunReport, console: Console, *, in_full: bool = False) -> None:
    """Print predicted against observed, axis by axis, and what each component took; in full by segments too."""
    axes = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("axis", "predicted peak", "weights", "all tensors"):
        axes.add_column(name, justify="left" if name == "axis" else "right")
    for axis in report.axes:
        axes.add_row(axis.axis, _size(axis.predicted_bytes), format_bytes(axis.weights_bytes), _size(axis.peak_bytes))
    console.print(axes)
    console.print()
    components = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("component", "computes on", "home/hold", "homes verified", "load", "first pass", "later passes"):
        components.add_column(name)
    for component in report.components:
        components.add_row(
            component.component,
            component.compute_device,
            ", ".join(component.homes),
            "yes" if component.homes_verified else "not on this platform",
            f"{component.load_s:.3f} s",
            "no sample inputs" if component.first_pass_s is None else f"{component.first_pass_s:.3f} s",
            "" if component.later_pass_s is None else f"{component.later_pass_s:.3f} s",
        )
    console.print(components)
    if in_full:
        _print_segments(report, console)
        _print_transfers(report, console)
    console.print(f"\nloaded in {report.load_s:.2f} s")
    for component in report.components:
        read = [f"{way} {format_bytes(count)}" for way, count in component.read_bytes.items() if count]
        if read:
            console.print(f"{component.component}: reader {component.reader}; read {', '.join(read)}")
        if component.replaced_bytes:
            size = format_bytes(component.replaced_bytes)
            console.print(f"{component.component}: new values of weights take {size} of their own")
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


def _print_segments(report: RunReport, console: Console) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("component", "part", "home/hold", "axis", "predicted", "observed"):
        table.add_column(name, justify="right" if name in ("predicted", "observed") else "left")
    for component in report.components:
        title = component.component
        for segment in component.segments:
            cells = _part(segment), f"{segment.home}/{segment.hold}"
            for axis in sorted({*segment.predicted_bytes, *segment.observed_bytes}):
                predicted = format_bytes(segment.predicted_bytes.get(axis, 0))
                table.add_row(title, *cells, axis, predicted, format_bytes(segment.observed_bytes.get(axis, 0)))
                title, cells = "", ("", "")
    console.print()
    console.print(table)


def _print_transfers(report: RunReport, console: Console) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("component", "passes and what they moved", "predicted for a request", "observed in this run"):
        table.add_column(name, justify="left" if name.startswith(("component", "passes")) else "right")
    for component in report.components:
        title = component.component
        for row in _transfers(component):
            table.add_row(title, *row)
            title = ""
    console.print()
    console.print(table)
    disk = "not counted here" if report.disk_read_bytes is None else format_bytes(report.disk_read_bytes)
    console.print(f"\nread from disks by the process: {disk}")


def _transfers(component: ComponentReport) -> list[tuple[str, str, str]]:
    """What a request is predicted to cost, beside what the passes that ran did."""
    predicted, passes = component.predicted, component.planned_passes
    pass_s = predicted.seconds / passes if predicted and predicted.seconds is not None else None
    observed_s = component.first_pass_s if component.later_pass_s is None else component.later_pass_s
    return [
        ("passes", str(passes), str(component.passes)),
        ("seconds per pass", _seconds(pass_s), _seconds(observed_s)),
        ("exposed stall", _seconds(predicted.stall_s if predicted else None), _seconds(component.stall_s)),
        (
            "copied to the device",
            _known(predicted.link_bytes if predicted else None),
            format_bytes(component.link_bytes),
        ),
        (
            "read from the file",
            _known(predicted.disk_bytes if predicted else None, "at most "),
            format_bytes(sum(component.read_bytes.values())),
        ),
    ]


def _part(segment: SegmentReport) -> str:
    if segment.stack is None:
        return "fixed part"
    runs = ", ".join(str(start) if stop == start + 1 else f"{start}-{stop - 1}" for start, stop in segment.layers)
    return f"{segment.stack} {runs}"


def _seconds(seconds: float | None) -> str:
    return "not known" if seconds is None else f"{seconds:.3f} s"


def _known(count: int | None, before: str = "") -> str:
    return "not known" if count is None else f"{before}{format_bytes(count)}"


def _size(count: int | None) -> str:
    return "not counted" if count is None else format_bytes(count)
