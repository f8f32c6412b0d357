"""Which operands of an operator may be on another device than the rest, as real accelerators have it.

Torch is imported with this module.
"""

# pyright: reportPrivateUsage=false
# torch has no public way to tell an operator's schema.

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Final, TypeAlias, cast

import torch
from torch._ops import OpOverload

Operator: TypeAlias = OpOverload[..., object]

# As on CUDA: the place of indices, and of lengths that the launching side reads.
_HOST_ARGUMENTS: Final[dict[str, int]] = {
    "aten::index.Tensor": 1, "aten::index_put": 1, "aten::index_put_": 1, "aten::_index_put_impl_": 1,
    "aten::_unsafe_index.Tensor": 1, "aten::_unsafe_index_put": 1,
    "aten::_pack_padded_sequence": 1, "aten::_pad_packed_sequence": 1,
    "aten::lstm.data": 1, "aten::gru.data": 1, "aten::rnn_tanh.data": 1, "aten::rnn_relu.data": 1,
}  # fmt: skip

# Beside the elementwise operators.
_TAKES_HOST_SCALARS: Final = frozenset({
    "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put", "index_fill", "index_fill_",
    "fill", "fill_", "masked_fill", "masked_fill_", "where", "equal",
})  # fmt: skip


def written_arguments(func: Operator, args: Sequence[object], kwargs: Mapping[str, object]) -> Iterator[object]:
    """Give the arguments that an operator writes: `self` of the in-place ones, `out`."""
    for place, name in written_places(func):
        value = args[place] if place < len(args) else kwargs.get(name)
        if isinstance(value, (list, tuple)):
            yield from cast(Sequence[object], value)
        else:
            yield value


def mixes_devices(func: Operator, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Tell whether operands are on several devices, those aside that belong on the host."""
    return len({each.device for each in _operands(func, args, kwargs)}) > 1


def mismatch(
    func: Operator, args: Sequence[object], kwargs: Mapping[str, object]
) -> tuple[torch.device, torch.device] | None:
    """The first two devices of operands that a real device refuses together; null where it takes them all.

    Host tensors are let in where CUDA lets them: as indices, and without dimensions as an operand of an
    elementwise operator.
    """
    written = {id(each) for each in written_arguments(func, args, kwargs)}
    scalars = torch.Tag.pointwise in func.tags or base_name(func) in _TAKES_HOST_SCALARS
    first: torch.device | None = None
    for tensor in _operands(func, args, kwargs):
        if tensor.device.type == "cpu" and tensor.dim() == 0 and scalars and id(tensor) not in written:
            continue
        first = tensor.device if first is None else first
        if tensor.device != first:
            return first, tensor.device
    return None


def _operands(func: Operator, args: Sequence[object], kwargs: Mapping[str, object]) -> Iterator[torch.Tensor]:
    host_place = _HOST_ARGUMENTS.get(_full_name(func))
    for place, value in enumerate((*args, *kwargs.values())):
        for each in cast(Sequence[object], value) if isinstance(value, (list, tuple)) else (value,):
            if isinstance(each, torch.Tensor) and (place != host_place or each.device.type != "cpu"):
                yield each


@cache
def written_places(func: Operator) -> tuple[tuple[int, str], ...]:
    """The place and the name of each argument that an operator writes."""
    return tuple(
        (place, argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


@cache
def _full_name(func: Operator) -> str:
    overload = func._schema.overload_name
    return f"{func._schema.name}.{overload}" if overload else func._schema.name


@cache
def base_name(func: Operator) -> str:
    """The operator's name without namespace and overload."""
    return func._schema.name.removeprefix("aten::")
