"""Weights that are not plain memory: mapped ones, which are never written, and released ones, which hold no data.

Both are tensors that torch and the libraries take for parameters. Every torch function that is given one passes
through here first; the tensors' own kernels then run on plain tensors, so results are what they would be without.
Lent ones, which are on their device for a while, only tell whether they were written.
"""

# Torch's modules keep these tables and switches underscored, and its stubs leave them untyped.
# pyright: reportPrivateUsage=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch.nn import functional as F

from ..plans.errors import ExecutionError, ReadOnlyWeightError, ReleasedWeightError

_Kwargs = dict[str, Any]
_Function = Callable[..., Any]
_Kind = TypeVar("_Kind", bound="_Guarded")

_SCALARS = (bool, int, float, complex, str, torch.dtype, torch.device, type(None))

_OPERATORS = "add sub mul truediv floordiv mod pow and or xor lshift rshift matmul"

_REFUSED = "to cpu cuda xpu half float double bfloat16 type data_ptr untyped_storage storage numpy"

_METADATA = """
shape dtype layout requires_grad requires_grad= requires_grad_ grad grad= is_leaf grad_fn ndim itemsize nbytes is_sparse
is_quantized is_nested size dim ndimension numel nelement stride storage_offset element_size is_floating_point
is_complex is_contiguous is_signed __len__ __hash__ is_inference _backward_hooks _has_compatible_shallow_copy_type
"""


def _name(function: _Function) -> str:
    """The function's name; for a property, the property's, with `=` behind it when it is being set."""
    name = getattr(function, "__name__", "")
    if name in ("__get__", "__set__"):
        attribute = getattr(getattr(function, "__self__", None), "__name__", "")
        return attribute if name == "__get__" else f"{attribute}="
    return name


@dataclass(frozen=True, slots=True)
class Loan:
    """A weight that is there until it is given back; null where it stays for the phase."""

    weight: torch.Tensor
    give_back: Callable[[], object] | None = None


class _Guarded(torch.Tensor):
    """What both kinds share: they count as parameters, and carry the name that errors give."""

    weight_name: str
    _is_param: bool

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]  # torch leaves it untyped


def unguarded() -> AbstractContextManager[None]:
    """Within it guards are not asked."""
    return torch._C.DisableTorchFunctionSubclass()


def plain(weight: torch.Tensor) -> torch.Tensor:
    """The same memory as an ordinary tensor, without its guard."""
    with unguarded():
        return weight.as_subclass(torch.Tensor)


class MappedWeight(_Guarded):
    """A weight that is a view of the checkpoint file. It computes like any other; writing to it is refused."""

    _COMPUTES: ClassVar[frozenset[_Function]] = frozenset(
        (
            F.linear,
            F.layer_norm,
            F.rms_norm,
            F.group_norm,
            F.conv1d,
            F.conv2d,
            F.conv3d,
            torch.matmul,
            torch.addmm,
        )
    )
    """Functions that are known to return memory of their own: their results need no look."""

    _IN_PLACE: ClassVar[frozenset[str]] = frozenset(f"__i{name}__" for name in _OPERATORS.split()) | {"__setitem__"}
    _HARMLESS: ClassVar[frozenset[str]] = frozenset(("requires_grad_", "retain_grad", "share_memory_"))

    @staticmethod
    def of(name: str, view: torch.Tensor) -> "MappedWeight":
        """The guarded weight over a view of the mapping."""
        # As nn.Parameter is made: kernels are chosen by whether an operand is a leaf or a view.
        weight = torch.Tensor._make_subclass(MappedWeight, view)
        weight.weight_name, weight._is_param = name, True
        return weight

    @classmethod
    def __torch_function__(
        cls, func: _Function, types: Sequence[type], args: Sequence[Any] = (), kwargs: _Kwargs | None = None
    ) -> Any:
        if ReleasedWeight in types:
            return NotImplemented  # Its own handler brings it or refuses, and comes back here.
        kwargs = kwargs or {}
        if func not in cls._COMPUTES:
            for weight in _written(func, args, kwargs, MappedWeight):
                raise ReadOnlyWeightError(
                    f"weight '{weight.weight_name}' is a view of the checkpoint file, and {_name(func)} would write it",
                    hint="give it a new value with the pipeline's update(), or plan it with home device or pageable",
                )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        return result if func in cls._COMPUTES else _guard_views(func, args, result)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        clone = torch.nn.Parameter(plain(self).clone(), requires_grad=False)
        memo[id(self)] = clone
        return clone


