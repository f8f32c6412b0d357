"""One cgroup's memory files: what caps it, what it uses, and how much of that the kernel can take back."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...plans.machine import Cap, CapKind, Malformed, Measured, Unlimited, Unmeasurable
from .kernel_files import read_count, read_kernel_file, read_limit, read_statistics, shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    """What a cgroup version calls its memory files.

    `reclaimable` are the lines of memory.stat that count file pages on the LRU lists, each with the names to
    try in order. Neither shared memory nor locked pages are on these lists.
    """

    version: Literal["v1", "v2"]
    limit: str
    high: str | None
    usage: str
    reclaimable: tuple[tuple[str, ...], ...]


V1 = Files(
    version="v1",
    limit="memory.limit_in_bytes",
    high=None,
    usage="memory.usage_in_bytes",
    # Usage counts the descendants too, and in v1 only the lines that begin with "total_" do.
    reclaimable=(("total_inactive_file", "inactive_file"), ("total_active_file", "active_file")),
)
V2 = Files(
    version="v2",
    limit="memory.max",
    high="memory.high",
    usage="memory.current",
    reclaimable=(("inactive_file",), ("active_file",)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """A cgroup: its folder on this machine, and its path in the hierarchy as far as that can be seen."""

    files: Files
    folder: Path
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Usage:
    total_bytes: int
    reclaimable_bytes: int


def caps_of(level: Level) -> tuple[Cap | Malformed, ...]:
    """The caps that are set on this cgroup itself: none, the limit, `memory.high`, or both.

    Without a cap, usage is not read. With one, usage that makes no sense makes the whole level `Malformed`.
    """
    limits = _limits(level)
    malformed = tuple(limit for limit in limits.values() if isinstance(limit, Malformed))
    capped = {kind: limit.value for kind, limit in limits.items() if isinstance(limit, Measured)}
    if malformed or not capped:
        return malformed
    usage = _usage(level)
    if isinstance(usage, Malformed):
        return (usage,)
    return tuple(_cap(level, kind=kind, limit_bytes=limit, usage=usage) for kind, limit in capped.items())


def caps_above(top: Level) -> tuple[Cap | Malformed, ...]:
    """The cap of ancestors that cannot be seen, where the topmost visible cgroup tells it, as v1 does.

    Such an ancestor uses at least what `top` uses, so the headroom is an upper bound.
    """
    if top.files is not V1:
        return ()
    statistics = read_statistics(top.folder / "memory.stat")
    own = read_limit(top.folder / top.files.limit)
    if isinstance(statistics, Malformed):
        return (statistics,)
    if isinstance(statistics, Unmeasurable) or isinstance(own, Malformed | Unmeasurable):
        return ()
    limit = statistics.limit("hierarchical_memory_limit")
    if isinstance(limit, Malformed):
        return (limit,)
    if not isinstance(limit, Measured) or (isinstance(own, Measured) and own.value <= limit.value):
        return ()
    usage = _usage(top)
    if isinstance(usage, Malformed):
        return (usage,)
    above = Level(files=top.files, folder=top.folder, path=f"above {top.path}")
    return (_cap(above, kind=CapKind.limit, limit_bytes=limit.value, usage=usage),)


def charges_children(level: Level) -> bool:
    """Whether memory of child cgroups counts here. Only v1 of Linux before 5.11 could say no."""
    return level.files is not V1 or read_kernel_file(level.folder / "memory.use_hierarchy") != b"0\n"


def _limits(level: Level) -> dict[CapKind, Measured | Unlimited | Unmeasurable | Malformed]:
    files, folder = level.files, level.folder
    limits = {CapKind.limit: read_limit(folder / files.limit)}
    if files.high is not None:
        limits[CapKind.high] = read_limit(folder / files.high)
    if isinstance(limits[CapKind.limit], Unmeasurable) and _must_have_limit(level):
        limits[CapKind.limit] = Malformed(source=shown(folder / files.limit), why="does not exist")
    return limits


def _must_have_limit(level: Level) -> bool:
    # In v2 the root has no such file, nor has a cgroup without the memory controller; in v1 each one has.
    files = level.files
    others = (files.usage, files.high) if files.high is not None else (files.usage,)
    return files is V1 or any(os.path.exists(level.folder / name) for name in others)


def _usage(level: Level) -> _Usage | Malformed:
    usage = read_count(level.folder / level.files.usage)
    if isinstance(usage, Malformed):
        return usage
    if isinstance(usage, Unmeasurable):
        return Malformed(source=shown(level.folder / level.files.usage), why="does not exist")
    reclaimable = _reclaimable(level)
    if isinstance(reclaimable, Malformed):
        return reclaimable
    # The two files are read one after the other, so a moment may lie between them.
    return _Usage(total_bytes=usage.value, reclaimable_bytes=min(reclaimable, usage.value))


def _reclaimable(level: Level) -> int | Malformed:
    file = level.folder / "memory.stat"
    statistics = read_statistics(file)
    if isinstance(statistics, Malformed):
        return statistics
    if isinstance(statistics, Unmeasurable):
        return Malformed(source=shown(file), why="does not exist")
    total = 0
    for names in level.files.reclaimable:
        count = statistics.count(names)
        if isinstance(count, Malformed):
            return count
        if isinstance(count, Unmeasurable):
            return Malformed(source=shown(file), why=f"has no {' or '.join(names)}")
        total += count.value
    return total


def _cap(level: Level, *, kind: CapKind, limit_bytes: int, usage: _Usage) -> Cap:
    return Cap(
        hierarchy=level.files.version,
        path=level.path,
        kind=kind,
        limit_bytes=limit_bytes,
        usage_bytes=usage.total_bytes,
        reclaimable_bytes=usage.reclaimable_bytes,
        headroom_bytes=max(0, limit_bytes - (usage.total_bytes - usage.reclaimable_bytes)),
    )
