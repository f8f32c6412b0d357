"""Tensors of the simulated device: each holds a CPU tensor, on which the CPU's own kernels run."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, cast

import torch
from torch._ops import OpOverload

from .simulated_device import DEVICE_TYPE, Allocation, SimulatedDevice, device_at, over_link
from .simulated_rules import check_devices, decomposes, host_results, mixes_devices, written_arguments

aten = torch.ops.aten

_HOST: Final = torch.device("cpu")


class SimulatedTensor(torch.Tensor):
    """A tensor that reports a simulated device and keeps its elements in a CPU tensor, `host`."""

    host: torch.Tensor
    allocation: Allocation
    home: SimulatedDevice

    # Disabled, not overridden: torch leaves its fused paths for tensors that override it.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, inner: torch.Tensor, allocation: Allocation, home: SimulatedDevice) -> "SimulatedTensor":
        outer = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=home.device,
        )
        outer.host, outer.allocation, outer.home = inner, allocation, home
        return outer

    def __init__(self, inner: torch.Tensor, allocation: Allocation, home: SimulatedDevice) -> None:
        super().__init__()

    @classmethod
    def __torch_dispatch__(
        cls,
        func: OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if not all(issubclass(kind, SimulatedTensor) for kind in types):
            return NotImplemented  # another subclass is among the operands: the operation is its to judge
        return execute(func, args, kwargs or {})

    def __repr__(self) -> str:  # type: ignore[override]
        return f"SimulatedTensor({self.host!r}, device='{self.home.name}')"

    def __deepcopy__(self, memo: dict[int, object]) -> "SimulatedTensor":
        if id(self) in memo:
            return cast(SimulatedTensor, memo[id(self)])
        with torch.no_grad():
            twin = cast(SimulatedTensor, self.clone())
        twin.requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            twin._is_param = True
        memo[id(self)] = twin
        return twin

    @property
    def data(self) -> torch.Tensor:
        """The same tensor outside of autograd; set it to rebind this tensor to another one's storage."""
        return cast(torch.Tensor, torch.Tensor.data.__get__(self))

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        torch.Tensor.data.__set__(self, value)
        if isinstance(value, SimulatedTensor):
            self.host, self.allocation, self.home = value.host, value.allocation, value.home

    def tolist(self) -> object:
        """The elements as Python numbers, copied off the device."""
        return self.cpu().tolist()

    def data_ptr(self) -> int:
        """The address of the first element, which lies in host memory."""
        return self.host.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """The storage of the inner tensor: two tensors share memory exactly if these are one."""
        return self.host.untyped_storage()


def execute(func: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object]) -> object:
    """Run one operator as the device would.

    Raises:
        DeviceMismatchError: the operands are on different devices.
        DeviceMemoryError: the results do not fit on the device.
    """
    if func is aten.copy_.default:
        return _copy(*args, **kwargs)  # type: ignore[arg-type]  # the schema's own types
    if func is aten._to_copy.default:
        return _to_copy(*args, **kwargs)  # type: ignore[arg-type]
    if func is aten._local_scalar_dense.default:
        return _item(*args)  # type: ignore[arg-type]
    operands = tuple(_tensors((*args, *kwargs.values())))
    homes = {id(each.home): each.home for each in operands if isinstance(each, SimulatedTensor)}
    mixed = mixes_devices(func, args, kwargs)
    if decomposes(func, mixed=mixed):
        return func.decompose(*args, **kwargs)
    if mixed:
        check_devices(func, args, kwargs)
    device = kwargs.get("device")
    if isinstance(device, torch.device):
        target = device_at(device) if device.type == DEVICE_TYPE else None
    else:
        target = next(iter(homes.values()), None)
    if target is not None and not homes:
        _check_room(func, args, kwargs, target)
    result = func(*(_unwrapped(each) for each in args), **{k: _unwrapped(v) for k, v in kwargs.items()})
    known = {id(each.host): each for each in operands if isinstance(each, SimulatedTensor)}
    for each in written_arguments(func, args, kwargs):
        if isinstance(each, SimulatedTensor):
            _follow(each, func)
    return result if target is None else _wrapped(result, target, known, func)


