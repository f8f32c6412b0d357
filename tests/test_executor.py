"""Loading and running: every home, streaming on the simulated device, ties, buffers, entry points, failures."""

import gc
import hashlib
import os
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from placewise.executor.guards import MappedWeight, ReleasedWeight
from placewise.executor.load import LoadedPipeline, load_plan
from placewise.executor.procmaps import snapshot_maps
from placewise.executor.resident import Resident
from placewise.executor.units import Unit
from placewise.plans.document import Plan
from placewise.plans.errors import (
    DeviceMemoryError,
    DriftError,
    ExecutionError,
    ReadOnlyWeightError,
    RefusedError,
)
from placewise.plans.policy import Hold, Home, Override
from placewise.plans.units import GIB
from torch import nn

from .modules import SIM, Gated, GatedTower, Tower, build, load, machine, overridden, plan_for, policy, save

pytestmark = pytest.mark.usefixtures("no_grad")

IDS = torch.tensor([[1, 2, 3, 10], [4, 5, 6, 0]])
LAYER = Override(select="model.blocks", hold=Hold.layer)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save(build(Tower), tmp_path / "model.safetensors")


def expected(order: tuple[int, ...] | None = None) -> torch.Tensor:
    """What the plain module gives."""
    tower = build(Tower)
    assert isinstance(tower, Tower)
    tower.order = order or tower.order
    result: torch.Tensor = tower(IDS)
    return result


def output(pipeline: LoadedPipeline) -> torch.Tensor:
    result: torch.Tensor = pipeline["model"](IDS.to(pipeline.device("model")))
    return result.cpu()


def with_home(plan: Plan, home: Home) -> Plan:
    """The same plan with every segment at another home, as an executor of hand-made plans may be given it."""
    placement = plan.placements[0]
    segments = tuple(segment.model_copy(update={"home": home}) for segment in placement.segments)
    return plan.model_copy(update={"placements": (placement.model_copy(update={"segments": segments}),)})


def streaming(path: Path, *, home: Home | None = None, **changes: object) -> Plan:
    """A plan that streams every block through the simulated device."""
    layer = Override(select="model.blocks", hold=Hold.layer, home=home)
    return plan_for(path, machine(GIB, GIB), overridden(layer, **changes), passes=2)


@pytest.mark.parametrize("home", [Home.device, Home.pageable, Home.mapped, Home.locked])
def test_each_home_on_the_cpu_gives_the_plain_output_and_is_where_the_plan_says(checkpoint: Path, home: Home) -> None:
    pipeline = load(with_home(plan_for(checkpoint, machine(GIB)), home), checkpoint, Tower)
    assert torch.equal(output(pipeline), expected())
    maps = snapshot_maps()
    assert maps is not None
    for parameter in pipeline["model"].parameters():
        backed = maps.file_at(parameter.data_ptr())
        assert (backed == str(checkpoint)) == (home in (Home.mapped, Home.locked))
    owned = pipeline.machines["cpu"].memory().allocated_bytes
    assert (owned == 0) == (home in (Home.mapped, Home.locked))


@pytest.mark.parametrize("home", [Home.pageable, Home.mapped])
def test_streamed_layers_give_the_plain_output_from_either_host_home(checkpoint: Path, home: Home) -> None:
    pipeline = load(streaming(checkpoint, home=home), checkpoint, Tower)
    for _ in range(3):
        assert torch.equal(output(pipeline), expected())
    blocks = pipeline["model"].get_submodule("blocks")
    assert all(isinstance(weight, ReleasedWeight) for weight in blocks.parameters())


def test_a_streamed_layer_takes_one_slot_and_no_more(checkpoint: Path) -> None:
    plan = streaming(checkpoint)
    pipeline = load(plan, checkpoint, Tower)
    output(pipeline)
    predicted = plan.phases[0].predicted.peak_bytes[SIM]
    resident = pipeline.components["model"].resident
    # Buffers are in the layers' planned bytes, but rest beside the slots.
    assert resident.peak_weight_bytes <= (predicted or 0)
    assert pipeline.machines[SIM].memory().allocated_bytes == (
        resident.weight_bytes + pipeline.components["model"].buffer_bytes
    )


