"""What the simulated device's tests cover, on a real accelerator. It needs a process in which no simulated one is.

pytest -m cuda tests/test_cuda.py
"""

# Torch's own types are partial here.
# pyright: reportUnknownMemberType=false

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from placewise.executor.load import LoadedPipeline
from placewise.executor.machine import Machine
from placewise.executor.machine_torch import TorchMachine
from placewise.executor.simulation.device import DEVICES
from placewise.plans.document import Plan, Reader
from placewise.plans.errors import DeviceMemoryError
from placewise.plans.policy import Hold, Home
from placewise.plans.units import MIB

from .laws.test_reader_laws import ON_DEVICE, Case, cases, check_mixture
from .modules import Tower, build, load, save
from .readings import plan_of

_REASON = None if torch.cuda.is_available() else "torch sees no CUDA device here"
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(_REASON is not None, reason=str(_REASON))]

DEVICE = "cuda:0"
HERE = (Home.device, Hold.always)
LAYERS, WIDTH = 6, 512
DELAY_CYCLES = 4_000_000
"""Some 2 ms, in which whatever does not wait overtakes."""


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    if DEVICES:
        pytest.skip("torch's accelerator is a simulated one in this process: run `pytest -m cuda tests/test_cuda.py`")
    with torch.no_grad():
        yield


@pytest.fixture
def machine() -> TorchMachine:
    return TorchMachine(DEVICE)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save(build(make), tmp_path / "model.safetensors")


def make() -> Tower:
    return Tower(width=WIDTH, layers=LAYERS)


def plan(path: Path, fate: tuple[Home, Hold], reader: Reader = Reader.mapping, slots: int = 2) -> Plan:
    fixed = HERE if fate[1] is Hold.layer else fate
    return plan_of(
        path,
        [fate] * LAYERS,
        fixed,
        reader=reader,
        chunk_bytes=MIB // 4,
        slots=slots,
        ahead=slots - 1,
        on_device=True,
        device=DEVICE,
    )


def output(pipeline: LoadedPipeline, order: tuple[int, ...] = tuple(range(LAYERS))) -> torch.Tensor:
    tower = pipeline["model"]
    assert isinstance(tower, Tower)
    tower.order = order
    result: torch.Tensor = tower(torch.arange(10, device=DEVICE).reshape(2, 5))
    return result


def expected(path: Path, order: tuple[int, ...] = tuple(range(LAYERS))) -> torch.Tensor:
    """The resident plan's output on the same device."""
    return output(load(plan(path, HERE), path, make), order)


def resting_bytes(pipeline: LoadedPipeline) -> int:
    loaded = pipeline.components["model"]
    return loaded.resident.always_bytes + loaded.buffer_bytes


def used_bytes(machine: Machine) -> int:
    torch.cuda.synchronize()
    return machine.memory().allocated_bytes


@pytest.mark.parametrize("fate", ON_DEVICE)
@pytest.mark.parametrize("reader", Reader)
def test_every_home_hold_and_reader_equals_the_resident_plan(
    checkpoint: Path, fate: tuple[Home, Hold], reader: Reader
) -> None:
    pipeline = load(plan(checkpoint, fate, reader), checkpoint, make)
    for again in (False, False, True):
        if again:
            pipeline.release()
        assert torch.equal(output(pipeline), expected(checkpoint))


@given(case=cases().filter(lambda case: case.on_device))
@settings(max_examples=40)
def test_every_mixture_gives_the_plain_bytes_and_leaves_nothing(case: Case) -> None:
    check_mixture(case, DEVICE)


@pytest.mark.parametrize("slots", [1, 2, 4])
@pytest.mark.parametrize("order", [(5, 4, 3, 2, 1, 0), (0, 2, 4), (1, 1, 1), (3, 0, 5, 0, 2, 2)])
def test_any_order_of_use_is_right(checkpoint: Path, slots: int, order: tuple[int, ...]) -> None:
    pipeline = load(plan(checkpoint, (Home.pinned, Hold.layer), slots=slots), checkpoint, make)
    for _ in range(2):
        assert torch.equal(output(pipeline, order), expected(checkpoint, order))
        assert torch.equal(output(pipeline), expected(checkpoint))


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize(
    ("home", "reader"),
    [(Home.pinned, Reader.mapping), (Home.pageable, Reader.mapping), (Home.mapped, Reader.direct)],
)
@pytest.mark.parametrize("late", ["compute", "copies"])
def test_whichever_stream_is_late_the_other_waits(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, home: Home, reader: Reader, slots: int, late: str
) -> None:
    wanted = expected(checkpoint)
    pipeline = load(plan(checkpoint, (home, Hold.layer), reader, slots), checkpoint, make)
    if late == "compute":
        for layer in pipeline["model"].get_submodule("blocks").children():
            layer.register_forward_pre_hook(delay)
    else:
        copy_in = TorchMachine.copy_in

        def copy_late(self: TorchMachine, destination: torch.Tensor, source: torch.Tensor) -> None:
            delay()
            copy_in(self, destination, source)

        monkeypatch.setattr(TorchMachine, "copy_in", copy_late)
    for _ in range(3):
        assert torch.equal(output(pipeline), wanted)


