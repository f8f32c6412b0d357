"""Pages of host memory, through the C library: anonymous ones, those in the page cache, and locking. Linux has all."""

import ctypes
import errno
import mmap
import os
import sys
import weakref
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import torch

PAGE_BYTES = mmap.PAGESIZE

_WILL_NEED, _ADVICE_BYTES = 3, 1 << 20  # The kernel cuts advice on more than a disk takes at once.
_READ_ONLY = 1
_SAMPLES = 8

Pages = tuple[int, int]
"""Addresses `[start, stop)`, at page boundaries."""


@cache
def _libc() -> ctypes.CDLL | None:
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mlock.argtypes = libc.munlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.mprotect.argtypes = libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    return libc


def anonymous_pages(nbytes: int) -> torch.Tensor:
    """A flat uint8 tensor of exactly so many bytes in pages of its own, all of them there."""
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    # The view's storage keeps the mapping; a read-only fault would give the shared page of zeros.
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8).zero_()


def pages_of(tensors: Iterable[torch.Tensor]) -> list[Pages]:
    """The pages that tensors touch, ascending; ranges that touch are one."""
    return merged(
        (start // PAGE_BYTES * PAGE_BYTES, -(-(start + each.nbytes) // PAGE_BYTES) * PAGE_BYTES)
        for each in tensors
        if each.nbytes and (start := each.data_ptr())
    )


def merged(spans: Iterable[Pages]) -> list[Pages]:
    """The ranges, ascending, with those that touch or overlap made one."""
    result: list[Pages] = []
    for start, stop in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(stop, result[-1][1])
        else:
            result.append((start, stop))
    return result


def without(pages: Sequence[Pages], held: Sequence[Pages]) -> list[Pages]:
    """What of ascending ranges is in none of the others, which are ascending and apart."""
    result: list[Pages] = []
    for start, stop in pages:
        first = max(0, bisect_right(held, (start, start)) - 1)
        for low, high in held[first : bisect_left(held, (stop, stop))]:
            if start < low:
                result.append((start, low))
            start = max(start, high)
        if start < stop:
            result.append((start, stop))
    return result


def read_ahead(pages: Iterable[Pages]) -> None:
    """Ask for file pages before they are touched, so that they are not read fault by fault. Only advice."""
    libc = _libc()
    if libc is not None:
        for start, stop in pages:
            for piece in range(start, stop, _ADVICE_BYTES):
                libc.madvise(piece, min(_ADVICE_BYTES, stop - piece), _WILL_NEED)


def tells_cached(path: Path) -> bool:
    """Whether the kernel tells this process which of a file's pages are cached: its owner, and who may write it."""
    return sys.platform == "linux" and (path.stat().st_uid == os.geteuid() or os.access(path, os.W_OK))


def in_page_cache(pages: Sequence[Pages]) -> bool:
    """Whether every page of a mapped file is cached. A few are asked first, since most often the answer is no."""
    ends = [end for start, stop in pages for end in (start, stop - PAGE_BYTES)][:_SAMPLES]
    return all(_cached(end, end + PAGE_BYTES) for end in ends) and all(_cached(*span) for span in pages)


def _cached(start: int, stop: int) -> bool:
    libc, count = _libc(), (stop - start) // PAGE_BYTES
    flags = ctypes.create_string_buffer(count)
    return libc is not None and libc.mincore(start, stop - start, flags) == 0 and flags.raw.count(b"\1") == count


class PageLock:
    """Pages of a private mapping, locked in memory until this object dies.

    They are made read-only: pages that might be written would be copied on being locked.

    Args:
        tensors: views of the mapping; it lives as long as the lock.
        held: pages that are locked already, and whose lock is another's.

    Raises:
        OSError: the kernel refuses; nothing stays locked.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], held: Sequence[Pages] = ()) -> None:
        libc = _libc()
        if libc is None:
            raise OSError(errno.ENOTSUP, f"{sys.platform} locks no file pages")
        self.pages = without(pages_of(tensors), held)
        weakref.finalize(self, _unlock, libc, self.pages, tuple(tensors)).atexit = False
        read_ahead(self.pages)
        for start, stop in self.pages:
            if libc.mprotect(start, stop - start, _READ_ONLY) or libc.mlock(start, stop - start):
                code = ctypes.get_errno()
                # Pages that could not be brought in stay marked as locked.
                _unlock(libc, self.pages, ())
                raise OSError(code, os.strerror(code))


def _unlock(libc: ctypes.CDLL, pages: Sequence[Pages], _: object) -> None:
    for start, stop in pages:
        libc.munlock(start, stop - start)
