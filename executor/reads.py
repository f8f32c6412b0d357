"""Reads of checkpoint files, several under way at once, around the page cache or through it.

Direct reads take whole blocks of the disk; what they cannot take, such as the rest of a read that a file system cut
short, goes through the cache. A file system that refuses them is read through the cache from then on.
"""

import errno
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TypeVar

from ..models.headers import READ_ALIGNMENT
from ..plans.document import Reader
from ..plans.errors import ExecutionError
from .layout import Read

_T = TypeVar("_T")
_REFUSALS = (errno.EINVAL, errno.ENOTSUP)


def can_read() -> bool:
    """Whether this platform reads at given offsets into given memory."""
    return hasattr(os, "preadv")


def disk_read_bytes() -> int | None:
    """What this process has had read from disks until now, by page faults too; null where the system does not count."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("read_bytes:")), None)


class _File:
    """One open file. `direct` is null where it is not, or no more, read around the page cache."""

    def __init__(self, path: Path) -> None:
        self.buffered = self._open(path, 0)
        self.direct: int | None = None

    def open_direct(self, path: Path) -> bool:
        """Whether the file system takes direct reads, as far as opening tells."""
        flag = getattr(os, "O_DIRECT", None)
        try:
            self.direct = None if flag is None else self._open(path, flag)
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
        return self.direct is not None

    def _open(self, path: Path, flag: int) -> int:
        descriptor = os.open(path, os.O_RDONLY | flag)
        weakref.finalize(self, os.close, descriptor).atexit = False
        return descriptor


class FileReader:
    """Reads files for one component.

    Args:
        paths: the files.
        reader: `direct` or `buffered`.
        chunk_bytes: the most that one read asks for; rounded to whole blocks.
        depth: how many reads are under way at once.

    Raises:
        ExecutionError: a file cannot be opened.
    """

    def __init__(self, paths: Iterable[Path], *, reader: Reader, chunk_bytes: int, depth: int) -> None:
        self.chunk_bytes = max(READ_ALIGNMENT, chunk_bytes // READ_ALIGNMENT * READ_ALIGNMENT)
        self.depth = depth
        self.read_bytes: Counter[Reader] = Counter()
        self.notes: dict[str, None] = {}
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(depth, thread_name_prefix="placewise-read")
        self._files: dict[Path, _File] = {}
        for path in paths:
            try:
                file = self._files[path] = _File(path)
                if reader is Reader.direct and not file.open_direct(path):
                    self._refused(path)
            except OSError as error:
                raise _failed(path, "cannot be opened", error) from error

    @property
    def reader(self) -> Reader:
        """How the files are read now: direct while at least one takes it."""
        return Reader.direct if any(file.direct is not None for file in self._files.values()) else Reader.buffered

    def each(self, items: Sequence[_T], work: Callable[[_T], None]) -> None:
        """Do the work on every item, `depth` at a time, and wait. After an error no other item is begun."""
        left = iter(items)

        def worker() -> None:
            try:
                for item in left:
                    work(item)
            except BaseException:
                list(left)
                raise

        workers = [self._pool.submit(worker) for _ in items[: self.depth]]
        try:
            wait(workers)
        except BaseException:
            # Whoever asked may give the memory to somebody else, so nothing may still be read into it.
            list(left)
            wait(workers)
            raise
        # An error knows this frame: a frame that knew the error would keep the memory until garbage is collected.
        while workers:
            workers.pop(0).result()

    def read(self, wanted: Read, into: memoryview, *, around: bool) -> None:
        """One read of at most a chunk.

        Args:
            wanted: which bytes.
            into: where they go; to read around the page cache it has whole blocks, and begins at one's boundary.
            around: whether to read around the page cache where the file system does so.

        Raises:
            ExecutionError: the file has become shorter, or the disk fails.
        """
        file, done = self._files[wanted.path], 0
        while done < wanted.nbytes:
            offset = wanted.offset + done
            try:
                done += self._once(wanted.path, file, offset, into[done:], wanted.nbytes - done, around=around)
            except OSError as error:
                raise _failed(wanted.path, f"reading {wanted.nbytes - done} bytes at {offset} failed", error) from error

    def _once(self, path: Path, file: _File, offset: int, into: memoryview, nbytes: int, *, around: bool) -> int:
        blocks = -(-nbytes // READ_ALIGNMENT) * READ_ALIGNMENT
        direct = file.direct if around and offset % READ_ALIGNMENT == 0 else None
        way = Reader.buffered if direct is None else Reader.direct
        try:
            if direct is None:
                got = os.preadv(file.buffered, [into[:nbytes]], offset)
            else:
                got = os.preadv(direct, [into[:blocks]], offset)
        except OSError as error:
            if direct is None or error.errno not in _REFUSALS:
                raise
            file.direct = None
            self._refused(path)
            return 0
        if got == 0:
            raise ExecutionError(
                f"{path}: ends at byte {os.fstat(file.buffered).st_size}, and {nbytes} bytes at {offset} were planned",
                hint="the file has changed since the plan was loaded: restore it, or plan again",
            )
        with self._lock:
            self.read_bytes[way] += got
        return got

    def _refused(self, path: Path) -> None:
        self.notes[f"direct reads are refused where {path.parent} is: read through the page cache"] = None


def _failed(path: Path, what: str, error: OSError) -> ExecutionError:
    return ExecutionError(f"{path}: {what}: {error.strerror}", hint="check the disk, and the kernel's log")
