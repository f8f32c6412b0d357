"""One case of the soundness benchmark, inside its cap: measure, plan, load, run, and say how far it came.

A line of JSON goes out before each step that may be the last one, so that a kill tells which step it was.
"""

# Torch's own types are partial here.
# pyright: reportUnknownMemberType=false

import gc
import sys
import tempfile
from pathlib import Path

import torch
from placewise.executor.load import LoadedPipeline, load_plan
from placewise.executor.machine import Machine as Opened
from placewise.executor.simulation.accelerator import inner, simulated_device
from placewise.executor.simulation.machine import SimulatedMachine
from placewise.models.pipeline import read_pipeline
from placewise.planner.compile import compile_plan
from placewise.planner.measuring.accelerators import given_accelerator, given_host, with_given
from placewise.planner.measuring.facts import measure_machine
from placewise.plans.document import Plan, Refused
from placewise.plans.errors import DeviceMemoryError
from placewise.plans.machine import Machine, Measured
from placewise.plans.pipeline import Workload
from placewise.plans.record import Record
from placewise.plans.units import MIB
from placewise.policies.presets import load_preset
from placewise.tests.modules import on_meta
from placewise.tests.questions import with_memory
from pydantic import Field

from .soundness_cases import Case, Part, Prepared, digest_of, inputs_of, prepare

DEVICE = "sim:0"

CAREFUL = "activations-are-known"
"""The rule of those who admit only what certainly fits."""

WARM = Case(
    parts=(Part(name="model", width=512, layers=2, words=100, half=False),),
    rows=64,
    passes=1,
    preset="auto",
    host_percent=0,
    device_percent=None,
    streams=False,
    activations_known=False,
    exact_heap=False,
)
"""Run first, on the CPU and on a device, so that no import and no kernel's first call comes after the measurement."""


class Short(Record):
    """A refused axis: what the least placement needs, what it may use, and all that there is, the reserve included."""

    axis: str
    need_bytes: int
    have_bytes: int
    available_bytes: int


class Report(Record):
    """How far the child came. `stage` is the last step begun: measured, admitted, forced; or how it ended.

    `broken` are the rules that refused the case; it is then planned without them, and that plan is run.

    Ends are `ran`, and `overflowed` with the error that the device raised. Peaks are of hard bytes, by axis, as the
    machines counted them, without activations on a CPU, which no counter sees. `reserve_bytes` is kept free where the
    components compute.
    """

    stage: str
    free_bytes: int
    broken: tuple[str, ...] = ()
    forced: bool = False
    reserve_bytes: int = 0
    homes: tuple[str, ...] = ()
    short: tuple[Short, ...] = ()
    peak_bytes: dict[str, int] = Field(default_factory=dict)
    predicted_bytes: dict[str, int] = Field(default_factory=dict)
    same: bool | None = None
    error: str | None = None

    def say(self, **changes: object) -> "Report":
        """Append the report with changes to the file that the command line names."""
        report = self.model_copy(update=changes)
        with Path(sys.argv[2]).open("a") as file:
            file.write(report.model_dump_json() + "\n")
        return report


def main() -> None:
    """Run the case in the file that the command line names first."""
    torch.set_num_threads(1)
    prepared = Prepared.model_validate_json(Path(sys.argv[1]).read_text())
    _warm_up()
    machine, free_bytes = _measure(prepared)
    report = Report(stage="measured", free_bytes=free_bytes).say()
    plan = _plan(prepared, machine, CAREFUL)
    if isinstance(plan.verdict, Refused) and plan.verdict.broken:
        report = report.model_copy(update={"broken": tuple(sorted({each.rule for each in plan.verdict.broken}))})
        plan = _plan(prepared, machine)
    computes = "host" if prepared.capacity_bytes is None else DEVICE
    reserve = next(budget.reserve_bytes for budget in plan.budgets if budget.axis == computes)
    report = report.model_copy(update={"reserve_bytes": reserve})
    if not isinstance(plan.verdict, Refused):
        report = report.say(stage="admitted", homes=_homes(plan))
        _run(prepared, plan, machine, report)
        return
    available = {budget.axis: budget.available_bytes or 0 for budget in plan.budgets}
    short = tuple(
        Short(
            axis=cause.axis,
            need_bytes=cause.need_bytes,
            have_bytes=cause.have_bytes,
            available_bytes=available[cause.axis],
        )
        for cause in plan.verdict.short
    )
    changes = [(change.axis, change.to_available_bytes) for change in plan.verdict.nearest]
    forced = _plan(prepared, with_memory(machine, changes))
    report = report.say(stage="forced", forced=True, short=short, homes=_homes(forced))
    _run(prepared, forced, machine, report)


