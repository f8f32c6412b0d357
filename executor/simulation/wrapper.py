"""The face of a simulated tensor: what Python sees of it beside the operators."""

# pyright: reportPrivateUsage=false
# torch has no public way to make a wrapper tensor.

from typing import Self, cast

import torch

from ..guards import write_lent
from .device import Allocation, SimulatedDevice

_DATA = torch._C.TensorBase.__dict__["data"]


class Wrapper(torch.Tensor):
    """A tensor that reports a simulated device and keeps its elements in a CPU tensor, `host`."""

    host: torch.Tensor
    allocation: Allocation
    home: SimulatedDevice
    weight_name: str | None = None
    """Of a weight that is lent to the device; then writes through `data` are counted, as `LentWeight` has them."""

    # Disabled, not overridden: torch leaves its fused paths for tensors that override it.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # so torch itself does

    @classmethod
    def around(cls, host: torch.Tensor, allocation: Allocation, home: SimulatedDevice) -> Self:
        """Wrap a CPU tensor whose storage is allocated on the device."""
        if host.is_inference() is not torch.is_inference_mode_enabled():
            # A view of a normal tensor is a normal tensor, under inference mode too; so its wrapper must be one.
            with torch.inference_mode(host.is_inference()):
                return cls.around(host, allocation, home)
        outer = cls._make_wrapper_subclass(
            cls, host.shape, host.stride(), host.storage_offset(), dtype=host.dtype, device=home.device
        )
        # Lazy conjugates and negatives are bits of a tensor, and torch asks the wrapper for them.
        if host.is_conj():
            torch._C._set_conj(outer, True)
        if host.is_neg():
            torch._C._set_neg(outer, True)
        outer.host, outer.allocation, outer.home = host, allocation, home
        return outer

    def __repr__(self) -> str:  # type: ignore[override]  # torch's takes contents for its own use
        return f"SimulatedTensor({self.host!r}, device='{self.home.name}')"

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        if id(self) not in memo:
            with torch.no_grad():
                twin = self.clone()
            twin.requires_grad_(self.requires_grad)
            if isinstance(self, torch.nn.Parameter):
                twin._is_param = True  # how torch marks parameters of a subclass
            memo[id(self)] = twin
        return cast(Self, memo[id(self)])

    @property
    def data(self) -> torch.Tensor:
        """The same tensor outside of autograd; set it to rebind this tensor to another one's storage."""
        return cast(torch.Tensor, _DATA.__get__(self)) if self.weight_name is None else self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        if self.weight_name is not None:
            write_lent(self, self.weight_name, value)
            return
        self.take_shape(value)
        if isinstance(value, Wrapper):
            # An object of its own: operands are told apart by their host tensors.
            self.host, self.allocation, self.home = value.host.detach(), value.allocation, value.home

    def take_shape(self, other: torch.Tensor) -> None:
        """Report the size, strides, offset and dtype of another tensor of this device."""
        _DATA.__set__(self, other)

    def tolist(self) -> list[object]:
        """The elements as Python numbers, copied off the device; one number for a tensor without dimensions."""
        return cast(list[object], self.cpu().tolist())  # pyright: ignore[reportUnknownMemberType]  # torch's stub

    def data_ptr(self) -> int:
        """The address of the first element, which lies in host memory."""
        return self.host.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """The storage of the host tensor: two tensors share memory exactly if these are one."""
        return self.host.untyped_storage()
