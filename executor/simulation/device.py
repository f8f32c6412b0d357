"""The books of one simulated device: its capacity, what is allocated, and what went over its link."""

# pyright: reportPrivateUsage=false
# torch has no public way to tell which storage a tensor has.

import gc
import threading
import time
from collections import deque
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final
from weakref import ref

import torch

from ...plans.errors import DeviceMemoryError, ExecutionError
from ...plans.units import KIB, format_bytes

DEVICE_TYPE = "sim"

_WITH_ITS_COMMAND_BYTES: Final = 64 * KIB
"""A copy of so little does not wait for others: drivers send it with its command, beside the copy engine (CUDA runtime,
"API synchronization behavior"). Else scalars that a forward makes on the device would wait for whole layers."""

DEVICES: Final[dict[int, "SimulatedDevice"]] = {}
"""The devices that were configured, by index. torch has one table of devices per process, and so has this."""


class Allocation:
    """One storage on a simulated device; its bytes are given back when the last tensor that uses it dies.

    Every tensor on the device holds the allocation of its storage, so no garbage collection is waited for.
    """

    __slots__ = ("__weakref__", "nbytes", "storage")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self.storage = storage
        self.nbytes = storage.nbytes()


class _Entry(ref[Allocation]):
    """What the books keep of an allocation: how to find it, and what it gives back when it dies."""

    __slots__ = ("key", "nbytes")
    key: int
    nbytes: int


