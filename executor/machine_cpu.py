"""The host's processor as a compute device."""

import threading
import weakref
from collections import deque

import torch

from ..plans.errors import ExecutionError
from .machine import AtOnce, Capabilities, MemoryFigures


class CpuMachine(AtOnce):
    """Computes where the weights are; its figures are those of what was allocated through it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # A finaliser may run anywhere, inside our own lock too: it only leaves its figure here.
        self._given_back: deque[int] = deque()
        self._allocated = self._peak = 0

    @property
    def device(self) -> torch.device:
        """`cpu`."""
        return torch.device("cpu")

    @property
    def capabilities(self) -> Capabilities:
        """One pool of memory, and nothing that copies beside the compute."""
        return Capabilities(pinned_memory=False, streams=False, unified=True, autocast=True)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Give a flat, uninitialised uint8 tensor; the host's memory bounds it, and nothing here does."""
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        with self._lock:
            self._allocated = self._settled() + nbytes
            self._peak = max(self._peak, self._allocated)
        # The storage's Python object lives as long as the storage does, whichever view holds it.
        weakref.finalize(buffer.untyped_storage(), self._given_back.append, nbytes).atexit = False
        return buffer

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Raise ExecutionError: nothing is copied to a device from here."""
        raise ExecutionError("the cpu has no pinned memory", hint="plan with home device or locked")

    def memory(self) -> MemoryFigures:
        """Tell what the live tensors hold that were allocated through this machine."""
        with self._lock:
            return MemoryFigures(allocated_bytes=self._settled(), peak_bytes=self._peak, capacity_bytes=None)

    def reset_peak(self) -> None:
        """Let the peak start again from what is held now."""
        with self._lock:
            self._peak = self._settled()

    def _settled(self) -> int:
        while self._given_back:
            self._allocated -= self._given_back.popleft()
        return self._allocated
