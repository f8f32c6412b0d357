"""The files that disk rates are measured on: the checkpoint's own where they are sound, else one written for it."""

import os
import shutil
import tempfile
import time
from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ...plans.errors import InputError
from ...plans.units import GIB, MIB, format_bytes
from ..measuring.kernel_files import shown

_ENOUGH_BYTES = 6 * GIB
_MOST_FILES = 16
_WRITE_LIMIT_S = 4.0
_BLOCK_BYTES = 4 * MIB
_STAT_BLOCK_BYTES = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """An open file to read. `direct` is a second descriptor, around the page cache; None where that is refused."""

    buffered: int
    direct: int | None
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """What can be read, and what has to be said about it."""

    files: tuple[Source, ...] = ()
    notes: tuple[str, ...] = ()


def checkpoint_files(model: Path) -> tuple[Path, ...]:
    """The regular files of a checkpoint, the largest first: of a folder also those one level below.

    An index or another JSON file stands for its folder.

    Raises:
        InputError: `model` does not exist or cannot be read.
    """
    try:
        if model.is_file() and model.suffix != ".json":
            return (model,)
        folder = model.parent if model.is_file() else model
        entries = [entry for top in folder.iterdir() for entry in (_below(top) if top.is_dir() else (top,))]
        sized = [(entry.stat().st_size, entry) for entry in entries if entry.is_file()]
    except OSError as error:
        raise InputError(f"{model}: {error.strerror}", hint="give the path of a checkpoint that can be read") from None
    return tuple(entry for _, entry in sorted(sized, key=lambda each: (-each[0], str(each[1]))))


def has_holes(descriptor: int) -> bool:
    """Whether parts of a file are not on the disk: to read those would measure memory.

    Files that the file system compresses count as such too, and so does space that was reserved and never written.
    """
    status = os.fstat(descriptor)
    if status.st_blocks * _STAT_BLOCK_BYTES < status.st_size:
        return True
    return status.st_size > 0 and os.lseek(descriptor, 0, os.SEEK_HOLE) < status.st_size


@contextmanager
def open_sources(
    model: Path, *, least_bytes: int, temporary_bytes: int, scratch: Path | None = None
) -> Generator[Sources]:
    """Open files to read from, and close them afterwards.

    The checkpoint's own largest files are taken where they have `least_bytes` and no holes. Otherwise a file of
    at most `temporary_bytes` is written into `scratch`, or beside the checkpoint; it has no name and is gone with
    its descriptor, however this process ends. Where neither is possible there are no files, and a note says why.

    Raises:
        InputError: `model` does not exist or cannot be read.
    """
    with ExitStack() as stack:
        files: list[Source] = []
        holes = 0
        for path in checkpoint_files(model)[:_MOST_FILES]:
            if path.stat().st_size < least_bytes or sum(file.size_bytes for file in files) >= _ENOUGH_BYTES:
                break
            descriptor = _open(path, os.O_RDONLY, stack)
            if has_holes(descriptor):
                holes += 1
            else:
                files.append(_source(descriptor, stack))
        if files:
            yield Sources(files=tuple(files))
            return
        why = "has holes" if holes else f"has no file of {format_bytes(least_bytes)}"
        folder = scratch if scratch is not None else model if model.is_dir() else model.parent
        written, note = _written(folder, model, temporary_bytes, stack)
        yield Sources(files=() if written is None else (written,), notes=(f"the checkpoint {why}: {note}",))


def _below(folder: Path) -> tuple[Path, ...]:
    return tuple(folder.iterdir())


def _open(path: Path | str, flags: int, stack: ExitStack) -> int:
    try:
        descriptor = os.open(path, flags | os.O_CLOEXEC)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}", hint="give the path of a checkpoint that can be read") from None
    stack.callback(os.close, descriptor)
    return descriptor


def _source(descriptor: int, stack: ExitStack) -> Source:
    # The cache keeps what the disk does not have yet, as of a checkpoint that was just written.
    with suppress(OSError):
        os.fdatasync(descriptor)
    # Through /proc, for a file without a name has no other path.
    size = os.fstat(descriptor).st_size
    try:
        direct = os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return Source(buffered=descriptor, direct=None, size_bytes=size)
    stack.callback(os.close, direct)
    return Source(buffered=descriptor, direct=direct, size_bytes=size)


def _written(folder: Path, model: Path, count: int, stack: ExitStack) -> tuple[Source | None, str]:
    """A file without a name in `folder`, or none, and what has to be said."""
    try:
        free = shutil.disk_usage(folder).free
        if folder.stat().st_dev != model.stat().st_dev:
            return None, f"{shown(folder)} is on another file system, so no disk was measured"
        if free < 2 * count:
            return None, f"{shown(folder)} has only {format_bytes(free)} free, so no disk was measured"
        handle = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 the stack closes it
        stack.callback(handle.close)
        size = _fill(handle.fileno(), count)
    except OSError as error:
        return None, f"{shown(folder)} cannot be written to ({error.strerror}), so no disk was measured"
    said = f"{format_bytes(size)} were written and read; a disk with a cache of its own may have answered from that"
    return _source(handle.fileno(), stack), said


def _fill(descriptor: int, count: int) -> int:
    """Write what no file system can compress or share, and wait until the disk has it."""
    stop = time.perf_counter() + _WRITE_LIMIT_S
    size = 0
    while size < count and (size == 0 or time.perf_counter() < stop):
        block = memoryview(os.urandom(min(_BLOCK_BYTES, count - size)))
        while block:
            block = block[os.write(descriptor, block) :]
        size = os.fstat(descriptor).st_size
        os.fdatasync(descriptor)
    return size