class SimulatedDevice:
    """One simulated device; counts bytes by storage against its capacity, so views cost nothing.

    Args:
        index: the number in its name, `sim:<index>`.
        capacity_bytes: what fits on it.
        link_bytes_per_s: the bandwidth of its link, in each direction; None for copies that cost no time.
    """

    def __init__(self, index: int, *, capacity_bytes: int, link_bytes_per_s: float | None = None) -> None:
        self.index = index
        self.device = torch.device(DEVICE_TYPE, index)
        self._lock = threading.Lock()
        self._into, self._out_of = threading.Lock(), threading.Lock()
        self._by_storage: dict[int, _Entry] = {}
        # An allocation may die anywhere, inside our own lock too: its entry is only left here.
        self._dead: deque[_Entry] = deque()
        self._allocated = self._peak = self._allocations = 0
        self._copied_in = self._copied_out = 0
        self.capacity_bytes = capacity_bytes
        self.link_bytes_per_s = link_bytes_per_s

    def __repr__(self) -> str:
        return f"SimulatedDevice({self.name}, {self.allocated_bytes} of {self.capacity_bytes} bytes allocated)"

    @property
    def name(self) -> str:
        """As torch prints it: `sim:0`."""
        return f"{DEVICE_TYPE}:{self.index}"

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all live storages."""
        with self._lock:
            return self._settled()

    @property
    def peak_bytes(self) -> int:
        """The most that was allocated since the last `reset_peak`."""
        with self._lock:
            return self._peak

    @property
    def allocations(self) -> int:
        """How many storages were ever allocated."""
        with self._lock:
            return self._allocations

    @property
    def copied_in_bytes(self) -> int:
        """Bytes that came over the link onto the device."""
        with self._lock:
            return self._copied_in

    @property
    def copied_out_bytes(self) -> int:
        """Bytes that left the device over the link."""
        with self._lock:
            return self._copied_out

    def reset_peak(self) -> None:
        """Let the peak start again from what is allocated now."""
        with self._lock:
            self._peak = self._settled()

    def reconfigure(self, *, capacity_bytes: int, link_bytes_per_s: float | None) -> None:
        """Give an empty device another capacity and link, and start its figures from zero.

        Raises:
            ExecutionError: tensors are allocated on it.
        """
        if self.allocated_bytes:
            gc.collect()  # modules are full of cycles; dead ones must not count as allocated
        with self._lock:
            if in_use := self._settled():
                raise ExecutionError(
                    f"{self.name} cannot be configured anew: {_exact(in_use)} in use",
                    hint="delete the tensors on it first, or configure another index",
                )
            self._peak = self._allocations = self._copied_in = self._copied_out = 0
            self.capacity_bytes, self.link_bytes_per_s = capacity_bytes, link_bytes_per_s

    def require(self, nbytes: int, operation: object) -> None:
        """Raise DeviceMemoryError if that many bytes more would not fit."""
        with self._lock:
            self._check(nbytes, operation)

    def claim(self, storages: Sequence[torch.UntypedStorage], operation: object) -> list[Allocation]:
        """Find or open the allocation of each storage: all of them, or none.

        Raises:
            DeviceMemoryError: the new ones together go beyond the capacity; nothing was allocated.
        """
        with self._lock:
            if len(storages) > 1:  # one is checked where it is opened
                fresh = {each._cdata: each.nbytes() for each in storages if self._find(each) is None}
                self._check(sum(fresh.values()), operation)
            return [self._find(each) or self._open(each, operation) for each in storages]

    def resize(self, allocation: Allocation, operation: object) -> None:
        """Follow a storage that an operation resized in place.

        Raises:
            DeviceMemoryError: it grew beyond the capacity; the allocation keeps the figure that it had.
        """
        with self._lock:
            change = allocation.storage.nbytes() - allocation.nbytes
            self._check(change, operation)
            allocation.nbytes += change
            self._by_storage[allocation.storage._cdata].nbytes += change
            self._allocated += change
            self._peak = max(self._peak, self._allocated)

    @contextmanager
    def copying_in(self, nbytes: int) -> Generator[None]:
        """Count a copy onto the device, and let it take as long as the link would."""
        with _taking(nbytes, self._into, self.link_bytes_per_s):
            yield
        with self._lock:
            self._copied_in += nbytes

    @contextmanager
    def copying_out(self, nbytes: int) -> Generator[None]:
        """Count a copy off the device, and let it take as long as the link would."""
        with _taking(nbytes, self._out_of, self.link_bytes_per_s):
            yield
        with self._lock:
            self._copied_out += nbytes

    def _find(self, storage: torch.UntypedStorage) -> Allocation | None:
        entry = self._by_storage.get(storage._cdata)
        return None if entry is None else entry()

    def _open(self, storage: torch.UntypedStorage, operation: object) -> Allocation:
        allocation = Allocation(storage)
        self._check(allocation.nbytes, operation)
        entry = self._by_storage[storage._cdata] = _Entry(allocation, self._dead.append)
        entry.key, entry.nbytes = storage._cdata, allocation.nbytes
        self._allocations += 1
        self._allocated += allocation.nbytes
        self._peak = max(self._peak, self._allocated)
        return allocation

    def _check(self, nbytes: int, operation: object) -> None:
        in_use = self._settled()
        if in_use + nbytes > self.capacity_bytes:
            raise DeviceMemoryError(
                f"{self.name} is out of memory in {operation}: {_exact(nbytes)} requested,"
                f" {_exact(in_use)} in use, {_exact(self.capacity_bytes)} capacity"
            )

    def _settled(self) -> int:
        while self._dead:
            entry = self._dead.popleft()
            self._allocated -= entry.nbytes
            if self._by_storage.get(entry.key) is entry:
                del self._by_storage[entry.key]
        return self._allocated


def device_at(device: torch.device) -> SimulatedDevice:
    """Find a configured device; no index means the first.

    Raises:
        ExecutionError: nothing is configured there.
    """
    index = device.index or 0
    if index not in DEVICES:
        raise ExecutionError(
            f"there is no simulated device {DEVICE_TYPE}:{index}",
            hint=f"configure it with simulated_device({index}, capacity_bytes=...)",
        )
    return DEVICES[index]


def over_link(
    source: SimulatedDevice | None, target: SimulatedDevice | None, nbytes: int
) -> AbstractContextManager[None]:
    """Count and time a copy between two devices, the host being None; on one device nothing crosses."""
    return nullcontext() if source is target else _crossing(source, target, nbytes)


@contextmanager
def _crossing(source: SimulatedDevice | None, target: SimulatedDevice | None, nbytes: int) -> Generator[None]:
    with (
        nullcontext() if source is None else source.copying_out(nbytes),
        nullcontext() if target is None else target.copying_in(nbytes),
    ):
        yield


@contextmanager
def _taking(nbytes: int, direction: threading.Lock, bytes_per_s: float | None) -> Generator[None]:
    if bytes_per_s is None:
        yield
        return
    # One direction carries one copy at a time: two threads that copy share the bandwidth.
    with nullcontext() if nbytes <= _WITH_ITS_COMMAND_BYTES else direction:
        start = time.perf_counter()
        yield
        left = nbytes / bytes_per_s - (time.perf_counter() - start)
        if left > 0:
            time.sleep(left)


def _exact(nbytes: int) -> str:
    return f"{nbytes} bytes" if nbytes < KIB else f"{format_bytes(nbytes)} ({nbytes} bytes)"
