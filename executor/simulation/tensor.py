"""Operators on simulated tensors: the CPU's own kernels run on what they wrap."""

# pyright: reportPrivateUsage=false
# torch has no public way to tell a storage, a schema or a dispatch key.

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final, cast

import torch

from ...models.operands import Operator, mixes_devices, written_arguments
from .device import DEVICE_TYPE, SimulatedDevice, device_at, over_link
from .rules import check_devices, decomposes, host_results, is_composite, refuse_layouts
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
        if not all(issubclass(kind, SimulatedTensor) for kind in types):
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
    mixed = mixes_devices(func, args, kwargs)
    if decomposes(func, mixed=mixed):
        return func.decompose(*args, **kwargs)
    if mixed:
        check_devices(func, args, kwargs)
    home = next((each.home for each in _wrappers((*args, *kwargs.values()))), None)
    device = kwargs.get("device")
    target = home
    if isinstance(device, torch.device):
        target = device_at(device) if device.type == DEVICE_TYPE else None
    if target is not None and home is None:
        _check_room(func, args, kwargs, target)
    known: dict[int, SimulatedTensor] = {}
    result = _on_host(func, args, kwargs, known)
    for each in written_arguments(func, args, kwargs):
        if isinstance(each, SimulatedTensor):
            _follow(each, func)
    return result if target is None else _wrapped(func, result, target, known)


def adopt(tensors: Sequence[torch.Tensor], home: SimulatedDevice, operation: str) -> list[SimulatedTensor]:
    """Put CPU tensors, as they are, behind the device; their storages count as allocated there from now.

    Raises:
        DeviceMemoryError: they do not fit together; none was put there.
    """
    allocations = home.claim([each.untyped_storage() for each in tensors], operation)
    return [SimulatedTensor.around(each, a, home) for each, a in zip(tensors, allocations, strict=True)]


def _wrappers(values: Sequence[object]) -> Iterator[SimulatedTensor]:
    for value in values:
        if isinstance(value, SimulatedTensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _wrappers(cast(Sequence[object], value))


def _on_host(
    func: Operator, args: tuple[object, ...], kwargs: Mapping[str, object], known: dict[int, SimulatedTensor]
) -> object:
    """Run the CPU's kernel; `known` is filled with the operands' wrappers, by the identity of what went in."""
    with ExitStack() as stack:
        graded = is_composite(func) and any(w.requires_grad for w in _wrappers((*args, *kwargs.values())))
        if graded:
            stack.enter_context(_autograd_visible())
        inputs = [_unwrapped(each, known, graded=graded) for each in args]
        named = {name: _unwrapped(each, known, graded=graded) for name, each in kwargs.items()}
        return func(*inputs, **named)


@contextmanager
def _autograd_visible() -> Generator[None]:
    """Let the kernel see autograd as a CPU tensor's would, which torch's dispatch to us has switched off.

    Some composites choose by it: a matmul folds its batch if the weight requires a gradient, no_grad or not.
    """
    key = torch._C.DispatchKey
    keys = (
        [key.ADInplaceOrView] if torch.is_inference_mode_enabled() else [key.ADInplaceOrView, key.AutogradFunctionality]
    )
    with ExitStack() as stack:
        for each in keys:
            stack.enter_context(torch._C._SetExcludeDispatchKeyGuard(each, False))
        yield


def _unwrapped(value: object, known: dict[int, SimulatedTensor], *, graded: bool) -> object:
    if isinstance(value, SimulatedTensor):
        host = value.host.detach().requires_grad_() if graded and value.requires_grad else value.host
        known[id(host)] = value
        return host
    if isinstance(value, (list, tuple)):
        return [_unwrapped(each, known, graded=graded) for each in cast(Sequence[object], value)]
    if isinstance(value, torch.device) and value.type == DEVICE_TYPE:
        return _HOST
    return value


def _wrapped(func: Operator, result: object, target: SimulatedDevice, known: Mapping[int, SimulatedTensor]) -> object:
    """Put results on the device; an operand that comes back is the operand's own wrapper."""
    many = isinstance(result, (list, tuple))
    flat = list(cast(Sequence[object], result)) if many else [result]
    stay = host_results(func)
    for place, each in enumerate(flat):
        if isinstance(each, torch.Tensor) and place not in stay:
            refuse_layouts(func, each)
            flat[place] = known.get(id(each), each.detach() if each.requires_grad else each)
    fresh = [
        place
        for place, each in enumerate(flat)
        if isinstance(each, torch.Tensor) and not isinstance(each, SimulatedTensor) and place not in stay
    ]
    outer = adopt([cast(torch.Tensor, flat[place]) for place in fresh], target, str(func))
    for place, each in zip(fresh, outer, strict=True):
        flat[place] = each
    return type(cast(Sequence[object], result))(flat) if many else flat[0]  # type: ignore[call-arg]


def _check_room(
    func: Operator, args: tuple[object, ...], kwargs: Mapping[str, object], target: SimulatedDevice
) -> None:
    """Refuse a factory that is too large before the host is asked for its bytes."""
    shape = func(*args, **{**kwargs, "device": torch.device("meta")})
    if isinstance(shape, torch.Tensor):
        target.require(shape.untyped_storage().nbytes(), str(func))


def _follow(outer: SimulatedTensor, func: Operator) -> None:
    """Make a wrapper agree with its host tensor, which an operator has written in place.

    What grew beyond the capacity becomes what it was, and the error leaves here.
    """
    host, storage = outer.host, outer.host.untyped_storage()
    if storage._cdata != outer.allocation.storage._cdata:
        (outer.allocation,) = outer.home.claim([storage], str(func))
    elif storage.nbytes() != outer.allocation.nbytes:
        try:
            outer.home.resize(outer.allocation, str(func))
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
        _host(destination).copy_(_host(source))
    return destination


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
        target.require(nbytes, str(aten._to_copy.default))
    with over_link(_home(source), target, nbytes):
        place = device if target is None else _HOST
        result = aten._to_copy.default(_host(source), device=place, dtype=dtype, **options)
    return result if target is None else adopt([result], target, str(aten._to_copy.default))[0]


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
