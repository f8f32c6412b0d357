"""The simulated accelerator's memory and link."""

import gc
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from placewise.executor.simulation.accelerator import SimulatedDevice, adopt, inner, simulated_device
from placewise.plans.errors import DeviceMemoryError, ExecutionError
from torch import nn

SIM = "sim:0"
MIB = 1 << 20


@pytest.fixture
def device() -> Iterator[SimulatedDevice]:
    """A device of 64 MiB, which must be empty afterwards."""
    made = simulated_device(0, capacity_bytes=64 * MIB)
    yield made
    if made.allocated_bytes:
        gc.collect()  # a caught error and its frames are a cycle
    assert made.allocated_bytes == 0


@pytest.fixture
def no_collection() -> Iterator[None]:
    """Switch the garbage collector off, so that what is given back is so by reference counting."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def second() -> SimulatedDevice:
    return simulated_device(1, capacity_bytes=MIB)


# --- memory --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_collection")
def test_bytes_are_counted_once_per_storage_and_given_back_with_the_last_view(device: SimulatedDevice) -> None:
    tensor = torch.empty(1000, device=SIM)
    view = nn.Parameter(tensor[10:20].view(2, 5), requires_grad=False)
    assert (device.allocated_bytes, device.allocations) == (4000, 1)
    del tensor
    assert device.allocated_bytes == 4000
    del view
    assert (device.allocated_bytes, device.peak_bytes) == (0, 4000)
    device.reset_peak()
    assert device.peak_bytes == 0


def test_results_count_and_in_place_operators_do_not(device: SimulatedDevice) -> None:
    tensor = torch.zeros(1000, device=SIM)
    tensor.add_(1).mul_(2)
    assert device.peak_bytes == 4000
    _ = tensor + 1
    assert device.peak_bytes == 8000


def test_a_storage_that_grows_is_followed(device: SimulatedDevice) -> None:
    tensor = torch.zeros(10, device=SIM)
    tensor.resize_(1000)
    assert device.allocated_bytes == 4000
    tensor[:10].sum()
    with pytest.raises(DeviceMemoryError):
        tensor.resize_(64 * MIB)
    assert (device.allocated_bytes, tensor.shape, inner(tensor).shape) == (4000, (1000,), (1000,))


@pytest.mark.parametrize(
    ("operator", "allocate"),
    [
        ("aten.empty.memory_format", lambda: torch.empty(4 * MIB, dtype=torch.uint8, device=SIM)),
        ("aten.empty_strided.default", lambda: torch.zeros(4 * MIB, dtype=torch.uint8).to(SIM)),
        ("aten._to_copy.default", lambda: torch.zeros(4 * MIB, dtype=torch.uint8, device="sim:1").to(SIM)),
        (
            "aten.pad.default",
            lambda: nn.functional.pad(torch.empty(0, dtype=torch.uint8, device=SIM), (0, 4 * MIB)),
        ),
    ],
)
def test_beyond_the_capacity_is_out_of_memory(operator: str, allocate: Callable[[], torch.Tensor]) -> None:
    simulated_device(1, capacity_bytes=4 * MIB)
    device = simulated_device(0, capacity_bytes=4 * MIB)
    tensor = torch.empty(512, dtype=torch.uint8, device=SIM)
    with pytest.raises(DeviceMemoryError) as caught:
        allocate()
    assert str(caught.value) == (
        f"sim:0 is out of memory in {operator}: 4.00 MiB (4194304 bytes) requested, 512 bytes in use,"
        " 4.00 MiB (4194304 bytes) capacity"
    )
    assert (device.allocated_bytes, device.peak_bytes) == (512, 512)
    del tensor, caught
    gc.collect()
    assert allocate().nbytes == 4 * MIB  # exactly full is not beyond


def test_several_results_are_allocated_together_or_not_at_all(device: SimulatedDevice) -> None:
    device = simulated_device(0, capacity_bytes=MIB)
    values = torch.zeros(100_000, device=SIM)
    with pytest.raises(DeviceMemoryError) as caught:
        values.sort()
    assert "aten.sort.default" in str(caught.value)
    assert device.allocated_bytes == 400_000


def test_views_that_are_put_there_together_are_one_storage(device: SimulatedDevice) -> None:
    device = simulated_device(0, capacity_bytes=4000)
    host = torch.zeros(1000)
    whole, part = adopt([host, host[10:]], device, "here")
    assert (device.allocated_bytes, device.peak_bytes, device.allocations) == (4000, 4000, 1)
    del whole
    assert device.allocated_bytes == 4000
    assert part.shape == (990,)


def test_a_storage_that_left_the_device_can_come_back(device: SimulatedDevice) -> None:
    host = torch.zeros(1000)
    for times in range(1, 4):
        (there,) = adopt([host], device, "here")
        assert (device.allocated_bytes, device.allocations) == (4000, times)
        del there
    assert (device.allocated_bytes, device.peak_bytes) == (0, 4000)


def test_no_host_memory_is_asked_for_what_cannot_fit(device: SimulatedDevice) -> None:
    with pytest.raises(DeviceMemoryError):
        torch.empty(1 << 60, device=SIM)
    assert device.peak_bytes == 0


def test_a_second_call_configures_an_empty_device_anew() -> None:
    device = simulated_device(0, capacity_bytes=MIB)
    tensor = torch.ones(10, device=SIM)
    with pytest.raises(ExecutionError) as caught:
        simulated_device(0, capacity_bytes=2 * MIB)
    assert str(caught.value) == (
        "sim:0 cannot be configured anew: 40 bytes in use\n"
        "hint: delete the tensors on it first, or configure another index"
    )
    assert device.capacity_bytes == MIB
    del tensor
    assert simulated_device(0, capacity_bytes=2 * MIB, link_bytes_per_s=1e9) is device
    assert (device.capacity_bytes, device.link_bytes_per_s) == (2 * MIB, 1e9)
    assert (device.peak_bytes, device.allocations, device.copied_in_bytes) == (0, 0, 0)


@pytest.mark.usefixtures("no_collection")
def test_threads_do_not_lose_a_byte(device: SimulatedDevice) -> None:
    def work() -> None:
        for size in range(1, 200):
            kept = torch.empty(size, dtype=torch.uint8, device=SIM)
            kept[: size // 2].add(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (device.allocated_bytes, device.allocations) == (0, 4 * 199 * 2)


# --- link ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("second")
def test_bytes_over_the_link_are_counted_by_direction(device: SimulatedDevice, second: SimulatedDevice) -> None:
    there = torch.ones(100).to(SIM)
    assert (device.copied_in_bytes, device.copied_out_bytes) == (400, 0)
    there.copy_(torch.ones(1))
    there.cpu()
    there[0].item()
    assert (device.copied_in_bytes, device.copied_out_bytes) == (800, 404)
    there.to("sim:1", torch.float16)
    assert (device.copied_out_bytes, second.copied_in_bytes) == (604, 200)
    there.clone().half()
    assert (device.copied_in_bytes, device.copied_out_bytes) == (800, 604)


def test_a_copy_takes_as_long_as_the_link() -> None:
    simulated_device(0, capacity_bytes=MIB, link_bytes_per_s=10 * MIB)
    source = torch.zeros(MIB // 2, dtype=torch.uint8)
    start = time.perf_counter()
    there = source.to(SIM)
    assert time.perf_counter() - start >= 0.05
    start = time.perf_counter()
    there.add_(1).cpu()
    assert time.perf_counter() - start >= 0.05
    del there
    simulated_device(0, capacity_bytes=MIB)


def test_copies_in_one_direction_share_the_link() -> None:
    device = simulated_device(0, capacity_bytes=MIB, link_bytes_per_s=10 * MIB)
    source = torch.zeros(MIB // 4, dtype=torch.uint8)
    threads = [threading.Thread(target=lambda: source.to(SIM)) for _ in range(2)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.perf_counter() - start >= 0.05
    assert device.copied_in_bytes == MIB // 2
    simulated_device(0, capacity_bytes=MIB)


def test_a_scalar_does_not_wait_for_a_layer_on_the_link() -> None:
    device = simulated_device(0, capacity_bytes=MIB, link_bytes_per_s=1e12)
    sources = (torch.zeros(9), torch.zeros(99_999))
    few, many = (threading.Thread(target=source.to, args=(SIM,), daemon=True) for source in sources)
    with device.copying_in(MIB // 2):
        for thread in (few, many):
            thread.start()
        few.join(10)
        many.join(0.05)
        assert (few.is_alive(), many.is_alive()) == (False, True)
    many.join()
    simulated_device(0, capacity_bytes=MIB)


def test_copies_are_the_same_bits_whatever_the_layout() -> None:
    simulated_device(0, capacity_bytes=MIB)
    numbers = torch.arange(12.0).view(3, 4)
    complex_numbers = torch.complex(numbers, numbers + 1)
    for source in (
        numbers,
        numbers.t(),
        numbers[:, 1:],
        numbers[:0],
        complex_numbers.conj(),
        complex_numbers.conj().imag,
    ):
        there = torch.empty(source.shape, dtype=source.dtype, device=SIM)
        assert torch.equal(inner(there.copy_(source)), source)
    assert torch.equal(inner(torch.empty(3, 4, device=SIM).copy_(numbers[0])), numbers[0].expand(3, 4))
    del there
    simulated_device(0, capacity_bytes=MIB)
