"""Reads of a unit's bytes to where they belong: into host memory, or through buffers on the host to a device."""

from bisect import bisect_right
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

from ..models.headers import READ_ALIGNMENT
from ..plans.units import MIB
from .layout import Layout, Read, Stored, as_stored, extents, reads_into
from .machine import Machine, Mark
from .pages import Pages, anonymous_pages, in_page_cache
from .reads import FileReader

Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A unit and the buffer that it may take: its weights as views of the buffer, and what writes them."""

    weights: Weights
    fill: Callable[[], None]


def _plain_mode() -> AbstractContextManager[object]:
    """Neither gradients nor inference mode. To leave what is not on takes as long as to fetch a small layer."""
    if torch.is_inference_mode_enabled():
        return _outside_inference()
    return torch.no_grad() if torch.is_grad_enabled() else nullcontext()


@contextmanager
def _outside_inference() -> Generator[None]:
    with torch.inference_mode(mode=False), torch.no_grad():
        yield


def fetch(machine: Machine, place: Place, behind: Iterable[Mark] = ()) -> Mark:
    """Fill a place through the copy stream, and give the mark behind which its weights are there.

    Weights are plain tensors whatever mode the caller computes in: they outlive it.

    Args:
        machine: the compute device.
        place: of the unit.
        behind: marks behind which the place's memory is not used any more.
    """
    with _plain_mode(), machine.copying():
        for mark in behind:
            machine.wait(mark)
        place.fill()
        return machine.mark()


_PIECE_BYTES = 4 * MIB
"""The most that is made contiguous on the host at once, on its way to a device."""


def filling(machine: Machine, weights: Weights, source: Weights) -> Callable[[], None]:
    """What writes each weight from the source of the same name. The copies may run on where the machine has streams.

    A source may be a strided view with more axes than its weight, and of another dtype. To another device it goes in
    pieces: there torch would first make a whole copy of it on the host.
    """
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    for name, weight in weights.items():
        view, target = source[name], weight.view(source[name].shape)
        as_it_is = target.device.type == "cpu" or (view.is_contiguous() and view.dtype == target.dtype)
        copies += ((target, view),) if as_it_is else _pieces(target, view)

    def fill() -> None:
        for target, view in copies:
            machine.copy_in(target, view)

    return fill


def _pieces(target: torch.Tensor, view: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Both in parts along the first axes, which are contiguous in the target."""
    if target.nbytes <= _PIECE_BYTES:
        yield target, view
    elif rows := _PIECE_BYTES * len(target) // target.nbytes:
        yield from zip(torch.split(target, rows), torch.split(view, rows), strict=True)
    else:
        for part, piece in zip(target, view, strict=True):
            yield from _pieces(part, piece)


def completed(place: Place, machine: Machine, source: Weights) -> Place:
    """The place whose weights of these names no read brings: they are written from their source, after the others."""
    fill_apart = filling(machine, {name: place.weights[name] for name in source}, source)

    def fill_all() -> None:
        place.fill()
        fill_apart()

    return replace(place, fill=fill_all)


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """How a unit is read: where its tensors lie then, from where in the files, and whether that is in whole blocks.

    Tensors that are `left_out` keep their place and are not delivered there.
    """

    layout: Layout
    reads: Sequence[Read]
    in_blocks: bool
    left_out: Collection[str] = ()


def packed_route(layout: Layout, stored: Stored, *, staged: bool) -> Route:
    """Tensor by tensor into a packed buffer on the host; to a device, in blocks through buffers."""
    reads = extents(layout, stored) if staged else reads_into(layout, stored)
    return Route(layout=layout, reads=reads, in_blocks=staged)


def route_in_place(layout: Layout, stored: Stored) -> Route | None:
    """In blocks into a buffer on the host, which then has the file's layout; null where torch could not view it."""
    reads = extents(layout, stored)
    filed = as_stored(layout, stored, reads)
    return None if filed is None else Route(layout=filed, reads=reads, in_blocks=True)


