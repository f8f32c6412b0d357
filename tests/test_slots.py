"""Layers fetched ahead of use by a reader thread: the same values, whatever the order, and whatever breaks."""

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from placewise.executor.guards import ReleasedWeight
from placewise.executor.load import LoadedPipeline, load_plan
from placewise.executor.simulation.accelerator import simulated_device
from placewise.executor.simulation.machine import SimulatedMachine
from placewise.plans.document import Plan
from placewise.plans.errors import ExecutionError
from placewise.plans.policy import Hold, Override
from placewise.plans.units import GIB
from torch import nn

from .modules import SIM, Tower, build, machine, on_meta, overridden, plan_for, save

pytestmark = pytest.mark.usefixtures("no_grad")

IDS = torch.tensor([[1, 2, 3, 10], [4, 5, 6, 0]])
LAYERS = 6
Copy = Callable[[torch.Tensor, torch.Tensor], None]


class Watched(SimulatedMachine):
    """The simulated machine, with the threads that copied, and copies that may be made to fail."""

    def __init__(self, *, fail_ahead_after: int | None = None, fail_always: bool = False) -> None:
        super().__init__(simulated_device(1, capacity_bytes=GIB))
        self.copied_by: list[str] = []
        self.fail_always = fail_always
        self._fail_ahead_after = fail_ahead_after

    def copy_in(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        name = threading.current_thread().name
        self.copied_by.append(name)
        ahead = [copier for copier in self.copied_by if copier.startswith("placewise-reader")]
        fails = self._fail_ahead_after is not None and len(ahead) > self._fail_ahead_after
        if self.fail_always or (fails and name.startswith("placewise-reader")):
            raise OSError("injected")
        super().copy_in(destination, source)

    def read_ahead(self) -> bool:
        """Whether the reader thread copied anything."""
        return any(name.startswith("placewise-reader") for name in self.copied_by)


@pytest.fixture
def without_gc() -> Iterator[None]:
    """Memory that goes only with a cycle is kept."""
    gc.disable()
    yield
    gc.enable()


def make() -> Tower:
    return Tower(layers=LAYERS)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save(build(make), tmp_path / "model.safetensors")


def plan(path: Path, *, slots: int = 2, ahead: int = 1, passes: int = 3) -> Plan:
    layer = Override(select="model.blocks", hold=Hold.layer)
    made = plan_for(path, machine(GIB, GIB), overridden(layer, slots=slots, prefetch_layers=ahead), passes=passes)
    staging = made.placements[0].staging
    assert staging is not None
    assert (staging.slots, staging.prefetch_layers) == (slots, ahead)
    return made


def load(path: Path, on: Watched, made: Plan) -> LoadedPipeline:
    return load_plan(made, path.parent, modules={"model": on_meta(make)}, machines={SIM: on})


def output(pipeline: LoadedPipeline, order: tuple[int, ...] = tuple(range(LAYERS))) -> torch.Tensor:
    tower = pipeline["model"]
    assert isinstance(tower, Tower)
    tower.order = order
    result: torch.Tensor = tower(IDS.to(SIM))
    return result.cpu()


def expected(order: tuple[int, ...] = tuple(range(LAYERS))) -> torch.Tensor:
    tower = build(make)
    assert isinstance(tower, Tower)
    tower.order = order
    result: torch.Tensor = tower(IDS)
    return result


@pytest.mark.parametrize(("slots", "ahead"), [(2, 1), (3, 1), (3, 2), (4, 3)])
def test_layers_are_read_ahead_and_values_are_the_plain_ones(checkpoint: Path, slots: int, ahead: int) -> None:
    on = Watched()
    pipeline = load(checkpoint, on, plan(checkpoint, slots=slots, ahead=ahead))
    for _ in range(3):
        assert torch.equal(output(pipeline), expected())
    assert on.read_ahead()
    assert not pipeline.components["model"].resident.reader_broke


@pytest.mark.parametrize("order", [(5, 4, 3, 2, 1, 0), (0, 2, 4), (1, 1, 1), (3, 0, 5, 0, 2, 2)])
def test_what_was_read_ahead_in_vain_gives_way(checkpoint: Path, order: tuple[int, ...]) -> None:
    pipeline = load(checkpoint, Watched(), plan(checkpoint))
    for _ in range(3):
        assert torch.equal(output(pipeline, order), expected(order))
    assert torch.equal(output(pipeline), expected())


def test_every_layer_is_copied_once_per_pass(checkpoint: Path) -> None:
    on = Watched()
    pipeline = load(checkpoint, on, plan(checkpoint))
    output(pipeline)
    output(pipeline)
    pipeline.release()
    # The first layer of each next pass was read ahead at the end of the one before, that of the third in vain.
    tensors = len(list(pipeline["model"].get_submodule("blocks.0").parameters()))
    fixed = len(next(unit for unit in pipeline.components["model"].units if unit.prefix is None).source)
    assert len(on.copied_by) == fixed + (2 * LAYERS + 1) * tensors


def test_a_single_pass_reads_nothing_ahead_of_its_end(checkpoint: Path) -> None:
    on = Watched()
    pipeline = load(checkpoint, on, plan(checkpoint, passes=1))
    output(pipeline)
    tensors = len(list(pipeline["model"].get_submodule("blocks.0").parameters()))
    fixed = len(next(unit for unit in pipeline.components["model"].units if unit.prefix is None).source)
    assert len(on.copied_by) == LAYERS * tensors + fixed


@pytest.mark.parametrize("after", [0, 3, 7])
def test_a_broken_reader_costs_speed_and_never_a_value(checkpoint: Path, after: int) -> None:
    on = Watched(fail_ahead_after=after)
    pipeline = load(checkpoint, on, plan(checkpoint))
    for _ in range(3):
        assert torch.equal(output(pipeline), expected())
    assert pipeline.components["model"].resident.reader_broke
    ahead = sum(name.startswith("placewise-reader") for name in on.copied_by)
    output(pipeline)
    assert sum(name.startswith("placewise-reader") for name in on.copied_by) == ahead


def test_a_copy_that_fails_when_it_is_needed_raises_and_the_next_forward_is_right(checkpoint: Path) -> None:
    on = Watched()
    pipeline = load(checkpoint, on, plan(checkpoint))
    output(pipeline)
    pipeline.release()
    on.fail_always = True
    with pytest.raises(OSError, match="injected"):
        output(pipeline)
    on.fail_always = False
    assert torch.equal(output(pipeline), expected())


def test_a_slot_whose_copy_goes_on_after_an_interrupt_is_given_to_nobody_before_its_end(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on, go_on, ended = Watched(), threading.Event(), threading.Event()
    pipeline = load(checkpoint, on, plan(checkpoint))
    last, copy_in = "blocks.1.norm.weight", on.copy_in

    def wait(destination: torch.Tensor, source: torch.Tensor) -> None:
        ahead = threading.current_thread().name.startswith("placewise-reader")
        if ahead and not ended.is_set():
            go_on.wait(10)
        copy_in(destination, source)
        weights = dict(pipeline.components["model"].weights())
        if ahead and source is weights[last]:
            ended.set()

    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(on, "copy_in", wait)
    with monkeypatch.context() as patch:
        patch.setattr(Future, "exception", interrupt)
        with pytest.raises(KeyboardInterrupt):
            output(pipeline)
    threading.Timer(0.1, go_on.set).start()
    pipeline.release()
    assert ended.is_set()
    assert torch.equal(output(pipeline), expected())


@pytest.mark.parametrize("fail_ahead_after", [None, 0])
def test_release_drops_what_was_read_ahead_or_failed(
    checkpoint: Path, fail_ahead_after: int | None, without_gc: None
) -> None:
    on = Watched(fail_ahead_after=fail_ahead_after)
    pipeline = load(checkpoint, on, plan(checkpoint))
    output(pipeline, (0,))  # The next one is read in vain.
    pipeline.release()
    assert pipeline.components["model"].resident.reader_broke == (fail_ahead_after == 0)
    resident = pipeline.components["model"].resident
    assert on.memory().allocated_bytes == resident.always_bytes + pipeline.components["model"].buffer_bytes
    assert all(isinstance(weight, ReleasedWeight) for weight in pipeline["model"].get_submodule("blocks").parameters())
    assert torch.equal(output(pipeline), expected())


def test_inference_mode_and_no_grad_may_alternate(checkpoint: Path) -> None:
    pipeline = load(checkpoint, Watched(), plan(checkpoint))
    for inference in (True, False, True, False):
        # Leaving inference mode turns gradients on.
        with torch.inference_mode(mode=inference), torch.no_grad():
            assert torch.equal(output(pipeline), expected())
        pipeline.release()


def test_layers_used_within_one_another_need_a_slot_each(checkpoint: Path) -> None:
    pipeline = load(checkpoint, Watched(), plan(checkpoint, slots=2, ahead=1))
    first, second, third = (pipeline["model"].get_submodule(f"blocks.{number}") for number in range(3))

    def calls(inner: nn.Module) -> Callable[[nn.Module, tuple[torch.Tensor, ...]], None]:
        def before(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            inner(*inputs)

        return before

    first.register_forward_pre_hook(calls(second))
    x = torch.ones(1, 16, device=SIM)
    pipeline.enter("model")
    assert first(x).shape == x.shape
    second.register_forward_pre_hook(calls(third))
    with pytest.raises(ExecutionError) as caught:
        first(x)
    assert str(caught.value) == (
        "component 'model': layer 'blocks.2' finds none of 2 slots free\n"
        "hint: its layers are used within one another: plan with more slots, or hold them for the phase"
    )
