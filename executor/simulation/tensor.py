"""Operators on simulated tensors: the CPU's own kernels run on what they wrap."""

# pyright: reportPrivateUsage=false
# torch has no public way to tell a storage, a schema or a dispatch key.

import ctypes
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import repeat
from typing import Final, cast

import torch

from ...models.operands import Operator, mixes_devices, written_arguments
from .device import DEVICE_TYPE, SimulatedDevice, device_at, over_link
from .rules import check_devices, refuse_layouts, rule_of
from .wrapper import Wrapper

aten = torch.ops.aten

_HOST: Final = torch.device("cpu")


class SimulatedTensor(Wrapper):
    """A tensor on a simulated device."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's stub lacks the operator
        cls,
        func: Operator,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Run an operator that torch found a simulated operand for."""
        for kind in types:
            if not issubclass(kind, SimulatedTensor):
                return NotImplemented  # another subclass is among the operands: the operation is its to judge
        return execute(func, args, kwargs or {})


def execute(func: Operator, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
    """Run one operator as the device would.

    Raises:
        DeviceMismatchError: the operands are on different devices.
        DeviceMemoryError: the results do not fit on the device.
    """
    if (crossing := _CROSSINGS.get(func)) is not None:
        return crossing(*args, **kwargs)
    rule = rule_of(func)
    known: dict[int, SimulatedTensor] = {}
    devices: set[torch.device] = set()
    hosts = _on_host((*args, *kwargs.values()), known, devices, composite=rule.composite)
    mixed = len(devices) > 1 and mixes_devices(func, args, kwargs)
    # Of a composite with operands of two devices, the part that mixes them is judged, and named.
    if rule.composite and (mixed or not rule.whole):
        return func.decompose(*args, **kwargs)
    if mixed:
        check_devices(func, args, kwargs)
    target = next(iter(known.values())).home if known else None
    if kwargs and isinstance(device := kwargs.get("device"), torch.device):
        target = device_at(device) if device.type == DEVICE_TYPE else None
    if target is not None and not known:
        _check_room(func, args, kwargs, target)
    inputs, named = hosts[: len(args)], dict(zip(kwargs, hosts[len(args) :], strict=True)) if kwargs else {}
    if rule.composite and any(each.requires_grad for each in known.values()):
        result = _seeing_autograd(func, inputs, named)
    else:
        result = func(*inputs, **named)
    if rule.writes:
        for each in written_arguments(func, args, kwargs):
            if isinstance(each, SimulatedTensor):
                _follow(each, func)
    return result if target is None else _wrapped(func, result, target, known)


def adopt(tensors: Sequence[torch.Tensor], home: SimulatedDevice, operation: object) -> list[SimulatedTensor]:
    """Put CPU tensors, as they are, behind the device; their storages count as allocated there from now.

    Raises:
        DeviceMemoryError: they do not fit together; none was put there.
    """
    allocations = home.claim([each.untyped_storage() for each in tensors], operation)
    return list(map(SimulatedTensor.around, tensors, allocations, repeat(home)))


def _on_host(
    values: Sequence[object], known: dict[int, SimulatedTensor], devices: set[torch.device], *, composite: bool
) -> list[object]:
    """Give what the CPU's kernel gets for the values.

    `known` is filled with the wrappers among them, by the identity of what stands for each, and `devices` with where
    the tensors are. A composite is shown which of them require a gradient.
    """
    hosts: list[object] = []
    for value in values:
        host = value
        if isinstance(value, SimulatedTensor):
            host = value.host.detach().requires_grad_() if composite and value.requires_grad else value.host
            known[id(host)] = value
            devices.add(value.home.device)
        elif isinstance(value, (list, tuple)):
            host = _on_host(cast(Sequence[object], value), known, devices, composite=composite)
        elif isinstance(value, torch.Tensor):
            devices.add(value.device)
        elif isinstance(value, torch.device) and value.type == DEVICE_TYPE:
            host = _HOST
        hosts.append(host)
    return hosts


def _seeing_autograd(func: Operator, inputs: Sequence[object], named: Mapping[str, object]) -> object:
    """Let the kernel see autograd as a CPU tensor's would, which torch's dispatch to us has switched off.

    Some composites choose by it: a matmul folds its batch if the weight requires a gradient, no_grad or not.
    """
    with (
        torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False),
        nullcontext()
        if torch.is_inference_mode_enabled()
        else torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False),
    ):
        return func(*inputs, **named)


