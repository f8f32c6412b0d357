"""Where modules say that they are, on every kind of device, and what becomes of weights in the host's own memory."""

# The libraries have no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from pathlib import Path
from typing import Any

import placewise
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from placewise.executor.guards import ReleasedWeight
from placewise.executor.load import LoadedPipeline, load_plan
from placewise.executor.machine import Capabilities
from placewise.executor.simulation.accelerator import simulated_device
from placewise.executor.simulation.machine import SimulatedMachine
from placewise.planner.measuring.accelerators import given_accelerator, given_host
from placewise.plans.document import Plan, Reader, Staging
from placewise.plans.errors import ExecutionError
from placewise.plans.machine import Accelerator, Machine, MemoryKind
from placewise.plans.policy import Hold, Home, Override
from placewise.plans.units import GIB

from .modules import Tower, build, load, on_meta, overridden, plan_for, save
from .pipelines import diffusion_transformer, llama, saved, seeded, stable_diffusion

pytestmark = pytest.mark.usefixtures("one_thread", "no_grad")

SIM, UNIFIED = "sim:8", "sim:9"
IDS = torch.tensor([[1, 2, 3, 10], [4, 5, 6, 0]])
HOMES = (Home.pageable, Home.mapped, Home.locked)
FATES = st.one_of(
    st.just((Home.device, Hold.always)), st.tuples(st.sampled_from(HOMES), st.sampled_from((Hold.phase, Hold.layer)))
)


def unified(memory_bytes: int = GIB) -> Accelerator:
    device = given_accelerator(UNIFIED, memory_bytes)
    return device.model_copy(update={"memory": MemoryKind.unified, "streams": False})


def machine(device: str) -> Machine:
    """A host alone, or with an accelerator of its own memory or of the host's."""
    given = {"cpu": (), SIM: (given_accelerator(SIM, GIB),), UNIFIED: (unified(),)}[device]
    return Machine(host=given_host(GIB), accelerators=given)


