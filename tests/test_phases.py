"""Intervals of use: what comes with a component's phase, what stays over it, and what a failure leaves."""

# Torch's own types are partial here.
# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

from itertools import groupby
from pathlib import Path
from unittest.mock import patch

import placewise
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from placewise.executor.guards import ReleasedWeight
from placewise.executor.load import LoadedPipeline, load_plan
from placewise.executor.machine import Machine
from placewise.executor.resident import Resident
from placewise.executor.simulation.accelerator import simulated_device
from placewise.executor.simulation.machine import SimulatedMachine
from placewise.executor.units import Unit
from placewise.plans.errors import DeviceMemoryError
from placewise.plans.policy import Hold, Home, Override
from placewise.plans.units import GIB
from torch import nn

from .modules import SIM, Tower, build, load, machine, on_meta, overridden, plan_for, save
from .readings import plan_of
from .test_entry_points import Encoder, two_towers

pytestmark = pytest.mark.usefixtures("one_thread", "no_grad")

IDS = torch.tensor([[1, 2, 3, 10], [4, 5, 6, 0]])
LAYERS = 6


def run(module: nn.Module, device: torch.device | str) -> torch.Tensor:
    result: torch.Tensor = module(IDS.to(device))
    return result.cpu()


def towers(folder: Path, *wishes: Override) -> LoadedPipeline:
    plan = placewise.plan(folder, machine=machine(GIB, GIB), policy=overridden(*wishes))
    return placewise.load(plan, folder, modules={name: on_meta(Encoder) for name in ("first", "second")})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return two_towers(tmp_path_factory.mktemp("towers"))


@given(uses=st.lists(st.sampled_from(("first", "second")), min_size=1, max_size=8), streamed=st.booleans())
@settings(max_examples=15)
def test_adjacent_uses_of_a_component_are_one_interval(folder: Path, uses: list[str], streamed: bool) -> None:  # noqa: FBT001
    """What is held for a phase is fetched once per interval, and no component's is kept over another's use."""
    hold = Hold.layer if streamed else Hold.phase
    wishes = [Override(select=name, hold=hold, home=Home.pageable) for name in ("first", "second")]
    loaded = towers(folder, *wishes)
    fetched: list[str] = []
    fetch = Resident._hold  # pyright: ignore[reportPrivateUsage]

    def note(self: Resident, unit: Unit) -> None:
        if unit.prefix is None:
            fetched.append(self.name)
        fetch(self, unit)

    with patch.object(Resident, "_hold", note):
        for name in uses:
            run(loaded[name], loaded.device(name))
            for other, component in loaded.components.items():
                resident = component.resident
                assert (resident.weight_bytes > resident.always_bytes) == (other == name)
    assert fetched == [name for name, _ in groupby(uses)]


def test_nothing_leaves_where_there_is_room_for_all(folder: Path) -> None:
    """B28: weights are parked between phases only where the plan says so; then slots and buffers go back as well."""
    ample = towers(folder)
    module = ample["first"]
    assert not any(each._forward_pre_hooks for each in module.modules())  # pyright: ignore[reportPrivateUsage]
    before = [each.data_ptr() for each in module.parameters()]
    for _ in range(2):
        run(module, SIM)
        ample.release()
    assert [each.data_ptr() for each in module.parameters()] == before


def test_what_leaves_takes_nothing_while_it_is_away(folder: Path) -> None:
    loaded = towers(folder, *(Override(select=name, hold=Hold.layer, home=Home.mapped) for name in ("first", "second")))
    device = loaded.machines[SIM]
    resting = device.memory().allocated_bytes
    run(loaded["second"], SIM)
    assert device.memory().allocated_bytes > resting
    loaded.release()
    assert device.memory().allocated_bytes == resting
    away = [each for each in loaded["second"].parameters() if isinstance(each, ReleasedWeight)]
    assert away


@st.composite
def cached_steps(draw: st.DrawFn) -> list[tuple[int, ...]]:
    """Steps of a denoiser with a cache that skips blocks in the middle, those that it likes in each step."""
    first, last = draw(st.integers(0, 3)), draw(st.integers(0, 2))
    always = {*range(first), *range(LAYERS - last, LAYERS)}
    middles = st.sets(st.integers(0, LAYERS - 1)) | st.just(set[int]()) | st.just(set(range(LAYERS)))
    return [tuple(sorted(always | draw(middles))) for _ in range(draw(st.integers(1, 5)))]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(build(make), tmp_path_factory.mktemp("tower") / "model.safetensors")


def make() -> Tower:
    return Tower(layers=LAYERS)


@given(
    steps=cached_steps(),
    slots=st.integers(1, 4),
    ahead=st.integers(0, 3),
    kept=st.sets(st.integers(0, LAYERS - 1), max_size=LAYERS - 1),
    on_device=st.booleans(),
)
@settings(max_examples=25)
def test_blocks_that_a_cache_skips_are_never_seen_empty(
    checkpoint: Path, *, steps: list[tuple[int, ...]], slots: int, ahead: int, kept: set[int], on_device: bool
) -> None:
    """B29: whichever blocks stay, however many are fetched ahead and not used, and from the last block to the first."""
    home = Home.pageable if on_device else Home.mapped
    fates = [(Home.device, Hold.always) if at in kept else (home, Hold.layer) for at in range(LAYERS)]
    plan = plan_of(
        checkpoint,
        fates,
        (Home.device, Hold.always),
        slots=slots,
        ahead=min(ahead, slots - 1),
        on_device=on_device,
    )
    loaded, plain = load(plan, checkpoint, make), build(make)
    assert isinstance(plain, Tower)
    tower = loaded["model"]
    assert isinstance(tower, Tower)
    for order in steps:
        tower.order = plain.order = order
        assert torch.equal(run(tower, loaded.device("model")), plain(IDS))
        assert len(loaded.components["model"].resident._slots.units()) <= slots  # pyright: ignore[reportPrivateUsage]


class Failing(SimulatedMachine):
    """Fails at one copy, once."""

    left = -1

    def copy_in(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        self.left -= 1
        if self.left == -1:
            raise DeviceMemoryError("injected")
        super().copy_in(destination, source)


@pytest.mark.parametrize("hold", [Hold.phase, Hold.layer])
@pytest.mark.parametrize("at", [0, 1, 7])
def test_a_failed_transfer_is_raised_and_leaves_all_at_home(checkpoint: Path, hold: Hold, at: int) -> None:
    """B35."""
    plan = plan_for(
        checkpoint,
        machine(GIB, GIB),
        overridden(Override(select="model", hold=hold, home=Home.pageable), slots=1, prefetch_layers=0),
    )
    failing = Failing(simulated_device(1, capacity_bytes=GIB))
    machines: dict[str, Machine] = {SIM: failing}
    loaded = load_plan(plan, checkpoint.parent, modules={"model": on_meta(make)}, machines=machines)
    resting = failing.memory().allocated_bytes
    failing.left = at
    with pytest.raises(DeviceMemoryError, match="injected"):
        run(loaded["model"], SIM)
    loaded.release()
    assert all(isinstance(each, ReleasedWeight) for each in loaded["model"].parameters())
    assert failing.memory().allocated_bytes == resting
    assert torch.equal(run(loaded["model"], SIM), build(make)(IDS))
