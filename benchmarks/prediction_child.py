"""One pair of a model and a budget, inside its cap: measure, trace, plan; then, when told to, load and pass."""

import sys
import time
from pathlib import Path

import torch
from placewise.executor.load import load_plan
from placewise.executor.machine import Capabilities, Machine
from placewise.executor.simulation.accelerator import simulated_device
from placewise.executor.simulation.machine import SimulatedMachine
from placewise.models.pipeline import read_pipeline
from placewise.planner.compile import compile_plan
from placewise.planner.measuring.accelerators import given_accelerator
from placewise.planner.measuring.facts import measure_machine
from placewise.planner.tracing.trace import trace_pipeline
from placewise.plans.calibration import Calibration
from placewise.plans.pipeline import known_peak_bytes
from placewise.plans.record import Record
from placewise.policies.presets import load_preset

from .prediction_models import MODELS

DEVICE = "sim:0"


class Case(Record):
    """A model in a folder, and budgets as shares of its weights. Without a device share it runs on the CPU."""

    model: str
    folder: str
    calibration: str
    host_share: float
    device_share: float | None = None
    link: float | None = None


class Predicted(Record):
    """What the plan says, and in short what it decided."""

    words: str
    seconds: float | None
    peak_bytes: dict[str, int]


class Outcome(Record):
    """Seconds of a request, loading aside, and the peak of the device."""

    load_s: float
    seconds: float
    peak_bytes: dict[str, int]


def main() -> None:
    """Plan; wait for a line; run."""
    case = Case.model_validate_json(sys.argv[1])
    model, folder = MODELS[case.model], Path(case.folder)
    pipeline = read_pipeline(folder, workload=model.workload, passes={"model": model.passes})
    pipeline = trace_pipeline(pipeline, folder, model.workload)
    weight_bytes = sum(pipeline.components[0].dtype_bytes.values())
    machine = measure_machine(folder, accelerators=False).model_copy(
        update={"calibration": Calibration.model_validate_json(case.calibration)}
    )
    machines: dict[str, Machine] = {}
    if case.device_share is not None:
        activations = known_peak_bytes(pipeline.components[0].activations) or 0
        capacity = round(case.device_share * weight_bytes) + activations
        machine = machine.model_copy(update={"accelerators": (given_accelerator(DEVICE, capacity),)})
        device = simulated_device(0, capacity_bytes=capacity, link_bytes_per_s=case.link)
        machines[DEVICE] = SimulatedMachine(
            device, capabilities=Capabilities(pinned_memory=False, streams=True, unified=False)
        )
    plan = compile_plan(pipeline, machine, load_preset("auto"), model.workload, version="0")
    (placement,), (phase,) = plan.placements, plan.phases
    parts = [
        f"{sum(stop - start for start, stop in segment.layers) or 'fixed'} {segment.home}/{segment.hold}"
        for segment in placement.segments
    ]
    staging = f", {placement.staging.slots} slots, {placement.staging.reader}" if placement.staging else ""
    peaks = {axis: peak for axis, peak in phase.predicted.peak_bytes.items() if peak is not None}
    predicted = Predicted(
        words=", ".join(parts) + staging,
        seconds=phase.predicted.seconds,
        peak_bytes={axis: peak for axis, peak in peaks.items() if axis in ("host", DEVICE)},
    )
    print(predicted.model_dump_json(), flush=True)
    sys.stdin.readline()
    started = time.perf_counter()
    loaded = load_plan(plan, folder, machines=machines)
    load_s, inputs = time.perf_counter() - started, model.inputs()
    started = time.perf_counter()
    with torch.no_grad():
        for _ in range(model.passes):
            loaded["model"](**{name: value.to(loaded.device("model")) for name, value in inputs.items()})
    seconds = time.perf_counter() - started
    peak_bytes = {name: opened.memory().peak_bytes for name, opened in loaded.machines.items() if name == DEVICE}
    print(Outcome(load_s=load_s, seconds=seconds, peak_bytes=peak_bytes).model_dump_json(), flush=True)


if __name__ == "__main__":
    main()
