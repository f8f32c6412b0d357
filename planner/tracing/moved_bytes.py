"""Bytes that operations read and write, matrix products aside: on a CPU they take a good part of a pass.

Torch is imported with this module.
"""

# Torch's own types are partial here.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Container, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_aten = torch.ops.aten

_LOOKS_UP = {_aten.embedding, _aten.index, _aten.index_select, _aten.gather}
"""They read as much as they give, whatever they are given."""

_MAKES = {_aten.empty, _aten.empty_strided, _aten.empty_like, _aten.new_empty, _aten.new_empty_strided}
"""They write nothing."""


class MovedBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """While active, adds up what operations read and write. Views move nothing.

    Args:
        products: operations that are timed by their arithmetic.
    """

    def __init__(self, products: Container[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.moved = 0
        self._products = products

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        results = func(*args, **(kwargs or {}))
        packet = func.overloadpacket
        if not (packet in self._products or packet in _MAKES or func.is_view):
            written = _nbytes(results)
            self.moved += written + (written if packet in _LOOKS_UP else _nbytes((args, kwargs)))
        return results


def _nbytes(tree: object) -> int:
    return sum(each.numel() * each.element_size() for each in tree_leaves(tree) if isinstance(each, torch.Tensor))
