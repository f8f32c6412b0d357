"""Machines: the same protocol over the CPU and the simulated device."""

import gc
from collections.abc import Iterator

import pytest
import torch
from placewise.executor.machine import Capabilities, Machine, MemoryFigures
from placewise.executor.machine_cpu import CpuMachine
from placewise.executor.machine_torch import TorchMachine
from placewise.executor.simulation.accelerator import simulated_device
from placewise.executor.simulation.machine import SimulatedMachine
from placewise.plans.errors import DeviceMemoryError, InputError

CAPACITY = 1 << 20


def open_cpu() -> Machine:
    return CpuMachine()


def open_simulated() -> Machine:
    return SimulatedMachine(simulated_device(0, capacity_bytes=CAPACITY))


@pytest.fixture(params=[open_cpu, open_simulated])
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    made = request.param()
    gc.disable()
    yield made
    gc.enable()


def test_memory_counts_storages_until_their_last_view_dies(machine: Machine) -> None:
    capacity = machine.memory().capacity_bytes
    buffer = machine.allocate(1000)
    assert (buffer.dtype, buffer.shape, buffer.device) == (torch.uint8, (1000,), machine.device)
    weight = torch.nn.Parameter(buffer[8:408].view(torch.float32), requires_grad=False)
    other = machine.allocate(24)
    assert machine.memory() == MemoryFigures(allocated_bytes=1024, peak_bytes=1024, capacity_bytes=capacity)
    del buffer, other
    assert machine.memory() == MemoryFigures(allocated_bytes=1000, peak_bytes=1024, capacity_bytes=capacity)
    del weight
    assert machine.memory().allocated_bytes == 0
    machine.reset_peak()
    assert machine.memory() == MemoryFigures(allocated_bytes=0, peak_bytes=0, capacity_bytes=capacity)


def test_copy_in_writes_the_slot(machine: Machine) -> None:
    slot = machine.allocate(64)
    source = torch.arange(16.0)
    machine.copy_in(slot.view(torch.float32), source)
    machine.synchronize()
    machine.empty_cache()
    assert torch.equal(slot.cpu().view(torch.float32), source)


def test_the_simulated_machine_bounds_memory_and_counts_copies() -> None:
    device = simulated_device(0, capacity_bytes=CAPACITY)
    machine = SimulatedMachine(device)
    with pytest.raises(DeviceMemoryError):
        machine.allocate(CAPACITY + 1)
    machine.copy_in(machine.allocate(64), torch.zeros(64, dtype=torch.uint8))
    assert device.copied_in_bytes == 64


def test_capabilities() -> None:
    assert CpuMachine().capabilities == Capabilities(pinned_memory=False, streams=False, unified=True, autocast=True)
    pretended = Capabilities(pinned_memory=False, streams=False, unified=True)
    device = simulated_device(0, capacity_bytes=CAPACITY)
    assert SimulatedMachine(device, capabilities=pretended).capabilities == pretended


def test_the_peak_on_mps_is_the_most_that_was_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its allocator keeps none, so it is looked at wherever weights come, and where streams are marked."""
    allocated = iter((100, 700, 300, 200))

    def mps(*, check_available: bool) -> torch.device:
        assert check_available
        return torch.device("mps")

    monkeypatch.setattr("torch.accelerator.current_accelerator", mps)
    monkeypatch.setattr("torch.accelerator.current_device_index", lambda: 0)
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 1)
    monkeypatch.setattr("torch.mps.current_allocated_memory", lambda: next(allocated))
    monkeypatch.setattr("torch.mps.recommended_max_memory", lambda: 1000)
    machine = TorchMachine("mps")
    assert machine.capabilities == Capabilities(pinned_memory=False, streams=False, unified=True, autocast=True)
    assert [machine.mark(), machine.mark()] == [None, None]
    assert machine.memory() == MemoryFigures(allocated_bytes=300, peak_bytes=700, capacity_bytes=1000)
    machine.reset_peak()
    assert machine.memory() == MemoryFigures(allocated_bytes=200, peak_bytes=200, capacity_bytes=1000)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this process has the accelerator that must be missing")
def test_a_missing_accelerator_is_refused() -> None:
    simulated_device(0, capacity_bytes=CAPACITY)
    with pytest.raises(InputError) as caught:
        TorchMachine("cuda")
    assert str(caught.value) == "torch has no accelerator 'cuda' here, but sim"
