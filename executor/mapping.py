"""Views of a checkpoint file in the page cache, whatever the file's size.

The mapping is private, so that no write can ever reach the file, and carries MAP_NORESERVE, so that the kernel does not
charge its size against memory: a file larger than the machine's memory opens. Writes are refused in Python, by the
guard that the executor puts around every mapped weight; one that slips past it from compiled code costs a page of
anonymous memory, where a read-only mapping would end the process.
"""

import mmap
from collections.abc import Iterable
from math import prod
from pathlib import Path

import torch

from ..models.headers import Header, TensorEntry
from ..plans.errors import ExecutionError
from .dtypes import torch_layout
from .layout import Stored

_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Named by the standard library from Python 3.13 on.


class FileMapping:
    """One mapped checkpoint file. Views keep the mapping alive; it closes when the last one is gone.

    Args:
        header: the file's header, which says where each tensor's data lies.

    Raises:
        ExecutionError: the file cannot be mapped.
    """

    def __init__(self, header: Header) -> None:
        self._header = header
        self._memory = _map(header.path, header.size_bytes)

    def view(self, entry: TensorEntry) -> torch.Tensor:
        """A tensor that is the file's pages, without a copy. Its storage holds this tensor alone.

        Raises:
            ExecutionError: torch has no dtype for what is stored.
        """
        dtype, shape = torch_layout(entry.dtype, entry.shape)
        if entry.nbytes == 0:
            return torch.empty(shape, dtype=dtype)
        offset = self._header.data_start + entry.data_offsets[0]
        return torch.frombuffer(self._memory, dtype=dtype, count=prod(shape), offset=offset).view(shape)

    def check(self) -> None:
        """Raise ExecutionError if the file has become shorter: reading pages beyond its end would end the process."""
        size = self._memory.size()
        if size < self._header.size_bytes:
            raise ExecutionError(
                f"{self._header.path}: ends at byte {size}, and {self._header.size_bytes} bytes were planned",
                hint="the file has changed since the plan was loaded: restore it, or plan again",
            )


class Mappings:
    """Every file of a checkpoint, mapped once.

    Args:
        files: the headers.
        stored: every tensor's file and entry.

    Raises:
        ExecutionError: a file cannot be mapped.
    """

    def __init__(self, files: Iterable[Header], stored: Stored) -> None:
        self._stored = stored
        self._by_path = {file.path: FileMapping(file) for file in files}

    def view(self, name: str) -> torch.Tensor:
        """A stored tensor, without a copy."""
        header, entry = self._stored[name]
        return self._by_path[header.path].view(entry)

    def of(self, names: Iterable[str]) -> tuple[FileMapping, ...]:
        """The mappings that hold these tensors."""
        return tuple(self._by_path[path] for path in sorted({self._stored[name][0].path for name in names}))


def _map(path: Path, size_bytes: int) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            if not hasattr(mmap, "MAP_PRIVATE"):
                return mmap.mmap(file.fileno(), size_bytes, access=mmap.ACCESS_COPY)
            flags = mmap.MAP_PRIVATE | _NORESERVE
            return mmap.mmap(file.fileno(), size_bytes, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except (OSError, ValueError) as error:
        raise ExecutionError(
            f"{path}: cannot be mapped: {error}", hint="check the file and the limits (ulimit -v)"
        ) from None
