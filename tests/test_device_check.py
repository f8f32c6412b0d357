"""Operations on two devices are found before anything is loaded: each one, with its module, and none that is right."""

# The cases are tables of lambdas over tensors, and the libraries have no types:
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import placewise
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from placewise.executor.simulation.accelerator import simulated_device
from placewise.planner.tracing.devices import DeviceCheck, MixedDevices
from placewise.plans.document import Plan
from placewise.plans.errors import DeviceMismatchError, InputError, RefusedError
from placewise.plans.policy import Hold, Home, Override
from placewise.plans.units import GIB
from torch import nn
from torch.nn import functional as F

from .modules import SIM, build, machine, on_meta, overridden, plan_for, save
from .pipelines import clip_text, diffusion_transformer, llama, saved, seeded, stable_diffusion, t5, vae

WIDTH = 8


class Encoder(nn.Module):
    """A text encoder whose `device` is its first parameter's, and which has a table that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.register_buffer("scale", torch.ones(WIDTH), persistent=False)
        self.frequencies = torch.ones(1, WIDTH, 1)
        self.built_on = self.embed.weight.device

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self.parameters()).device
        return device

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) * self.scale
        rotary = torch.bmm(x, frequencies)
        for layer in self.layers:
            x = layer(x) * mask
        result: torch.Tensor = x + rotary
        return result


class Vision(nn.Module):
    """Embeds images of a rank, which may have none. `right` is whether it then makes its tensors where it computes."""

    def __init__(self, *, right: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.right = right

    def forward(self, images: torch.Tensor, gathered: torch.Tensor) -> torch.Tensor:
        if images.shape[0] == 0:
            own = torch.empty((0, WIDTH), device=gathered.device if self.right else images.device)
        else:
            own = self.blocks[1](self.blocks[0](images.to(gathered.device)))
        return torch.cat([own, gathered]) * 2


@pytest.fixture
def encoder(tmp_path: Path) -> Path:
    return save(build(Encoder), tmp_path / "model.safetensors")


def streamed(path: Path, hold: Hold = Hold.layer, home: Home = Home.mapped) -> Plan:
    return plan_for(path, machine(GIB, GIB), overridden(Override(select="model", hold=hold, home=home)))


def resident(path: Path) -> Plan:
    plan = plan_for(path, machine(GIB, GIB))
    assert {segment.home for segment in plan.placements[0].segments} == {Home.device}
    return plan


def where(pipeline: Any) -> Any:
    return pipeline.device("model")


def inputs(ids: object, mask: object, frequencies: object) -> tuple[torch.Tensor, ...]:
    return (
        torch.ones(2, 3, dtype=torch.int64, device=cast(Any, ids)),
        torch.ones(2, 3, 1, device=cast(Any, mask)),
        torch.ones(2, WIDTH, 1, device=cast(Any, frequencies)),
    )


def on_its_device(pipeline: Any) -> Any:
    return pipeline["model"](*inputs(where(pipeline), where(pipeline), where(pipeline)))


def on_its_first_parameters(pipeline: Any) -> Any:
    device = pipeline["model"].device
    return pipeline["model"](*inputs(device, device, device))


def found(plan: Plan, path: Path, request: Callable[[Any], object], make: Any = Encoder, **options: Any) -> list[str]:
    check = placewise.check_devices(plan, path, request, modules={"model": on_meta(make)}, **options)
    assert check.unchecked == {}
    return [str(each) for each in check.mixed]


EACH = [
    f"model.embed: aten.embedding.default on {SIM} and cpu",
    f"model: aten.bmm.default on {SIM} and cpu",
    f"model: aten.mul.Tensor on {SIM} and cpu",
]


@pytest.mark.parametrize("at_rest", [False, True])
@pytest.mark.parametrize("plan", [resident, streamed, lambda path: streamed(path, Hold.phase, Home.pageable)])
def test_inputs_where_it_computes_are_right(encoder: Path, plan: Callable[[Path], Plan], at_rest: bool) -> None:  # noqa: FBT001
    assert found(plan(encoder), encoder, on_its_device, at_rest=at_rest) == []


def test_inputs_where_the_first_parameter_rests_are_each_found(encoder: Path) -> None:
    """Case 1: the parameters rest on the CPU, and `device` tells so, while the encoder computes elsewhere."""
    assert found(streamed(encoder), encoder, on_its_first_parameters, at_rest=True) == EACH
    assert found(resident(encoder), encoder, on_its_first_parameters, at_rest=True) == []


def test_the_first_parameter_answers_as_the_executor_has_it(encoder: Path) -> None:
    plan = streamed(encoder)
    assert found(plan, encoder, on_its_first_parameters) == []
    loaded = placewise.load(plan, encoder, modules={"model": on_meta(Encoder)})
    with torch.no_grad():
        assert torch.equal(on_its_first_parameters(loaded).cpu(), build(Encoder)(*inputs("cpu", "cpu", "cpu")))


@pytest.mark.parametrize("at_rest", [False, True])
@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (lambda pipeline: pipeline["model"](*inputs("cpu", "cpu", "cpu")), EACH),
        (lambda pipeline: pipeline["model"](*inputs(None, where(pipeline), where(pipeline))), EACH[:1]),
        (
            lambda pipeline: on_its_device(pipeline) + torch.ones(WIDTH),
            [f"request: aten.add.Tensor on {SIM} and cpu"],
        ),
        (
            lambda pipeline: torch.bmm(on_its_device(pipeline), pipeline["model"].frequencies.expand(2, -1, -1)),
            [f"request: aten.bmm.default on {SIM} and cpu"],
        ),
        (
            lambda pipeline: on_its_device(pipeline) + torch.ones(WIDTH, device=pipeline["model"].built_on),
            [f"request: aten.add.Tensor on {SIM} and meta"],
        ),
        (lambda pipeline: on_its_device(pipeline).cpu() @ torch.ones(WIDTH, 2), []),
        (lambda pipeline: on_its_device(pipeline) * torch.tensor(2.0), []),
        (lambda pipeline: on_its_device(pipeline)[torch.tensor([1, 0])], []),
    ],
)
def test_what_no_plan_binds_is_found_in_any_case(
    encoder: Path,
    request_: Callable[[Any], object],
    expected: list[str],
    at_rest: bool,  # noqa: FBT001
) -> None:
    """Inputs, tensors without a device, a table that is no buffer, a device that was asked when it was built."""
    assert found(streamed(encoder), encoder, request_, at_rest=at_rest) == expected


@pytest.mark.parametrize("right", [False, True])
def test_an_empty_embedding_on_the_device_of_its_inputs_is_found(tmp_path: Path, right: bool) -> None:  # noqa: FBT001
    """Case 3: a rank with no image makes its part on the CPU, where its images are, and gathers it on the device."""

    def make() -> Vision:
        return Vision(right=right)

    def request(pipeline: Any) -> Any:
        return pipeline["model"](torch.empty(0, WIDTH), torch.ones(3, WIDTH, device=where(pipeline)))

    path = save(build(make), tmp_path / "model.safetensors")
    expected = [] if right else [f"model: aten.cat.default on cpu and {SIM}"]
    assert found(streamed(path), path, request, make) == expected
    if not right:
        loaded = placewise.load(streamed(path), path, modules={"model": on_meta(make)})
        with pytest.raises(DeviceMismatchError, match=f"aten.cat.default .* cpu and {SIM}"):
            request(loaded)


Site = Callable[[Callable[[], torch.device]], object]
"""An operation, each tensor of which is made on the device that is asked for next."""


def ones(*shape: int) -> Callable[[Any], torch.Tensor]:
    return lambda device: torch.ones(shape, device=device())


def whole(*shape: int) -> Callable[[Any], torch.Tensor]:
    return lambda device: torch.ones(shape, dtype=torch.int64, device=device())


def true(*shape: int) -> Callable[[Any], torch.Tensor]:
    return lambda device: torch.ones(shape, dtype=torch.bool, device=device())


SITES: dict[str, Site] = {
    "add": lambda device: ones(3)(device) + ones(3)(device),
    "add a scalar": lambda device: ones(3)(device) + ones()(device),
    "add in place": lambda device: ones(3)(device).add_(ones(3)(device)),
    "add in place to a scalar": lambda device: ones()(device).add_(ones()(device)),
    "out": lambda device: torch.mul(ones(3)(device), ones(3)(device), out=ones(3)(device)),
    "matmul": lambda device: ones(2, 3)(device) @ ones(3, 2)(device),
    "linear": lambda device: F.linear(ones(2, 3)(device), ones(4, 3)(device), ones(4)(device)),
    "bmm": lambda device: torch.bmm(ones(1, 2, 3)(device), ones(1, 3, 2)(device)),
    "cat": lambda device: torch.cat([ones(2, 3)(device), ones(0, 3)(device), ones(1, 3)(device)]),
    "stack": lambda device: torch.stack([ones()(device), ones()(device)]),
    "where": lambda device: torch.where(true(3)(device), ones(3)(device), ones()(device)),
    "mask": lambda device: ones(3)(device).masked_fill(true(3)(device), 0.0),
    "embedding": lambda device: F.embedding(whole(2)(device), ones(5, 3)(device)),
    "index": lambda device: ones(3, 2)(device)[whole(2)(device)],
    "select": lambda device: ones(3, 2)(device).index_select(0, whole(2)(device)),
    "gather": lambda device: ones(3, 2)(device).gather(0, whole(1, 2)(device)),
    "norm": lambda device: F.layer_norm(ones(2, 3)(device), (3,), ones(3)(device), ones(3)(device)),
    "convolution": lambda device: F.conv1d(ones(1, 2, 5)(device), ones(2, 2, 3)(device), ones(2)(device)),
    "strided convolution": lambda device: F.conv1d(ones(1, 5, 2)(device).mT, ones(2, 2, 3)(device), ones(2)(device)),
    "attention": lambda device: F.scaled_dot_product_attention(
        ones(1, 1, 2, 4)(device), ones(1, 1, 2, 4)(device), ones(1, 1, 2, 4)(device)
    ),
    "copy": lambda device: ones(3)(device).copy_(ones(3)(device)),
    "move": lambda device: ones(3)(device).to(device()) + ones(3)(device).to(device()),
}
FIRST, OTHER = "sim:10", "sim:11"
"""Devices of one test alone, in which nothing is left."""


@pytest.fixture(scope="module")
def two_devices(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both are simulated."""
    for index in (10, 11):
        simulated_device(index, capacity_bytes=GIB)
    return save(build(Encoder), tmp_path_factory.mktemp("encoder") / "model.safetensors")


