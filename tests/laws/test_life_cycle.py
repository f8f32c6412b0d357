"""Law I17: any sequence of use, skip, failure and release keeps values right and the device within the plan.

`PLACEWISE_LIFE_CYCLES=1000` tries so many sequences instead of a few.
"""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from placewise.executor import slots
from placewise.executor.guards import ReleasedWeight
from placewise.executor.load import load_plan
from placewise.executor.machine import Capabilities, Machine
from placewise.executor.machine_cpu import CpuMachine
from placewise.executor.simulation.accelerator import simulated_device
from placewise.executor.simulation.device import DEVICES
from placewise.executor.simulation.machine import SimulatedMachine
from placewise.plans.document import Plan, Reader
from placewise.plans.errors import DeviceMemoryError
from placewise.plans.policy import Hold, Home
from placewise.plans.units import GIB, KIB
from torch import nn

from ..modules import build, on_meta, save
from ..readings import DEVICE, Fate, plan_of
from .test_reader_laws import ON_CPU, ON_DEVICE

NAMES = ("one", "two")
LAYERS, WIDTH = 4, 64
ACTIVATION_BYTES = 8 * KIB
"""More than a forward's activations, and less than half a layer."""

READER = "placewise-reader"
ALL = Capabilities(pinned_memory=True, streams=True, unified=False)

Use = tuple[int, ...]
"""A layer, or layers that are used within one another, the outermost first."""

FAULTS: tuple[str, ...] = ("read", "copy", "allocation", "thread", "ahead")

names = st.sampled_from(NAMES)
layers = st.integers(0, LAYERS - 1)
uses = st.lists(st.one_of(st.tuples(layers), st.tuples(layers, layers)), min_size=1, max_size=6)


class Layer(nn.Module):
    """Reads its weights before and after what is used within it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: torch.Tensor, within: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        y = within(torch.tanh(self.linear(x)))
        result: torch.Tensor = y * self.scale + self.linear.bias
        return result


class Walk(nn.Module):
    """Layers in the order that `uses` says. Before the use `fails`, an error is raised."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(WIDTH))
        self.blocks = nn.ModuleList([Layer() for _ in range(LAYERS)])
        self.uses: Sequence[Use] = ()
        self.fails: tuple[int, type[BaseException]] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.first
        for number, use in enumerate(self.uses):
            x = self.use(x, use, fails=self.fails[1] if self.fails and self.fails[0] == number else None)
        return x

    def use(self, x: torch.Tensor, use: Use, fails: type[BaseException] | None = None) -> torch.Tensor:
        def within(y: torch.Tensor) -> torch.Tensor:
            if len(use) > 1:
                return self.use(y, use[1:], fails)
            if fails:
                raise fails("raised within")
            return y

        result: torch.Tensor = self.blocks[use[0]](x, within)
        return result


class Faults:
    """What fails: so many times from now on. `raised` tells whether something did."""

    def __init__(self) -> None:
        self.left = dict.fromkeys(FAULTS, 0)
        self.raised = False

    def injected(self) -> ExitStack:
        """Reads, copies, allocations, and the thread that reads ahead, at its begin or later, fail as said."""
        stack = ExitStack()
        stack.enter_context(self._before(os, "preadv", "read", lambda: OSError(5, "injected")))
        for machine in (CpuMachine, SimulatedMachine):
            stack.enter_context(self._before(machine, "copy_in", "copy", lambda: OSError("injected")))
            stack.enter_context(self._before(machine, "allocate", "allocation", lambda: DeviceMemoryError("injected")))
        # A reader's end is never seen.
        stack.enter_context(
            self._before(
                ThreadPoolExecutor,
                "submit",
                "thread",
                lambda: RuntimeError("no thread"),
                when=reads_ahead,
            )
        )
        stack.enter_context(
            self._before(
                slots,
                "fetch",
                "ahead",
                lambda: SystemExit("the thread ends"),
                when=in_reader,
            )
        )
        return stack

    def _before(
        self,
        owner: object,
        name: str,
        what: str,
        error: Callable[[], BaseException],
        when: Callable[..., bool] | None = None,
    ) -> AbstractContextManager[object]:
        whole = getattr(owner, name)

        def failing(*arguments: Any) -> Any:
            if self.left[what] > 0 and (when is None or when(*arguments)):
                self.left[what] -= 1
                self.raised = True
                raise error()
            return whole(*arguments)

        return patch.object(owner, name, failing)


