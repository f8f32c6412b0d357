"""How many processor cores this process may use: its affinity, and the quotas of its cgroups."""

import os
from pathlib import Path, PurePosixPath

from .kernel_files import lines_of, read_kernel_file
from .mountinfo import Mount, read_mounts

_NO_QUOTA = frozenset({"max", "-1"})


def available_cores(root: Path = Path("/")) -> float:
    """Cores, of which a quota may leave a fraction. A quota that cannot be read counts as none.

    Args:
        root: where the tree that holds `proc` and the cgroup mounts begins.
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([float(affinity), *_quotas(root)])


def _quotas(root: Path) -> list[float]:
    content, mounts = read_kernel_file(root / "proc/self/cgroup"), read_mounts(root)
    if not isinstance(content, bytes) or not isinstance(mounts, tuple):
        return []
    found: list[float] = []
    for line in lines_of(content):
        number, _, rest = line.partition(b":")
        controllers, _, path = rest.partition(b":")
        unified = number == b"0"
        if unified or b"cpu" in controllers.split(b","):
            for mount in mounts:
                if _shows_cpu(mount, unified=unified):
                    found += _quotas_up(root, mount, os.fsdecode(path), unified=unified)
    return found


def _shows_cpu(mount: Mount, *, unified: bool) -> bool:
    return mount.filesystem == "cgroup2" if unified else mount.filesystem == "cgroup" and "cpu" in mount.options


def _quotas_up(root: Path, mount: Mount, path: str, *, unified: bool) -> list[float]:
    """The quotas of a cgroup and of all that are above it in sight; of the mount's top alone where it is elsewhere."""
    place = PurePosixPath(path)
    inside = place.relative_to(mount.root) if place.is_relative_to(mount.root) else PurePosixPath()
    if ".." in inside.parts:
        inside = PurePosixPath()
    top = root / mount.point.lstrip("/")
    quotas = [_quota(top / folder, unified=unified) for folder in (inside, *inside.parents)]
    return [quota for quota in quotas if quota is not None]


def _quota(folder: Path, *, unified: bool) -> float | None:
    if unified:
        fields = _words(folder / "cpu.max")
    else:
        fields = [*_words(folder / "cpu.cfs_quota_us"), *_words(folder / "cpu.cfs_period_us")]
    if len(fields) != 2 or fields[0] in _NO_QUOTA or not all(field.isdecimal() for field in fields):
        return None
    quota, period = (int(field) for field in fields)
    return quota / period if quota > 0 and period > 0 else None


def _words(file: Path) -> list[str]:
    content = read_kernel_file(file)
    return content.decode("ascii", "replace").split() if isinstance(content, bytes) else []