@given(
    name=st.sampled_from(sorted(SITES)), places=st.lists(st.sampled_from(("cpu", FIRST, OTHER)), min_size=4, max_size=4)
)
@settings(max_examples=150)
def test_what_is_found_is_what_a_device_refuses(two_devices: Path, name: str, places: list[str]) -> None:
    """The simulated device stops at the first part of an operation; the check names it too, and goes on."""
    plan = elsewhere(streamed(two_devices), FIRST)
    try:
        with torch.no_grad():
            SITES[name](iter(map(torch.device, places)).__next__)
        refused = None
    except RuntimeError as error:
        refused = str(error)
    second = plan.placements[0].model_copy(update={"component": "second", "compute_device": OTHER})
    plan = plan.model_copy(update={"placements": (*plan.placements, second)})

    def request(pipeline: Any) -> object:
        devices = {"cpu": torch.device("cpu"), FIRST: pipeline.device("model"), OTHER: pipeline.device("second")}
        return SITES[name](iter([devices[place] for place in places]).__next__)

    modules = {"model": on_meta(Encoder), "second": nn.Identity()}
    check = placewise.check_devices(plan, two_devices, request, modules=modules)
    assert check.unchecked == {}
    event(f"{name}: {'right' if refused is None else 'wrong'}")
    if refused is None:
        assert check.mixed == ()
    else:
        first = check.mixed[0]
        assert first.module == "request"
        assert all(device in refused for device in first.devices)
        if not refused.startswith("Expected query, key, and value to have the same device type"):  # torch's own
            assert refused.startswith(f"{first.operation} needs its tensors on one device, but found ")


