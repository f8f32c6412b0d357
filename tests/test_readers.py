"""Readers and host homes when something is in their way: failing reads, refused ways, cut files, refused locks."""

import contextlib
import errno
import gc
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from placewise.executor.guards import MappedWeight, ReleasedWeight
from placewise.executor.load import LoadedPipeline
from placewise.executor.pages import PAGE_BYTES, PageLock, in_page_cache, pages_of
from placewise.executor.report import ComponentReport, report_run
from placewise.executor.simulation.machine import SimulatedMachine
from placewise.plans.document import Reader
from placewise.plans.errors import ExecutionError, ReadOnlyWeightError
from placewise.plans.policy import Hold, Home
from placewise.plans.units import format_bytes
from torch import nn

from .modules import build, load, save
from .readings import Stacked, are_gone, locked_bytes, open_files, plan_of, reader_threads

MAPPED, LOCKED = (Home.mapped, Hold.layer), (Home.locked, Hold.always)
HERE, LAYERS = (Home.device, Hold.always), 4
Preadv = Callable[[int, Sequence[memoryview], int], int]
preadv: Preadv = os.preadv

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="direct reads and locked pages are Linux's"),
    pytest.mark.usefixtures("no_grad"),
]


def make() -> Stacked:
    return Stacked([(torch.float32, (33, 257)), (torch.bfloat16, (5,))], layers=LAYERS)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save(build(make), tmp_path / "model.safetensors")