@pytest.mark.parametrize("order", [(3, 2, 1, 0), (0, 3), (2, 2, 2), (0, 1, 0, 3, 0), ()])
def test_any_order_of_use_gives_the_plain_output(checkpoint: Path, order: tuple[int, ...]) -> None:
    pipeline = load(streaming(checkpoint), checkpoint, Tower)
    tower = pipeline["model"]
    assert isinstance(tower, Tower)
    tower.order = order
    assert torch.equal(output(pipeline), expected(order)) or order == ()
    assert torch.equal(output(pipeline), expected(order)) or order == ()


def test_tied_weights_stay_tied_and_are_stored_once(checkpoint: Path) -> None:
    for plan in (plan_for(checkpoint, machine(GIB)), plan_for(checkpoint, machine(0)), streaming(checkpoint)):
        pipeline = load(plan, checkpoint, Tower)
        tower = pipeline["model"]
        assert isinstance(tower, Tower)
        output(pipeline)
        assert tower.head.weight is tower.embed.weight
        pipeline.release()
        assert tower.head.weight is tower.embed.weight


def test_a_layer_that_is_tied_to_another_is_there_whenever_either_runs(tmp_path: Path) -> None:
    def make() -> Tower:
        tower = Tower()
        tower.blocks[2].get_submodule("blocks.0").weight = tower.blocks[0].get_submodule("blocks.0").weight
        return tower

    path = save(build(make), tmp_path / "model.safetensors")
    pipeline = load(streaming(path), path, make)
    assert torch.equal(output(pipeline), build(make)(IDS))


def test_building_on_meta_imports_no_compiler() -> None:
    """Random fills on meta would: 68 MiB of a small host."""
    code = "import sys; from placewise.tests.modules import *; on_meta(Tower); sys.exit('torch._dynamo' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent / ".src")}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


def test_transient_buffers_are_computed_and_nothing_is_left_on_meta(checkpoint: Path) -> None:
    plain = dict(build(Tower).named_buffers())
    for plan in (plan_for(checkpoint, machine(0)), plan_for(checkpoint, machine(GIB, GIB)), streaming(checkpoint)):
        module = load(plan, checkpoint, Tower)["model"]
        for name, buffer in module.named_buffers():
            assert torch.equal(buffer.cpu(), plain[name])
        device = torch.device(plan.placements[0].compute_device)
        assert {tensor.device for tensor in (*module.parameters(), *module.buffers())} == {device}


def test_what_a_forward_writes_to_a_buffer_survives_release(checkpoint: Path) -> None:
    pipeline = load(streaming(checkpoint), checkpoint, Tower)
    for _ in range(3):
        output(pipeline)
    pipeline.release()
    blocks = pipeline["model"].get_submodule("blocks").children()
    assert [int(block.get_buffer("calls").cpu()) for block in blocks] == [3] * 4


def test_a_buffer_that_layers_share_stays_one_and_stays_there(tmp_path: Path) -> None:
    def make() -> Tower:
        tower = Tower()
        table = tower.blocks[0].get_buffer("table")
        for block in tower.blocks:
            block._buffers["table"] = table  # pyright: ignore[reportPrivateUsage]
        return tower

    path = save(build(make), tmp_path / "model.safetensors")
    pipeline = load(streaming(path), path, make)
    tables = [block.get_buffer("table") for block in pipeline["model"].get_submodule("blocks").children()]
    assert all(table is tables[0] for table in tables)
    assert torch.equal(output(pipeline), build(make)(IDS))
    assert tables[0].device == torch.device(SIM)


def test_the_device_of_a_module_is_where_it_computes_wherever_its_weights_rest(checkpoint: Path) -> None:
    for home in (Home.pageable, Home.mapped):
        pipeline = load(streaming(checkpoint, home=home), checkpoint, Tower)
        for during in (False, True):
            if during:
                output(pipeline)
            assert {parameter.device for parameter in pipeline["model"].parameters()} == {torch.device(SIM)}
            assert pipeline.device("model") == torch.device(SIM)