@pytest.mark.parametrize("at_rest", [False, True])
@pytest.mark.parametrize("make", [llama, t5, clip_text, vae])
def test_library_models_are_right_wherever_their_weights_rest(
    tmp_path: Path,
    make: Callable[[], Any],
    at_rest: bool,  # noqa: FBT001
) -> None:
    """Nor is a byte of the weights looked at."""
    folder = saved(seeded(make), tmp_path)
    plan = placewise.plan(
        folder,
        machine=machine(GIB, GIB),
        policy=overridden(Override(select="model", hold=Hold.layer, home=Home.pageable)),
    )
    for file in folder.glob("*.safetensors"):
        file.unlink()
    assert placewise.check_devices(plan, folder, at_rest=at_rest) == DeviceCheck(mixed=(), unchecked={})


@pytest.mark.parametrize("make", [stable_diffusion, diffusion_transformer])
@pytest.mark.parametrize("device", ["cuda:1", "mps:0", "sim:7", "npu:0"])
def test_pipelines_are_checked_for_devices_that_are_not_here(
    tmp_path: Path, make: Callable[[Path], Path], device: str
) -> None:
    folder = seeded(make, tmp_path)
    plan = elsewhere(placewise.plan(folder, machine=machine(GIB, GIB), policy=overridden()), device)
    assert placewise.check_devices(plan, folder) == DeviceCheck(mixed=(), unchecked={})


