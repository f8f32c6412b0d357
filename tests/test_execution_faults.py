"""Faults of other placement tools, each named by its public report, that execution must not have."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import copy
import gc
import io
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from placewise.executor.load import LoadedPipeline
from placewise.executor.timeline import recorded
from placewise.models.pipeline import read_pipeline
from placewise.plans.errors import DeviceMemoryError, ReleasedWeightError
from placewise.plans.pipeline import Workload
from placewise.plans.policy import Hold, Home
from safetensors.torch import load_file, save_file
from torch import nn

from .checkpoints import write_safetensors
from .modules import Tower, build, load, save
from .readings import DEVICE, Fate, are_gone, plan_of, reader_threads

pytestmark = pytest.mark.usefixtures("no_grad")

IDS = torch.tensor([[1, 2, 3, 10], [4, 5, 6, 0]])
WEIGHT = "blocks.1.blocks.0.weight"
HERE: Fate = (Home.device, Hold.always)
LEAVING: tuple[Fate, ...] = tuple(
    (home, hold) for home in (Home.mapped, Home.pageable) for hold in (Hold.phase, Hold.layer)
)
FATES: tuple[Fate, ...] = (*LEAVING, HERE)


class Frame(nn.Module):
    """Layers below a module that has buffers of its own, of which one is in no file."""

    scale: torch.Tensor
    shift: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.blocks = Tower().blocks
        self.register_buffer("scale", torch.rand(16))
        self.register_buffer("shift", torch.linspace(-1, 1, 16), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x * self.scale + self.shift)
        return x


class Framed(nn.Module):
    """An embedding before such a frame."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        self.frame = Frame()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.frame(self.embed(ids))
        return result


class Adapted(nn.Module):
    """A low-rank adapter round a layer, as peft puts it."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(16, 2, bias=False), nn.Linear(2, 16, bias=False)
        self.base_layer = base

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base_layer(x) + self.up(self.down(x))
        return result


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save(build(Tower), tmp_path / "model.safetensors")


@pytest.fixture
def without_gc() -> Iterator[None]:
    """Memory that goes only with a cycle is kept."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def placed(path: Path, fate: Fate, make: Callable[[], nn.Module] = Tower) -> LoadedPipeline:
    """Every layer with one fate on the simulated device, where the fixed part stays."""
    return load(plan_of(path, [fate] * 4, HERE, on_device=True), path, make)


def output(pipeline: LoadedPipeline) -> torch.Tensor:
    result: torch.Tensor = pipeline["model"](IDS.to(DEVICE))
    return result.cpu()


def held(pipeline: LoadedPipeline) -> dict[str, int]:
    return {name: each.memory().allocated_bytes for name, each in pipeline.machines.items()}


@pytest.mark.parametrize("fate", FATES)
def test_buffers_of_modules_around_layers_are_where_these_compute(tmp_path: Path, fate: Fate) -> None:
    """accelerate 3956, 4014, 2701, transformers 27199: buffers beside or above what was placed were forgotten."""
    path = save(build(Framed), tmp_path / "model.safetensors")
    pipeline = placed(path, fate, Framed)
    for _ in range(2):
        assert torch.equal(output(pipeline), build(Framed)(IDS))
        pipeline.release()
    assert {buffer.device for buffer in pipeline["model"].buffers()} == {torch.device(DEVICE)}


def are_away(fate: Fate, *, after_a_pass: bool) -> bool:
    """Whether layers are placeholders outside of their forward."""
    return fate[1] is Hold.layer or (fate[1] is Hold.phase and not after_a_pass)


def saved_whole(pipeline: LoadedPipeline, path: Path) -> None:
    names = dict(pipeline["model"].named_parameters()).keys() | dict(pipeline["model"].named_buffers()).keys()
    state = pipeline["model"].state_dict()
    save_file({name: value for name, value in state.items() if name in names}, path)


