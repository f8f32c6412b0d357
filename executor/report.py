"""Predicted against observed: what loading and running a plan took, beside what the plan said."""

import time
from typing import cast

import torch
from torch import nn

from ..plans.document import Reader
from ..plans.record import Record
from .load import LoadedPipeline
from .machines import CPU


class AxisReport(Record):
    """One axis. `weights_bytes` are those of the executor's own allocations, `peak_bytes` of all tensors there.

    On the host, page-locked bytes and the buffers of reads to a device are among the former. `peak_bytes` is null where
    nothing counts them: on the CPU, whose allocator is not ours.
    """

    axis: str
    predicted_bytes: int | None
    weights_bytes: int
    peak_bytes: int | None


class ComponentReport(Record):
    """One component. `homes_verified` is false where the platform does not tell what backs an address.

    `reader` is how mapped units are read, and `read_bytes` what was read by each way since loading. `reader_broke` says
    that fetching ahead failed once, and layers were fetched when they were needed ever since. `notes` tell what could
    not be had as planned.
    """

    component: str
    compute_device: str
    homes: tuple[str, ...]
    homes_verified: bool
    buffer_bytes: int
    unused: tuple[str, ...]
    as_built: tuple[str, ...]
    page_locked_bytes: int
    reader: Reader
    read_bytes: dict[str, int]
    notes: tuple[str, ...]
    reader_broke: bool
    forward_s: float | None


class RunReport(Record):
    """A run of a plan."""

    plan_digest: str
    load_s: float
    axes: tuple[AxisReport, ...]
    components: tuple[ComponentReport, ...]


def report_run(pipeline: LoadedPipeline, forward_s: dict[str, float]) -> RunReport:
    """What was observed until now. `forward_s` has the seconds of components that ran."""
    return RunReport(
        plan_digest=pipeline.plan.digest,
        load_s=pipeline.load_s,
        axes=tuple(_axis(axis, pipeline) for axis in sorted(_axes(pipeline))),
        components=tuple(
            ComponentReport(
                component=name,
                compute_device=str(loaded.resident.machine.device),
                homes=tuple(sorted({f"{unit.home}/{unit.hold}" for unit in loaded.units})),
                homes_verified=loaded.homes_verified,
                buffer_bytes=loaded.buffer_bytes,
                unused=loaded.unused,
                as_built=loaded.as_built,
                page_locked_bytes=loaded.page_locked_bytes,
                reader=loaded.resident.fetcher.reader,
                read_bytes=loaded.resident.fetcher.read_bytes,
                notes=(*loaded.notes, *loaded.resident.fetcher.notes),
                reader_broke=loaded.resident.reader_broke,
                forward_s=forward_s.get(name),
            )
            for name, loaded in pipeline.components.items()
        ),
    )


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


def run_samples(pipeline: LoadedPipeline) -> dict[str, float]:
    """Run one forward of each component that offers sample inputs, as transformers' models do; seconds by component."""
    seconds: dict[str, float] = {}
    for name, loaded in pipeline.components.items():
        sample = sample_inputs(loaded.module)
        if sample is not None:
            device = pipeline.device(name)
            inputs = {key: value.to(device) for key, value in sample.items()}
            started = time.perf_counter()
            with torch.no_grad():
                loaded.module(**inputs)
            loaded.resident.machine.synchronize()
            seconds[name] = time.perf_counter() - started
    return seconds


def sample_inputs(module: nn.Module) -> dict[str, torch.Tensor] | None:
    """The class's own sample inputs, or null where it has none."""
    inputs: object = getattr(module, "dummy_inputs", None)
    if not isinstance(inputs, dict):
        return None
    named = cast("dict[object, object]", inputs)
    return {str(key): value for key, value in named.items() if isinstance(value, torch.Tensor)} or None
