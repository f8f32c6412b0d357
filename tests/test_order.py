"""Copies beside the compute, in the order that streams need: on a machine whose copies run as late as marks allow."""

import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from placewise.executor.load import LoadedPipeline, load_plan
from placewise.executor.machine import Capabilities, Mark
from placewise.executor.simulation.accelerator import simulated_device
from placewise.executor.simulation.machine import SimulatedMachine
from placewise.plans.document import Plan, Reader
from placewise.plans.policy import Hold, Home
from placewise.plans.units import GIB
from torch import nn

from .modules import build, on_meta, save
from .readings import DEVICE, Fate, Stacked, plan_of

pytestmark = pytest.mark.usefixtures("no_grad")

LAYERS = 5
HERE = (Home.device, Hold.always)
MIXTURES: Mapping[str, tuple[Fate, ...]] = {
    "mapped": ((Home.mapped, Hold.layer),),
    "pageable": ((Home.pageable, Hold.layer),),
    "pinned": ((Home.pinned, Hold.layer),),
    "phase": ((Home.mapped, Hold.phase), (Home.pinned, Hold.phase)),
    "mixed": ((Home.mapped, Hold.layer), HERE, (Home.pinned, Hold.layer), (Home.locked, Hold.phase)),
}


@dataclass(frozen=True, slots=True)
class Point:
    """So many copies, or so many uses, from the begin of a stream."""

    stream: str
    count: int


class Deferred(SimulatedMachine):
    """A machine with a compute stream and a copy stream.

    A copy runs when somebody waits for it, so that what is read without waiting, or whose source is written too early,
    is wrong. A copy into memory whose last use the copy stream does not wait for is refused.
    """

    def __init__(self) -> None:
        super().__init__(
            simulated_device(2, capacity_bytes=GIB),
            capabilities=Capabilities(pinned_memory=True, streams=True, unified=False),
        )
        self._lock = threading.RLock()
        self._here = threading.local()
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._copied = self._uses = self._waited_for = 0
        self._last_use: dict[int, int] = {}
        self.synchronized = 0

    def allocate(self, nbytes: int) -> torch.Tensor:
        buffer = super().allocate(nbytes)
        buffer.fill_(255)  # What stays from before may be what is expected.
        self.use(buffer)  # The allocator may give what its last owner still reads.
        return buffer

    def use(self, weight: torch.Tensor) -> None:
        """Let the compute stream read memory."""
        with self._lock:
            self._uses += 1
            self._last_use[weight.untyped_storage().data_ptr()] = self._uses

    def copy_in(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        with self._lock:
            assert self._on_copy_stream(), "a copy on the compute stream"
            used = self._last_use.get(destination.untyped_storage().data_ptr(), 0)
            assert used <= self._waited_for, "a copy before the last use of its memory"
            self._copies.append((destination, source))

    @contextmanager
    def copying(self) -> Generator[None]:
        before, self._here.copying = self._on_copy_stream(), True
        yield
        self._here.copying = before

    def mark(self) -> Mark:
        with self._lock:
            return Point("copies", len(self._copies)) if self._on_copy_stream() else Point("uses", self._uses)

    def wait(self, mark: Mark) -> None:
        with self._lock:
            if isinstance(mark, Point) and self._on_copy_stream() and mark.stream == "uses":
                self._waited_for = max(self._waited_for, mark.count)
            elif not self._on_copy_stream():
                self._run(mark)

    def reach(self, mark: Mark) -> None:
        self._run(mark)

    def _run(self, mark: Mark) -> None:
        with self._lock, torch.inference_mode(mode=False), torch.no_grad():
            while isinstance(mark, Point) and mark.stream == "copies" and self._copied < mark.count:
                destination, source = self._copies[self._copied]
                destination.copy_(source)
                self._copied += 1

    def synchronize(self) -> None:
        with self._lock:
            self.synchronized += 1
            self._run(Point("copies", len(self._copies)))
            self._waited_for = self._uses

    def _on_copy_stream(self) -> bool:
        return getattr(self._here, "copying", False)


def make() -> Stacked:
    return Stacked([(torch.float32, (33, 257)), (torch.bfloat16, (5,)), (torch.float32, (3, 4099))], layers=LAYERS)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return save(build(make), tmp_path / "model.safetensors")


def plan(path: Path, mixture: str = "mixed", reader: Reader = Reader.direct, slots: int = 2) -> Plan:
    fates = MIXTURES[mixture]
    chosen = [fates[number % len(fates)] for number in range(LAYERS)]
    return plan_of(
        path, chosen, HERE, reader=reader, chunk_bytes=8192, depth=3, slots=slots, ahead=slots - 1, on_device=True
    )


def load(made: Plan, path: Path, on: Deferred) -> LoadedPipeline:
    pipeline = load_plan(made, path.parent, modules={"model": on_meta(make)}, machines={DEVICE: on})

    def use(layer: nn.Module, *_: object) -> None:
        for weight in layer.parameters():
            on.use(weight)

    for layer in pipeline["model"].get_submodule("blocks").children():
        layer.register_forward_hook(use, prepend=True)
    return pipeline


def passes(pipeline: LoadedPipeline) -> None:
    """Two passes, and one of another phase, equal the plain module's."""
    x = torch.ones(2, dtype=torch.float64)
    expected = build(make)(x)
    for number in range(3):
        if number == 2:
            pipeline.release()
        assert torch.equal(pipeline["model"](x.to(DEVICE)).cpu(), expected), "other values"


@pytest.mark.parametrize(
    ("mixture", "reader", "slots"),
    [
        *((mixture, Reader.mapping, 2) for mixture in MIXTURES),
        *((mixture, Reader.direct, 2) for mixture in ("mapped", "phase")),
        *(("mixed", reader, slots) for reader in (Reader.buffered, Reader.direct) for slots in (1, 3)),
    ],
)
def test_copies_are_waited_for_and_wait_for_uses(checkpoint: Path, mixture: str, reader: Reader, slots: int) -> None:
    passes(load(plan(checkpoint, mixture, reader, slots), checkpoint, Deferred()))


def test_a_forward_never_waits_for_the_whole_device(checkpoint: Path) -> None:
    on = Deferred()
    pipeline = load(plan(checkpoint), checkpoint, on)
    before = on.synchronized
    for _ in range(3):
        pipeline["model"](torch.ones(2, dtype=torch.float64).to(DEVICE))
    assert on.synchronized == before
    pipeline.release()
    assert on.synchronized > before


def unwaited(self: Deferred, mark: Mark) -> None:
    """The copy stream waits, the compute stream does not."""
    if self._on_copy_stream():  # pyright: ignore[reportPrivateUsage]
        WAIT(self, mark)


def unordered(self: Deferred, mark: Mark) -> None:
    """The other way about."""
    if not self._on_copy_stream():  # pyright: ignore[reportPrivateUsage]
        WAIT(self, mark)


def unreached(_: Deferred, __: Mark) -> None:
    """Buffers on the host are written while they are copied from."""


WAIT: Callable[[Deferred, Mark], None] = Deferred.wait


@pytest.mark.parametrize(
    ("method", "sabotage", "why"),
    [
        ("wait", unwaited, "other values"),
        ("wait", unordered, "before the last use"),
        ("reach", unreached, "other values"),
    ],
)
def test_an_order_that_is_not_kept_is_seen(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, method: str, sabotage: Callable[..., None], why: str
) -> None:
    pipeline = load(plan(checkpoint), checkpoint, Deferred())
    monkeypatch.setattr(Deferred, method, sabotage)
    with pytest.raises(AssertionError, match=why):
        passes(pipeline)
