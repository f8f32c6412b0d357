"""Bytes that operations read and write, matrix products aside, and of the memory that they take for it.

Torch is imported with this module.
"""

# Torch's own types are partial here.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from collections.abc import Container, Iterable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...plans.heap import FRESH_BLOCK_BYTES

_aten = torch.ops.aten

_LOOKS_UP = {_aten.embedding, _aten.index, _aten.index_select, _aten.gather}
"""They read as much as they give, whatever they are given."""

_MAKES = {_aten.empty, _aten.empty_strided, _aten.empty_like, _aten.new_empty, _aten.new_empty_strided}
"""They write nothing."""


class MovedBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """While active, adds up what operations read and write, and what they take in large blocks. Views do neither.

    Args:
        products: operations that are timed by their arithmetic.
    """

    def __init__(self, products: Container[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.moved: int = 0
        self.fresh: int = 0
        self._products = products

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        packet, read, made = func.overloadpacket, _tensors((args, kwargs)), _tensors(results)
        given = {tensor.untyped_storage()._cdata for tensor in read}
        new = [tensor for tensor in made if tensor.untyped_storage()._cdata not in given]
        taken = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in new}
        self.fresh += sum(count for count in taken.values() if count >= FRESH_BLOCK_BYTES)
        if packet not in self._products and packet not in _MAKES:
            written = made if func._schema.is_mutable else new
            if written:
                self.moved += _nbytes(written) + _nbytes(written if packet in _LOOKS_UP else read)
        return results


def _tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _nbytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
