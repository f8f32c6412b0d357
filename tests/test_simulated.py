"""The simulated accelerator as a device: its tensors and its refusals."""

# The cases are tables of lambdas over tensors:
# pyright: reportUnknownLambdaType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from placewise.executor.simulation.accelerator import SimulatedDevice, SimulatedTensor, inner, simulated_device
from placewise.plans.errors import DeviceMismatchError, ExecutionError, InputError
from torch import nn

SIM = "sim:0"
Mode = Callable[[], AbstractContextManager[object]]
MIB = 1 << 20
BOTH_MODES = pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])


@pytest.fixture(scope="module")
def device() -> SimulatedDevice:
    return simulated_device(0, capacity_bytes=64 * MIB)


@pytest.fixture(scope="module")
def second() -> SimulatedDevice:
    return simulated_device(1, capacity_bytes=MIB)


# --- tensors -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    "make",
    [
        lambda d: torch.empty(3, device=d).fill_(1),
        lambda d: torch.zeros(3, device=d),
        lambda d: torch.ones(3, device=d),
        lambda d: torch.full((3,), 2.0, device=d),
        lambda d: torch.arange(3, device=d),
        lambda d: torch.linspace(0, 1, 3, device=d),
        lambda d: torch.eye(3, device=d),
        lambda d: torch.tensor(3, device=d),
        lambda d: torch.tensor([[1.0, 2.0]], device=d),
        lambda d: torch.as_tensor([1, 2], device=d),
        lambda d: torch.asarray([1, 2], device=d),
        lambda d: torch.scalar_tensor(3, device=d),
        lambda d: torch.zeros_like(torch.ones(3), device=d),
        lambda d: torch.ones(3, device=d).new_tensor([1, 2]),
        lambda d: torch.ones(3, device=d).new_zeros(2),
        lambda d: torch.randn(3, device=d, generator=torch.Generator().manual_seed(1)),
        lambda d: torch.randperm(5, device=d, generator=torch.Generator().manual_seed(1)),
        lambda d: torch.ones(1).type_as(torch.ones(1, dtype=torch.half, device=d)),
        lambda d: torch.ones(1).to(torch.ones(1, dtype=torch.half, device=d)),
    ],
)
@BOTH_MODES
def test_factories_give_what_they_give_on_the_cpu(make: Callable[[str], torch.Tensor], mode: Mode) -> None:
    with mode():
        simulated, plain = make(SIM), make("cpu")
    assert isinstance(simulated, SimulatedTensor)
    assert simulated.device == torch.device("sim:0")
    assert simulated.dtype == plain.dtype
    assert torch.equal(simulated.cpu(), plain)


@pytest.mark.usefixtures("device")
def test_the_seed_governs_random_numbers_on_the_device() -> None:
    torch.manual_seed(7)
    simulated = torch.randn(4, device=SIM)
    torch.manual_seed(7)
    assert torch.equal(simulated.cpu(), torch.randn(4))


@pytest.mark.usefixtures("device", "second")
def test_devices_are_told_apart_by_index() -> None:
    on_second = torch.ones(2, device="sim:1")
    assert on_second.device == torch.device("sim:1")
    assert on_second.to("sim").device == torch.device("sim:0")
    assert torch.ones(2, device="sim").to("sim:0").device == torch.device("sim:0")


@pytest.mark.usefixtures("device")
def test_to_the_same_device_is_the_same_tensor() -> None:
    tensor = torch.ones(2, device=SIM)
    assert tensor.to(SIM) is tensor
    assert tensor.to("sim") is tensor
    assert tensor.contiguous() is tensor
    assert tensor.cpu().device == torch.device("cpu")
    assert tensor.to("meta").device == torch.device("meta")


@pytest.mark.usefixtures("device")
@BOTH_MODES
def test_in_place_operators_and_out_return_the_same_object(mode: Mode) -> None:
    with mode():
        tensor = torch.ones(3, device=SIM)
        assert tensor.add_(1) is tensor
        assert torch.mul(tensor, 2, out=tensor) is tensor
        assert tensor.copy_(torch.zeros(3)) is tensor
        assert tensor.unsqueeze_(0) is tensor
        assert (tensor.shape, inner(tensor).shape) == ((1, 3), (1, 3))
        empty = torch.empty(0, device=SIM)
        torch.add(tensor, 1, out=empty)
    assert empty.tolist() == [[1, 1, 1]]