@pytest.fixture
def _cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that a test has just written are in the page cache; this says that they are not."""

    def no(_: object) -> bool:
        return False

    monkeypatch.setattr("placewise.executor.transport.in_page_cache", no)


@pytest.fixture(params=[False, True], ids=["cpu", "device"])
def on_device(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def streamed(path: Path, reader: Reader, *, on_device: bool) -> LoadedPipeline:
    fixed = (Home.device, Hold.always)
    return load(
        plan_of(path, [MAPPED] * LAYERS, fixed, reader=reader, chunk_bytes=8192, on_device=on_device), path, make
    )


def output(pipeline: LoadedPipeline) -> torch.Tensor:
    result: torch.Tensor = pipeline["model"](torch.ones(2, dtype=torch.float64).to(pipeline.device("model")))
    return result.cpu()


def expected() -> torch.Tensor:
    result: torch.Tensor = build(make)(torch.ones(2, dtype=torch.float64))
    return result


def report(pipeline: LoadedPipeline) -> ComponentReport:
    return report_run(pipeline, {}).components[0]


def failing(monkeypatch: pytest.MonkeyPatch, fails: Callable[[], bool], code: int = errno.EIO) -> None:
    """Let reads fail when asked."""

    def read(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if fails():
            raise OSError(code, os.strerror(code))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", read)


@pytest.mark.usefixtures("_cold")
@pytest.mark.parametrize("reader", Reader)
def test_what_was_read_is_counted_by_its_way(checkpoint: Path, reader: Reader, *, on_device: bool) -> None:
    pipeline = streamed(checkpoint, reader, on_device=on_device)
    assert torch.equal(output(pipeline), expected())
    found = report(pipeline)
    assert (found.reader, found.notes) == (reader, ())
    assert {way for way, count in found.read_bytes.items() if count} == {reader}


def test_what_is_in_the_page_cache_is_not_read_from_the_disk(checkpoint: Path, *, on_device: bool) -> None:
    pipeline = streamed(checkpoint, Reader.direct, on_device=on_device)
    assert torch.equal(output(pipeline), expected())
    assert report(pipeline).read_bytes.keys() == {"mapping", "buffered"}


def test_the_page_cache_is_asked_for_every_page(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(64 * PAGE_BYTES))
    mapped = torch.from_file(str(file), size=64 * PAGE_BYTES, dtype=torch.uint8)
    assert in_page_cache(pages_of([mapped]))
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        for page in (0, 63):
            os.pread(opened.fileno(), PAGE_BYTES, page * PAGE_BYTES)
    assert in_page_cache(pages_of([mapped[:1], mapped[-1:]]))
    assert not in_page_cache(pages_of([mapped]))


@pytest.mark.parametrize("reader", [Reader.direct, Reader.buffered])
def test_a_read_that_fails_once_ahead_of_use_costs_speed_and_never_a_value(
    checkpoint: Path, reader: Reader, monkeypatch: pytest.MonkeyPatch, *, on_device: bool
) -> None:
    pipeline = streamed(checkpoint, reader, on_device=on_device)
    output(pipeline)
    left = [None]
    failing(monkeypatch, lambda: bool(left) and left.pop() is None)
    for _ in range(2):
        assert torch.equal(output(pipeline), expected())
    assert left == []
    assert report(pipeline).reader_broke


@pytest.mark.parametrize("reader", [Reader.direct, Reader.buffered])
def test_a_disk_that_fails_is_named_with_file_and_place_and_leaves_nothing_bound(
    checkpoint: Path, reader: Reader, monkeypatch: pytest.MonkeyPatch, *, on_device: bool
) -> None:
    pipeline = streamed(checkpoint, reader, on_device=on_device)
    output(pipeline)
    broken = [None]
    failing(monkeypatch, lambda: bool(broken))
    with pytest.raises(ExecutionError) as caught:
        output(pipeline)
    message = str(caught.value)
    assert message.startswith(f"{checkpoint}: reading ")
    assert message.endswith(" failed: Input/output error\nhint: check the disk, and the kernel's log")
    blocks = pipeline["model"].get_submodule("blocks")
    assert all(isinstance(weight, ReleasedWeight) for weight in blocks.parameters())
    broken.clear()
    assert torch.equal(output(pipeline), expected())


def test_a_read_that_fails_keeps_no_memory_until_garbage_is_collected(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, *, on_device: bool
) -> None:
    pipeline = streamed(checkpoint, Reader.direct, on_device=on_device)
    machine = pipeline.components["model"].resident.machine
    resting = machine.memory().allocated_bytes
    failing(monkeypatch, lambda: True)
    gc.disable()
    try:
        with contextlib.suppress(ExecutionError):
            output(pipeline)
        pipeline.release()
        # The failed forward's input may stay.
        assert machine.memory().allocated_bytes < resting + 1000
    finally:
        gc.enable()


@pytest.mark.usefixtures("_cold")
@pytest.mark.parametrize("reader", Reader)
def test_a_backward_never_takes_another_layers_weights(tmp_path: Path, reader: Reader) -> None:
    """A slot that was read into since, past torch, is known as changed."""

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(64, 64) for _ in range(LAYERS)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    path = save(build(Chain), tmp_path / "chain.safetensors")
    pipeline = load(plan_of(path, [MAPPED] * LAYERS, HERE, reader=reader), path, Chain)
    pipeline["model"].requires_grad_(requires_grad=False)
    with torch.enable_grad():
        loss: Any = pipeline["model"](torch.ones(1, 64, requires_grad=True)).sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.usefixtures("_cold")
@pytest.mark.parametrize("opening", [True, False], ids=["open", "read"])
def test_a_file_system_that_refuses_direct_reads_is_read_through_the_cache(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, *, opening: bool, on_device: bool
) -> None:
    opened, direct = os.open, set[int]()

    def refuse() -> OSError:
        return OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    def open_file(path: Path, flags: int) -> int:
        if flags & os.O_DIRECT and opening:
            raise refuse()
        descriptor = opened(path, flags)
        if flags & os.O_DIRECT:
            direct.add(descriptor)
        return descriptor

    def read(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        if descriptor in direct:
            raise refuse()
        return preadv(descriptor, buffers, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", open_file)
        pipeline = streamed(checkpoint, Reader.direct, on_device=on_device)
    monkeypatch.setattr(os, "preadv", read)
    assert torch.equal(output(pipeline), expected())
    found = report(pipeline)
    assert found.reader is Reader.buffered
    assert found.read_bytes.keys() == {"mapping", "buffered"}
    assert found.notes == (f"direct reads are refused where {checkpoint.parent} is: read through the page cache",)
    assert not found.reader_broke


@pytest.mark.usefixtures("_cold")
@pytest.mark.parametrize("reader", [Reader.direct, Reader.buffered])
@pytest.mark.parametrize("most", [4096, 1000])
def test_short_reads_are_completed(
    checkpoint: Path, reader: Reader, most: int, monkeypatch: pytest.MonkeyPatch, *, on_device: bool
) -> None:
    def read(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        # A direct read must ask for whole blocks; the caller is told of less than there is.
        return min(most, preadv(descriptor, buffers, offset))

    monkeypatch.setattr(os, "preadv", read)
    assert torch.equal(output(streamed(checkpoint, reader, on_device=on_device)), expected())


@pytest.mark.parametrize("reader", Reader)
def test_a_file_that_was_cut_is_an_error_and_not_the_end_of_the_process(
    checkpoint: Path, reader: Reader, *, on_device: bool
) -> None:
    size = checkpoint.stat().st_size
    pipeline = streamed(checkpoint, reader, on_device=on_device)
    os.truncate(checkpoint, size // 3)
    with pytest.raises(ExecutionError) as caught:
        output(pipeline)
    assert str(caught.value).startswith(f"{checkpoint}: ends at byte {size // 3}, and ")
    assert str(caught.value).endswith("hint: the file has changed since the plan was loaded: restore it, or plan again")


def test_a_forward_that_raises_leaves_nothing_bound(checkpoint: Path, *, on_device: bool) -> None:
    pipeline = streamed(checkpoint, Reader.direct, on_device=on_device)
    block = pipeline["model"].get_submodule("blocks.2")

    def fail(*_: object) -> None:
        raise RuntimeError("injected")

    handle = block.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="injected"):
        output(pipeline)
    handle.remove()
    assert all(isinstance(weight, ReleasedWeight) for weight in block.parameters())
    assert torch.equal(output(pipeline), expected())


def test_a_pipeline_that_is_deleted_while_it_reads_leaves_nothing(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, *, on_device: bool
) -> None:
    before = reader_threads()
    at_the_last_layer, begun, go_on = threading.Event(), threading.Event(), threading.Event()
    pipeline = streamed(checkpoint, Reader.direct, on_device=on_device)

    def wait() -> bool:
        if at_the_last_layer.is_set():
            begun.set()
            go_on.wait(10)
        return False

    def last(*_: object) -> None:
        at_the_last_layer.set()

    failing(monkeypatch, wait)
    handle = pipeline["model"].get_submodule("blocks.3").register_forward_pre_hook(last)
    output(pipeline)
    handle.remove()
    assert begun.wait(10)
    threads = reader_threads() - before
    assert threads
    del pipeline
    go_on.set()
    assert are_gone(threads)
    assert open_files(checkpoint.parent) == 0


def test_a_slot_that_is_too_small_for_its_layer_is_refused_before_anything_runs(checkpoint: Path) -> None:
    plan = plan_of(checkpoint, [MAPPED] * LAYERS, HERE, reader=Reader.direct)
    placement = plan.placements[0]
    assert placement.staging is not None
    small = placement.model_copy(update={"staging": placement.staging.model_copy(update={"slot_bytes": 40000})})
    with pytest.raises(ExecutionError) as caught:
        load(plan.model_copy(update={"placements": (small,)}), checkpoint, make)
    assert str(caught.value) == (
        "component 'model': layer 'blocks.0' takes 45056 bytes, and the plan has slots of 40000 bytes\n"
        "hint: plan again with this version"
    )


@pytest.mark.parametrize("home", [Home.pageable, Home.pinned, Home.mapped, Home.locked])
def test_weights_that_would_never_come_to_their_device_are_refused(checkpoint: Path, home: Home) -> None:
    plan = plan_of(checkpoint, [(home, Hold.always)] * LAYERS, HERE, on_device=True)
    with pytest.raises(ExecutionError) as caught:
        load(plan, checkpoint, make)
    assert str(caught.value) == (
        f"component 'model': home {home} is not on sim:2, and hold always would leave its weights there\n"
        "hint: plan with hold phase or layer, or with home device"
    )


def test_pinned_weights_take_exactly_their_bytes_and_give_them_back(checkpoint: Path) -> None:
    plan = plan_of(checkpoint, [(Home.pinned, Hold.layer)] * LAYERS, (Home.pinned, Hold.phase), on_device=True)
    before = reader_threads()
    pipeline = load(plan, checkpoint, make)
    machine = pipeline.machines["sim:2"]
    assert isinstance(machine, SimulatedMachine)
    packed = sum(unit.layout.nbytes for unit in pipeline.components["model"].units)
    assert machine.pinned_bytes == report(pipeline).page_locked_bytes == packed
    assert torch.equal(output(pipeline), expected())
    threads = reader_threads() - before
    del pipeline
    assert are_gone(threads)  # The first layer of a next pass was on its way.
    assert machine.pinned_bytes == 0


@pytest.mark.parametrize(("on_device", "device"), [(False, "the cpu"), (True, "sim:2")])
def test_pinned_weights_need_a_machine_that_pins(checkpoint: Path, device: str, *, on_device: bool) -> None:
    fate = (Home.pinned, Hold.layer)
    plan = plan_of(checkpoint, [fate] * LAYERS, HERE, on_device=on_device, pinned=False)
    with pytest.raises(ExecutionError, match=f"^{device} has no pinned memory\nhint: plan with home "):
        load(plan, checkpoint, make)


def test_locked_weights_are_in_memory_read_only_and_unlocked_with_the_pipeline(checkpoint: Path) -> None:
    before = locked_bytes()
    pipeline = load(plan_of(checkpoint, [LOCKED] * LAYERS, LOCKED), checkpoint, make)
    assert locked_bytes() - before == report(pipeline).page_locked_bytes >= checkpoint.stat().st_size - 4096
    weight = pipeline["model"].get_parameter("last")
    assert isinstance(weight, MappedWeight)
    with pytest.raises(ReadOnlyWeightError):
        weight.zero_()
    assert torch.equal(output(pipeline), expected())
    # Somebody who keeps a weight keeps its memory, and not the lock.
    del pipeline
    assert locked_bytes() == before
    assert torch.equal(weight, build(make).get_parameter("last"))


_UNDER_A_LIMIT = """
import resource, sys, torch
from pathlib import Path
from typing import Any
from placewise.executor.report import report_run
from placewise.plans.policy import Hold, Home
from placewise.tests.modules import build, load
from placewise.tests.readings import locked_bytes, plan_of
from placewise.tests.test_readers import LAYERS, LOCKED, make, output, expected
resource.setrlimit(resource.RLIMIT_MEMLOCK, (int(sys.argv[2]), int(sys.argv[2])))
path = Path(sys.argv[1])
with torch.no_grad():
    pipeline = load(plan_of(path, [LOCKED] * LAYERS, LOCKED), path, make)
    assert torch.equal(output(pipeline), expected())