def elsewhere(plan: Plan, device: str) -> Plan:
    placements = tuple(each.model_copy(update={"compute_device": device}) for each in plan.placements)
    return plan.model_copy(update={"placements": placements})


@pytest.mark.parametrize(
    "move",
    [
        lambda x: x.to("cuda"),
        lambda x: x.cuda(),
        lambda x: x.to(device="cuda:0"),
        lambda x: x.to("cuda:0", x.dtype),
    ],
)
def test_code_that_names_the_device_is_run_without_it(
    encoder: Path, move: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    plan = elsewhere(streamed(encoder), "cuda:0")

    def request(pipeline: Any) -> Any:
        return pipeline["model"](*map(move, inputs("cpu", "cuda", "cuda:0")))[:, 1:].transpose(0, 1).contiguous()

    assert found(plan, encoder, request) == []


def test_what_one_component_hands_to_another_is_moved_or_found(encoder: Path) -> None:
    plan = streamed(encoder)
    other = plan.placements[0].model_copy(update={"component": "head", "compute_device": "cuda:0"})
    plan = plan.model_copy(update={"placements": (*plan.placements, other)})

    def request(pipeline: Any) -> object:
        states = on_its_device(pipeline)
        pipeline["head"](states.to(pipeline.device("head")))
        return pipeline["head"](states)

    check = placewise.check_devices(
        plan, encoder, request, modules={"model": on_meta(Encoder), "head": on_meta(lambda: nn.Linear(WIDTH, 2))}
    )
    assert check.unchecked == {}
    (mixed,) = check.mixed
    assert (mixed.module, set(mixed.devices)) == ("head", {SIM, "cuda:0"})


def test_a_module_gets_back_what_it_had(encoder: Path) -> None:
    module = on_meta(Encoder)
    before = {name: id(each) for name, each in [*module.named_parameters(), *module.named_buffers()]}
    placewise.check_devices(streamed(encoder), encoder, on_its_device, modules={"model": module}, at_rest=True)
    assert {name: id(each) for name, each in [*module.named_parameters(), *module.named_buffers()]} == before
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in module.modules())  # pyright: ignore[reportPrivateUsage]
    placewise.load(streamed(encoder), encoder, modules={"model": module})


def test_what_could_not_be_run_is_said(encoder: Path) -> None:
    def request(pipeline: Any) -> None:
        torch.add(on_its_device(pipeline), torch.ones(WIDTH))
        raise ValueError("no such image")

    plan = streamed(encoder)
    check = placewise.check_devices(plan, encoder, request, modules={"model": on_meta(Encoder)})
    assert check.mixed == (MixedDevices(module="request", operation="aten.add.Tensor", devices=(SIM, "cpu")),)
    assert check.unchecked == {"request": "ValueError: no such image"}
    without = placewise.check_devices(plan, encoder)
    assert without.unchecked == {"model": "component 'model' does not say how it is built (library None)"}


def test_bad_questions_are_errors(encoder: Path) -> None:
    plan = streamed(encoder)
    with pytest.raises(InputError) as caught:
        placewise.check_devices(plan, encoder, modules={"vae": on_meta(Encoder)})
    assert str(caught.value) == "the plan has no component 'vae'\nhint: it has model"
    tight = placewise.plan(encoder, machine=machine(GIB, 1), policy=overridden())
    with pytest.raises(RefusedError):
        placewise.check_devices(tight, encoder)
