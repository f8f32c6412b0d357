"""A real accelerator, through torch's interface for all of them."""

import weakref
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import torch

from ..plans.errors import DeviceMemoryError, ExecutionError, InputError
from ..plans.units import format_bytes
from .machine import Capabilities, Mark, MemoryFigures
from .pages import anonymous_pages


class TorchMachine:
    """The accelerator that this torch is built for: CUDA, ROCm, XPU or MPS.

    Args:
        device: its type, with an index or without; without, the current one is taken.

    Raises:
        InputError: torch has no such accelerator here.
    """

    def __init__(self, device: torch.device | str) -> None:
        wanted = torch.device(device)
        present = torch.accelerator.current_accelerator(check_available=True)
        if present is None or present.type != wanted.type:
            raise InputError(f"torch has no accelerator '{wanted}' here, but {present or 'none'}")
        index = cast(int | None, wanted.index)  # torch's stub has no None
        if index is None:
            index = torch.accelerator.current_device_index()
        if index >= torch.accelerator.device_count():
            raise InputError(f"there is no '{wanted}' among {torch.accelerator.device_count()} accelerators")
        self._device = torch.device(wanted.type, index)
        self._capabilities = _capabilities(self._device)
        # MPS has one queue, which all copies are in already.
        self._copies = None if wanted.type == "mps" else torch.Stream(self._device)
        self._peak = 0

    @property
    def device(self) -> torch.device:
        """Type and index."""
        return self._device

    @property
    def capabilities(self) -> Capabilities:
        """As its platform and, for an integrated processor, its properties tell."""
        return self._capabilities

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Give a flat, uninitialised uint8 tensor on the device.

        Raises:
            DeviceMemoryError: the device does not have that many bytes left.
        """
        try:
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        except torch.OutOfMemoryError as error:
            figures = self.memory()
            raise DeviceMemoryError(
                f"{self._device} is out of memory: {format_bytes(nbytes)} ({nbytes} bytes) requested,"
                f" {format_bytes(figures.allocated_bytes)} in use by this process, {error}"
            ) from error
        if self._copies is not None:
            # Whoever frees it may do so while it is still copied into: the allocator then waits for that stream.
            buffer.record_stream(self._copies)
        self._look()
        return buffer

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Give pages of the host that CUDA has registered; torch's own pinned memory is rounded up to a power of two.

        Raises:
            ExecutionError: the platform is another, or CUDA refuses.
        """
        if not self._capabilities.pinned_memory:
            raise ExecutionError(
                f"{self._device} has no pinned memory", hint="plan with home pageable, mapped or locked"
            )
        buffer = anonymous_pages(nbytes)
        if nbytes:
            runtime: Any = cast(Any, torch.cuda).cudart()
            if code := int(runtime.cudaHostRegister(buffer.data_ptr(), nbytes, 0)):
                raise ExecutionError(
                    f"{format_bytes(nbytes)} ({nbytes} bytes) could not be page-locked: {self._device} error {code}",
                    hint="lower the policy's pinned_max_percent, or raise the limit (ulimit -l)",
                )
            # A storage's finalisers run before its memory goes.
            weakref.finalize(buffer.untyped_storage(), self._unpin, buffer.data_ptr()).atexit = False
        return buffer

    def _unpin(self, address: int) -> None:
        """Copies may still read the pages."""
        self.synchronize()
        cast(Any, torch.cuda).cudart().cudaHostUnregister(address)

    def copy_in(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        """Write `source` into `destination` on the current stream; asynchronous if `source` is pinned."""
        destination.copy_(source, non_blocking=self._capabilities.streams)

    @contextmanager
    def copying(self) -> Generator[None]:
        """Make the copy stream this thread's, and afterwards the one that was."""
        if self._copies is None:
            yield
            return
        # A stream is no context of its own: what it would restore is kept in it, and threads share it.
        with torch.accelerator.device_index(self._device.index):
            before = torch.accelerator.current_stream(self._device)
            torch.accelerator.set_stream(self._copies)
            try:
                yield
            finally:
                torch.accelerator.set_stream(before)

    def mark(self) -> Mark:
        """Record an event; None on MPS, whose one queue keeps the order."""
        self._look()
        return None if self._copies is None else torch.accelerator.current_stream(self._device).record_event()

    def wait(self, mark: Mark) -> None:
        """Let this thread's stream wait for an event; the host goes on."""
        if isinstance(mark, torch.Event):
            torch.accelerator.current_stream(self._device).wait_event(mark)

    def reach(self, mark: Mark) -> None:
        """Let the host wait for an event."""
        if isinstance(mark, torch.Event):
            mark.synchronize()

    def synchronize(self) -> None:
        """Wait for all streams of the device."""
        torch.accelerator.synchronize(self._device)

    def empty_cache(self) -> None:
        """Give cached, unused blocks back to the driver."""
        torch.accelerator.empty_cache()

    def memory(self) -> MemoryFigures:
        """Tell the allocator's figures of this process. MPS keeps no peak: there it is the most that was seen."""
        if self._device.type == "mps":
            allocated = self._look()
            capacity = torch.mps.recommended_max_memory()
        else:
            allocated = torch.accelerator.memory_allocated(self._device)
            self._peak = torch.accelerator.max_memory_allocated(self._device)
            capacity = torch.accelerator.get_memory_info(self._device)[1]
        return MemoryFigures(allocated_bytes=allocated, peak_bytes=self._peak, capacity_bytes=capacity)

    def _look(self) -> int:
        """On MPS, what is allocated now: looked at wherever weights come and go, as the allocator keeps no peak."""
        allocated = torch.mps.current_allocated_memory() if self._device.type == "mps" else 0
        self._peak = max(self._peak, allocated)
        return allocated

    def reset_peak(self) -> None:
        """Let the peak start again from what is held now."""
        self._peak = 0
        if self._device.type != "mps":
            torch.accelerator.reset_peak_memory_stats(self._device)


def _capabilities(device: torch.device) -> Capabilities:
    unified = device.type == "mps" or (
        device.type == "cuda" and bool(torch.cuda.get_device_properties(device).is_integrated)  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]  # untyped in torch
    )
    return Capabilities(
        pinned_memory=device.type == "cuda" and not unified,
        streams=not unified,
        unified=unified,
        autocast=torch.amp.is_autocast_available(device.type),
    )