def delay(*_: object) -> None:
    """Let this thread's stream do nothing for a while."""
    torch.cuda._sleep(DELAY_CYCLES)  # type: ignore[no-untyped-call]  # pyright: ignore[reportPrivateUsage]


def test_a_forward_on_a_stream_of_the_callers_is_right(checkpoint: Path) -> None:
    wanted = expected(checkpoint)
    pipeline = load(plan(checkpoint, (Home.pinned, Hold.layer)), checkpoint, make)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        for _ in range(3):
            assert torch.equal(output(pipeline), wanted)


def test_a_forward_never_waits_for_the_whole_device(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = load(plan(checkpoint, (Home.mapped, Hold.layer), Reader.direct), checkpoint, make)
    output(pipeline)

    def refuse(_: TorchMachine) -> None:
        raise AssertionError("the whole device is waited for")

    with monkeypatch.context() as patch:
        patch.setattr(TorchMachine, "synchronize", refuse)
        output(pipeline)


def test_the_copy_stream_is_a_threads_own_only_while_it_copies(machine: TorchMachine) -> None:
    before = torch.cuda.current_stream()
    with machine.copying():
        copies = torch.cuda.current_stream()
        with machine.copying():
            assert torch.cuda.current_stream() == copies
        assert torch.cuda.current_stream() == copies != before
    assert torch.cuda.current_stream() == before


def test_marks_order_streams_and_the_host(machine: TorchMachine) -> None:
    source, target = machine.pinned(MIB), machine.allocate(MIB)
    source.fill_(1)
    with machine.copying():
        delay()
        machine.copy_in(target, source)
        mark = machine.mark()
    machine.wait(mark)
    result = target + 1
    machine.reach(mark)
    source.fill_(5)  # The copy is done, so that its source may change.
    assert bool((result == 2).all())


def test_pinned_weights_are_page_locked_and_given_back(checkpoint: Path, machine: TorchMachine) -> None:
    pipeline = load(plan(checkpoint, (Home.pinned, Hold.layer)), checkpoint, make)
    sources = [weight for unit in pipeline.components["model"].units if unit.prefix for weight in unit.source.values()]
    assert all(weight.is_pinned() for weight in sources)
    output(pipeline)
    del pipeline, sources
    again = machine.pinned(MIB)
    assert again.is_pinned()


def test_release_gives_everything_back(checkpoint: Path, machine: TorchMachine) -> None:
    expected(checkpoint)  # Libraries make workspaces of their own at their first use.
    for fate in ((Home.pinned, Hold.layer), (Home.mapped, Hold.phase)):
        before = used_bytes(machine)
        pipeline = load(plan(checkpoint, fate), checkpoint, make)
        loaded = used_bytes(machine)
        output(pipeline)
        pipeline.release()
        assert used_bytes(machine) == loaded
        del pipeline
        assert used_bytes(machine) == before


def test_more_than_the_device_has_is_an_error_with_figures(machine: TorchMachine) -> None:
    with pytest.raises(
        DeviceMemoryError, match=rf"^{DEVICE} is out of memory: .* requested, .* in use by this process"
    ):
        machine.allocate(1 << 50)


def test_slots_beyond_the_device_refuse_and_keep_nothing(checkpoint: Path, machine: TorchMachine) -> None:
    made = plan(checkpoint, (Home.pageable, Hold.layer))
    placement = made.placements[0]
    assert placement.staging is not None
    huge = placement.model_copy(update={"staging": placement.staging.model_copy(update={"slot_bytes": 1 << 50})})
    pipeline = load(made.model_copy(update={"placements": (huge,)}), checkpoint, make)
    before = used_bytes(machine)
    with pytest.raises(DeviceMemoryError):
        output(pipeline)
    assert used_bytes(machine) == before


def test_an_error_in_a_layer_leaves_nothing_and_the_next_forward_is_right(checkpoint: Path) -> None:
    wanted = expected(checkpoint)
    pipeline = load(plan(checkpoint, (Home.pinned, Hold.layer)), checkpoint, make)

    def fail(*_: object) -> None:
        raise RuntimeError("injected")

    handle = pipeline["model"].get_submodule("blocks.2.norm").register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="injected"):
        output(pipeline)
    handle.remove()
    assert torch.equal(output(pipeline), wanted)


@pytest.mark.parametrize("fate", ON_DEVICE)
def test_new_values_are_computed_with_wherever_weights_rest(checkpoint: Path, fate: tuple[Home, Hold]) -> None:
    before = checkpoint.read_bytes()
    pipeline, resident = (load(plan(checkpoint, each), checkpoint, make) for each in (fate, HERE))
    old = output(pipeline)
    for each in (pipeline, resident):
        each.update("model", {f"blocks.{number}.blocks.0.weight": torch.neg for number in range(0, LAYERS, 2)})
    assert torch.equal(output(pipeline), output(resident))
    assert not torch.equal(output(pipeline), old)
    assert checkpoint.read_bytes() == before