def reads_ahead(pool: ThreadPoolExecutor, *_: object) -> bool:
    return bool(vars(pool)["_thread_name_prefix"] == READER)


def in_reader(*_: object) -> bool:
    return threading.current_thread().name.startswith(f"{READER}_")


def by_forward(module: Walk, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = module(x)
    return result


def plan_of_two(folder: Path, fates: Mapping[str, Sequence[Fate]], fixed: Fate, **staging: Any) -> Plan:
    """One plan for both components; each has its file in a folder of its own."""
    plans = {name: plan_of(folder / name / "model.safetensors", fates[name], fixed, **staging) for name in NAMES}
    components = [plan.pipeline.components[0] for plan in plans.values()]
    renamed = [
        each.model_copy(update={"name": name, "checkpoint": each.checkpoint.model_copy(update={"root": name})})
        for name, each in zip(NAMES, components, strict=True)
    ]
    first = plans[NAMES[0]]
    return first.model_copy(
        update={
            "pipeline": first.pipeline.model_copy(update={"components": tuple(renamed)}),
            "placements": tuple(
                plan.placements[0].model_copy(update={"component": name}) for name, plan in plans.items()
            ),
        }
    )


class LifeCycle(RuleBasedStateMachine):
    """Two components take turns on one device; each step is compared with the plain modules."""

    def __init__(self) -> None:
        super().__init__()
        self.resources = ExitStack()

    @initialize(data=st.data(), on_device=st.booleans(), reader=st.sampled_from(Reader), slot_count=st.integers(1, 3))
    def load(self, data: st.DataObject, reader: Reader, slot_count: int, *, on_device: bool) -> None:
        folder = Path(self.resources.enter_context(TemporaryDirectory()))
        self.plain = {name: walk(seed) for seed, name in enumerate(NAMES)}
        for name, module in self.plain.items():
            save(module, folder / name / "model.safetensors")
        known = ON_DEVICE if on_device else ON_CPU
        self.fates = {
            name: data.draw(st.lists(st.sampled_from(known), min_size=LAYERS, max_size=LAYERS)) for name in NAMES
        }
        self.fixed = data.draw(st.sampled_from([fate for fate in known if fate[1] is not Hold.layer]))
        self.slots = slot_count
        plan = plan_of_two(
            folder,
            self.fates,
            self.fixed,
            reader=reader,
            chunk_bytes=4096,
            slots=slot_count,
            ahead=data.draw(st.integers(0, slot_count - 1)),
            on_device=on_device,
        )
        machines = {DEVICE: an_empty_device()} if on_device else {}
        self.pipeline = load_plan(plan, folder, modules={name: on_meta(Walk) for name in NAMES}, machines=machines)
        self.device = self.pipeline.device(NAMES[0])
        self.frozen = data.draw(st.booleans())
        for name in NAMES:
            self.plain[name].requires_grad_(requires_grad=not self.frozen)
            self.pipeline[name].requires_grad_(requires_grad=not self.frozen)
        self.phase: str | None = None
        self.interrupted = False
        self.faults = Faults()
        self.resources.enter_context(self.faults.injected())
        self.resources.enter_context(patch("placewise.executor.transport.in_page_cache", return_value=False))
        for machine in self.pipeline.machines.values():
            machine.reset_peak()

    def teardown(self) -> None:
        self.resources.close()
        if hasattr(self, "pipeline"):
            self.pipeline.release()
            del self.pipeline  # Hypothesis keeps the machine.

    @rule(
        name=names,
        uses=uses,
        rows=st.integers(1, 3),
        mode=st.sampled_from(("no_grad", "no_grad", "inference", "grad")),
        alone=st.booleans(),
        fault=st.sampled_from((None, *FAULTS)),
        times=st.sampled_from((1, 2, 10**9)),
    )
    def forward(
        self, name: str, uses: list[Use], rows: int, mode: str, fault: str | None, times: int, *, alone: bool
    ) -> None:
        """By the component's forward, or by its layers in its phase; in which something may fail, once or for ever."""
        if fault:
            self.faults.left[fault] = times
        with torch.inference_mode(mode == "inference"), torch.set_grad_enabled(mode == "grad"):
            why = self.refused(name, uses, grad=mode == "grad")
            self.run(name, uses, self.by_layers if alone else by_forward, rows=rows, why=why)
        self.faults.left = dict.fromkeys(FAULTS, 0)

    @rule(name=names, uses=uses, at=st.integers(0, 5), kind=st.sampled_from((RuntimeError, KeyboardInterrupt)))
    def forward_that_raises(self, name: str, uses: list[Use], at: int, kind: type[BaseException]) -> None:
        fails = min(at, len(uses) - 1), kind
        with torch.no_grad():
            why = self.refused(name, uses[: fails[0] + 1], grad=False) or "raised within"
            self.run(name, uses, by_forward, fails=fails, why=why)

    @precondition(lambda self: self.phase is None)
    @rule(name=names, layer=layers)
    def layer_outside_of_the_phase(self, name: str, layer: int) -> None:
        """Its first use begins the phase."""
        with torch.no_grad():
            self.run(name, (), lambda module, x: module.use(x, (layer,)))

    @rule(name=names, uses=uses)
    def gradients_of_the_input(self, name: str, uses: list[Use]) -> None:
        """A backward through weights that have gone since is refused by torch, or right."""
        if self.device.type != "cpu" or not self.frozen or self.refused(name, uses, grad=True):
            return  # Autograd has no queue for devices that were made after it began.
        plain, x = self.plain[name], torch.ones(1, WIDTH, requires_grad=True)
        plain.uses = uses
        plain(x).sum().backward()
        module, given = self.module(name, uses), torch.ones(1, WIDTH).to(self.device).requires_grad_()
        try:
            module(given).sum().backward()
        except Exception as error:
            if "modified by an inplace operation" not in str(error):
                raise
            event("backward refused")
        else:
            assert x.grad is not None
            assert given.grad is not None
            assert torch.equal(given.grad.cpu(), x.grad)
            event("backward")
        self.phase, self.interrupted = name, False

    @rule(name=names)
    def input_on_another_device(self, name: str) -> None:
        if self.device.type != "cpu":
            with torch.no_grad():
                self.run(name, [(0,)], lambda module, x: module(x.cpu()), why="on one device")

    @rule()
    def release(self) -> None:
        self.pipeline.release()
        self.phase, self.interrupted = None, False

    @invariant()
    def nothing_goes_beyond_the_plan(self) -> None:
        most = {str(device): self.most(machine) for device, machine in self.pipeline.machines.items()}
        found = {device: machine.memory().peak_bytes for device, machine in self.pipeline.machines.items()}
        assert all(found[device] <= most[device] for device in most), (found, most)
        if self.phase is None:
            for machine in self.pipeline.machines.values():
                # An error's traceback may keep a failed forward's activations; it must not keep weights.
                stays = machine.memory().allocated_bytes - self.resting(machine)
                assert 0 <= stays < ACTIVATION_BYTES

    @invariant()
    def what_is_not_in_use_is_released(self) -> None:
        for name in NAMES:
            for number, (_, hold) in enumerate(self.fates[name]):
                if (hold is Hold.layer and not self.interrupted) or (hold is Hold.phase and name != self.phase):
                    weights = self.pipeline[name].get_submodule(f"blocks.{number}").parameters()
                    assert all(isinstance(weight, ReleasedWeight) for weight in weights)

    def by_layers(self, module: Walk, x: torch.Tensor) -> torch.Tensor:
        for name in NAMES:
            if module is self.pipeline[name]:
                self.pipeline.enter(name)
        for use in module.uses:
            x = module.use(x, use)
        return x

    def module(self, name: str, uses: Sequence[Use], fails: tuple[int, type[BaseException]] | None = None) -> Walk:
        module = self.pipeline[name]
        assert isinstance(module, Walk)
        module.uses, module.fails = uses, fails
        return module

    def run(
        self,
        name: str,
        uses: Sequence[Use],
        call: Callable[[Walk, torch.Tensor], torch.Tensor],
        *,
        rows: int = 1,
        fails: tuple[int, type[BaseException]] | None = None,
        why: str | None = None,
    ) -> None:
        """One step: the plain module's output, or the error that says why; with faults, theirs too."""
        plain, module = self.plain[name], self.module(name, uses, fails)
        x = torch.linspace(-1, 1, rows * WIDTH).reshape(rows, WIDTH)
        self.interrupted, self.faults.raised, message = False, False, None
        try:
            found = call(module, x.to(self.device)).detach().cpu()
        except (Exception, KeyboardInterrupt) as error:
            message, self.interrupted = str(error), isinstance(error, KeyboardInterrupt)
        else:
            assert why is None, f"no error says {why}"
            plain.uses = uses
            assert torch.equal(found, call(plain, x).detach())
        if message is not None:
            assert (self.faults.raised and "injected" in message) or (why is not None and why in message), (
                why,
                message,
            )
        event(message.splitlines()[0][-30:] if message else "output")
        holds = (hold for _, hold in (*self.fates[name], self.fixed))
        if why != "requires a gradient" or Hold.phase not in holds:
            self.phase = name  # else it was refused before its phase began

    def refused(self, name: str, uses: Sequence[Use], *, grad: bool) -> str | None:
        """Why the executor refuses: gradients would be lost, or too few slots."""
        training = grad and not self.frozen
        if training and any(hold is Hold.phase for _, hold in (*self.fates[name], self.fixed)):
            return "requires a gradient"
        for use in uses:
            streamed = {number for number in use if self.fates[name][number][1] is Hold.layer}
            if training and streamed:
                return "requires a gradient"
            if len(streamed) > self.slots:
                return "slots free"
        return None

    def resting(self, machine: Machine) -> int:
        """What stays on a machine outside of any phase."""
        at_home = Home.device if machine.device == self.device else None
        host = machine.device.type == "cpu"
        return sum(
            unit.layout.nbytes
            for loaded in self.pipeline.components.values()
            for unit in loaded.units
            if unit.home is at_home or (host and unit.home is Home.pageable)
        )

    def most(self, machine: Machine) -> int:
        """What the plan allows on a machine: one component's phase beside what rests there, and activations."""
        if machine.device != self.device:
            return self.resting(machine)
        phases = [
            sum(
                unit.layout.nbytes
                for unit in self.pipeline.components[placement.component].units
                if unit.hold is Hold.phase
            )
            + (placement.staging.slots * placement.staging.slot_bytes if placement.staging else 0)
            for placement in self.pipeline.plan.placements
        ]
        return self.resting(machine) + max(phases) + (0 if machine.device.type == "cpu" else ACTIVATION_BYTES)


def an_empty_device() -> SimulatedMachine:
    """What a failed run holds is in the traceback that is shown, so the next one has a device of its own."""
    index = next(index for index in range(10, 100) if index not in DEVICES or not DEVICES[index].allocated_bytes)
    return SimulatedMachine(simulated_device(index, capacity_bytes=GIB), capabilities=ALL)


def walk(seed: int) -> Walk:
    module = build(Walk, seed)
    assert isinstance(module, Walk)
    return module


TestLifeCycle = LifeCycle.TestCase
TestLifeCycle.settings = settings(
    max_examples=int(os.environ.get("PLACEWISE_LIFE_CYCLES", "40")), stateful_step_count=15, deadline=None
)
