"""The measurement against real cgroups: what the kernel charges is what the figures say."""

import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from placewise.planner.measuring.disk import disk_of
from placewise.planner.measuring.host import measure_host
from placewise.plans.machine import Cap, Host, Measured

from .cgroup import MemoryGroup, live_reason, memory_cap
from .hosts import available

_REASON = live_reason()
pytestmark = [pytest.mark.live, pytest.mark.skipif(_REASON is not None, reason=str(_REASON))]

MIB = 1 << 20
# Counters of the kernel lag behind by a batch of pages per processor.
SLACK = 24 * MIB

MEASURE = """
import sys
from placewise.planner.measuring.host import measure_host
"""
REPORT = "\nprint(measure_host().model_dump_json())\n"
READ = "\nwith open(sys.argv[1], 'rb') as file:\n    while file.read(1 << 20): pass\n"
ALLOCATE = "\nheld = bytearray(b'x') * (int(sys.argv[1]) << 20)\n"
LOCK = """
import ctypes, mmap, os
size = os.path.getsize(sys.argv[1])
with open(sys.argv[1], 'r+b') as file:
    view = mmap.mmap(file.fileno(), size, mmap.MAP_SHARED)
address = ctypes.addressof(ctypes.c_char.from_buffer(view))
libc = ctypes.CDLL(None, use_errno=True)
if libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(size)):
    sys.exit(os.strerror(ctypes.get_errno()))
"""


def report(group: MemoryGroup, body: str = "", *arguments: str) -> Host:
    done = group.python(MEASURE + body + REPORT, *arguments)
    assert done.returncode == 0, done.stderr
    return Host.model_validate_json(done.stdout)


def cap_with(host: Host, limit_bytes: int) -> Cap:
    return next(cap for cap in host.caps if cap.limit_bytes == limit_bytes)


@pytest.fixture
def group() -> Iterator[MemoryGroup]:
    with memory_cap(512 * MIB) as group:
        yield group


@pytest.fixture
def cold_file(tmp_path: Path) -> Path:
    disk = disk_of(tmp_path)
    if disk is None or disk.filesystem in ("tmpfs", "ramfs"):
        pytest.skip("the temporary folder is in memory: its pages are not file pages")
    file = tmp_path / "file"
    with file.open("wb") as stream:
        for _ in range(192):
            stream.write(b"x" * MIB)
        stream.flush()
        os.fsync(stream.fileno())
        # Pages are charged to whom reads them first, so none may be left from writing.
        os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return file


def test_a_real_cap_binds(group: MemoryGroup) -> None:
    host = report(group)
    cap = cap_with(host, group.limit_bytes)
    assert cap.path.endswith(group.folder.name)
    assert host.binding == f"cgroup {cap.hierarchy} {cap.path} (limit)"
    assert host.total == Measured(value=group.limit_bytes, source=host.binding)
    assert 300 * MIB < available(host) < group.limit_bytes
    assert cap.usage_bytes <= group.peak_bytes() + SLACK


def test_anonymous_memory_lowers_it(group: MemoryGroup) -> None:
    before, after = report(group), report(group, ALLOCATE, "192")
    assert abs(available(before) - available(after) - 192 * MIB) < SLACK


def test_page_cache_does_not(group: MemoryGroup, cold_file: Path) -> None:
    before, after = report(group), report(group, READ, str(cold_file))
    assert cap_with(after, group.limit_bytes).usage_bytes > 192 * MIB
    assert abs(available(before) - available(after)) < SLACK


def test_locked_file_pages_do(group: MemoryGroup, cold_file: Path) -> None:
    before, after = report(group), report(group, LOCK, str(cold_file))
    assert abs(available(before) - available(after) - 192 * MIB) < SLACK


def test_a_tighter_ancestor_binds(group: MemoryGroup) -> None:
    with memory_cap(1024 * MIB, parent=group) as child:
        host = report(child)
        assert cap_with(host, child.limit_bytes).headroom_bytes > available(host)
        assert host.binding.endswith(f"{group.folder.name} (limit)")


def test_a_sibling_counts(group: MemoryGroup, cold_file: Path) -> None:
    # The sibling is gone, but the page cache that it left, and nothing else, is still charged to the parent.
    with memory_cap(384 * MIB, parent=group) as sibling, memory_cap(448 * MIB, parent=group) as child:
        report(sibling, READ, str(cold_file))
        host = report(child)
        assert cap_with(host, group.limit_bytes).usage_bytes > 192 * MIB
        assert cap_with(host, child.limit_bytes).usage_bytes < 128 * MIB
        assert abs(cap_with(host, group.limit_bytes).headroom_bytes - available(host) - 64 * MIB) < SLACK


def test_headroom_is_what_can_really_be_allocated(group: MemoryGroup) -> None:
    headroom = available(report(group)) // MIB
    fits = group.python("import sys" + ALLOCATE, str(headroom - 48))
    assert (fits.returncode, group.oom_kills()) == (0, 0)
    beyond = group.python("import sys" + ALLOCATE, str(headroom + 96))
    assert beyond.returncode == -9
    assert group.oom_kills() == 1


def test_groups_are_taken_away() -> None:
    with memory_cap(64 * MIB) as group, memory_cap(32 * MIB, parent=group) as child:
        assert child.run(["/bin/true"]).returncode == 0
        assert "anon" in child.stat() or "rss" in child.stat()
    assert not group.folder.exists()


def test_this_machine_is_measured() -> None:
    host = measure_host()
    assert available(host) <= psutil.virtual_memory().total
    assert isinstance(host.shared_memory, Measured)