(report,) = report_run(pipeline, {}).components
assert locked_bytes() == report.page_locked_bytes
print(report.homes, report.page_locked_bytes, *report.notes, sep="\\n")
"""


_REASON = None if os.geteuid() == 0 and shutil.which("setpriv") else "only root, with setpriv, can give up a right"


@pytest.mark.skipif(_REASON is not None, reason=str(_REASON))
def test_what_goes_beyond_the_limit_stays_mapped_with_a_note(checkpoint: Path) -> None:
    limit = 100_000
    ran = subprocess.run(
        ["setpriv", "--bounding-set=-ipc_lock", sys.executable, "-c", _UNDER_A_LIMIT, checkpoint, str(limit)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent / ".src")},
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    homes, count, *notes = ran.stdout.splitlines()
    assert homes == "('locked/always', 'mapped/always')"
    assert 0 < int(count) <= limit
    # The fixed part and two layers are within it.
    assert notes == [
        f"blocks.{number} stays mapped: 33.1 KiB (33938 bytes) could not be locked, Cannot allocate memory;"
        f" the limit is {format_bytes(limit)} (ulimit -l)"
        for number in (2, 3)
    ]


def test_a_refused_lock_is_noted_and_the_values_are_right(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> PageLock:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr("placewise.executor.homes.PageLock", refuse)
    pipeline = load(plan_of(checkpoint, [LOCKED] * LAYERS, LOCKED), checkpoint, make)
    assert torch.equal(output(pipeline), expected())
    found = report(pipeline)
    assert (found.homes, found.page_locked_bytes, len(found.notes)) == (("mapped/always",), 0, LAYERS + 1)
    assert found.notes[0].startswith("the fixed part stays mapped: 12 B (12 bytes) could not be locked, Operation not")
