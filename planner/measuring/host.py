"""The host as this process may use it: the kernel's word on available memory, and every cgroup's.

Placing by the machine's memory inside a container ends with the process killed; placing by a limit minus all
that counts towards it, page cache too, ends with nothing placed. So the smallest *headroom* decides.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil

from ...plans.machine import Cap, Host, Malformed, Measured, Reading, Unlimited, Unmeasurable
from .cgroups import Caps, find_caps
from .kernel_files import shown

_LINUX = "linux"


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The machine's memory, whoever may use it. `available_bytes` can be had without swapping."""

    total_bytes: int
    available_bytes: int


def measure_host(
    root: Path = Path("/"),
    *,
    memory: Memory | Unmeasurable | Malformed | None = None,
    platform: str = sys.platform,
) -> Host:
    """Measure the host. Nothing is changed, and nothing is kept between calls.

    Where a cgroup's figures make no sense, `available` and `total` are `Malformed`, never a guess at them.

    Args:
        root: where the tree that holds `proc`, `sys` and `dev` begins.
        memory: the machine's memory; psutil is asked where it is not given.
        platform: a value of `sys.platform`. Only Linux has cgroups.
    """
    machine = read_memory() if memory is None else memory
    found = find_caps(root) if platform == _LINUX else Caps(notes=(_uncapped_note(platform),))
    malformed = found.malformed[0] if found.malformed else None
    available, binding = _available(machine, found.caps)
    return Host(
        platform=platform,
        available=malformed or available,
        total=malformed or _total(machine, found.caps),
        binding=malformed.source if malformed else binding,
        caps=found.caps,
        memlock=_memlock(platform),
        shared_memory=_shared_memory(root, platform=platform),
        notes=(*found.notes, *(f"{other.source}: {other.why}" for other in found.malformed[1:])),
    )


def read_memory() -> Memory | Unmeasurable | Malformed:
    """What psutil says of this machine."""
    try:
        figures = psutil.virtual_memory()
    except (psutil.Error, OSError, NotImplementedError) as error:
        return Unmeasurable(why=f"psutil: {error}")
    except (KeyError, ValueError, IndexError) as error:
        return Malformed(source="psutil", why=repr(error))
    return Memory(total_bytes=int(figures.total), available_bytes=int(figures.available))


def _available(machine: Memory | Unmeasurable | Malformed, caps: tuple[Cap, ...]) -> tuple[Reading, str]:
    if not isinstance(machine, Memory):
        return machine, "psutil"
    figures = [("psutil", machine.available_bytes), *((_label(cap), cap.headroom_bytes) for cap in caps)]
    # Of equal figures the first: psutil, then the process's own cgroup, then its ancestors going up.
    binding, smallest = min(figures, key=lambda figure: figure[1])
    return Measured(value=smallest, source=binding), binding


def _total(machine: Memory | Unmeasurable | Malformed, caps: tuple[Cap, ...]) -> Reading:
    if not isinstance(machine, Memory):
        return machine
    figures = [("psutil", machine.total_bytes), *((_label(cap), cap.limit_bytes) for cap in caps)]
    source, smallest = min(figures, key=lambda figure: figure[1])
    return Measured(value=smallest, source=source)


def _label(cap: Cap) -> str:
    return f"cgroup {cap.hierarchy} {cap.path} ({cap.kind})"


def _uncapped_note(platform: str) -> str:
    return f"{platform} has no cgroups: available memory is psutil's word alone"


def _memlock(platform: str) -> Reading:
    if platform == "win32":
        return Unmeasurable(why="Windows has no RLIMIT_MEMLOCK")
    try:
        import resource
    except ImportError:
        return Unmeasurable(why="this Python has no resource module")
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    source = "RLIMIT_MEMLOCK"
    return Unlimited(source=source) if soft == resource.RLIM_INFINITY else Measured(value=soft, source=source)


def _shared_memory(root: Path, *, platform: str) -> Reading:
    if platform != _LINUX:
        return Unmeasurable(why=f"{platform} has no /dev/shm")
    folder = root / "dev/shm"
    try:
        figures = os.statvfs(folder)
    except (FileNotFoundError, NotADirectoryError):
        return Unmeasurable(why=f"{shown(folder)} does not exist")
    except OSError as error:
        return Malformed(source=shown(folder), why=f"cannot be read: {error.strerror}")
    # A tmpfs that was mounted without a size limit tells 0 blocks.
    if figures.f_blocks == 0:
        return Unlimited(source=shown(folder))
    return Measured(value=figures.f_blocks * figures.f_frsize, source=shown(folder))
