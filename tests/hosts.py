"""Host trees as the kernel would show them, built from plain files below a temporary folder."""

import os
from dataclasses import dataclass, field
from pathlib import Path

from placewise.planner.measuring.host import Memory, measure_host
from placewise.plans.machine import Host, Malformed, Measured, Unmeasurable

GIB = 1 << 30
V1_NO_CAP = 9223372036854771712
V1_MOUNT = "/sys/fs/cgroup/memory"
V2_MOUNT = "/sys/fs/cgroup"
HYBRID_MOUNT = "/sys/fs/cgroup/unified"


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """What a cgroup's memory consists of. The usage that the kernel would tell is the sum."""

    anonymous: int = 0
    inactive_file: int = 0
    active_file: int = 0
    shmem: int = 0
    unevictable: int = 0

    @property
    def total(self) -> int:
        return self.anonymous + self.inactive_file + self.active_file + self.shmem + self.unevictable

    def statistics(self, *, prefix: str = "") -> str:
        cache = self.inactive_file + self.active_file + self.shmem
        lines = {
            "anon": self.anonymous,
            "file": cache,
            "cache": cache,
            "shmem": self.shmem,
            "inactive_anon": self.shmem,
            "inactive_file": self.inactive_file,
            "active_file": self.active_file,
            "unevictable": self.unevictable,
        }
        return "".join(f"{prefix}{name} {value}\n" for name, value in lines.items())


@dataclass(slots=True)
class HostTree:
    """A tree to fill. Each method writes files; what is not written is not there."""

    root: Path
    _mounts: list[str] = field(default_factory=list[str])

    def write(self, path: str, content: str | bytes) -> Path:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(os.fsencode(content))
        return file

    def member_of(self, *lines: str) -> None:
        self.write("/proc/self/cgroup", "".join(f"{line}\n" for line in lines))

    def mount(self, point: str, filesystem: str, *, root: str = "/", options: str = "rw") -> None:
        number = len(self._mounts) + 20
        before = f"{number} 1 0:{number} {root} {point} rw,relatime shared:{number}"
        self._mounts.append(f"{before} - {filesystem} {filesystem} {options}\n")
        self.write("/proc/self/mountinfo", "".join(self._mounts))

    def mount_v1(self, *, root: str = "/", point: str = V1_MOUNT) -> None:
        self.mount(point, "cgroup", root=root, options="rw,memory")

    def mount_v2(self, *, root: str = "/", point: str = V2_MOUNT) -> None:
        self.mount(point, "cgroup2", root=root, options="rw,nsdelegate")

    def v1(
        self,
        path: str,
        *,
        limit: int | str = V1_NO_CAP,
        use: Use = Use(),
        own: Use | None = None,
        hierarchical: int | None = None,
    ) -> None:
        """Fill `<V1_MOUNT><path>`. `use` is with the descendants, `own` without them."""
        folder = f"{V1_MOUNT}/{path}"
        above = "" if hierarchical is None else f"hierarchical_memory_limit {hierarchical}\n"
        own_lines = (use if own is None else own).statistics()
        self.write(f"{folder}/memory.limit_in_bytes", f"{limit}\n")
        self.write(f"{folder}/memory.usage_in_bytes", f"{use.total}\n")
        self.write(f"{folder}/memory.stat", own_lines + above + use.statistics(prefix="total_"))

    def v2(
        self,
        path: str,
        *,
        limit: int | str = "max",
        high: int | str = "max",
        use: Use = Use(),
        point: str = V2_MOUNT,
    ) -> None:
        folder = f"{point}/{path}"
        self.write(f"{folder}/memory.max", f"{limit}\n")
        self.write(f"{folder}/memory.high", f"{high}\n")
        self.write(f"{folder}/memory.current", f"{use.total}\n")
        self.write(f"{folder}/memory.stat", use.statistics())

    def v2_root(self) -> None:
        """The true root of v2: figures of what is used, and neither a limit nor `memory.current`."""
        self.write(f"{V2_MOUNT}/cgroup.controllers", "cpu memory\n")
        self.write(f"{V2_MOUNT}/memory.stat", Use(anonymous=GIB).statistics())

    def measure(
        self,
        *,
        total: int = 256 * GIB,
        available: int = 200 * GIB,
        memory: Memory | Unmeasurable | Malformed | None = None,
        platform: str = "linux",
    ) -> Host:
        figures = Memory(total_bytes=total, available_bytes=available) if memory is None else memory
        return measure_host(self.root, memory=figures, platform=platform)


def v1_tree(tree: HostTree, path: str) -> HostTree:
    """A v1 machine without caps, with this process in `path`."""
    tree.member_of("5:cpu,cpuacct:/elsewhere", f"4:memory:{path}", "1:name=systemd:/init", "0::/")
    tree.mount("/sys/fs/cgroup", "tmpfs", options="rw,mode=755")
    tree.mount("/sys/fs/cgroup/cpu,cpuacct", "cgroup", options="rw,cpu,cpuacct")
    tree.mount_v1()
    tree.v1("/")
    return tree


def v2_tree(tree: HostTree, path: str) -> HostTree:
    """A v2 machine without caps, with this process in `path`."""
    tree.member_of(f"0::{path}")
    tree.mount_v2()
    tree.v2_root()
    return tree


def available(host: Host) -> int:
    assert isinstance(host.available, Measured), host.available
    return host.available.value


def total(host: Host) -> int:
    assert isinstance(host.total, Measured), host.total
    return host.total.value


def malformed(host: Host) -> Malformed:
    """What made no sense, after a check that no other figure stands in for it."""
    assert isinstance(host.available, Malformed), host.available
    assert host.total == host.available
    assert host.binding == host.available.source
    return host.available
