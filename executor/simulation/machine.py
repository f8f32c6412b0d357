"""The simulated accelerator as a machine of the executor."""

import weakref
from collections import deque

import torch

from ...plans.errors import ExecutionError
from ..machine import AtOnce, Capabilities, MemoryFigures
from ..pages import anonymous_pages
from .device import SimulatedDevice


class SimulatedMachine(AtOnce):
    """A machine without hardware; see `simulated_device`.

    Args:
        simulated: the device, configured.
        capabilities: what it pretends to have; copies are done when `copy_in` returns in any case, so that
            overlap comes from the thread that copies.
    """

    def __init__(self, simulated: SimulatedDevice, *, capabilities: Capabilities | None = None) -> None:
        self.simulated = simulated
        self._pinned_bytes = 0
        self._released: deque[int] = deque()
        self._capabilities = capabilities or Capabilities(pinned_memory=False, streams=True, unified=False)

    @property
    def device(self) -> torch.device:
        """`sim:<index>`."""
        return self.simulated.device

    @property
    def capabilities(self) -> Capabilities:
        """As given."""
        return self._capabilities

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Give a flat, uninitialised uint8 tensor on the device.

        Raises:
            DeviceMemoryError: the device does not have that many bytes left.
        """
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Give pages of the host that only count as page-locked.

        Raises:
            ExecutionError: pinned memory is not among its capabilities.
        """
        if not self._capabilities.pinned_memory:
            raise ExecutionError(f"{self.device} has no pinned memory", hint="plan with home pageable or locked")
        buffer = anonymous_pages(nbytes)
        self._pinned_bytes += nbytes
        weakref.finalize(buffer.untyped_storage(), self._released.append, nbytes).atexit = False
        return buffer

    @property
    def pinned_bytes(self) -> int:
        """Bytes of live memory from `pinned`."""
        return self._pinned_bytes - sum(self._released)

    def memory(self) -> MemoryFigures:
        """Tell the device's own figures."""
        return MemoryFigures(
            allocated_bytes=self.simulated.allocated_bytes,
            peak_bytes=self.simulated.peak_bytes,
            capacity_bytes=self.simulated.capacity_bytes,
        )

    def reset_peak(self) -> None:
        """Let the peak start again from what is held now."""
        self.simulated.reset_peak()