def adopt(tensors: Sequence[torch.Tensor], home: SimulatedDevice, operation: str) -> list[SimulatedTensor]:
    """Put CPU tensors, as they are, behind the device; their storages count as allocated there from now.

    Raises:
        DeviceMemoryError: they do not fit together; none was put there.
    """
    allocations = home.claim([each.untyped_storage() for each in tensors], operation)
    return [_wrapper(each, held, home) for each, held in zip(tensors, allocations, strict=True)]


def _wrapper(inner: torch.Tensor, allocation: Allocation, home: SimulatedDevice) -> SimulatedTensor:
    # A view of a normal tensor is a normal tensor, under inference mode too; so the wrapper must be one.
    with torch.inference_mode(inner.is_inference()):
        return SimulatedTensor(inner, allocation, home)


def _tensors(values: Sequence[object]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(cast(Sequence[object], value))


def _unwrapped(value: object) -> object:
    if isinstance(value, SimulatedTensor):
        return value.host
    if isinstance(value, (list, tuple)):
        return [_unwrapped(each) for each in cast(Sequence[object], value)]
    if isinstance(value, torch.device) and value.type == DEVICE_TYPE:
        return _HOST
    return value


def _wrapped(result: object, target: SimulatedDevice, known: Mapping[int, SimulatedTensor], func: OpOverload) -> object:
    """Put results on the device; an operand that comes back is the operand's own wrapper."""
    stay = host_results(func)
    flat = list(cast(Sequence[object], result)) if isinstance(result, (list, tuple)) else [result]
    fresh = [
        each
        for place, each in enumerate(flat)
        if isinstance(each, torch.Tensor) and id(each) not in known and place not in stay
    ]
    outer = dict(known)
    outer.update(zip(map(id, fresh), adopt(fresh, target, str(func)), strict=True))
    flat = [outer.get(id(each), each) for each in flat]
    return type(result)(flat) if isinstance(result, (list, tuple)) else flat[0]


def _check_room(
    func: OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object], target: SimulatedDevice
) -> None:
    """Refuse a factory that is too large before the host is asked for its bytes."""
    shape = func(*args, **{**kwargs, "device": torch.device("meta")})
    target.require(sum(each.untyped_storage().nbytes() for each in _tensors((shape,))), str(func))


def _follow(outer: SimulatedTensor, func: OpOverload) -> None:
    """Make a wrapper agree with its inner tensor, which an operation has written in place.

    What grew beyond the capacity becomes what it was, and the error leaves here.
    """
    inner = outer.host
    if inner.untyped_storage()._cdata != outer.allocation.storage._cdata:
        (outer.allocation,) = outer.home.claim([inner.untyped_storage()], str(func))
    elif inner.untyped_storage().nbytes() != outer.allocation.nbytes:
        try:
            outer.home.resize(outer.allocation, str(func))
        except MemoryError:
            storage = inner.untyped_storage()
            storage.resize_(outer.allocation.nbytes)
            inner.set_(storage, outer.storage_offset(), outer.shape, outer.stride())
            raise
    if (inner.shape, inner.stride(), inner.storage_offset()) != (
        outer.shape,
        outer.stride(),
        outer.storage_offset(),
    ):
        torch.Tensor.data.__set__(outer, _wrapper(inner, outer.allocation, outer.home))


def _copy(destination: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    nbytes = destination.numel() * destination.element_size()
    with over_link(_home(source), _home(destination), nbytes):
        _inner(destination).copy_(_inner(source))
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
        target.require(nbytes, "aten._to_copy.default")
    with over_link(_home(source), target, nbytes):
        host = _HOST if target is not None else device
        result = aten._to_copy.default(_inner(source), device=host, dtype=dtype, **options)
    return result if target is None else adopt([result], target, "aten._to_copy.default")[0]


def _item(source: torch.Tensor) -> bool | int | float | complex:
    with over_link(_home(source), None, source.element_size()):
        return _inner(source).item()


def _home(tensor: torch.Tensor) -> SimulatedDevice | None:
    return tensor.home if isinstance(tensor, SimulatedTensor) else None


def _inner(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.host if isinstance(tensor, SimulatedTensor) else tensor