@pytest.mark.usefixtures("device")
@BOTH_MODES
def test_views_share_the_elements(mode: Mode) -> None:
    tensor = torch.zeros(4, 2, device=SIM)
    with mode():
        tensor[1].fill_(1)
        tensor.t()[0].add_(1)
        tensor.view(-1).narrow(0, 6, 2).mul_(5)
        first, *_ = tensor.unbind()
        first.sub_(1)
    assert tensor.tolist() == [[0, -1], [2, 1], [1, 0], [5, 0]]
    assert tensor[1:].untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
    assert tensor[1:].data_ptr() == tensor.data_ptr() + 8


@pytest.mark.usefixtures("device")
def test_under_inference_mode_a_view_is_of_the_kind_of_its_tensor_and_a_result_is_an_inference_tensor() -> None:
    tensor = torch.zeros(4, device=SIM)
    with torch.inference_mode():
        view, result = tensor[1:], tensor + 1
        assert (view.is_inference(), result.is_inference(), result[1:].is_inference()) == (False, True, True)
    assert (tensor[1:].is_inference(), result[1:].is_inference()) == (False, True)


@pytest.mark.parametrize(("dtype", "offset"), [(torch.bfloat16, 6), (torch.float32, 64), (torch.float64, 8)])
def test_a_byte_buffer_packs_weights_of_any_dtype(device: SimulatedDevice, dtype: torch.dtype, offset: int) -> None:
    buffer = torch.zeros(256, dtype=torch.uint8, device=SIM)
    weight = nn.Parameter(buffer.narrow(0, offset, 12 * dtype.itemsize).view(dtype).view(3, 4), requires_grad=False)
    values = torch.randn(3, 4).to(dtype)
    buffer[offset : offset + 12 * dtype.itemsize].copy_(values.flatten().view(torch.uint8))
    assert torch.equal(weight.cpu(), values)
    assert weight.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
    assert device.allocated_bytes == 256


def test_setting_data_rebinds_a_parameter(device: SimulatedDevice) -> None:
    weight = nn.Parameter(torch.zeros(8, device=SIM), requires_grad=False)
    buffer = torch.arange(16.0, device=SIM)
    weight.data = buffer[4:10]
    assert device.allocated_bytes == 64
    assert weight.shape == (6,)
    buffer.add_(1)
    assert weight.tolist() == [5, 6, 7, 8, 9, 10]
    assert weight.add_(torch.ones(6, device=SIM)) is weight
    whole = torch.zeros(2, device=SIM)
    weight.data = whole
    whole.unsqueeze_(0)
    assert (weight.shape, inner(weight).shape) == ((2,), (2,))
    weight.data = buffer
    assert weight.data.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()


@pytest.mark.usefixtures("device")
def test_a_module_moves_and_runs_there() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).eval()
    there = copy.deepcopy(module).to(SIM)
    assert {p.device for p in there.parameters()} == {torch.device("sim:0")}
    assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in there.parameters())
    with torch.no_grad():
        assert torch.equal(there(torch.ones(2, 4, device=SIM)).cpu(), module(torch.ones(2, 4)))
    half = next(iter(there.half().parameters()))
    assert half.dtype is inner(half).dtype is torch.float16
    assert {p.device for p in there.cpu().parameters()} == {torch.device("cpu")}


@pytest.mark.usefixtures("device")
def test_deepcopy_is_a_second_storage_and_keeps_ties() -> None:
    one, other = nn.Linear(2, 2, device=SIM), nn.Linear(2, 2, device=SIM)
    other.weight = one.weight
    twin_one, twin_other = copy.deepcopy((one, other))
    assert isinstance(twin_one.weight, nn.Parameter)
    assert twin_one.weight is twin_other.weight
    assert twin_one.weight.data_ptr() != one.weight.data_ptr()


@pytest.mark.usefixtures("device")
def test_a_tensor_is_shown_with_its_device() -> None:
    assert repr(torch.ones(2, device=SIM)) == "SimulatedTensor(tensor([1., 1.]), device='sim:0')"


