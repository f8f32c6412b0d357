"""Machine facts for people."""

from rich.console import Console
from rich.table import Table

from .machine import Machine
from .readings import reading_text
from .units import format_bytes


def print_machine(machine: Machine, console: Console) -> None:
    """Print what was measured."""
    host = machine.host
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_row("host available", reading_text(host.available), f"bound by {host.binding}")
    table.add_row("host total", reading_text(host.total), host.platform)
    for cap in host.caps:
        table.add_row(
            f"cgroup {cap.hierarchy} {cap.kind}",
            format_bytes(cap.limit_bytes),
            f"{cap.path}: {format_bytes(cap.usage_bytes)} used, {format_bytes(cap.reclaimable_bytes)} of it "
            f"reclaimable, headroom {format_bytes(cap.headroom_bytes)}",
        )
    table.add_row("lockable memory", reading_text(host.memlock), "RLIMIT_MEMLOCK")
    table.add_row("shared memory", reading_text(host.shared_memory), "/dev/shm")
    for accelerator in machine.accelerators:
        traits = [f"{accelerator.memory} memory"]
        traits += ["pinned memory"] if accelerator.pinned_memory else []
        traits += ["streams"] if accelerator.streams else []
        free, total = reading_text(accelerator.free), reading_text(accelerator.total)
        table.add_row(accelerator.device, f"{free} free of {total}", f"{accelerator.name}: {', '.join(traits)}")
    if not machine.accelerators:
        table.add_row("accelerators", "none", "the CPU computes")
    if machine.disk is not None:
        kind = "network" if machine.disk.network else "local"
        table.add_row("disk of the model", machine.disk.filesystem, kind)
    console.print(table)
    for note in host.notes:
        console.print(f"note: {note}", style="dim")
