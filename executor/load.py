"""From a plan to running modules."""

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..models.build import build_module, build_pipeline
from ..models.checkpoint import CheckpointFacts, read_files
from ..models.transforms import transformed
from ..plans.document import Placement, Plan, Refused
from ..plans.errors import DriftError, InputError, RefusedError
from ..plans.pipeline import Component
from ..plans.policy import Hold
from .component import LoadedComponent, load_component
from .dtypes import torch_layout
from .heap import fix_heap, leaves_little
from .machine import Machine
from .machines import CPU, open_machines
from .reads import disk_read_bytes
from .resident import Stage
from .units import Progress, ignore
from .updates import Allowance, Value


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedPipeline:
    """Running components by name, their machines by device, and how long loading took.

    `pipeline["vae"]` is the bound module. `read_before_bytes` is what the process had read from disks before loading;
    null where the system does not count it.
    """

    plan: Plan
    root: Path
    components: Mapping[str, LoadedComponent]
    machines: Mapping[str, Machine]
    load_s: float
    read_before_bytes: int | None
    _stage: Stage = field(repr=False)

    def __getitem__(self, component: str) -> nn.Module:
        return self.components[component].module

    def library(self) -> Any:
        """What the model's library gives: a new pipeline over the bound modules, or the model itself.

        Raises:
            ExecutionError: as `models.build.build_pipeline`.
        """
        if not (self.root / "model_index.json").is_file():
            (component,) = self.components
            return self[component]
        modules = {name: self[name] for name in self.components}
        return build_pipeline(self.root, modules, {name: self.device(name) for name in self.components})

    def device(self, component: str) -> torch.device:
        """Where a component computes, whatever its weights' homes: inputs, masks and tables are made there."""
        return self.components[component].resident.machine.device

    def autocast(self, component: str, dtype: torch.dtype) -> AbstractContextManager[object]:
        """Mixed precision for a component's passes, where its device has it; elsewhere the context changes nothing."""
        machine = self.components[component].resident.machine
        return torch.autocast(machine.device.type, dtype=dtype) if machine.capabilities.autocast else nullcontext()

    def enter(self, component: str) -> None:
        """Begin a component's phase before anything of it is used; its first use does so too."""
        self.components[component].resident.enter()

    def update(self, component: str, changes: Mapping[str, Value]) -> None:
        """Give weights new values, as merging an adapter or a refit does. The checkpoint's files never change.

        Weights at home in memory are written there. Those that are views of the file get copies on the host, and are
        streamed or held as before. Such copies come out of what the plan left of the host's budget, and the report
        lists them. A layer that was fetched ahead is fetched again; a phase that is going on sees the new values.

        Args:
            component: its name.
            changes: by the module's names, those of its `state_dict()`, or by patterns of them such as
                `blocks.*.attn.q.weight`. Each is a tensor of the weight's shape and dtype on any device, or a function
                that is given a copy of the old value on the host and returns the new one. Functions are called one by
                one, so that no more than one weight is in memory twice.

        Raises:
            InputError: no such component or weight, or a value of another shape or dtype.
            ExecutionError: a layer is in use by a forward, or the plan left too little of the host.
            Nothing has changed then; but where a function fails, or what it returns, those before it have had effect.
        """
        if component not in self.components:
            raise InputError(f"there is no component '{component}'", hint=f"there are {', '.join(self.components)}")
        self.components[component].update(changes)

    def release(self) -> None:
        """End the phase that is going on: every weight that is not always held goes home."""
        self._stage.clear()


def load_plan(
    plan: Plan,
    root: Path,
    *,
    modules: Mapping[str, nn.Module] | None = None,
    machines: Mapping[str, Machine] | None = None,
    progress: Progress = ignore,
) -> LoadedPipeline:
    """Build and bind every component as the plan says, and check that each unit got its home.

    On a host with little to spare glibc's heap is fixed for the whole process (`executor.heap`).

    Args:
        plan: one that fits.
        root: the model's folder, which the plan's paths start from; a bare file's own folder.
        modules: built by the caller, on meta, for components that name no library class.
        machines: by device, for those that should not be opened from the plan's facts.
        progress: told the bytes of each unit when it is at home.

    Raises:
        RefusedError: the plan does not fit, so there is nothing to execute.
        DriftError: the checkpoint is not the one that was planned.
        ExecutionError: a component cannot be built or bound, or a home could not be given.
        DeviceMemoryError: a device has less memory than the plan was told.
    """
    if isinstance(plan.verdict, Refused):
        raise RefusedError("the plan is refused: nothing fits", hint="`placewise show` prints the causes")
    started, read_before = time.perf_counter(), disk_read_bytes()
    if leaves_little(plan):
        fix_heap()
    opened = open_machines(plan, machines or {})
    stage = Stage(
        has_phases=any(segment.hold is not Hold.always for each in plan.placements for segment in each.segments)
    )
    allowance = Allowance(plan.verdict.margin_bytes.get("host"))
    by_name = {component.name: component for component in plan.pipeline.components}
    components = {
        placement.component: _load(
            placement, by_name[placement.component], root, modules or {}, opened, stage, allowance, progress
        )
        for placement in plan.placements
    }
    return LoadedPipeline(
        plan=plan,
        root=root,
        components=components,
        machines=opened,
        load_s=time.perf_counter() - started,
        read_before_bytes=read_before,
        _stage=stage,
    )


def _load(
    placement: Placement,
    component: Component,
    root: Path,
    modules: Mapping[str, nn.Module],
    machines: Mapping[str, Machine],
    stage: Stage,
    allowance: Allowance,
    progress: Progress,
) -> LoadedComponent:
    facts = _read_planned(component, root)
    module = modules.get(component.name)
    if module is None:
        module = build_module(component, root / component.checkpoint.root, _stored_dtype(facts))
    return _loader(placement)(
        placement,
        facts,
        module,
        machines[CPU],
        machines[placement.compute_device],
        stage,
        progress,
        passes=component.passes,
        allowance=allowance,
    )


def _loader(placement: Placement) -> Callable[..., LoadedComponent]:
    if placement.sharding is None:
        return load_component
    from .distributed.sharded import load_sharded  # FSDP2 takes seconds to import

    return load_sharded


def _read_planned(component: Component, root: Path) -> CheckpointFacts:
    """The headers, from the very files that were planned."""
    files = component.checkpoint.files
    facts = read_files(root / component.checkpoint.root, (file.path for file in files))
    changed = [
        f"{planned.path}: {what} was {old}, is {new}"
        for planned, found in zip(files, facts.files, strict=True)
        for what, old, new in (
            ("size", planned.size_bytes, found.size_bytes),
            ("header", planned.header_sha256[:12], found.header_sha256[:12]),
        )
        if old != new
    ]
    if changed:
        raise DriftError(
            f"component '{component.name}': not the checkpoint that was planned: " + "; ".join(changed),
            hint="plan again with `placewise plan`",
        )
    return transformed(facts, component.transforms, component.name)


def _stored_dtype(facts: CheckpointFacts) -> torch.dtype:
    """The first floating dtype that is stored, as the libraries' own loaders take it; float32 where there is none."""
    for entry in (facts.wanted(name) for name in facts.tensors):
        if entry.dtype.startswith(("F", "BF")) and entry.dtype in ("F16", "BF16", "F32", "F64"):
            return torch_layout(entry.dtype, entry.shape)[0]
    return torch.float32