@pytest.fixture(scope="module")
def language_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(seeded(llama), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def logits() -> torch.Tensor:
    """The plain model's."""
    with torch.no_grad():
        found: torch.Tensor = seeded(llama)(IDS, attention_mask=torch.ones_like(IDS)).logits
    return found


@given(device=st.sampled_from(("cpu", SIM, UNIFIED)), fates=st.lists(FATES, min_size=4, max_size=4))
@settings(max_examples=12)
def test_every_module_says_where_it_computes_wherever_its_weights_rest(
    language_model: Path, logits: torch.Tensor, device: str, fates: list[tuple[Home, Hold]]
) -> None:
    """B45. Before, within and after a pass, and of every child; what is built from it is in the right place."""
    plan = placewise.plan(language_model, machine=machine(device), policy=overridden())
    plan = fated(plan, device, fates)
    loaded = placewise.load(plan, language_model)
    model, there = loaded.library(), torch.device(device)
    seen: list[set[torch.device]] = []

    def look(*_: object) -> None:
        seen.append({each.device for part in model.modules() for each in [*part.parameters(), *part.buffers()]})

    hooks = [part.register_forward_pre_hook(look) for part in model.modules()]
    for _ in range(2):
        look()
        assert model.device == model.model.device == loaded.device("model") == there
        ids = IDS.to(model.device)
        out = model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        assert torch.equal(out.cpu(), logits)
        loaded.release()
    look()
    for hook in hooks:
        hook.remove()
    assert len(seen) > 20
    assert set().union(*seen) == {there}


def fated(plan: Plan, device: str, fates: list[tuple[Home, Hold]]) -> Plan:
    """The plan with a home and a hold for the fixed part and each layer, as far as the device has them."""
    placement = plan.placements[0]
    (fixed, *_), (stack,) = placement.segments, plan.pipeline.components[0].stacks
    if device == "cpu":
        fates = [(Home.mapped if home is Home.pageable else home, Hold.always) for home, _ in fates]
    if fates[0][1] is Hold.layer:
        fates = [(fates[0][0], Hold.phase), *fates[1:]]
    segments = [fixed.model_copy(update={"home": fates[0][0], "hold": fates[0][1]})]
    for number, (home, hold) in enumerate(fates[1 : stack.layers + 1]):
        runs = ((number, number + 1),)
        segments.append(fixed.model_copy(update={"stack": stack.name, "layers": runs, "home": home, "hold": hold}))
    staging = staging_on(device, plan) if any(hold is Hold.layer for _, hold in fates[1:]) else None
    placed = placement.model_copy(update={"segments": tuple(segments), "staging": staging})
    return plan.model_copy(update={"placements": (placed,)})


def staging_on(device: str, plan: Plan) -> Staging:
    (stack,) = plan.pipeline.components[0].stacks
    slots = 1 if device == UNIFIED else 2
    return Staging(
        device=device,
        reader=Reader.mapping,
        slots=slots,
        slot_bytes=max(size.packed_bytes for size in stack.sizes),
        chunk_bytes=None,
        depth=None,
        prefetch_layers=slots - 1,
    )


@pytest.mark.parametrize("device", ["cpu", SIM, UNIFIED])
@pytest.mark.parametrize("make", [stable_diffusion, diffusion_transformer])
def test_a_pipeline_of_diffusers_executes_where_it_computes(tmp_path: Path, make: Any, device: str) -> None:
    folder = seeded(make, tmp_path)
    names = [path.name for path in folder.iterdir() if (path / "diffusion_pytorch_model.safetensors").exists()]
    wishes = [] if device == "cpu" else [Override(select=name, hold=Hold.layer, home=Home.mapped) for name in names]
    loaded = placewise.load(placewise.plan(folder, machine=machine(device), policy=overridden(*wishes)), folder)
    pipe, there = loaded.library(), torch.device(device)
    assert (pipe.device, pipe._execution_device) == (there, there)
    assert {getattr(pipe, name).device for name in names} == {there}
    loaded.release()
    assert (pipe.device, pipe._execution_device) == (there, there)


@pytest.mark.parametrize("device", ["cpu", SIM, UNIFIED])
def test_passes_have_mixed_precision_where_the_device_has_it_and_are_as_ever_elsewhere(
    language_model: Path, device: str
) -> None:
    loaded = placewise.load(
        placewise.plan(language_model, machine=machine(device), policy=overridden()), language_model
    )
    plain, ids = seeded(llama), IDS.to(device)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=device == "cpu"):
        expected = plain(IDS).logits
    assert torch.equal(expected, plain(IDS).logits) == (device != "cpu")
    with loaded.autocast("model", torch.bfloat16):
        assert torch.equal(loaded["model"](ids).logits.cpu(), expected)


class Counting(SimulatedMachine):
    """Unified memory; counts what is waited for, and how much is held when caches are emptied."""

    def __init__(self) -> None:
        capabilities = Capabilities(pinned_memory=False, streams=False, unified=True)
        super().__init__(simulated_device(9, capacity_bytes=GIB), capabilities=capabilities)
        self.calls: list[str] = []
        self.held: list[int] = []

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def empty_cache(self) -> None:
        self.calls.append("empty cache")
        self.held.append(self.memory().allocated_bytes)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save(build(Tower), tmp_path / "model.safetensors")


def planned(path: Path) -> Plan:
    """All layers streamed, the rest held for the phase."""
    wish = Override(select="model", hold=Hold.layer, home=Home.mapped)
    return plan_for(path, machine(UNIFIED), overridden(wish), passes=3)


@pytest.fixture
def streamed(checkpoint: Path) -> tuple[LoadedPipeline, Counting]:
    counting = Counting()
    loaded = load_plan(
        planned(checkpoint), checkpoint.parent, modules={"model": on_meta(Tower)}, machines={UNIFIED: counting}
    )
    return loaded, counting


def run(loaded: LoadedPipeline) -> torch.Tensor:
    result: torch.Tensor = loaded["model"](IDS.to(loaded.device("model")))
    return result.cpu()


