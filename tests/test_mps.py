"""What the tests of unified memory cover, on Apple's accelerator. It needs a process in which no simulated one is.

pytest -m mps tests/test_mps.py
"""

# Torch's own types are partial here.
# pyright: reportUnknownMemberType=false

from collections.abc import Iterator
from pathlib import Path

import placewise
import pytest
import torch
from placewise.executor.guards import ReleasedWeight
from placewise.executor.load import LoadedPipeline
from placewise.executor.machine_torch import TorchMachine
from placewise.executor.simulation.device import DEVICES
from placewise.plans.document import Plan, Reader
from placewise.plans.errors import ExecutionError
from placewise.plans.policy import Hold, Home
from placewise.plans.units import MIB

from .modules import Tower, build, load, machine, on_meta, plan_for, save
from .readings import plan_of

_REASON = None if torch.backends.mps.is_available() else "torch sees no MPS device here"
pytestmark = [pytest.mark.mps, pytest.mark.skipif(_REASON is not None, reason=str(_REASON))]

DEVICE = "mps:0"
HERE = (Home.device, Hold.always)
FATES = [HERE, *((home, hold) for home in (Home.pageable, Home.mapped) for hold in (Hold.phase, Hold.layer))]
LAYERS, WIDTH = 6, 512


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    if DEVICES:
        pytest.skip("torch's accelerator is a simulated one in this process: run `pytest -m mps tests/test_mps.py`")
    with torch.no_grad():
        yield


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save(build(make), tmp_path / "model.safetensors")


def make() -> Tower:
    return Tower(width=WIDTH, layers=LAYERS)


def plan(path: Path, fate: tuple[Home, Hold], reader: Reader = Reader.mapping, slots: int = 1) -> Plan:
    return plan_of(
        path,
        [fate] * LAYERS,
        HERE if fate[1] is Hold.layer else fate,
        reader=reader,
        chunk_bytes=MIB // 4,
        slots=slots,
        ahead=slots - 1,
        on_device=True,
        pinned=False,
        device=DEVICE,
    )


def output(pipeline: LoadedPipeline, order: tuple[int, ...] = tuple(range(LAYERS))) -> torch.Tensor:
    tower = pipeline["model"]
    assert isinstance(tower, Tower)
    tower.order = order
    result: torch.Tensor = tower(torch.arange(10, device=DEVICE).reshape(2, 5))
    return result


@pytest.mark.parametrize("fate", FATES)
@pytest.mark.parametrize("reader", Reader)
def test_every_home_hold_and_reader_equals_the_resident_plan(
    checkpoint: Path, fate: tuple[Home, Hold], reader: Reader
) -> None:
    expected = output(load(plan(checkpoint, HERE), checkpoint, make))
    pipeline = load(plan(checkpoint, fate, reader), checkpoint, make)
    for again in (False, False, True):
        if again:
            pipeline.release()
        assert pipeline.device("model") == torch.device(DEVICE)
        assert {each.device for each in pipeline["model"].parameters()} == {torch.device(DEVICE)}
        assert torch.equal(output(pipeline), expected)


@pytest.mark.parametrize("order", [(5, 4, 3, 2, 1, 0), (0, 2, 4), (1, 1, 1), (3, 0, 5, 0, 2, 2)])
def test_any_order_of_use_is_right(checkpoint: Path, order: tuple[int, ...]) -> None:
    resident = load(plan(checkpoint, HERE), checkpoint, make)
    pipeline = load(plan(checkpoint, (Home.mapped, Hold.layer)), checkpoint, make)
    for _ in range(2):
        assert torch.equal(output(pipeline, order), output(resident, order))


def test_a_plan_of_what_was_measured_runs(checkpoint: Path) -> None:
    made = placewise.plan(checkpoint, policy="layerwise")
    assert [each.compute_device for each in made.placements] == [DEVICE]
    staging = made.placements[0].staging
    assert staging is not None
    assert (staging.slots, staging.prefetch_layers) == (1, 0)
    pipeline = placewise.load(made, checkpoint, modules={"model": on_meta(make)})
    assert torch.equal(output(pipeline), output(load(plan(checkpoint, HERE), checkpoint, make)))


def test_layers_ahead_are_refused(checkpoint: Path) -> None:
    with pytest.raises(ExecutionError, match="2 slots with 1 filled ahead, and mps:0 shares the host's memory"):
        load(plan(checkpoint, (Home.mapped, Hold.layer), slots=2), checkpoint, make)


def test_what_rests_is_the_same_memory_for_ever(checkpoint: Path) -> None:
    pipeline = load(plan(checkpoint, (Home.mapped, Hold.layer)), checkpoint, make)
    before = {name: weight.data_ptr() for name, weight in pipeline.components["model"].weights()}
    for _ in range(2):
        output(pipeline)
        pipeline.release()
    assert {name: weight.data_ptr() for name, weight in pipeline.components["model"].weights()} == before


def test_release_gives_everything_back_and_the_peak_was_seen(checkpoint: Path) -> None:
    device = TorchMachine(DEVICE)
    pipeline = load(plan(checkpoint, (Home.mapped, Hold.phase)), checkpoint, make)
    own = pipeline.machines[DEVICE]
    output(pipeline)
    pipeline.release()
    resting = device.memory().allocated_bytes
    own.reset_peak()
    output(pipeline)
    weights = sum(each.numel() * each.element_size() for _, each in pipeline.components["model"].weights())
    assert own.memory().peak_bytes >= resting + weights
    pipeline.release()
    assert all(isinstance(each, ReleasedWeight) for each in pipeline["model"].parameters())
    assert device.memory().allocated_bytes <= resting


def test_the_host_alone_is_not_asked_of_it(checkpoint: Path) -> None:
    """A plan for the CPU runs beside it, with the CPU's own values."""
    pipeline = load(plan_for(checkpoint, machine(1 << 30)), checkpoint, make)
    ids = torch.arange(10).reshape(2, 5)
    assert torch.equal(pipeline["model"](ids), build(make)(ids))
