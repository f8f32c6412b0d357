"""Reading a part of a file with several threads, timed. Linux only."""

import errno
import mmap
import os
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from ...plans.calibration import ReadMode
from ...plans.units import GIB, MIB
from .files import Source

_PAGE_BYTES = mmap.PAGESIZE
_MOST_VECTORS = 1024
_LANDING_BYTES = 64 * MIB
"""Reads land in so much memory in turn. In a few MiB they would stay in the processor's cache, and be faster than reads
into slots ever are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to read: the mode, the size of a read, and how many are under way at once."""

    mode: ReadMode
    chunk_bytes: int
    depth: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What one measurement gave."""

    bytes_per_s: float
    cpu_s_per_gib: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A part of a file, of whole chunks."""

    source: Source
    offset: int
    length: int


def is_cached(region: Region) -> bool:
    """Ask for the last page without waiting: a miss begins to read ahead, there mostly beyond the region."""
    page = bytearray(_PAGE_BYTES)
    try:
        return os.preadv(region.source.buffered, [page], region.offset + region.length - len(page), os.RWF_NOWAIT) > 0
    except OSError:
        # Not in the cache, or this file system does not tell.
        return False


def timed_read(
    way: Way, region: Region, descriptor: int, limit_s: float, *, most_bytes: int = _LANDING_BYTES
) -> Sample:
    """Read a region once, or what of it can be read until the time is over. Each thread reads at least one chunk.

    Args:
        way: how it is read.
        region: what is read; not in the page cache, unless that is what is to be measured.
        descriptor: the open file, around the page cache for direct reads.
        limit_s: after this time no thread takes another chunk.
        most_bytes: of memory to read into, if all that is under way fits there.

    Raises:
        OSError: a read was refused, or the file became shorter.
    """
    with _reader(way, region, descriptor, most_bytes) as read:
        return _timed(way, region, read, limit_s)


def _timed(way: Way, region: Region, read: Callable[[int, int], int], limit_s: float) -> Sample:
    offsets = iter(range(region.offset, region.offset + region.length, way.chunk_bytes))
    lock = threading.Lock()
    start = threading.Barrier(way.depth + 1)

    def work(slot: int) -> int:
        start.wait()
        stop, count = time.perf_counter() + limit_s, 0
        while count == 0 or time.perf_counter() < stop:
            with lock:
                offset = next(offsets, None)
            if offset is None:
                break
            count += read(slot, offset)
        return count

    with ThreadPoolExecutor(way.depth) as pool:
        try:
            workers = [pool.submit(work, slot) for slot in range(way.depth)]
            begun, cpu_begun = time.perf_counter(), time.process_time()
            start.wait()
        except BaseException:
            # A thread that did not start would let the others wait for it.
            start.abort()
            raise
        count = sum(worker.result() for worker in workers)
        seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu_begun
    if count == 0:
        raise OSError(errno.ENODATA, os.strerror(errno.ENODATA))
    return Sample(bytes_per_s=count / max(seconds, 1e-9), cpu_s_per_gib=max(0.0, cpu) * GIB / count)


@contextmanager
def _reader(way: Way, region: Region, descriptor: int, most_bytes: int) -> Generator[Callable[[int, int], int]]:
    """A function of a thread's number and an offset in the file, which reads one chunk and gives its bytes."""
    if way.mode is ReadMode.faults:
        with _toucher(way, region, descriptor) as touch:
            yield touch
        return
    # Page-aligned, as direct reads ask for; and written to once, for new memory costs time of its own.
    count = max(way.depth, min(most_bytes, _LANDING_BYTES) // way.chunk_bytes)
    buffer = mmap.mmap(-1, way.chunk_bytes * count)
    buffer[::_PAGE_BYTES] = bytes(len(range(0, len(buffer), _PAGE_BYTES)))
    whole = memoryview(buffer)
    places = [whole[place * way.chunk_bytes : (place + 1) * way.chunk_bytes] for place in range(count)]
    try:
        yield lambda _, offset: os.preadv(descriptor, [places[offset // way.chunk_bytes % count]], offset)
    finally:
        for view in (*places, whole):
            view.release()
        buffer.close()


@contextmanager
def _toucher(way: Way, region: Region, descriptor: int) -> Generator[Callable[[int, int], int]]:
    """Touch one byte of each page of a mapping.

    The bytes are written to a file in memory, because a write touches them without Python's lock, so that threads
    fault side by side, and because a file cut short meanwhile then is an error instead of a killed process.
    """
    try:
        mapping = mmap.mmap(descriptor, region.length, access=mmap.ACCESS_READ, offset=region.offset)
    except ValueError:
        # The file no longer reaches so far.
        raise OSError(errno.ENODATA, os.strerror(errno.ENODATA)) from None
    pages = memoryview(mapping)
    sinks = [os.memfd_create("placewise-calibrate", os.MFD_CLOEXEC) for _ in range(way.depth)]

    def touch(slot: int, offset: int) -> int:
        start = offset - region.offset
        touched = [pages[at : at + 1] for at in range(start, start + way.chunk_bytes, _PAGE_BYTES)]
        try:
            for first in range(0, len(touched), _MOST_VECTORS):
                batch = touched[first : first + _MOST_VECTORS]
                if os.pwritev(sinks[slot], batch, 0) < len(batch):
                    raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
        finally:
            for page in touched:
                page.release()
        return way.chunk_bytes

    try:
        yield touch
    finally:
        pages.release()
        mapping.close()
        for sink in sinks:
            os.close(sink)
