"""The public face: measure, plan, check, load, apply. Each call is one step from facts to a running module."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from . import __version__
from .models.pipeline import read_pipeline
from .planner.calibrating.cache import fingerprint_of, load_calibration
from .planner.compile import compile_plan
from .planner.measuring.facts import measure_machine
from .planner.measuring.ranks import RankFacts, facts_of_rank, machine_of_ranks
from .plans.codec import plan_from_json, plan_to_json, read_plan
from .plans.document import Plan
from .plans.drift import ChangedFact, drift
from .plans.errors import InputError
from .plans.machine import Machine
from .plans.pipeline import Pipeline, Transform, Workload
from .plans.policy import Policy
from .policies.presets import load_preset

if TYPE_CHECKING:
    from torch import distributed, nn

    from .executor.load import LoadedPipeline
    from .planner.tracing.devices import DeviceCheck, DryPipeline

__all__ = [
    "apply",
    "check",
    "check_devices",
    "inspect",
    "load",
    "measure",
    "plan",
    "plan_from_json",
    "plan_to_json",
    "plan_together",
    "read_plan",
]


def measure(model: Path | str | None = None, *, accelerators: bool = True) -> Machine:
    """Measure the host that this process may use, its accelerators, and the disk that holds `model`.

    The rates of `placewise calibrate` are taken along where they are of this machine and that disk.

    Args:
        model: the file or folder that will be planned.
        accelerators: whether to look for them.
    """
    path = None if model is None else Path(model)
    machine = measure_machine(path, accelerators=accelerators)
    if path is None or not path.exists():
        return machine
    return machine.model_copy(update={"calibration": load_calibration(fingerprint_of(machine, path))})


def inspect(model: Path | str, *, workload: Workload | None = None) -> Pipeline:
    """What a checkpoint holds, from its headers.

    Raises:
        CheckpointError: it cannot be read as a checkpoint.
    """
    return read_pipeline(Path(model), workload=workload or Workload())


def plan(
    model: Path | str,
    *,
    machine: Machine | None = None,
    policy: Policy | str = "auto",
    workload: Workload | None = None,
    passes: Mapping[str, int] | None = None,
    activation_bytes: Mapping[str, int] | None = None,
    transforms: Mapping[str, Sequence[Transform]] | None = None,
    trace: bool = False,
) -> Plan:
    """Plan a model on a machine. Nothing is loaded; a plan that does not fit comes back with the verdict `refused`.

    Args:
        model: a safetensors file, or a folder of one, of transformers or of a diffusers pipeline.
        machine: facts; measured here when null.
        policy: a preset's name or a policy.
        workload: what one request asks.
        passes: forwards per request, by component, where the workload does not say it.
        activation_bytes: peak live activation bytes of one pass, by component, where they are known.
        transforms: what the module wants otherwise than it is stored, by component.
        trace: count activations and operations of the others on tensors without data; imports torch, takes seconds.

    Raises:
        InputError: the model cannot be read, or an argument names something that is not there.
    """
    workload, path = workload or Workload(), Path(model)
    pipeline = read_pipeline(
        path, workload=workload, passes=passes, activation_bytes=activation_bytes, transforms=transforms
    )
    if trace:
        from .planner.tracing.trace import trace_pipeline

        pipeline = trace_pipeline(pipeline, path if path.is_dir() else path.parent, workload)
    return compile_plan(
        pipeline,
        machine or measure(model),
        load_preset(policy) if isinstance(policy, str) else policy,
        workload,
        version=__version__,
    )


def plan_together(
    model: Path | str,
    *,
    group: "distributed.ProcessGroup | None" = None,
    machine: Machine | None = None,
    policy: Policy | str = "auto",
    workload: Workload | None = None,
    passes: Mapping[str, int] | None = None,
    activation_bytes: Mapping[str, int] | None = None,
    transforms: Mapping[str, Sequence[Transform]] | None = None,
    trace: bool = False,
) -> Plan:
    """One plan for all ranks of this host; all call it. Rank 0 plans from what each has measured, all check the digest.

    Each rank computes on its own accelerator, torch's current device. The host's memory is divided among them.

    Args:
        model: as for `plan`; rank 0's arguments count.
        group: the ranks of this host; null is the group of all.
        machine: facts, with this rank's accelerator alone; measured here when null.
        policy: as for `plan`.
        workload: as for `plan`; its ranks are those of the group.
        passes: as for `plan`.
        activation_bytes: as for `plan`.
        transforms: as for `plan`.
        trace: as for `plan`.

    Raises:
        InputError: as `plan`, at rank 0; or the ranks are on several hosts, or their accelerators are not of a kind.
        ExecutionError: torch.distributed is not set up, or another rank failed, which is named.
    """
    from .executor.distributed.agreement import agree, share

    facts = agree(lambda: RankFacts(machine=machine) if machine else facts_of_rank(measure(model)), group)
    return share(
        lambda: plan(
            model,
            machine=machine_of_ranks(facts),
            policy=policy,
            workload=(workload or Workload()).model_copy(update={"ranks": len(facts)}),
            passes=passes,
            activation_bytes=activation_bytes,
            transforms=transforms,
            trace=trace,
        ),
        group,
    )


def check(plan: Plan, model: Path | str, *, machine: Machine | None = None) -> tuple[ChangedFact, ...]:
    """Every fact of a plan that no longer holds; none means that it can be executed.

    Raises:
        CheckpointError: there is no checkpoint any more.
    """
    return drift(plan, read_pipeline(Path(model), workload=plan.workload), machine or measure(model))


def check_devices(
    plan: Plan,
    model: Path | str,
    request: "Callable[[DryPipeline], object] | None" = None,
    *,
    modules: "Mapping[str, nn.Module] | None" = None,
    at_rest: bool = False,
) -> "DeviceCheck":
    """Find every operation on two devices before anything is loaded, by a run on tensors without data.

    Args:
        plan: one that fits; its devices need not be here.
        model: the path that was planned.
        request: code that runs on a loaded pipeline as well; null runs a sample pass of each component.
        modules: your own modules on meta, for components without a library class; they stay as they are.
        at_rest: let a weight's `device` answer where it rests, as other runtimes do; `load` has it answer where its
            component computes.

    Raises:
        RefusedError: the plan does not fit.
        InputError: `modules` names a component that the plan does not have.
    """
    from .planner.tracing.devices import check_devices as find

    path = Path(model)
    return find(plan, path if path.is_dir() else path.parent, request, modules=modules, at_rest=at_rest)


def load(
    plan: Plan,
    model: Path | str,
    *,
    modules: "Mapping[str, nn.Module] | None" = None,
    progress: Callable[[int], None] | None = None,
) -> "LoadedPipeline":
    """Execute a plan: build and bind every component. See `executor.load.load_plan` for errors.

    Args:
        plan: one that fits.
        model: the path that was planned.
        modules: your own modules on meta, for components without a library class.
        progress: told how many more bytes are at home.
    """
    from .executor.load import load_plan
    from .executor.units import ignore

    path = Path(model)
    return load_plan(plan, path if path.is_dir() else path.parent, modules=modules, progress=progress or ignore)


def apply(plan: Plan, model: Path | str, module: "nn.Module") -> "LoadedPipeline":
    """Bind a module that you built to a plan of one component. Its weights become those of the checkpoint.

    Args:
        plan: one that fits.
        model: the path that was planned.
        module: on meta, or with weights, which it loses.

    Raises:
        InputError: the plan has several components.
        PlacewiseError: as `load`.
    """
    names = [placement.component for placement in plan.placements]
    if len(names) > 1:
        raise InputError(
            f"the plan has {len(names)} components: {', '.join(names)}",
            hint="load(plan, model, modules={name: module}) takes any of them",
        )
    return load(plan, model, modules=dict.fromkeys(names, module))
