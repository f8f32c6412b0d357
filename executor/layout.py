"""Where a unit's weights lie in one buffer: packed for copies, or as their files have them for reads into place."""

from bisect import bisect_right
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

import torch

from ..models.headers import READ_ALIGNMENT, Header, TensorEntry, packed_bytes
from .dtypes import torch_layout

Stored = Mapping[str, tuple[Header, TensorEntry]]
"""Every tensor's file and entry, by stored name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int
    transformed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where each tensor of a unit, as the module has it, lies in a buffer of `nbytes`."""

    spans: tuple[_Span, ...]
    nbytes: int

    def views(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """The unit's tensors as views of a flat uint8 buffer, on whatever device it is."""
        return {
            span.name: buffer[span.begin : span.end].view(span.dtype).view(span.shape)
            if prod(span.shape)
            else torch.empty(span.shape, dtype=span.dtype, device=buffer.device)
            for span in self.spans
        }


def pack(entries: Mapping[str, TensorEntry], names: Iterable[str], transformed: Container[str] = ()) -> Layout:
    """Lay the named tensors out one after another, in order of their names, each at a boundary of 64 bytes.

    Args:
        entries: as the module has them.
        names: those to lay out.
        transformed: those that the module does not have as they are stored.
    """
    spans: list[_Span] = []
    offset = 0
    for name in sorted(names):
        spans.append(_span(name, entries[name], offset, transformed=name in transformed))
        offset += packed_bytes(entries[name].nbytes)
    return Layout(spans=tuple(spans), nbytes=offset)


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """Bytes `[offset, offset + nbytes)` of a file, and the place in the buffer where the first one goes."""

    path: Path
    offset: int
    nbytes: int
    at: int

    def chunks(self, chunk_bytes: int) -> Iterator["Read"]:
        """The same in reads of at most that size."""
        for done in range(0, self.nbytes, chunk_bytes):
            count = min(chunk_bytes, self.nbytes - done)
            yield Read(path=self.path, offset=self.offset + done, nbytes=count, at=self.at + done)


def reads_into(layout: Layout, stored: Stored) -> list[Read]:
    """One read for each tensor that has bytes and is not transformed, to its place."""
    read = (span for span in layout.spans if span.end > span.begin and not span.transformed)
    places = ((span, *stored[span.name]) for span in read)
    return [
        Read(path=header.path, offset=_offset(header, entry), nbytes=entry.nbytes, at=span.begin)
        for span, header, entry in places
    ]


def extents(layout: Layout, stored: Stored) -> list[Read]:
    """The ranges of files that hold the unit, from one block's begin on, one after another in whole blocks.

    Ranges with at most two blocks between them are one: apart they would take as much.
    """
    found: list[tuple[Path, int, int]] = []
    for read in sorted(reads_into(layout, stored), key=lambda read: (read.path, read.offset)):
        end = read.offset + read.nbytes
        if found and found[-1][0] == read.path and read.offset <= found[-1][2] + 2 * READ_ALIGNMENT:
            found[-1] = read.path, found[-1][1], end
        else:
            found.append((read.path, read.offset // READ_ALIGNMENT * READ_ALIGNMENT, end))
    reads: list[Read] = []
    at = 0
    for path, begin, end in found:
        reads.append(Read(path=path, offset=begin, nbytes=end - begin, at=at))
        at += -(-(end - begin) // READ_ALIGNMENT) * READ_ALIGNMENT
    return reads


def as_stored(layout: Layout, stored: Stored, ranges: Sequence[Read]) -> Layout | None:
    """The unit as it lies after its extents were read, transformed tensors packed behind them.

    Null where a tensor would not lie at a multiple of its dtype.
    """
    begins = [(each.path, each.offset) for each in ranges]
    spans: list[_Span] = []
    last = ranges[-1].at + ranges[-1].nbytes if ranges else 0
    behind = -(-last // READ_ALIGNMENT) * READ_ALIGNMENT
    for span in layout.spans:
        nbytes = span.end - span.begin
        if span.transformed:
            at, behind = behind, behind + packed_bytes(nbytes)
        else:
            header, entry = stored[span.name]
            offset = _offset(header, entry)
            within = ranges[bisect_right(begins, (header.path, offset)) - 1] if nbytes else None
            at = within.at + offset - within.offset if within else 0
        if nbytes and at % span.dtype.itemsize:
            return None
        spans.append(replace(span, begin=at, end=at + nbytes))
    # The buffer's own begin is moved to a block's.
    return Layout(spans=tuple(spans), nbytes=behind + READ_ALIGNMENT)


def _span(name: str, entry: TensorEntry, begin: int, *, transformed: bool) -> _Span:
    dtype, shape = torch_layout(entry.dtype, entry.shape)
    end = begin + entry.nbytes
    return _Span(name=name, dtype=dtype, shape=shape, begin=begin, end=end, transformed=transformed and end > begin)


def _offset(header: Header, entry: TensorEntry) -> int:
    return header.data_start + entry.data_offsets[0]
