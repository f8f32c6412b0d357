"""Views of a checkpoint file in the page cache, whatever the file's size.

The mapping is private, so that no write can ever reach the file, and carries MAP_NORESERVE, so that the kernel does not
charge its size against memory: a file larger than the machine's memory opens. Writes are refused in Python, by the
guard that the executor puts around every mapped weight; one that slips past it from compiled code costs a page of
anonymous memory, where a read-only mapping would end the process.
"""

import mmap
from collections.abc import Callable, Collection
from math import prod
from pathlib import Path

import torch

from ..models.checkpoint import CheckpointFacts
from ..models.headers import Header, TensorEntry
from ..plans.errors import ExecutionError
from ..plans.pipeline import Deinterleave, Transpose
from .dtypes import torch_layout
from .pages import pages_of, read_ahead

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
        facts: the headers, and how tensors are transformed.

    Raises:
        ExecutionError: a file cannot be mapped.
    """

    def __init__(self, facts: CheckpointFacts) -> None:
        self._facts = facts
        self._by_path = {file.path: FileMapping(file) for file in facts.files}

    def view(self, name: str) -> torch.Tensor:
        """A stored tensor, without a copy.

        One that is transformed is a strided view: its elements in order are those that the module has, but for their
        dtype, and an axis of the module's may be several of its own.
        """
        header, entry = self._facts.tensors[name]
        view = self._by_path[header.path].view(entry)
        if not view.numel():
            return self._empty(name)
        change = self._facts.transforms.get(name)
        for step in change.steps if change else ():
            if isinstance(step, Deinterleave):
                view = view.view(step.groups, step.parts, -1, *view.shape[1:]).transpose(0, 1)
            elif isinstance(step, Transpose):
                # The rows of a matrix may be several axes by now.
                view = view.movedim(-1, 0) if len(entry.shape) == 2 else view.transpose(-1, -2)
        return view

    def value(self, name: str) -> torch.Tensor:
        """A tensor as the module has it, in memory of its own on the host."""
        view, value = self.view(name), self._empty(name)
        value.view(view.shape).copy_(view)
        return value

    def expect(self, names: Collection[str]) -> None:
        """Make ready to copy these tensors out of the mapping.

        Raises:
            ExecutionError: a file has become shorter.
        """
        self.expecting(names)()

    def expecting(self, names: Collection[str]) -> Callable[[], None]:
        """What does so, as often as they are copied. The pages of transformed tensors are not touched in order."""
        files = [self._by_path[path] for path in sorted({self._facts.tensors[name][0].path for name in names})]
        pages = pages_of(self.view(name) for name in names if name in self._facts.transforms)

        def expect() -> None:
            for file in files:
                file.check()
            read_ahead(pages)

        return expect

    def _empty(self, name: str) -> torch.Tensor:
        entry = self._facts.wanted(name)
        dtype, shape = torch_layout(entry.dtype, entry.shape)
        return torch.empty(shape, dtype=dtype)


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