def pickled(pipeline: LoadedPipeline, path: Path) -> None:
    state = {name: value for name, value in pipeline["model"].state_dict().items() if name.endswith("weight")}
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    save_file({name: value.cpu().clone() for name, value in torch.load(file).items()}, path)


@pytest.mark.parametrize("after_a_pass", [False, True])
@pytest.mark.parametrize("write", [saved_whole, pickled])
@pytest.mark.parametrize("fate", FATES)
def test_what_is_saved_are_weights_or_nothing(
    checkpoint: Path, tmp_path: Path, fate: Fate, write: Callable[[LoadedPipeline, Path], None], *, after_a_pass: bool
) -> None:
    """transformers PR 46902: saving an offloaded model lost buffers and weights."""
    pipeline = load(plan_of(checkpoint, [fate] * 4, HERE), checkpoint, Tower)
    if after_a_pass:
        pipeline["model"](IDS)
    path, plain = tmp_path / "saved.safetensors", build(Tower).state_dict()
    if are_away(fate, after_a_pass=after_a_pass):
        with pytest.raises(ReleasedWeightError, match=r"to read it from its home, use LoadedComponent\.weights\(\)"):
            write(pipeline, path)
        save_file(dict(pipeline.components["model"].weights()), path)
    else:
        write(pipeline, path)
    found = load_file(path)
    assert found.keys() >= {"embed.weight", WEIGHT}
    assert all(torch.equal(value, plain[name]) for name, value in found.items() if not name.endswith("calls"))


@pytest.mark.parametrize("after_a_pass", [False, True])
@pytest.mark.parametrize("fate", FATES)
def test_a_copy_of_a_placed_module_has_its_own_weights_or_is_refused(
    checkpoint: Path, fate: Fate, *, after_a_pass: bool
) -> None:
    """accelerate 2129: what was copied were placeholders."""
    pipeline = placed(checkpoint, fate)
    if after_a_pass:
        output(pipeline)
    if are_away(fate, after_a_pass=after_a_pass):
        with pytest.raises(ReleasedWeightError, match="is released and cannot be copied"):
            copy.deepcopy(pipeline["model"])
    else:
        twin = copy.deepcopy(pipeline["model"])
        assert torch.equal(twin(IDS.to(DEVICE)).cpu(), build(Tower)(IDS))
        twin.get_parameter(WEIGHT).zero_()
        assert not torch.equal(twin(IDS.to(DEVICE)).cpu(), build(Tower)(IDS))
    assert torch.equal(output(pipeline), build(Tower)(IDS))


@pytest.mark.parametrize("fate", FATES)
def test_memory_does_not_grow_with_calls(checkpoint: Path, fate: Fate, without_gc: None) -> None:
    """diffusers 7970: host memory grew with each call."""
    pipeline = load(plan_of(checkpoint, [fate] * 4, HERE), checkpoint, Tower)
    counts: list[tuple[int, dict[str, int]]] = []
    for calls in (2, 18):
        for _ in range(calls):
            pipeline["model"](IDS)
            pipeline.release()
        # Asking each for its class would wake what is only there to be warned of.
        tensors = sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())
        counts.append((tensors, held(pipeline)))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("fate", LEAVING)
def test_a_pass_that_ran_out_of_memory_is_healed_by_room(checkpoint: Path, fate: Fate, without_gc: None) -> None:
    """diffusers 14328: after one failure the hooks' books were wrong for good."""
    pipeline = placed(checkpoint, fate)
    on = pipeline.machines[DEVICE]
    resting = held(pipeline)
    capacity = on.memory().capacity_bytes
    assert capacity is not None
    for left in (0, 64, 1 << 11, 1 << 12):
        ids = IDS.to(DEVICE)
        ballast = on.allocate(capacity - on.memory().allocated_bytes - left)
        with pytest.raises(DeviceMemoryError):
            pipeline["model"](ids)
        del ballast, ids
        assert held(pipeline) == resting
    assert torch.equal(output(pipeline), build(Tower)(IDS))