def _written(function: _Function, args: Sequence[Any], kwargs: _Kwargs, kind: type[_Kind]) -> Iterator[_Kind]:
    """The weights of a kind that a call would write."""
    name = _name(function)
    if name == "data=":
        yield from (target for target in _among(args[:1], kind) if not _same_memory(target, args[1]))
    elif name in MappedWeight._IN_PLACE or (
        name.endswith("_") and not name.endswith("__") and name not in MappedWeight._HARMLESS
    ):
        # Functions of torch.nn.init hand their tensor over by name.
        yield from _among(args[:1] or tuple(kwargs.values())[:1], kind)
    elif kwargs.get("inplace"):
        yield from _among(args[:1], kind)
    elif name in ("embedding", "embedding_bag") and (kwargs.get("max_norm") or (len(args) > 3 and args[3])):
        yield from _among(args[1:2], kind)  # Rows longer than max_norm are scaled where they lie.
    yield from _among((kwargs.get("out"),), kind)


def _among(values: Sequence[Any], kind: type[_Kind]) -> Iterator[_Kind]:
    for value in values:
        if isinstance(value, kind):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _among(cast("Sequence[Any]", value), kind)


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    first, second = plain(one), plain(other)
    return first.device == second.device and first.untyped_storage()._cdata == second.untyped_storage()._cdata


def _guard_views(function: _Function, args: Sequence[Any], result: Any) -> Any:
    """Results that still are the file's pages stay guarded, under the name of the weight that they are views of."""
    if isinstance(result, torch.Tensor):
        if result.device.type != "cpu" or isinstance(result, MappedWeight):
            return result
        for weight in _among(args, MappedWeight):
            if _same_memory(weight, result):
                view = result.as_subclass(MappedWeight)
                view.weight_name, view._is_param = weight.weight_name, False
                return view
    elif isinstance(result, (tuple, list)):
        members = [_guard_views(function, args, member) for member in cast("Sequence[Any]", result)]
        unchanged = all(guarded is member for guarded, member in zip(members, result, strict=True))
        return result if unchanged else type(result)(members)
    elif _name(function) in ("numpy", "__array__"):
        result.flags.writeable = False
    return result


