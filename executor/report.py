"""Predicted against observed: what loading and running a plan took, beside what the plan said."""

import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median

import torch

from ..models.headers import packed_bytes
from ..models.inputs.passes import latents_of, pass_of
from ..plans.document import Placement, Predicted, Reader, Segment
from ..plans.errors import InputError
from ..plans.pipeline import Run, Workload
from ..plans.policy import Hold, Home
from ..plans.record import Record
from .component import LoadedComponent
from .load import LoadedPipeline
from .machines import CPU
from .reads import disk_read_bytes
from .slots import Span
from .timeline import recorded

PAGE_CACHE = "page cache"


class AxisReport(Record):
    """One axis. `weights_bytes` are those of the executor's own allocations, `peak_bytes` of all tensors there.

    On the host, page-locked bytes and the buffers of reads to a device are among the former. `peak_bytes` is null where
    nothing counts them: on the CPU, whose allocator is not ours.
    """

    axis: str
    predicted_bytes: int | None
    weights_bytes: int
    peak_bytes: int | None


class SegmentReport(Record):
    """One segment of a placement: where its bytes rest, by axis, as planned and as found.

    What the module has no place for, and its buffers, are in the plan's figure alone. `replaced_bytes` are those of
    weights that updates made.
    """

    stack: str | None
    layers: tuple[Run, ...]
    home: Home
    hold: Hold
    predicted_bytes: dict[str, int]
    observed_bytes: dict[str, int]
    replaced_bytes: int


class ComponentReport(Record):
    """One component. `homes_verified` is false where the platform does not tell what backs an address.

    `predicted` is the plan's for the `planned_passes` of one request; `first_pass_s`, and the median of the later ones,
    are those of the `passes` that ran, and `load_s` is without building the module. `stall_s`, `link_bytes` and
    `read_bytes` are all since loading: what the computing thread waited for weights, what of them went to the device,
    and what was read for them.

    `reader` is how mapped units are read, and `read_bytes` tells what was read by each way. `reader_broke` says
    that fetching ahead failed once, and layers were fetched when they were needed ever since. `notes` tell what could
    not be had as planned.
    """

    component: str
    compute_device: str
    homes: tuple[str, ...]
    homes_verified: bool
    segments: tuple[SegmentReport, ...]
    buffer_bytes: int
    unused: tuple[str, ...]
    as_built: tuple[str, ...]
    page_locked_bytes: int
    replaced_bytes: int
    reader: Reader
    read_bytes: dict[str, int]
    notes: tuple[str, ...]
    reader_broke: bool
    predicted: Predicted | None
    planned_passes: int
    load_s: float
    passes: int
    first_pass_s: float | None
    later_pass_s: float | None
    stall_s: float
    link_bytes: int


