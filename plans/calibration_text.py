"""A calibration for people."""

from rich.console import Console
from rich.table import Table

from .calibration import Calibration, ComputeRate, DiskRate
from .units import format_bytes

_SCALES = (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3))


def print_calibration(calibration: Calibration, console: Console) -> None:
    """Print the rates, the ways of reading the disk one a line, then the notes."""
    how = "given" if calibration.given else f"measured {calibration.measured_at}"
    console.print(f"calibration: {how}")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    for disk in calibration.disks:
        table.add_row(f"disk, {disk.mode}", _rate(disk.bytes_per_s), _way(disk))
    if not calibration.disks:
        table.add_row("disk", "unknown", "")
    copy = calibration.memory_copy_bytes_per_s
    table.add_row("memory copy", "unknown" if copy is None else _rate(copy), "")
    if calibration.touch_s_per_gib is not None:
        table.add_row("fresh memory", f"{calibration.touch_s_per_gib:.2f} s/GiB", "")
    for link in calibration.links:
        table.add_row(f"link to {link.device}", _rate(link.bytes_per_s), f"from {link.source} memory")
    if calibration.pin_s_per_gib is not None:
        table.add_row("pinning", f"{calibration.pin_s_per_gib:.2f} s/GiB", "")
    for product in calibration.compute:
        table.add_row(f"compute on {product.device}", f"{_scaled(product.flops_per_s)}FLOP/s", _product(product))
    console.print(table)
    for note in calibration.notes:
        console.print(f"note: {note}", style="dim")


def _way(disk: DiskRate) -> str:
    reads = f"{format_bytes(disk.chunk_bytes)} at a time, {disk.depth} at once"
    return reads if disk.cpu_s_per_gib is None else f"{reads}, {disk.cpu_s_per_gib:.2f} s/GiB of processor time"


def _product(product: ComputeRate) -> str:
    return product.dtype if product.rows is None else f"{product.dtype}, {product.rows} rows"


def _rate(bytes_per_s: float) -> str:
    return f"{format_bytes(round(bytes_per_s))}/s"


def _scaled(rate: float) -> str:
    """Three significant figures and the decimal prefix."""
    for prefix, factor in _SCALES:
        if rate >= factor:
            return f"{rate / factor:#.3g} {prefix}".replace(". ", " ")
    return f"{rate:.3g} "