def test_a_mapped_weight_is_never_written_and_the_file_never_changes(checkpoint: Path) -> None:
    before = hashlib.sha256(checkpoint.read_bytes()).digest()
    module = load(plan_for(checkpoint, machine(0)), checkpoint, Tower)["model"]
    weight = module.get_parameter("embed.weight")
    assert isinstance(weight, MappedWeight)
    with pytest.raises(ReadOnlyWeightError) as caught:
        nn.init.zeros_(weight)
    assert str(caught.value) == (
        "weight 'embed.weight' is a view of the checkpoint file, and zero_ would write it\n"
        "hint: give it a new value with the pipeline's update(), or plan it with home device or pageable"
    )
    module(IDS)
    assert hashlib.sha256(checkpoint.read_bytes()).digest() == before


def test_a_mapped_weight_may_be_replaced(checkpoint: Path) -> None:
    module = load(plan_for(checkpoint, machine(0)), checkpoint, Tower)["model"]
    assert isinstance(module, Tower)
    module.head.weight = nn.Parameter(torch.zeros(11, 16))
    assert torch.equal(module(IDS), torch.zeros(2, 4, 11))


def test_an_exception_in_a_forward_leaves_nothing_behind(checkpoint: Path) -> None:
    pipeline = load(streaming(checkpoint), checkpoint, Tower)
    output(pipeline)
    resting = pipeline.machines[SIM].memory().allocated_bytes
    block = pipeline["model"].get_submodule("blocks.2")

    def fail(*_: object) -> None:
        raise RuntimeError("injected")

    handle = block.get_submodule("norm").register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="injected"):
        output(pipeline)
    handle.remove()
    assert all(isinstance(weight, ReleasedWeight) for weight in block.parameters())
    assert pipeline.machines[SIM].memory().allocated_bytes == resting
    assert torch.equal(output(pipeline), expected())


def test_an_interrupt_in_a_forward_is_healed_by_the_next(checkpoint: Path) -> None:
    pipeline = load(streaming(checkpoint), checkpoint, Tower)
    block = pipeline["model"].get_submodule("blocks.1")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    handle = block.get_submodule("norm").register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        output(pipeline)
    handle.remove()
    assert torch.equal(output(pipeline), expected())


def test_a_device_that_is_smaller_than_planned_refuses_and_keeps_nothing(checkpoint: Path) -> None:
    plan = streaming(checkpoint)
    facts = plan.machine.accelerators[0]
    small = facts.model_copy(update={"free": facts.free.model_copy(update={"value": 3000})})
    cramped = plan.model_copy(update={"machine": plan.machine.model_copy(update={"accelerators": (small,)})})
    pipeline = load(cramped, checkpoint, Tower)
    resting = pipeline.machines[SIM].memory().allocated_bytes
    with pytest.raises(DeviceMemoryError):
        output(pipeline)
    assert pipeline.machines[SIM].memory().allocated_bytes == resting


def test_deleting_a_pipeline_frees_it_without_garbage_collection(checkpoint: Path) -> None:
    pipeline = load(streaming(checkpoint), checkpoint, Tower)
    output(pipeline)
    module, device = weakref.ref(pipeline["model"]), pipeline.machines[SIM]
    gc.disable()
    try:
        del pipeline
        assert module() is None
        end = time.monotonic() + 10
        while device.memory().allocated_bytes and time.monotonic() < end:
            time.sleep(0.01)  # a copy that was begun ahead of use ends first
        assert device.memory().allocated_bytes == 0
    finally:
        gc.enable()


def test_training_through_weights_that_leave_is_refused_and_not_silently_without_gradients(checkpoint: Path) -> None:
    pipeline = load(streaming(checkpoint), checkpoint, Tower)
    with torch.enable_grad(), pytest.raises(ExecutionError) as caught:
        output(pipeline)
    assert str(caught.value) == (
        "component 'model': weight 'blocks.0.blocks.0.bias' requires a gradient, "
        "and does not stay on its device to keep it\n"
        "hint: run under torch.no_grad(), or call requires_grad_(False) on the module"
    )
    pipeline["model"].requires_grad_(requires_grad=False)
    with torch.enable_grad():
        assert torch.equal(output(pipeline), expected())