class LentWeight(torch.nn.Parameter):
    """A copy that goes away again. Torch counts every write to it, those through `data` too, so that none is lost.

    Torch functions do not pass through here: it computes as a plain parameter does.
    """

    weight_name: str

    @staticmethod
    def of(name: str, weight: torch.Tensor) -> torch.nn.Parameter:
        """The weight as a parameter with a count of its own. A simulated tensor stays one, and counts by its name."""
        # Views of one buffer share their base's count, and what `data` gives has a new one.
        lent = LentWeight(weight.data, False)
        lent.weight_name = name
        return lent

    @property
    def data(self) -> torch.Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]  # torch's is an attribute
        """The same memory without gradients; writes to it are counted here."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        write_lent(self, self.weight_name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Parameter:
        clone = torch.nn.Parameter(self.detach().clone(), self.requires_grad)
        memo[id(self)] = clone
        return clone

    def __reduce_ex__(self, protocol: Any) -> Any:
        return torch.nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]  # torch leaves it untyped


def write_lent(weight: torch.Tensor, name: str, value: torch.Tensor) -> None:
    """Set the data of a lent weight: by writing, so that it is counted and the copy stays where it is.

    Raises:
        ExecutionError: the value has another shape, dtype or device.
    """
    if (value.shape, value.dtype, value.device) != (weight.shape, weight.dtype, weight.device):
        raise ExecutionError(
            f"weight '{name}' is on {weight.device} for a while, and cannot become another tensor there",
            hint="keep its shape, dtype and device, or plan a checkpoint that has the new ones",
        )
    with torch.no_grad():
        weight.copy_(value.clone() if _same_memory(weight, value) else value)


class ReleasedWeight(_Guarded):
    """A placeholder with the shape and dtype of a weight that is not on its compute device now.

    Its `device` is the compute device, so that what is built beside the weights is built there. Computing with it
    borrows the weight itself; moving it, writing it and what else would outlast the loan raises an error that names it.
    """

    compute_device: torch.device
    borrow: Callable[[], Loan | None]

    _ANSWERS: ClassVar[frozenset[str]] = frozenset(_METADATA.split())
    """All that is known of a weight without its data."""

    _REFUSES: ClassVar[frozenset[str]] = frozenset(_REFUSED.split())
    """What a module's casts and moves call to replace its weights, and what gives away where the data lies."""

    @staticmethod
    def of(
        name: str,
        weight: torch.Tensor,
        compute_device: torch.device,
        borrow: Callable[[], Loan | None],
    ) -> "ReleasedWeight":
        """The placeholder for a weight, and what lends the weight itself to a function; null when it is gone."""
        shell = torch.empty(weight.shape, dtype=weight.dtype, device="meta")
        placeholder = shell.as_subclass(ReleasedWeight)
        placeholder.weight_name, placeholder.compute_device, placeholder.borrow, placeholder._is_param = (
            name,
            compute_device,
            borrow,
            True,
        )
        return placeholder

    @classmethod
    def __torch_function__(
        cls, func: _Function, types: Sequence[type], args: Sequence[Any] = (), kwargs: _Kwargs | None = None
    ) -> Any:
        name, kwargs = _name(func), kwargs or {}
        first = args[0] if args else None
        if isinstance(first, ReleasedWeight):
            if name == "device":
                return first.compute_device
            if name in ("is_cuda", "is_cpu", "is_mps", "is_xpu", "is_meta"):
                return first.compute_device.type == name.removeprefix("is_")
            if name in ("data", "detach") or (name == "to" and first._is_there(args, kwargs)):
                return first
            if name in cls._ANSWERS or (name == "data=" and args[1] is first):
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
        if name in cls._REFUSES:
            raise _refusal(name, args, kwargs)
        for weight in _written(func, args, kwargs, ReleasedWeight):
            raise ReleasedWeightError(
                f"weight '{weight.weight_name}' is released, and {name} would write it",
                hint="give it a new value with the pipeline's update()",
            )
        loans: list[Loan] = []
        try:
            lent, named = _lent(args, loans), {key: _lent(value, loans) for key, value in kwargs.items()}
            if next(_among((*lent, *named.values()), ReleasedWeight), None) is not None:
                raise _refusal(name, lent, named)
            kept = _owned(func(*lent, **named), [loan.weight for loan in loans if loan.give_back])
            if kept is NotImplemented:
                raise _refusal(name, args, kwargs)
            return kept
        finally:
            for loan in loans:
                if loan.give_back:
                    loan.give_back()

    def _is_there(self, args: Sequence[Any], kwargs: _Kwargs) -> bool:
        """Whether `.to(...)` asks for nothing that is not so already."""
        device, dtype, *_ = cast(Any, torch._C)._nn._parse_to(*args[1:], **kwargs)
        return device in (None, self.compute_device) and dtype in (None, self.dtype)

    def __repr__(self, **_: object) -> str:  # type: ignore[override]
        return f"ReleasedWeight('{self.weight_name}', {tuple(self.shape)}, {self.dtype}, {self.compute_device})"

    def __deepcopy__(self, memo: dict[int, Any]) -> "ReleasedWeight":
        raise ReleasedWeightError(
            f"weight '{self.weight_name}' is released and cannot be copied",
            hint="load the plan once more; to read it from its home, use LoadedComponent.weights()",
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return copy.deepcopy(self)


def _refusal(name: str, args: Sequence[Any], kwargs: _Kwargs) -> ReleasedWeightError:
    weight = next(_among((*args, *kwargs.values()), ReleasedWeight))
    return ReleasedWeightError(
        f"weight '{weight.weight_name}' is released, and {name} would move it or outlast its stay on the device",
        hint="compute with it; to read it from its home, use LoadedComponent.weights()",
    )


def _lent(value: Any, loans: list[Loan]) -> Any:
    """The same argument with weights in place of placeholders; those that are gone stay."""
    if isinstance(value, ReleasedWeight):
        loan = value.borrow()
        loans += [loan] if loan else []
        return loan.weight if loan else value
    if isinstance(value, (tuple, list)):
        members = [_lent(member, loans) for member in cast("Sequence[Any]", value)]
        return members if isinstance(value, list) else tuple(members)
    return value


def _owned(result: Any, lent: Sequence[torch.Tensor]) -> Any:
    """A result that keeps nothing of weights that are given back: views are copied; NotImplemented for other kinds."""
    if not lent or isinstance(result, _SCALARS):
        return result
    if isinstance(result, torch.Tensor):
        storages = {weight.untyped_storage()._cdata for weight in lent}
        return result.clone() if result.untyped_storage()._cdata in storages else result
    if isinstance(result, (tuple, list)):
        members = [_owned(member, lent) for member in cast("Sequence[Any]", result)]
        return NotImplemented if any(member is NotImplemented for member in members) else type(result)(members)
    return NotImplemented
