"""The simulated accelerator: a device of its own that keeps its tensors in host memory.

It refuses what a real accelerator refuses (operands of two devices, bytes beyond its capacity), counts what
it holds and what went over its link, and computes with the CPU's own kernels, bit for bit. So placement can
be tested, and a plan rehearsed, without the hardware.

It takes torch's one place for a foreign device, after which `torch.accelerator` means this device: rehearse
in a process that uses no real accelerator.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# torch has no public way to bring a device from Python, and its library has no types.

import threading
from functools import partial
from typing import Final

import torch
from torch._ops import OpOverload
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from ...plans.errors import InputError
from .device import DEVICE_TYPE, DEVICES, SimulatedDevice
from .rules import whole_composites
from .tensor import SimulatedTensor, adopt, execute

__all__ = ["simulated_device", "inner", "adopt", "SimulatedDevice", "SimulatedTensor"]

_CONFIGURING: Final = threading.Lock()

# Libraries take their kernels back when they die.
_LIBRARIES: Final[list[torch.library.Library]] = []


def simulated_device(index: int = 0, *, capacity_bytes: int, link_bytes_per_s: float | None = None) -> SimulatedDevice:
    """Configure the device `sim:<index>`, and tell torch of it at the first call.

    A second call for an index gives the same device with a new capacity and link, and zeroed figures.

    Args:
        index: the number of the device.
        capacity_bytes: what fits on it.
        link_bytes_per_s: its link's bandwidth in each direction: a copy takes at least bytes / bandwidth.
            None for copies that take only what the host takes.

    Raises:
        InputError: a figure is out of its range.
        ExecutionError: tensors are allocated on the device.
    """
    if index < 0 or capacity_bytes < 0:
        raise InputError(
            f"a simulated device has an index and a capacity of 0 or more, not {index} and {capacity_bytes}"
        )
    if link_bytes_per_s is not None and link_bytes_per_s <= 0:
        raise InputError(f"link_bytes_per_s is {link_bytes_per_s}, but must be above 0", hint="None is instant")
    with _CONFIGURING:
        if not _LIBRARIES:
            _register()
        if index in DEVICES:
            DEVICES[index].reconfigure(capacity_bytes=capacity_bytes, link_bytes_per_s=link_bytes_per_s)
        else:
            DEVICES[index] = SimulatedDevice(index, capacity_bytes=capacity_bytes, link_bytes_per_s=link_bytes_per_s)
        return DEVICES[index]


def inner(tensor: torch.Tensor) -> torch.Tensor:
    """Give the CPU tensor behind a simulated one; it shares the elements, and nothing is counted as copied.

    Raises:
        InputError: the tensor is not on a simulated device.
    """
    if not isinstance(tensor, SimulatedTensor):
        raise InputError(f"a tensor on {tensor.device} has no inner tensor, only one on '{DEVICE_TYPE}' has")
    return tensor.host


class _Backend:
    """What torch asks of the module `torch.sim`."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return max(DEVICES, default=-1) + 1

    def current_device(self) -> int:
        return 0

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        """Do nothing: random numbers here are drawn by the CPU's generator, which torch seeds itself."""


def _register() -> None:
    _setup_privateuseone_for_python_backend(DEVICE_TYPE, _Backend())
    anything = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
    anything.fallback(_kernel, "PrivateUse1")  # type: ignore[no-untyped-call]
    ours = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    # torch.tensor and its like copy below Python's dispatch, where the fallback above is not looked for.
    below_python = [torch.ops.aten.copy_.default, torch.ops.aten._local_scalar_dense.default]
    # A kernel of its own keeps a composite from being decomposed on the way to the tensor's own dispatch.
    for func in (*below_python, *whole_composites()):
        if not func.has_kernel_for_dispatch_key(torch._C.DispatchKey.PrivateUse1):
            ours.impl(func, partial(_kernel, func), "PrivateUse1")  # type: ignore[no-untyped-call]
    _LIBRARIES.extend((anything, ours))


def _kernel(func: OpOverload, *args: object, **kwargs: object) -> object:
    return execute(func, args, kwargs)