def test_a_changed_checkpoint_is_not_loaded(checkpoint: Path) -> None:
    plan = plan_for(checkpoint, machine(0))
    save(build(lambda: Tower(words=12)), checkpoint)
    with pytest.raises(DriftError) as caught:
        load(plan, checkpoint, Tower)
    message = str(caught.value)
    assert message.startswith("component 'model': not the checkpoint that was planned: model.safetensors: size was ")
    assert message.endswith("\nhint: plan again with `placewise plan`")


def test_a_module_that_the_checkpoint_does_not_fill_is_refused_by_name(checkpoint: Path) -> None:
    with pytest.raises(ExecutionError) as caught:
        load(plan_for(checkpoint, machine(0)), checkpoint, lambda: Tower(layers=5))
    assert str(caught.value) == (
        "Tower: 6 parameters are not in the checkpoint: blocks.4.norm.weight, blocks.4.norm.bias, "
        "blocks.4.blocks.0.weight, blocks.4.blocks.0.bias, blocks.4.blocks.1.weight and 1 more\n"
        "hint: give the checkpoint that belongs to this class"
    )


def test_a_component_without_a_class_asks_for_its_module(checkpoint: Path) -> None:
    with pytest.raises(ExecutionError) as caught:
        load_plan(plan_for(checkpoint, machine(0)), checkpoint.parent)
    assert str(caught.value) == (
        "component 'model' does not say how it is built (library None)\n"
        "hint: build the module yourself, on the meta device, and give it: load(..., modules={name: module})"
    )


def chunked(plan: Plan, tokens: int) -> Plan:
    """The same plan with chunks of tokens."""
    placement = plan.placements[0].model_copy(update={"chunk_tokens": tokens})
    return plan.model_copy(update={"placements": (placement,)})


def test_chunked_tokens_that_would_have_no_effect_are_refused(checkpoint: Path) -> None:
    with pytest.raises(ExecutionError) as caught:
        load(chunked(plan_for(checkpoint, machine(GIB)), 128), checkpoint, Tower)
    assert str(caught.value) == (
        "component 'model': chunk_tokens 128 would have no effect: "
        "no module of Tower gains from running over parts of its tokens\n"
        "hint: plan it without chunk_tokens"
    )


class GatedStack(nn.Module):
    """Token-wise as a whole, and so is each of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Gated(16) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.blocks(x)
        return result


@pytest.mark.parametrize(("make", "given"), [(GatedTower, IDS), (GatedStack, torch.ones(2, 4, 16))])
def test_a_streamed_layer_is_fetched_once_for_all_its_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[], nn.Module], given: torch.Tensor
) -> None:
    fetched: list[str] = []
    taken: list[int] = []
    acquire = Resident.acquire

    def count(self: Resident, unit: Unit) -> None:
        fetched.append(unit.label)
        acquire(self, unit)

    def see(_: nn.Module, args: tuple[torch.Tensor]) -> None:
        taken.append(args[0].shape[:-1].numel())

    monkeypatch.setattr(Resident, "acquire", count)
    path = save(build(make), tmp_path / "model.safetensors")
    pipeline = load(chunked(streaming(path), 3), path, make)
    for module in pipeline["model"].modules():
        if isinstance(module, Gated):
            module.up.register_forward_pre_hook(see)
    found = pipeline["model"](given.to(SIM)).cpu()
    assert torch.allclose(found, build(make)(given), rtol=1e-5, atol=1e-6)
    assert fetched == [f"blocks.{number}" for number in range(4)]
    assert taken == 4 * [3, 3, 2]


def test_a_refused_plan_is_not_executed(checkpoint: Path) -> None:
    from placewise.models.pipeline import read_pipeline
    from placewise.planner.compile import compile_plan
    from placewise.plans.pipeline import Workload

    refused = compile_plan(
        read_pipeline(checkpoint, workload=Workload()), machine(GIB, 64), policy(), Workload(), version="0"
    )
    with pytest.raises(RefusedError, match="the plan is refused: nothing fits"):
        load_plan(refused, checkpoint.parent)
