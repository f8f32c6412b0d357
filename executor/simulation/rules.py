"""Which operators the simulated device runs as one, and which operands it lets in from the host."""

# pyright: reportPrivateUsage=false
# torch has no public way to list operators, or to tell their schema and kernels.

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final, cast

import torch
from torch._ops import OpOverload

from ...models.operands import Operator, base_name, mismatch, written_places
from ...plans.errors import DeviceMismatchError

_COMPOSITE: Final = torch._C.DispatchKey.CompositeImplicitAutograd

# Their meaning depends on the device, on autograd or on vmap: the inner tensors cannot answer for it.
_NEVER_WHOLE: Final = frozenset({
    "type_as", "_to_cpu", "to_dense", "item", "set_", "_shape_as_tensor", "_pad_packed_sequence",
    "data", "requires_grad_", "get_gradients", "_unpack_dual", "_add_batch_dim", "_remove_batch_dim",
})  # fmt: skip
_NEVER_WHOLE_PREFIXES: Final = ("sparse", "_sparse", "to_sparse", "quantized", "fbgemm", "_test")

_HOST_RESULTS: Final[dict[str, frozenset[int]]] = {"_pack_padded_sequence": frozenset({1})}


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


@dataclass(frozen=True, slots=True)
class Rule:
    """What of an operator does not depend on its operands.

    Attributes:
        composite: its kernel is made of other operators, and chooses among them.
        whole: operands of one device let it run as one, not as its parts, each an operation of its own.
        writes: it writes operands.
        host_results: the places of its results that are host tensors on every device.
    """

    composite: bool
    whole: bool
    writes: bool
    host_results: frozenset[int]


@cache
def rule_of(func: Operator) -> Rule:
    """Give the rule of an operator; it is looked up at every call, so it is kept."""
    return Rule(
        composite=func.has_kernel_for_dispatch_key(_COMPOSITE),
        whole=_computes(func),
        writes=bool(written_places(func)),
        host_results=_HOST_RESULTS.get(base_name(func), frozenset()),
    )


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


def check_devices(func: Operator, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
    """Refuse operands of more than one device, as a real device does.

    Raises:
        DeviceMismatchError: names the operator and the two devices.
    """
    if (devices := mismatch(func, args, kwargs)) is not None:
        raise DeviceMismatchError(
            f"{func} needs its tensors on one device, but found {devices[0]} and {devices[1]}",
            hint="move one of them with .to(device), or create it on the compute device",
        )


def _computes(func: Operator) -> bool:
    name = base_name(func)
    if name in _NEVER_WHOLE or name.startswith(_NEVER_WHOLE_PREFIXES):
        return False
    results = func._schema.returns
    makes_views = any(each.alias_info is not None and not each.alias_info.is_write for each in results)
    return any("Tensor" in str(each.type) for each in results) and not makes_views