def leave_out(route: Route, stored: Stored, names: Collection[str]) -> Route:
    """The same route without the reads that only these tensors need. Blocks that they share with others are read."""
    if not names:
        return route
    wanted = replace(route.layout, spans=tuple(span for span in route.layout.spans if span.name not in names))
    reads = reads_into(wanted, stored)
    if route.in_blocks:
        # Fewer tensors lie farther apart, so that each range is part of one of the route's.
        reads = [
            replace(read, at=whole.at + read.offset - whole.offset)
            for read in extents(wanted, stored)
            for whole in route.reads
            if whole.path == read.path and whole.offset <= read.offset < whole.offset + whole.nbytes
        ]
    return replace(route, reads=reads, left_out=names)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One read: into memory of its own, or into any buffer, whose bytes `[begin, end)` then go to tensors."""

    read: Read
    into: memoryview | None = None
    copies: Sequence[tuple[torch.Tensor, int, int]] = ()


class Transport:
    """Brings units from their files to one machine's memory, or to the host's.

    Args:
        machine: the compute device.
        reader: of the files.
    """

    def __init__(self, machine: Machine, reader: FileReader) -> None:
        self.reader = reader
        self.staged = machine.device.type != "cpu"
        self._machine = machine
        self._buffers: SimpleQueue[tuple[torch.Tensor, Mark]] = SimpleQueue()  # Each with its last copy's mark.

    @property
    def staging_bytes(self) -> int:
        """What the buffers on the host take while they are open."""
        return self.reader.depth * self.reader.chunk_bytes if self.staged else 0

    def open(self) -> None:
        """Make the buffers on the host, page-locked where the machine's copies gain by it.

        Raises:
            ExecutionError: memory could not be page-locked.
        """
        if self.staged and self._buffers.empty():
            make = self._machine.pinned if self._machine.capabilities.pinned_memory else anonymous_pages
            for buffer in [make(self.reader.chunk_bytes) for _ in range(self.reader.depth)]:
                self._buffers.put((buffer, None))

    def close(self) -> None:
        """Give the buffers back; nothing may be under way."""
        self._buffers = SimpleQueue()

    def place(self, route: Route, stored: Stored, buffer: torch.Tensor, cached: Sequence[Pages] = ()) -> Place:
        """Make ready to read a unit into a buffer, as often as it is asked for.

        Args:
            route: how it is read.
            stored: where its tensors are.
            buffer: flat uint8, on the host or on the machine.
            cached: its pages in the mapping: if all are in the page cache, it is read from there. None where the
                kernel does not tell.
        """
        if buffer.device.type != "cpu":
            parts = [
                _Part(read=read, copies=[(buffer[begin:end], *within) for begin, end, within in overlaps])
                for read, overlaps in self._deliveries(route, stored)
            ]
        else:
            # Blocks land at a block's boundary.
            buffer = buffer[-buffer.data_ptr() % READ_ALIGNMENT :] if route.in_blocks else buffer
            memory, unit = _memory(buffer), READ_ALIGNMENT if route.in_blocks else 1
            parts = [
                _Part(read=read, into=memory[read.at : read.at + -(-read.nbytes // unit) * unit])
                for read in self._chunks(route)
            ]
        fill_buffer = partial(self._fill, parts, route.in_blocks, cached)
        return Place(weights=route.layout.views(buffer), fill=fill_buffer)

    def _chunks(self, route: Route) -> Iterator[Read]:
        return (chunk for read in route.reads for chunk in read.chunks(self.reader.chunk_bytes))

    def _deliveries(
        self, route: Route, stored: Stored
    ) -> Iterator[tuple[Read, list[tuple[int, int, tuple[int, int]]]]]:
        """Each chunk, with the ranges of the packed buffer that its bytes go to, and where in the chunk they are."""
        wanted = replace(route.layout, spans=tuple(s for s in route.layout.spans if s.name not in route.left_out))
        tensors = sorted(reads_into(wanted, stored), key=lambda read: (read.path, read.offset))
        begins = [(each.path, each.offset) for each in tensors]
        for chunk in self._chunks(route):
            overlaps: list[tuple[int, int, tuple[int, int]]] = []
            first = max(0, bisect_right(begins, (chunk.path, chunk.offset)) - 1)
            for each in tensors[first : bisect_right(begins, (chunk.path, chunk.offset + chunk.nbytes - 1))]:
                low = max(each.offset, chunk.offset)
                high = min(each.offset + each.nbytes, chunk.offset + chunk.nbytes)
                if each.path == chunk.path and low < high:
                    begin = each.at + low - each.offset
                    overlaps.append((begin, begin + high - low, (low - chunk.offset, high - chunk.offset)))
            yield chunk, overlaps

    def _fill(self, parts: Sequence[_Part], in_blocks: bool, cached: Sequence[Pages]) -> None:  # noqa: FBT001
        around = in_blocks and not (cached and in_page_cache(cached))
        self.reader.each(parts, partial(self._carry, around=around))

    def _carry(self, part: _Part, *, around: bool) -> None:
        if part.into is not None:
            return self.reader.read(part.read, part.into, around=around)
        buffers = self._buffers
        buffer, copied = buffers.get()
        try:
            self._machine.reach(copied)
            self.reader.read(part.read, _memory(buffer), around=around)
            with self._machine.copying():
                try:
                    for target, begin, end in part.copies:
                        self._machine.copy_in(target, buffer[begin:end])
                finally:
                    copied = self._machine.mark()
        finally:
            buffers.put((buffer, copied))
        return None


def _memory(buffer: torch.Tensor) -> memoryview:
    array: Any = buffer.numpy()  # pyright: ignore[reportUnknownMemberType]  # torch's stub
    return memoryview(array)