def test_a_plan_has_one_slot_and_nothing_ahead(checkpoint: Path) -> None:
    staging = planned(checkpoint).placements[0].staging
    assert staging is not None
    assert (staging.slots, staging.prefetch_layers) == (1, 0)


@pytest.mark.parametrize(("slots", "ahead"), [(2, 0), (2, 1)])
def test_another_plan_is_refused(checkpoint: Path, slots: int, ahead: int) -> None:
    plan = planned(checkpoint)
    placement = plan.placements[0]
    assert placement.staging is not None
    staging = placement.staging.model_copy(update={"slots": slots, "prefetch_layers": ahead})
    changed = plan.model_copy(update={"placements": (placement.model_copy(update={"staging": staging}),)})
    with pytest.raises(ExecutionError) as caught:
        load(changed, checkpoint, Tower)
    assert str(caught.value) == (
        f"component 'model': 2 slots with {ahead} filled ahead, and {UNIFIED} shares the host's memory: nothing is "
        "copied there beside the compute\n"
        "hint: plan it for a device with unified memory: with one slot, and nothing ahead"
    )


def test_passes_wait_for_nothing_and_the_end_of_a_phase_once(streamed: tuple[LoadedPipeline, Counting]) -> None:
    """Each layer goes to the one slot in its turn; the device is waited for, and its cache emptied, when all go."""
    loaded, machine = streamed
    machine.calls.clear()
    for _ in range(2):
        for _ in range(3):
            assert torch.equal(run(loaded), build(Tower)(IDS))
        assert machine.calls == []
        loaded.release()
        assert machine.calls == ["synchronize", "empty cache"]
        component = loaded.components["model"]
        assert machine.held.pop() == component.buffer_bytes + component.resident.always_bytes
        machine.calls.clear()


def test_compiling_streamed_layers_is_refused(streamed: tuple[LoadedPipeline, Counting]) -> None:
    loaded, _ = streamed
    torch.compiler.reset()
    with pytest.raises(ExecutionError, match=f"torch.compile does not go with layers that are streamed to {UNIFIED}"):
        torch.compile(loaded["model"], backend="eager")(IDS.to(UNIFIED))
    assert torch.equal(run(loaded), build(Tower)(IDS))


def test_never_two_layers_are_there_at_once(streamed: tuple[LoadedPipeline, Counting]) -> None:
    loaded, _ = streamed
    layers = [*loaded["model"].get_submodule("blocks").children()]
    there: list[int] = []

    def look(*_: object) -> None:
        there.append(sum(not isinstance(each.get_parameter("norm.weight"), ReleasedWeight) for each in layers))

    for layer in layers:
        layer.get_submodule("norm").register_forward_pre_hook(look)
    for _ in range(2):
        run(loaded)
    assert there == [1] * len(there)
    assert len(there) == 2 * len(layers)


def test_what_rests_is_the_same_memory_for_ever_and_nothing_is_written_back(
    streamed: tuple[LoadedPipeline, Counting],
) -> None:
    loaded, machine = streamed
    component = loaded.components["model"]
    before = {name: (id(weight), weight.data_ptr()) for name, weight in component.weights()}
    for _ in range(3):
        run(loaded)
        loaded.release()
    assert {name: (id(weight), weight.data_ptr()) for name, weight in component.weights()} == before
    assert all(weight.device.type == "cpu" for _, weight in component.weights())
    out = 3 * IDS.numel() * 11 * 4  # the logits that the caller takes
    assert machine.simulated.copied_out_bytes == out


def test_the_fixed_part_comes_with_the_phase_and_goes_with_it(streamed: tuple[LoadedPipeline, Counting]) -> None:
    loaded, machine = streamed
    embed = loaded["model"].get_submodule("embed")
    resting = machine.memory().allocated_bytes
    for _ in range(2):
        assert isinstance(embed.weight, ReleasedWeight)
        run(loaded)
        assert not isinstance(embed.weight, ReleasedWeight)
        assert torch.equal(embed.weight.cpu(), build(Tower).get_parameter("embed.weight"))
        loaded.release()
        assert machine.memory().allocated_bytes == resting