class RunReport(Record):
    """A run of a plan. `disk_read_bytes` is what the whole process read from disks since loading began."""

    plan_digest: str
    load_s: float
    disk_read_bytes: int | None
    axes: tuple[AxisReport, ...]
    components: tuple[ComponentReport, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """The seconds of a component's passes, in their order, and what happened in the last one if it was recorded."""

    seconds: tuple[float, ...]
    spans: tuple[Span, ...] = ()


_NO_PASSES = Passes(seconds=())


def report_run(pipeline: LoadedPipeline, ran: Mapping[str, Passes]) -> RunReport:
    """What was observed until now. `ran` has the components that ran."""
    read = disk_read_bytes()
    known = read is not None and pipeline.read_before_bytes is not None
    return RunReport(
        plan_digest=pipeline.plan.digest,
        load_s=pipeline.load_s,
        disk_read_bytes=(read or 0) - (pipeline.read_before_bytes or 0) if known else None,
        axes=tuple(_axis(axis, pipeline) for axis in sorted(_axes(pipeline))),
        components=tuple(
            _component(placement, pipeline, ran.get(placement.component, _NO_PASSES).seconds)
            for placement in pipeline.plan.placements
        ),
    )


def _component(placement: Placement, pipeline: LoadedPipeline, seconds: tuple[float, ...]) -> ComponentReport:
    name, loaded = placement.component, pipeline.components[placement.component]
    phase = next((phase for phase in pipeline.plan.phases if phase.component == name), None)
    fetcher = loaded.resident.fetcher
    return ComponentReport(
        component=name,
        compute_device=str(loaded.resident.machine.device),
        homes=tuple(sorted({f"{unit.home}/{unit.hold}" for unit in loaded.units})),
        homes_verified=loaded.homes_verified,
        segments=tuple(
            _segment(number, segment, placement.compute_device, loaded)
            for number, segment in enumerate(placement.segments)
        ),
        buffer_bytes=loaded.buffer_bytes,
        unused=loaded.unused,
        as_built=loaded.as_built,
        page_locked_bytes=loaded.page_locked_bytes,
        replaced_bytes=loaded.replaced_bytes,
        reader=fetcher.reader,
        read_bytes=fetcher.read_bytes,
        notes=(*loaded.notes, *fetcher.notes),
        reader_broke=loaded.resident.reader_broke,
        predicted=phase.predicted if phase else None,
        planned_passes=phase.passes if phase else 1,
        load_s=loaded.load_s,
        passes=len(seconds),
        first_pass_s=seconds[0] if seconds else None,
        later_pass_s=median(seconds[1:]) if seconds[1:] else None,
        stall_s=loaded.resident.stall_s,
        link_bytes=fetcher.link_bytes,
    )


def _segment(number: int, segment: Segment, device: str, loaded: LoadedComponent) -> SegmentReport:
    observed: Counter[str] = Counter()
    units = [unit for unit in loaded.units if unit.segment == number]
    for unit in units:
        axis = _axis_of(unit.home, device)
        observed[axis] += unit.layout.nbytes
        if axis == PAGE_CACHE:
            # Whatever their home was: pages that are locked stay locked, and memory stays allocated.
            observed[axis] -= sum(packed_bytes(unit.source[name].nbytes) for name in unit.replaced)
        for name in unit.replaced:
            weight = unit.source[name]
            observed["host" if weight.device.type == CPU else device] += weight.nbytes
    return SegmentReport(
        stack=segment.stack,
        layers=segment.layers,
        home=segment.home,
        hold=segment.hold,
        predicted_bytes={_axis_of(segment.home, device): segment.packed_bytes},
        observed_bytes=dict(sorted(observed.items())),
        replaced_bytes=sum(unit.replaced_bytes for unit in units),
    )


def _axis_of(home: Home, device: str) -> str:
    """The axis on which weights of a home rest."""
    if home is Home.mapped:
        return PAGE_CACHE
    return device if home is Home.device and device != CPU else "host"


def _axes(pipeline: LoadedPipeline) -> dict[str, str]:
    """The device of each axis that the plan budgets; the host's is the CPU."""
    devices = {budget.axis: budget.axis for budget in pipeline.plan.budgets if budget.axis in pipeline.machines}
    return {"host": CPU, **devices}


def _axis(axis: str, pipeline: LoadedPipeline) -> AxisReport:
    machine = pipeline.machines[_axes(pipeline)[axis]]
    predicted = [phase.predicted.peak_bytes.get(axis) for phase in pipeline.plan.phases]
    known = [peak for peak in predicted if peak is not None]
    figures = machine.memory()
    residents = [loaded.resident for loaded in pipeline.components.values() if loaded.resident.machine is machine]
    phase_bytes = max((resident.peak_weight_bytes - resident.always_bytes for resident in residents), default=0)
    weights = sum(resident.always_bytes for resident in residents) + phase_bytes
    locked = sum(loaded.page_locked_bytes for loaded in pipeline.components.values())
    staging = max((loaded.resident.fetcher.staging_bytes for loaded in pipeline.components.values()), default=0)
    return AxisReport(
        axis=axis,
        predicted_bytes=max(known, default=None),
        weights_bytes=figures.peak_bytes + locked + staging if axis == "host" else weights,
        peak_bytes=None if axis == "host" else figures.peak_bytes,
    )


_SMALL = {"tokens": 16, "height": 64, "width": 64, "frames": 9}
"""What a sample pass takes where the workload states no shape: enough to see that it runs, on any machine."""


def run_samples(pipeline: LoadedPipeline, passes: int = 1, *, record: bool = False) -> dict[str, Passes]:
    """Run each component whose inputs are known, at the plan's workload, and time its forwards.

    Args:
        pipeline: loaded.
        passes: how many forwards.
        record: whether to log what happens in the last one.
    """
    plan = pipeline.plan
    workload = Workload.model_validate(_SMALL | plan.workload.model_dump(exclude_none=True))
    latents = latents_of((each, pipeline.root / each.checkpoint.root) for each in plan.pipeline.components)
    ran: dict[str, Passes] = {}
    for name, loaded in pipeline.components.items():
        try:
            with pipeline.device(name):
                sample = pass_of(loaded.module, workload, latents)
        except InputError:
            continue
        seconds, spans = list[float](), list[Span]()
        for number in range(passes):
            with torch.no_grad(), ExitStack() as stack:
                if record and number == passes - 1:
                    spans = stack.enter_context(recorded(loaded))
                started = time.perf_counter()
                sample.call(**sample.arguments)
                loaded.resident.machine.synchronize()
                seconds.append(time.perf_counter() - started)
        ran[name] = Passes(seconds=tuple(seconds), spans=tuple(spans))
    return ran
