"""A unit's weights packed into one buffer: one allocation, each tensor at a boundary of 64 bytes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

import torch

from ..models.headers import TensorEntry, packed_bytes
from .dtypes import torch_layout


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLayout:
    """Where each tensor of a unit lies in a buffer of `nbytes`."""

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


def pack(entries: Mapping[str, TensorEntry], names: Iterable[str]) -> PackedLayout:
    """Lay the named tensors out one after another, in order of their names."""
    spans: list[_Span] = []
    offset = 0
    for name in sorted(names):
        entry = entries[name]
        dtype, shape = torch_layout(entry.dtype, entry.shape)
        spans.append(_Span(name=name, dtype=dtype, shape=shape, begin=offset, end=offset + entry.nbytes))
        offset += packed_bytes(entry.nbytes)
    return PackedLayout(spans=tuple(spans), nbytes=offset)