def _wrapped(func: Operator, result: object, target: SimulatedDevice, known: Mapping[int, SimulatedTensor]) -> object:
    """Put results on the device; an operand that comes back is the operand's own wrapper."""
    if isinstance(result, torch.Tensor):
        operand = known.get(id(result))
        return adopt([_plain(func, result)], target, func)[0] if operand is None else operand
    if not isinstance(result, (list, tuple)):
        return result
    several = cast(Sequence[object], result)
    flat = [known.get(id(each), each) for each in several]
    stay = rule_of(func).host_results
    fresh = {
        place: _plain(func, each)
        for place, each in enumerate(flat)
        if isinstance(each, torch.Tensor) and not isinstance(each, SimulatedTensor) and place not in stay
    }
    for place, each in zip(fresh, adopt(list(fresh.values()), target, func), strict=True):
        flat[place] = each
    return type(several)(flat)  # type: ignore[call-arg]


def _plain(func: Operator, result: torch.Tensor) -> torch.Tensor:
    refuse_layouts(func, result)
    return result.detach() if result.requires_grad else result


def _check_room(
    func: Operator, args: tuple[object, ...], kwargs: Mapping[str, object], target: SimulatedDevice
) -> None:
    """Refuse a factory that is too large before the host is asked for its bytes."""
    shape = func(*args, **{**kwargs, "device": torch.device("meta")})
    if isinstance(shape, torch.Tensor):
        target.require(shape.untyped_storage().nbytes(), func)


def _follow(outer: SimulatedTensor, func: Operator) -> None:
    """Make a wrapper agree with its host tensor, which an operator has written in place.

    What grew beyond the capacity becomes what it was, and the error leaves here.
    """
    host, storage = outer.host, outer.host.untyped_storage()
    if storage._cdata != outer.allocation.storage._cdata:
        (outer.allocation,) = outer.home.claim([storage], func)
    elif storage.nbytes() != outer.allocation.nbytes:
        try:
            outer.home.resize(outer.allocation, func)
        except MemoryError:
            storage.resize_(outer.allocation.nbytes)
            host.set_(storage, outer.storage_offset(), outer.shape, outer.stride())
            raise
    if (host.shape, host.stride()) != (outer.shape, outer.stride()) or (
        host.storage_offset() != outer.storage_offset()
    ):
        outer.take_shape(SimulatedTensor.around(host, outer.allocation, outer.home))


def _copy(destination: torch.Tensor, source: torch.Tensor, non_blocking: object = None) -> torch.Tensor:
    nbytes = destination.numel() * destination.element_size()
    with over_link(_home(source), _home(destination), nbytes):
        _move(_host(destination), _host(source))
    return destination


def _move(destination: torch.Tensor, source: torch.Tensor) -> None:
    """Copy on the host, in one thread where bytes alone move: a device's copies leave the processor to the compute.

    Torch's own would start a second team of threads beside the one that computes.
    """
    alike = destination.dtype == source.dtype and destination.shape == source.shape
    both = (destination, source)
    if alike and all(each.is_contiguous() and not each.is_conj() and not each.is_neg() for each in both):
        ctypes.memmove(destination.data_ptr(), source.data_ptr(), destination.nbytes)
    else:
        destination.copy_(source)


def _to_copy(
    source: torch.Tensor,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
    **options: object,
) -> torch.Tensor:
    device = source.device if device is None else device
    target = device_at(device) if device.type == DEVICE_TYPE else None
    nbytes = source.numel() * (source.dtype if dtype is None else dtype).itemsize
    if target is not None:
        target.require(nbytes, aten._to_copy.default)
    with over_link(_home(source), target, nbytes):
        place = device if target is None else _HOST
        result = aten._to_copy.default(_host(source), device=place, dtype=dtype, **options)
    return result if target is None else adopt([result], target, aten._to_copy.default)[0]


def _item(source: torch.Tensor) -> bool | int | float | complex:
    with over_link(_home(source), None, source.element_size()):
        return _host(source).item()


def _home(tensor: torch.Tensor) -> SimulatedDevice | None:
    return tensor.home if isinstance(tensor, SimulatedTensor) else None


def _host(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.host if isinstance(tensor, SimulatedTensor) else tensor


_CROSSINGS: Final[Mapping[object, Callable[..., object]]] = {
    aten.copy_.default: _copy,
    aten._to_copy.default: _to_copy,
    aten._local_scalar_dense.default: _item,
}
"""The operators that move bytes between devices."""
