"""One pair of a model and a budget, inside its cap: measure, trace, plan; then, when told to, load and pass."""

import ctypes
import sys
import time
from pathlib import Path
from threading import Event, Thread
from typing import Self

import psutil
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
from placewise.plans.machine import Measured
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
    """Seconds of a request, loading aside, and peaks: the device's own, and the host's anonymous bytes beyond it."""

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
        # The simulated device's memory is the host's: what it may take is not there for anything else.
        available = machine.host.available
        assert isinstance(available, Measured)
        left = available.model_copy(update={"value": available.value - capacity})
        machine = machine.model_copy(
            update={
                "host": machine.host.model_copy(update={"available": left}),
                "accelerators": (given_accelerator(DEVICE, capacity),),
            }
        )
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
    _compute_once()
    print(predicted.model_dump_json(), flush=True)
    sys.stdin.readline()
    with HostPeak(machines.get(DEVICE)) as host:
        started = time.perf_counter()
        loaded = load_plan(plan, folder, machines=machines)
        load_s, inputs = time.perf_counter() - started, model.inputs()
        started = time.perf_counter()
        with torch.no_grad():
            for _ in range(model.passes):
                loaded["model"](**{name: value.to(loaded.device("model")) for name, value in inputs.items()})
        seconds = time.perf_counter() - started
    peak_bytes = {name: opened.memory().peak_bytes for name, opened in machines.items()} | {"host": host.bytes}
    print(Outcome(load_s=load_s, seconds=seconds, peak_bytes=peak_bytes).model_dump_json(), flush=True)


_SAMPLE_S = 0.005
_SAMPLING_PART = 0.02
"""The most of the time: to ask glibc what a heap keeps free stops all who allocate, in a large one for milliseconds."""


class HostPeak:
    """The most anonymous bytes of this process above those at the beginning.

    Beside a simulated device without what that holds, and without what glibc's heap keeps free: its tensors were there,
    as a real device's never are.
    """

    def __init__(self, device: Machine | None) -> None:
        self._device = device
        self._before = self._now()
        self._over = Event()
        self._thread = Thread(target=self._watch)
        self.bytes = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        pause_s = _SAMPLE_S
        while not self._over.wait(pause_s):
            begun = time.perf_counter()
            self.bytes = max(self.bytes, self._now() - self._before)
            pause_s = max(_SAMPLE_S, (time.perf_counter() - begun) / _SAMPLING_PART)

    def _now(self) -> int:
        memory = psutil.Process().memory_info()
        anonymous = memory.rss - memory.shared
        return anonymous if self._device is None else anonymous - self._device.memory().allocated_bytes - _free_bytes()


class _Mallinfo(ctypes.Structure):
    """What glibc's `mallinfo2` gives; `fordblks` are the bytes of free blocks in all heaps."""

    _fields_ = (("others", ctypes.c_size_t * 8), ("fordblks", ctypes.c_size_t), ("keepcost", ctypes.c_size_t))


def _free_bytes() -> int:
    mallinfo = ctypes.CDLL(None).mallinfo2
    mallinfo.restype = _Mallinfo
    return int(mallinfo().fordblks)


def _compute_once() -> None:
    """What the kernels' libraries take for good at their first use is the process's own, whatever it loads."""
    for dtype in (torch.float32, torch.bfloat16):
        square = torch.ones(1024, 1024, dtype=dtype)
        torch.nn.functional.linear(square, square)


if __name__ == "__main__":
    main()
