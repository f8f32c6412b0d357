"""Whatever is called first, of whichever component: it gives what the plain module gives, or our error."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

import json
from collections.abc import Callable
from pathlib import Path

import placewise
import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from placewise.executor.guards import ReleasedWeight
from placewise.executor.load import LoadedPipeline, load_plan
from placewise.plans.document import Plan, Reader
from placewise.plans.errors import ExecutionError, InputError, ReleasedWeightError
from placewise.plans.policy import Hold, Home, Override
from placewise.plans.units import GIB, KIB
from torch import nn
from torch.nn import functional as F

from .modules import SIM, Tower, build, load, machine, on_meta, overridden, plan_for, policy, save

pytestmark = pytest.mark.usefixtures("one_thread", "no_grad")

IDS = torch.tensor([[1, 2, 3, 10], [4, 5, 6, 0]])
STATES = torch.linspace(-1, 1, 2 * 4 * 16).view(2, 4, 16)


class Encoder(Tower):
    """A tower with an encoder beside its blocks, which takes a fused kernel where it may."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)


Entry = Callable[[Tower, torch.Tensor, torch.Tensor], torch.Tensor]


def run(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = module(x)
    return result


def embed(tower: Tower, ids: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return run(tower.embed, ids)


def whole(tower: Tower, ids: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return run(tower, ids)


def head(tower: Tower, _: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return run(tower.head, x)


def looked_up(tower: Tower, ids: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return tower.embed.weight[ids] * 2


def tied_weight(tower: Tower, _: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, tower.head.weight)


def layer(tower: Tower, _: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return run(tower.blocks[2], x)


def child_of_layer(tower: Tower, _: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return run(tower.blocks[1].get_submodule("blocks.0"), x)


def children_in_a_list(tower: Tower, _: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    for block in tower.blocks:
        x = run(block.get_submodule("blocks.1"), run(block.get_submodule("norm"), x))
    return x


def weights_of_layers(tower: Tower, _: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    parts = [block.get_parameter("blocks.0.weight") for block in tower.blocks]
    return x @ torch.cat([parts[0], parts[0]]).t()


def view_of_a_layers_weight(tower: Tower, _: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    view = tower.blocks[0].get_parameter("blocks.0.weight")[:8]
    for block in (tower.blocks[1], tower.blocks[2], tower.blocks[3]):
        x = run(block, x)
    return x @ view.t()


def largest(tower: Tower, _: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    values, _places = tower.blocks[3].get_parameter("blocks.0.weight").max(dim=0)
    return values * x


def copied(tower: Tower, _: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.ones(16, device=x.device).copy_(tower.blocks[3].get_parameter("norm.weight"))


def fused(tower: Tower, _: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return run(tower.get_submodule("encoder"), x)


ENTRIES: tuple[Entry, ...] = (
    embed,
    whole,
    head,
    looked_up,
    tied_weight,
    layer,
    child_of_layer,
    children_in_a_list,
    weights_of_layers,
    view_of_a_layers_weight,
    largest,
    copied,
    fused,
)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save(build(Encoder), tmp_path / "model.safetensors")


def two_towers(folder: Path) -> Path:
    """A pipeline of two components that are no library's."""
    for seed, name in enumerate(("first", "second")):
        save(build(Encoder, seed), folder / name / "model.safetensors")
    (folder / "model_index.json").write_text(json.dumps({"first": ["mine", "Tower"], "second": ["mine", "Tower"]}))
    return folder


def streaming(path: Path, hold: Hold = Hold.layer, home: Home = Home.pageable) -> Plan:
    return plan_for(path, machine(GIB, GIB), overridden(Override(select="model", hold=hold, home=home)))


def on_cpu(plan: Plan) -> Plan:
    """The same plan, computed on the host: weights come from the file into slots."""
    placements = tuple(each.model_copy(update={"compute_device": "cpu"}) for each in plan.placements)
    return plan.model_copy(update={"placements": placements})


def call(entry: Entry, module: nn.Module, device: torch.device) -> torch.Tensor:
    assert isinstance(module, Tower)
    return entry(module, IDS.to(device), STATES.to(device)).cpu()


Towers = tuple[Path, dict[tuple[Hold, Home], Plan], dict[str, nn.Module]]


@pytest.fixture(scope="module")
def towers(tmp_path_factory: pytest.TempPathFactory) -> Towers:
    """Two components' folder, its plans, and the plain modules."""
    folder = two_towers(tmp_path_factory.mktemp("towers"))
    plain = {name: build(Encoder, seed) for seed, name in enumerate(("first", "second"))}
    plans = {
        (hold, home): placewise.plan(
            folder,
            machine=machine(GIB, GIB),
            policy=overridden(*(Override(select=name, hold=hold, home=home) for name in plain)),
        )
        for hold in (Hold.phase, Hold.layer)
        for home in (Home.pageable, Home.mapped)
    }
    return folder, plans, plain


@given(
    hold=st.sampled_from((Hold.phase, Hold.layer)),
    home=st.sampled_from((Home.pageable, Home.mapped)),
    host=st.booleans(),
    calls=st.lists(
        st.tuples(st.sampled_from(("first", "second")), st.sampled_from((*ENTRIES, None))), min_size=1, max_size=6
    ),
)
@settings(max_examples=25)
def test_any_sequence_of_calls_gives_the_plain_outputs(
    *, towers: Towers, hold: Hold, home: Home, host: bool, calls: list[tuple[str, Entry | None]]
) -> None:
    """Also: no more than one component's phase is on the device at any time. No entry at all is a release."""
    folder, plans, plain = towers
    plan = plans[hold, home]
    with torch.no_grad():
        pipeline = load_plan(on_cpu(plan) if host else plan, folder, modules={name: on_meta(Encoder) for name in plain})
        for component, entry in calls:
            event(f"{entry.__name__ if entry else 'release'} {hold}")
            if entry is None:
                pipeline.release()
            else:
                found = call(entry, pipeline[component], pipeline.device(component))
                assert torch.equal(found, call(entry, plain[component], torch.device("cpu")))
            residents = [each.resident for each in pipeline.components.values()]
            assert sum(each.weight_bytes > each.always_bytes for each in residents) <= (entry is not None)


@pytest.mark.parametrize("entry", ENTRIES)
def test_the_last_component_goes_home_on_release(checkpoint: Path, entry: Entry) -> None:
    """diffusers 11376: the last component of a chain was never offloaded."""
    pipeline = load(streaming(checkpoint, Hold.phase), checkpoint, Encoder)
    resting = pipeline.machines[SIM].memory().allocated_bytes
    call(entry, pipeline["model"], pipeline.device("model"))
    assert pipeline.machines[SIM].memory().allocated_bytes > resting
    pipeline.release()
    assert pipeline.machines[SIM].memory().allocated_bytes == resting
    assert all(isinstance(weight, ReleasedWeight) for weight in pipeline["model"].parameters())


def test_an_exception_outside_of_forward_leaves_nothing_behind(checkpoint: Path) -> None:
    pipeline = load(streaming(checkpoint), checkpoint, Encoder)
    tower, device = pipeline["model"], pipeline.device("model")
    assert isinstance(tower, Tower)
    call(head, tower, device)
    resting = pipeline.machines[SIM].memory().allocated_bytes
    for entry in (layer, child_of_layer, weights_of_layers):
        with pytest.raises(RuntimeError):
            entry(tower, IDS, torch.ones(3, 5, device=SIM))
        assert pipeline.machines[SIM].memory().allocated_bytes == resting
        assert all(isinstance(weight, ReleasedWeight) for weight in tower.blocks.parameters())
    assert torch.equal(call(whole, tower, device), call(whole, build(Encoder), torch.device("cpu")))


Use = Callable[[torch.Tensor], object]


USES: dict[str, Use] = {
    "to": lambda weight: weight.to("cpu"),
    "half": lambda weight: weight.half(),
    "mul_": lambda weight: weight.mul_(2),
    "zero_": lambda weight: nn.init.zeros_(weight),
    "data_ptr": lambda weight: weight.data_ptr(),
    "numpy": lambda weight: weight.numpy(),
    "untyped_storage": lambda weight: weight.untyped_storage(),
}


@pytest.mark.parametrize("hold", [Hold.phase, Hold.layer])
@pytest.mark.parametrize("name", USES)
def test_a_released_weight_is_never_moved_written_or_pointed_at(checkpoint: Path, name: str, hold: Hold) -> None:
    pipeline = load(streaming(checkpoint, hold), checkpoint, Encoder)
    with pytest.raises(ReleasedWeightError) as caught:
        USES[name](pipeline["model"].get_parameter("blocks.2.blocks.1.weight"))
    why = (
        "write it\nhint: give it a new value with the pipeline's update()"
        if name.endswith("_")
        else "move it or outlast its stay on the device\n"
        "hint: compute with it; to read it from its home, use LoadedComponent.weights()"
    )
    assert str(caught.value) == f"weight 'blocks.2.blocks.1.weight' is released, and {name} would {why}"


def test_a_placeholder_that_outlives_its_component_is_not_data(checkpoint: Path) -> None:
    pipeline = load(streaming(checkpoint), checkpoint, Encoder)
    weight = pipeline["model"].get_parameter("head.weight")
    del pipeline
    with pytest.raises(ReleasedWeightError, match=r"weight 'embed\.weight' is released"):
        F.linear(STATES.to(SIM), weight)


def test_a_layer_that_finds_no_slot_says_so(checkpoint: Path) -> None:
    pipeline = load(streaming(checkpoint), checkpoint, Encoder)
    slots = pipeline.plan.placements[0].staging
    assert slots is not None
    weights: list[torch.Tensor] = [
        block.get_parameter("blocks.0.weight") for block in pipeline["model"].get_submodule("blocks").children()
    ]
    with pytest.raises(ExecutionError, match=rf"layer 'blocks.\d' finds none of {slots.slots} slots free"):
        torch.cat(weights)
    assert torch.equal(call(whole, pipeline["model"], pipeline.device("model")), build(Encoder)(IDS))


@pytest.mark.parametrize("entry", [embed, head, looked_up, layer, child_of_layer])
def test_training_is_refused_at_every_entry(checkpoint: Path, entry: Entry) -> None:
    pipeline = load(streaming(checkpoint), checkpoint, Encoder)
    with torch.enable_grad(), pytest.raises(ExecutionError, match="requires a gradient, and does not stay"):
        call(entry, pipeline["model"], pipeline.device("model"))


@pytest.mark.parametrize("reader", Reader)
def test_gradients_of_inputs_are_refused_and_never_wrong(checkpoint: Path, reader: Reader) -> None:
    """The slots' weights are others by the time of the backward pass."""
    plan = on_cpu(streaming(checkpoint, home=Home.mapped))
    (placement,) = plan.placements
    assert placement.staging is not None
    reads = {"reader": reader, "chunk_bytes": 64 * KIB, "depth": 2, "slot_bytes": 64 * KIB}
    staging = placement.staging.model_copy(update=reads)
    plan = plan.model_copy(update={"placements": (placement.model_copy(update={"staging": staging}),)})
    module = load(plan, checkpoint, Encoder)["model"].requires_grad_(requires_grad=False)
    x = STATES.clone().requires_grad_()
    with torch.enable_grad():
        assert isinstance(module, Tower)
        loss = children_in_a_list(module, IDS, x).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, x)


def test_a_module_is_placed_once(checkpoint: Path) -> None:
    """diffusers 2907: hooks of two offloads stacked on one module."""
    plan, module = streaming(checkpoint), on_meta(Encoder)
    pipeline = load_plan(plan, checkpoint.parent, modules={"model": module})
    expected = call(whole, build(Encoder), torch.device("cpu"))
    for again in (module, nn.Sequential(module)):
        with pytest.raises(ExecutionError) as caught:
            load_plan(plan, checkpoint.parent, modules={"model": again})
        assert str(caught.value) == (
            f"component 'model': this {type(again).__name__} is placed already, by another load\n"
            "hint: give a module that was built afresh"
        )
    assert torch.equal(call(whole, module, pipeline.device("model")), expected)


def test_a_plan_may_be_loaded_twice(checkpoint: Path) -> None:
    plan = streaming(checkpoint)
    expected = call(whole, build(Encoder), torch.device("cpu"))
    one, other = load(plan, checkpoint, Encoder), load(plan, checkpoint, Encoder)
    for pipeline in (one, other, one):
        assert torch.equal(call(whole, pipeline["model"], pipeline.device("model")), expected)


def test_a_module_that_accelerate_holds_is_refused(checkpoint: Path) -> None:
    """accelerate 2129: offloading what was offloaded copied out of meta tensors."""
    accelerate = pytest.importorskip("accelerate")
    module = build(Encoder)
    accelerate.cpu_offload(module, "cpu")
    with pytest.raises(ExecutionError) as caught:
        load_plan(streaming(checkpoint), checkpoint.parent, modules={"model": module})
    assert str(caught.value) == (
        "component 'model': this Encoder is placed already, by accelerate\nhint: give a module that was built afresh"
    )


def test_where_nothing_leaves_there_are_no_hooks(checkpoint: Path) -> None:
    for host_bytes in (GIB, 0):
        module = load(plan_for(checkpoint, machine(host_bytes)), checkpoint, Encoder)["model"]
        assert sum(len(each._forward_pre_hooks) + len(each._forward_hooks) for each in module.modules()) == 0


def test_a_buffer_that_nobody_computed_is_refused_by_name(checkpoint: Path) -> None:
    """diffusers 8644: leftovers on meta were found out in the middle of a call."""
    module = on_meta(Encoder)
    for block in module.get_submodule("blocks").children():
        block._buffers["table"] = block.get_buffer("table").to("meta")
    with pytest.raises(ExecutionError) as caught:
        placewise.apply(streaming(checkpoint), checkpoint, module)
    assert str(caught.value) == (
        "Encoder: 4 buffers are on meta and not in the checkpoint: "
        "blocks.0.table, blocks.1.table, blocks.2.table, blocks.3.table\n"
        "hint: build it on the CPU, or under placewise.models.build.parameters_on_meta, "
        "so that its buffers are computed"
    )


def test_apply_binds_a_module_of_ones_own(checkpoint: Path) -> None:
    """Its weights become the checkpoint's."""
    pipeline = placewise.apply(streaming(checkpoint), checkpoint, build(Encoder, seed=7))
    expected = call(whole, build(Encoder), torch.device("cpu"))
    assert torch.equal(call(whole, pipeline["model"], pipeline.device("model")), expected)


def test_apply_takes_plans_of_one_component(tmp_path: Path) -> None:
    plan = placewise.plan(two_towers(tmp_path), machine=machine(GIB), policy=policy())
    with pytest.raises(InputError) as caught:
        placewise.apply(plan, tmp_path, on_meta(Encoder))
    assert str(caught.value) == (
        "the plan has 2 components: first, second\nhint: load(plan, model, modules={name: module}) takes any of them"
    )


def compiled(pipeline: LoadedPipeline, *, fullgraph: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    torch.compiler.reset()
    made: Callable[[torch.Tensor], torch.Tensor] = torch.compile(
        pipeline["model"], backend="eager", fullgraph=fullgraph
    )
    return made


def test_a_resident_module_compiles_into_one_graph(checkpoint: Path) -> None:
    pipeline = load(plan_for(checkpoint, machine(GIB)), checkpoint, Encoder)
    assert torch.equal(compiled(pipeline, fullgraph=True)(IDS), build(Encoder)(IDS))


@pytest.mark.parametrize("hold", [Hold.phase, Hold.layer])
def test_fetching_stays_out_of_compiled_graphs(checkpoint: Path, hold: Hold) -> None:
    pipeline = load(on_cpu(streaming(checkpoint, hold)), checkpoint, Encoder)
    graphs = compiled(pipeline, fullgraph=False)
    for _ in range(2):
        assert torch.equal(graphs(IDS), build(Encoder)(IDS))
        pipeline.release()
    with pytest.raises(RuntimeError, match="weights are fetched here"):
        compiled(pipeline, fullgraph=True)(IDS)


def test_a_mapped_module_runs_where_it_is_compiled(checkpoint: Path) -> None:
    pipeline = load(plan_for(checkpoint, machine(0)), checkpoint, Encoder)
    assert torch.equal(compiled(pipeline, fullgraph=False)(IDS), build(Encoder)(IDS))


@given(
    strided=st.booleans(),
    grad=st.booleans(),
    offset=st.integers(0, 15),
    rows=st.integers(1, 4),
    cols=st.integers(1, 40),
)
def test_a_mapped_weight_takes_the_kernel_of_a_parameter(
    *, strided: bool, grad: bool, offset: int, rows: int, cols: int
) -> None:
    """A weight that was a view and required a gradient was multiplied in another way, and differed in the last bit."""
    from placewise.executor.guards import MappedWeight

    buffer = torch.linspace(-1, 1, 32 * cols + offset).sin()
    view = buffer[offset:].view(cols, 32)
    x = torch.linspace(-2, 3, 2 * 4 * 32).sin().view(2, 4, 32)[:, -rows:]
    x = x if strided else x.contiguous()
    mapped = MappedWeight.of("w", view)
    mapped.requires_grad_(grad)
    parameter = nn.Parameter(view, grad)
    with torch.no_grad():
        assert torch.equal(F.linear(x, mapped), F.linear(x, parameter))
        assert torch.equal(x @ mapped.t(), x @ parameter.t())
        assert torch.equal(x @ mapped[1:].t(), x @ parameter[1:].t())
