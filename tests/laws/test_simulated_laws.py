"""Laws of the simulated device's books, over any order of allocating, viewing, copying and freeing."""

from collections.abc import Callable

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
)
from placewise.executor.simulation.accelerator import simulated_device
from placewise.plans.errors import DeviceMemoryError

CAPACITY = 4096
SIZES = st.integers(0, CAPACITY + 64)


class Books(RuleBasedStateMachine):
    """Allocated is what an oracle says: the bytes of the storages that some tensor still uses."""

    tensors: Bundle[int] = Bundle("tensors")

    @initialize()
    def configure(self) -> None:
        self.device = simulated_device(3, capacity_bytes=CAPACITY)
        self.live: dict[int, torch.Tensor] = {}
        self.storage_of: dict[int, int] = {}
        self.size_of: dict[int, int] = {}
        self.peak = self.copied_in = self.copied_out = 0
        self.names = iter(range(1 << 30))

    def held(self) -> int:
        return sum(self.size_of[storage] for storage in set(self.storage_of.values()))

    def keep(self, tensor: torch.Tensor, storage: int | None = None) -> int:
        name = next(self.names)
        self.live[name] = tensor
        self.storage_of[name] = name if storage is None else storage
        self.size_of.setdefault(self.storage_of[name], tensor.nbytes)
        self.peak = max(self.peak, self.held())
        return name

    def attempt(self, nbytes: int, make: Callable[[], torch.Tensor]) -> MultipleResults[int]:
        """Make a tensor with a storage of its own; it is refused exactly if it does not fit."""
        fits = self.held() + nbytes <= CAPACITY
        try:
            tensor = make()
        except DeviceMemoryError:
            assert not fits
            return multiple()
        assert fits
        return multiple(self.keep(tensor))

    @rule(target=tensors, nbytes=SIZES)
    def allocate(self, nbytes: int) -> MultipleResults[int]:
        return self.attempt(nbytes, lambda: torch.empty(nbytes, dtype=torch.uint8, device="sim:3"))

    @rule(target=tensors, nbytes=SIZES)
    def copy_in(self, nbytes: int) -> MultipleResults[int]:
        before = len(self.live)
        made = self.attempt(nbytes, lambda: torch.zeros(nbytes, dtype=torch.uint8).to("sim:3"))
        self.copied_in += nbytes if len(self.live) > before else 0
        return made

    @rule(target=tensors, name=tensors)
    def clone(self, name: int) -> MultipleResults[int]:
        return self.attempt(self.live[name].nbytes, self.live[name].clone)

    @rule(target=tensors, name=tensors, parts=st.integers(1, 3))
    def view(self, name: int, parts: int) -> int:
        tensor = self.live[name]
        return self.keep(tensor[tensor.numel() // parts :], self.storage_of[name])

    @rule(name=tensors)
    def write(self, name: int) -> None:
        assert self.live[name].fill_(1) is self.live[name]

    @rule(name=tensors)
    def copy_out(self, name: int) -> None:
        self.live[name].cpu()
        self.copied_out += self.live[name].nbytes

    @rule(name=consumes(tensors))
    def free(self, name: int) -> None:
        del self.live[name], self.storage_of[name]

    @precondition(lambda self: self.live)
    @rule()
    def reset_peak(self) -> None:
        self.device.reset_peak()
        self.peak = self.held()

    @invariant()
    def the_books_are_right(self) -> None:
        device = self.device
        assert device.allocated_bytes == self.held() <= CAPACITY
        assert device.peak_bytes == self.peak <= CAPACITY
        assert (device.copied_in_bytes, device.copied_out_bytes) == (self.copied_in, self.copied_out)

    def teardown(self) -> None:
        if hasattr(self, "live"):
            self.live.clear()
            assert self.device.allocated_bytes == 0


TestBooks = Books.TestCase
TestBooks.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