def fail(pipeline: LoadedPipeline) -> None:
    def stop(_: nn.Module, __: object) -> None:
        raise RuntimeError("injected")

    handle = pipeline["model"].get_submodule("blocks.2.norm").register_forward_pre_hook(stop)
    with pytest.raises(RuntimeError, match="injected"):
        output(pipeline)
    handle.remove()


def record(pipeline: LoadedPipeline) -> None:
    with recorded(pipeline.components["model"]) as spans:
        output(pipeline)
    assert spans


def change(pipeline: LoadedPipeline) -> None:
    pipeline.update("model", {WEIGHT: lambda old: old * 2})
    output(pipeline)


def give_up(pipeline: LoadedPipeline) -> None:
    output(pipeline)
    pipeline.release()


@pytest.mark.parametrize("use", [fail, record, change, give_up])
@pytest.mark.parametrize("fate", LEAVING)
def test_nothing_stays_of_a_deleted_pipeline_whatever_was_done_with_it(
    checkpoint: Path, fate: Fate, use: Callable[[LoadedPipeline], None], without_gc: None
) -> None:
    """Offload hooks keep models alive in cycles and tables of their own."""
    threads = reader_threads()
    pipeline = placed(checkpoint, fate)
    use(pipeline)
    alive = [weakref.ref(each) for each in (*pipeline["model"].modules(), *pipeline["model"].parameters())]
    alive += [weakref.ref(pipeline.components["model"].resident)]
    machines = pipeline.machines
    del pipeline
    assert are_gone(reader_threads() - threads)  # A copy that was begun ahead of use ends first.
    assert not any(each() is not None for each in alive)
    assert {each.memory().allocated_bytes for each in machines.values()} == {0}


def adapted(base: nn.Module, device: str) -> nn.Module:
    """Its own weights go to the device; what it is put round is there already."""
    adapter = build(lambda: Adapted(nn.Identity())).to(device)
    adapter.base_layer = base
    return adapter


@pytest.mark.parametrize("fate", FATES)
def test_an_adapter_round_a_layer_is_no_stranger(checkpoint: Path, fate: Fate) -> None:
    """diffusers 11791, from the other side: the layer within is still the plan's."""
    pipeline, plain = placed(checkpoint, fate), build(Tower)
    output(pipeline)
    for module, device in ((pipeline["model"], DEVICE), (plain, "cpu")):
        linears = module.get_submodule("blocks.1.blocks")
        assert isinstance(linears, nn.ModuleList)
        linears[0] = adapted(linears[0], device)
    for _ in range(2):
        assert torch.equal(output(pipeline), plain(IDS))
        pipeline.release()


@pytest.mark.parametrize("fate", [*FATES, (Home.locked, Hold.layer)])
def test_nothing_is_cast_and_nothing_is_there_twice(tmp_path: Path, fate: Fate) -> None:
    """transformers 24393, safetensors 437: source and cast copy were both in memory."""
    path = save(build(lambda: Tower().bfloat16()), tmp_path / "model.safetensors")
    pipeline = placed(path, fate)
    assert {weight.dtype for weight in pipeline["model"].parameters()} == {torch.bfloat16}
    component = pipeline.components["model"]
    assert pipeline.machines["cpu"].memory().peak_bytes == component.host_bytes
    assert held(pipeline)[DEVICE] == component.resident.always_bytes + component.buffer_bytes


def calls_to_read(path: Path, tensors: int) -> int:
    """How many functions are called to read a file of so many tensors."""
    write_safetensors(path, {f"blocks.{number}.weight": ("F32", (1,)) for number in range(tensors)})
    count = 0

    def see(_: object, event: str, __: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(see)
    try:
        read_pipeline(path, workload=Workload())
    finally:
        sys.setprofile(None)
    return count


def test_the_work_for_many_tensors_is_in_proportion(tmp_path: Path) -> None:
    """transformers 37887: loading took 71 ms per tensor where there were very many."""
    path = tmp_path / "model.safetensors"
    few = calls_to_read(path, 2000)
    assert calls_to_read(path, 20000) < 11 * few
