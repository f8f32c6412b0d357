"""Which operators the simulated device runs as one, and which operands it lets in from the host."""

# pyright: reportPrivateUsage=false
# torch has no public way to list operators, or to tell their schema and kernels.

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Final, TypeAlias, cast

import torch
from torch._ops import OpOverload

from ...plans.errors import DeviceMismatchError
from .device import DEVICE_TYPE

Operator: TypeAlias = OpOverload[..., object]

_COMPOSITE: Final = torch._C.DispatchKey.CompositeImplicitAutograd

# Their meaning depends on the device, on autograd or on vmap: the inner tensors cannot answer for it.
_NEVER_WHOLE: Final = frozenset({
    "type_as", "_to_cpu", "to_dense", "item", "set_", "_shape_as_tensor", "_pad_packed_sequence",
    "data", "requires_grad_", "get_gradients", "_unpack_dual", "_add_batch_dim", "_remove_batch_dim",
})  # fmt: skip
_NEVER_WHOLE_PREFIXES: Final = ("sparse", "_sparse", "to_sparse", "quantized", "fbgemm", "_test")

# As on CUDA: the place of indices, and of lengths that the launching side reads.
_HOST_ARGUMENTS: Final[dict[str, int]] = {
    "aten::index.Tensor": 1, "aten::index_put": 1, "aten::index_put_": 1, "aten::_index_put_impl_": 1,
    "aten::_unsafe_index.Tensor": 1, "aten::_unsafe_index_put": 1,
    "aten::_pack_padded_sequence": 1, "aten::_pad_packed_sequence": 1,
    "aten::lstm.data": 1, "aten::gru.data": 1, "aten::rnn_tanh.data": 1, "aten::rnn_relu.data": 1,
}  # fmt: skip
_HOST_RESULTS: Final[dict[str, frozenset[int]]] = {"_pack_padded_sequence": frozenset({1})}

# Beside the elementwise operators.
_TAKES_HOST_SCALARS: Final = frozenset({
    "index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put", "index_fill", "index_fill_",
    "fill", "fill_", "masked_fill", "masked_fill_", "where", "equal",
})  # fmt: skip


def whole_composites() -> Iterator[Operator]:
    """List the composite operators that compute; the CPU decides inside them by device, so they run as one.

    Composites that only make views are not among them: decomposed they are the same, and autograd follows.
    """
    for full_name in torch._C._dispatch_get_all_op_names():
        if full_name.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(
            full_name, "CompositeImplicitAutograd"
        ):
            name, _, overload = full_name.removeprefix("aten::").partition(".")
            func = getattr(getattr(torch.ops.aten, name), overload or "default", None)
            if isinstance(func, OpOverload) and _computes(cast(Operator, func)):
                yield cast(Operator, func)


@cache
def decomposes(func: Operator, *, mixed: bool) -> bool:
    """Tell whether an operator is to be run as its parts, each an operation of its own.

    With operands of two devices every composite is: the part that mixes them is judged, and named.
    """
    return is_composite(func) and (mixed or not _computes(func))


@cache
def is_composite(func: Operator) -> bool:
    """Tell whether an operator's kernel is made of other operators, and chooses among them."""
    return func.has_kernel_for_dispatch_key(_COMPOSITE)


def refuse_layouts(func: Operator, result: torch.Tensor) -> None:
    """Refuse a result that no wrapper can stand for.

    Raises:
        NotImplementedError: it is nested or sparse.
    """
    if result.is_nested or result.layout is not torch.strided:
        kind = "nested" if result.is_nested else str(result.layout)
        raise NotImplementedError(
            f"{func} gave a {kind} tensor, and a simulated device holds strided ones only"
            "\nhint: for nn.TransformerEncoder, pass enable_nested_tensor=False"
        )


def host_results(func: Operator) -> frozenset[int]:
    """Tell which results of an operator are host tensors on every device, by place."""
    return _HOST_RESULTS.get(_name(func), frozenset())


def written_arguments(func: Operator, args: Sequence[object], kwargs: Mapping[str, object]) -> Iterator[object]:
    """Give the arguments that an operator writes: `self` of the in-place ones, `out`."""
    for place, name in _written(func):
        value = args[place] if place < len(args) else kwargs.get(name)
        if isinstance(value, (list, tuple)):
            yield from cast(Sequence[object], value)
        else:
            yield value


def mixes_devices(func: Operator, args: Sequence[object], kwargs: Mapping[str, object]) -> bool:
    """Tell whether operands are on several devices, those aside that belong on the host."""
    return len({each.device for each in _operands(func, args, kwargs)}) > 1


def check_devices(func: Operator, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    """Refuse operands of more than one device, as a real device does.

    Host tensors are let in where CUDA lets them: as indices, and without dimensions as an operand of an
    elementwise operator.

    Raises:
        DeviceMismatchError: names the operator and the two devices.
    """
    written = {id(each) for each in written_arguments(func, args, kwargs)}
    scalars = torch.Tag.pointwise in func.tags or _name(func) in _TAKES_HOST_SCALARS
    first: torch.device | None = None
    for tensor in _operands(func, args, kwargs):
        if tensor.device.type == "cpu" and tensor.dim() == 0 and scalars and id(tensor) not in written:
            continue
        first = tensor.device if first is None else first
        if tensor.device != first:
            raise DeviceMismatchError(
                f"{func} needs its tensors on one device, but found {first} and {tensor.device}",
                hint="move one of them with .to(device), or create it on the compute device",
            )


def _operands(func: Operator, args: Sequence[object], kwargs: Mapping[str, object]) -> Iterator[torch.Tensor]:
    host_place = _HOST_ARGUMENTS.get(_full_name(func))
    for place, value in enumerate((*args, *kwargs.values())):
        for each in cast(Sequence[object], value) if isinstance(value, (list, tuple)) else (value,):
            if isinstance(each, torch.Tensor) and (place != host_place or each.device.type == DEVICE_TYPE):
                yield each


@cache
def _computes(func: Operator) -> bool:
    name = _name(func)
    if name in _NEVER_WHOLE or name.startswith(_NEVER_WHOLE_PREFIXES):
        return False
    results = func._schema.returns
    makes_views = any(each.alias_info is not None and not each.alias_info.is_write for each in results)
    return any("Tensor" in str(each.type) for each in results) and not makes_views


@cache
def _written(func: Operator) -> tuple[tuple[int, str], ...]:
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
def _name(func: Operator) -> str:
    return func._schema.name.removeprefix("aten::")