@pytest.mark.usefixtures("device")
def test_grad_mode_runs_forward() -> None:
    linear = nn.Linear(3, 3, device=SIM)
    assert linear(torch.ones(1, 3, device=SIM)).requires_grad


@pytest.mark.usefixtures("device")
def test_inner_is_for_simulated_tensors() -> None:
    with pytest.raises(InputError) as caught:
        inner(torch.ones(1))
    assert str(caught.value) == "a tensor on cpu has no inner tensor, only one on 'sim' has"


# --- refusals ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("device", "second")
@pytest.mark.parametrize(
    ("operator", "where", "run"),
    [
        ("aten.add.Tensor", "sim:0 and cpu", lambda x: x + torch.ones(3)),
        ("aten.add.Tensor", "cpu and sim:0", lambda x: torch.ones(3) + x),
        ("aten.add_.Tensor", "cpu and sim:0", lambda x: torch.tensor(1.0).add_(x[0])),
        ("aten.add.Tensor", "sim:0 and sim:1", lambda x: x + torch.ones(3, device="sim:1")),
        ("aten.cat.default", "sim:0 and cpu", lambda x: torch.cat([x, torch.ones(3)])),
        ("aten.stack.default", "sim:0 and cpu", lambda x: torch.stack([x[0], torch.tensor(1.0)])),
        ("aten.mm.default", "sim:0 and cpu", lambda x: nn.functional.linear(x[None], torch.ones(3, 3))),
        ("aten.embedding.default", "cpu and sim:0", lambda x: nn.functional.embedding(x.long(), torch.ones(3, 3))),
        ("aten.index_select.default", "sim:0 and cpu", lambda x: x.index_select(0, torch.tensor(1))),
        ("aten.index.Tensor", "cpu and sim:0", lambda x: torch.ones(3)[x > 0]),
    ],
)
@BOTH_MODES
def test_operands_of_two_devices_are_refused(
    operator: str, where: str, run: Callable[[torch.Tensor], object], mode: Mode
) -> None:
    with mode(), pytest.raises(DeviceMismatchError) as caught:
        run(torch.ones(3, device=SIM))
    assert str(caught.value) == (
        f"{operator} needs its tensors on one device, but found {where}\n"
        "hint: move one of them with .to(device), or create it on the compute device"
    )
    assert isinstance(caught.value, RuntimeError)


@pytest.mark.usefixtures("device")
@BOTH_MODES
def test_host_tensors_are_let_in_where_a_real_device_lets_them(
    mode: Mode,
) -> None:
    scalar, places = torch.tensor(2.0), torch.tensor([0, 2])
    with mode():
        x = torch.arange(3.0, device=SIM)
        assert (x * scalar).tolist() == [0, 2, 4]
        assert torch.where(x > 1, x, scalar).tolist() == [2, 2, 2]
        assert torch.isclose(x, scalar).tolist() == [False, False, True]
        assert x[places].tolist() == [0, 2]
        x[places] = torch.ones(2, device=SIM)
        assert x.masked_fill_(x > 0, scalar).tolist() == [2, 2, 2]
        x[0] = scalar + 1
        assert x.tolist() == [3, 2, 2]
        assert x.copy_(torch.ones(3)).sum().item() == 3


@pytest.mark.usefixtures("device")
def test_a_device_that_was_not_configured_is_named() -> None:
    with pytest.raises(ExecutionError) as caught:
        torch.ones(1, device="sim:77")
    assert str(caught.value) == (
        "there is no simulated device sim:77\nhint: configure it with simulated_device(77, capacity_bytes=...)"
    )


@pytest.mark.parametrize(
    ("index", "options", "message"),
    [
        (-1, {"capacity_bytes": 1}, "a simulated device has an index and a capacity of 0 or more, not -1 and 1"),
        (0, {"capacity_bytes": -1}, "a simulated device has an index and a capacity of 0 or more, not 0 and -1"),
        (
            0,
            {"capacity_bytes": 1, "link_bytes_per_s": 0.0},
            "link_bytes_per_s is 0.0, but must be above 0\nhint: None is instant",
        ),
    ],
)
def test_figures_out_of_range_are_refused(index: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        simulated_device(index, **options)
    assert str(caught.value) == message
