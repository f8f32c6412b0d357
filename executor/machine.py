"""What differs between platforms, behind one protocol: where bytes live, how they get there, what is left."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a machine can do besides computing; the executor asks this and never a device's name.

    Attributes:
        pinned_memory: page-locked host memory makes its copies faster and asynchronous.
        streams: copies can run beside the compute, on a copy engine.
        unified: host and device are one pool of memory, so that staging would only make a second copy.
        autocast: torch can choose the dtype of each operation there.
    """

    pinned_memory: bool
    streams: bool
    unified: bool
    autocast: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFigures:
    """A machine's memory at one moment.

    Attributes:
        allocated_bytes: held by live tensors now.
        peak_bytes: the most that was held since the last `reset_peak`.
        capacity_bytes: all that the device has; None where the machine does not bound it.
    """

    allocated_bytes: int
    peak_bytes: int
    capacity_bytes: int | None


Mark: TypeAlias = object
"""A point in a stream; None where everything asked before is done."""


class Machine(Protocol):
    """A compute device as the executor needs it."""

    @property
    def device(self) -> torch.device:
        """Where its tensors are; the index is always given, except for the CPU."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What it can do besides computing."""
        ...

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Give a flat, uninitialised uint8 tensor on the device; its bytes go back when its last view dies.

        Raises:
            DeviceMemoryError: the device does not have that many bytes left.
        """
        ...

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Give a flat, uninitialised uint8 tensor of exactly so many page-locked bytes on the host, for its copies.

        Raises:
            ExecutionError: the machine has no page-locked memory, or the system gives no more.
        """
        ...

    def copy_in(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Write the host tensor `source` into `destination`, which is on the device and of the same shape.

        The copy may still run afterwards where the machine has streams: `destination` may be read only behind a
        `mark` made after it, and the bytes of `source` may be reused only when that mark is reached.
        """
        ...

    def copying(self) -> AbstractContextManager[object]:
        """Within it this thread's stream is the machine's only copy stream, which runs beside the compute."""
        ...

    def mark(self) -> Mark:
        """Give the point behind all that this thread's stream was asked until now."""
        ...

    def wait(self, mark: Mark) -> None:
        """Let what this thread's stream is asked from now on begin behind a mark; the host goes on."""
        ...

    def reach(self, mark: Mark) -> None:
        """Let the host wait for a mark."""
        ...

    def synchronize(self) -> None:
        """Wait until everything that was asked of the device is done."""
        ...

    def empty_cache(self) -> None:
        """Give memory that no tensor holds back to the system, where an allocator keeps some."""
        ...

    def memory(self) -> MemoryFigures:
        """Tell what is held, was held at most, and can be."""
        ...

    def reset_peak(self) -> None:
        """Let the peak start again from what is held now."""
        ...


class AtOnce:
    """What machines have in common on which every copy is done when it returns, and which keep no freed memory."""

    def copy_in(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Write `source` into `destination`; done when this returns."""
        destination.copy_(source)

    def copying(self) -> AbstractContextManager[object]:
        """Change nothing: copies are done when `copy_in` returns."""
        return nullcontext()

    def mark(self) -> Mark:
        """Give None: everything is done."""
        return None

    def wait(self, mark: Mark) -> None:
        """Return at once: nothing runs later here."""

    def reach(self, mark: Mark) -> None:
        """Return at once: nothing runs later here."""

    def synchronize(self) -> None:
        """Return at once: nothing runs later here."""

    def empty_cache(self) -> None:
        """Return at once: nothing is kept here."""