def _measure(prepared: Prepared) -> tuple[Machine, int]:
    """The machine to plan on, and what it has free. What the device may take is not the host's to spend."""
    machine = measure_machine(Path(prepared.root), accelerators=False)
    if not isinstance(machine.host.available, Measured):
        raise SystemExit(f"the host is {machine.host.available}")
    free_bytes = max(0, machine.host.available.value - prepared.hidden_bytes)
    machine = with_memory(machine, [("host", free_bytes)])
    capacity = prepared.capacity_bytes
    if capacity is None:
        return machine, free_bytes
    device = given_accelerator(DEVICE, capacity).model_copy(update={"streams": prepared.case.streams})
    return with_given(machine, host=given_host(max(0, free_bytes - capacity)), accelerators=(device,)), free_bytes


def _plan(prepared: Prepared, machine: Machine, *rules: str) -> Plan:
    names = [part.name for part in prepared.case.parts]
    pipeline = read_pipeline(
        Path(prepared.root),
        workload=Workload(),
        passes=dict.fromkeys(names, prepared.case.passes),
        activation_bytes=prepared.activation_bytes if prepared.case.activations_known else {},
    )
    policy = load_preset(prepared.case.preset)
    policy = policy.model_copy(update={"rules": (*policy.rules, *rules)})
    return compile_plan(pipeline, machine, policy, Workload(), version="0")


def _homes(plan: Plan) -> tuple[str, ...]:
    segments = (segment for placement in plan.placements for segment in placement.segments)
    return tuple(sorted({f"{segment.home}/{segment.hold}" for segment in segments}))


def _run(prepared: Prepared, plan: Plan, machine: Machine, report: Report) -> None:
    """Load and run on the device's true capacity, whatever the plan was told."""
    opened: dict[str, Opened] = {}
    if prepared.capacity_bytes is not None:
        opened[DEVICE] = SimulatedMachine(simulated_device(0, capacity_bytes=prepared.capacity_bytes))
    try:
        pipeline, same = _load_and_pass(prepared, plan, opened)
    except DeviceMemoryError as error:
        report.say(stage="overflowed", error=error.message)
        return
    names = {"host" if device == "cpu" else device: device for device in pipeline.machines}
    predicted = {axis: max(phase.predicted.peak_bytes.get(axis) or 0 for phase in plan.phases) for axis in names}
    peaks = {axis: pipeline.machines[device].memory().peak_bytes for axis, device in names.items()}
    report.say(stage="ran", same=same, peak_bytes=peaks, predicted_bytes=predicted)


def _load_and_pass(prepared: Prepared, plan: Plan, opened: dict[str, Opened]) -> tuple[LoadedPipeline, bool]:
    """Two passes of every component, one component after the other; whether each bit is as expected."""
    parts = prepared.case.parts
    modules = {part.name: on_meta(part.make) for part in parts}
    pipeline = load_plan(plan, Path(prepared.root), modules=modules, machines=opened)
    same = True
    with torch.no_grad():
        for part in (*parts, *parts):
            output = pipeline[part.name](inputs_of(part, prepared.case.rows).to(pipeline.device(part.name)))
            # A simulated output is read where it is: its copy would be the host's, and no plan knows of it.
            seen = output if output.device.type == "cpu" else inner(output)
            same = same and digest_of(seen) == prepared.digests[part.name]
            del output, seen
    return pipeline, same


def _warm_up() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for capacity in (None, 64 * MIB):
            prepared = prepare(WARM, Path(folder), 0).model_copy(update={"capacity_bytes": capacity})
            machine, _ = _measure(prepared)
            plan = _plan(prepared, with_memory(machine, [("host", 64 * MIB)]))
            opened: dict[str, Opened] = {}
            if capacity is not None:
                opened[DEVICE] = SimulatedMachine(simulated_device(0, capacity_bytes=capacity))
            pipeline, _ = _load_and_pass(prepared, plan, opened)
            pipeline.release()
            del pipeline, opened
            gc.collect()


if __name__ == "__main__":
    main()
