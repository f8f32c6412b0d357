"""What the command line's options mean: a machine, a policy, a workload, and together a request for a plan."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from pydantic import TypeAdapter, ValidationError

from .api import measure
from .models.pipeline import read_pipeline
from .planner.calibrating.given import given_calibration
from .planner.measuring.accelerators import given_accelerator, given_host, with_given
from .planner.measuring.facts import read_machine
from .plans.codec import explain_validation, read_file
from .plans.errors import InputError
from .plans.machine import Accelerator, Machine
from .plans.pipeline import Pipeline, Transform, Workload
from .plans.policy import Override, Policy
from .plans.units import parse_bytes
from .policies.admission import CPU
from .policies.presets import PRESETS, load_preset, policy_from_json


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineOptions:
    """The options that say for which machine a plan is; null is not given."""

    facts: tuple[Path, ...]
    host_memory: int | None
    device_memory: int | None
    device: str | None
    disk_rate: int | None
    link_rate: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """All that a plan is made from; several machines by the names of their facts."""

    pipeline: Pipeline
    machines: Mapping[str, Machine]
    policy: Policy
    workload: Workload

    @property
    def machine(self) -> Machine:
        """The only machine.

        Raises:
            InputError: facts of several were given.
        """
        if len(self.machines) > 1:
            raise InputError(f"facts of {len(self.machines)} machines were given", hint="give one --machine")
        return next(iter(self.machines.values()))


def machines_of(model: Path, options: MachineOptions) -> dict[str, Machine]:
    """The machines to plan for: measured here, read from facts, or with parts of them given.

    A calibration is taken along where it is of the very machine: one that was measured here and described by no option,
    or the one in the facts.

    Raises:
        InputError: the options contradict each other, or the facts cannot be read.
    """
    device, memory = options.device, options.device_memory
    if device == CPU and memory is not None:
        raise InputError("--device cpu has no --device-memory", hint="give --host-memory")
    if device not in (None, CPU) and memory is None:
        raise InputError(f"--device {device} goes with --device-memory", hint="say how much memory is free there")
    given: tuple[Accelerator, ...] | None = () if device == CPU else None
    if memory is not None:
        given = (given_accelerator(_indexed(device or "cuda:0"), memory),)
    machines = {name: read_machine(file) for name, file in _facts_files(options.facts).items()}
    machines = machines or {"here": measure(model, accelerators=given is None)}
    return {name: _described(machine, options, given) for name, machine in machines.items()}


def _facts_files(paths: Iterable[Path]) -> dict[str, Path]:
    """Files of facts by their names without ending; a folder stands for its JSON files."""
    found: dict[str, Path] = {}
    for path in paths:
        files = sorted(path.glob("*.json")) if path.is_dir() else [path]
        if not files:
            raise InputError(
                f"{path}: no facts in this folder", hint="`placewise facts --json > facts.json` writes them"
            )
        for file in files:
            if file.stem in found:
                raise InputError(
                    f"{found[file.stem]} and {file} have one name", hint="give each machine's facts another"
                )
            found[file.stem] = file
    return found


def _described(machine: Machine, options: MachineOptions, given: tuple[Accelerator, ...] | None) -> Machine:
    host = None if options.host_memory is None else given_host(options.host_memory)
    described = with_given(machine, host=host, accelerators=given)
    if options.disk_rate is not None or options.link_rate is not None:
        link_to = described.accelerators[0].device if described.accelerators else None
        rates = given_calibration(
            disk_bytes_per_s=options.disk_rate, link_bytes_per_s=options.link_rate, device=link_to
        )
        return described.model_copy(update={"calibration": rates})
    if host is not None or options.device_memory is not None:
        return described.model_copy(update={"calibration": None})
    return described


def policy_of(name: str, reserve: int | None, overrides: tuple[str, ...]) -> Policy:
    """A preset or a policy file, with the options' changes on top.

    Raises:
        InputError: no such preset or file, or an override that does not read as one.
    """
    is_file = name not in PRESETS and (name.endswith(".json") or Path(name).exists())
    policy = policy_from_json(read_file(Path(name)), source=name) if is_file else load_preset(name)
    changes: dict[str, object] = {}
    if reserve is not None:
        changes = {"reserve_bytes": reserve, "reserve_max_percent": 100}
    parsed = tuple(_override(text) for text in overrides)
    return policy.model_copy(update={**changes, "overrides": (*policy.overrides, *parsed)})


def request_of(path: Path, *, trace: Callable[[str], None] | None, given: Mapping[str, object]) -> Request:
    """Everything that a plan needs, from the options that `planning_options` defines.

    Args:
        path: the model.
        trace: told each component before its activations are traced; null does not trace.
        given: the options by name.

    Raises:
        InputError: an option does not read as what it is, or contradicts another.
    """
    counts = pairs_of(_texts(given["passes"]), "--passes")
    sizes = pairs_of(_texts(given["activations"]), "--activations")
    workload = Workload.model_validate({name: given[name] for name in _WORKLOAD if given[name] is not None})
    pipeline = read_pipeline(
        path,
        workload=workload,
        passes={name: whole_number(count, "--passes") for name, count in counts.items()},
        activation_bytes={name: parse_bytes(size) for name, size in sizes.items()},
        transforms=transforms_of(_texts(given["transforms"])),
    )
    if trace is not None:
        from .planner.tracing.trace import trace_pipeline

        root = path if path.is_dir() else path.parent
        pipeline = trace_pipeline(pipeline, root, workload, trace)
    options = MachineOptions(**{name: given[name] for name in MachineOptions.__slots__})  # type: ignore[arg-type]
    reserve = given["reserve"]
    assert reserve is None or isinstance(reserve, int)
    return Request(
        pipeline=pipeline,
        machines=machines_of(path, options),
        policy=policy_of(str(given["policy"]), reserve, _texts(given["override"])),
        workload=workload,
    )


_WORKLOAD = ("steps", "tokens", "batch", "ranks", "height", "width", "frames")


def _texts(value: object) -> tuple[str, ...]:
    return tuple(str(text) for text in cast("tuple[object, ...]", value))


def pairs_of(texts: tuple[str, ...], option: str) -> dict[str, str]:
    """`name=value` options by name.

    Raises:
        InputError: one has no `=`, or a name comes twice.
    """
    pairs: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not (name and equals and value):
            raise InputError(f"{option} '{text}' is not NAME=VALUE", hint=f"write {option} transformer=...")
        if name in pairs:
            raise InputError(f"{option} names '{name}' twice", hint="say it once")
        pairs[name] = value
    return pairs


_FIELDS = {"deinterleave": ("groups", "parts"), "transpose": (), "cast": ("dtype",)}
"""What follows the kind of a transform, by the kind."""


def transforms_of(texts: tuple[str, ...]) -> dict[str, list[Transform]]:
    """`component:tensor=kind` options by component, in their order.

    Raises:
        InputError: one does not read as a transform.
    """
    found: dict[str, list[Transform]] = {}
    for text in texts:
        component, colon, rest = text.partition(":")
        tensor, equals, given = rest.rpartition("=")
        kind, *values = given.split(":")
        fields = _FIELDS.get(kind)
        if not (component and colon and tensor and equals) or fields is None or len(fields) != len(values):
            raise InputError(
                f"--transform '{text}' is not COMPONENT:TENSOR=KIND",
                hint="kinds are deinterleave:GROUPS:PARTS, transpose and cast:DTYPE",
            )
        stated = {"kind": kind, "tensor": tensor, **dict(zip(fields, values, strict=True))}
        try:
            transform: Transform = TypeAdapter[Transform](Transform).validate_python(stated, strict=False)
        except ValidationError as error:
            raise InputError(f"--transform '{text}': {explain_validation(error)}") from None
        found.setdefault(component, []).append(transform)
    return found


def whole_number(text: str, option: str) -> int:
    """A number of at least 1.

    Raises:
        InputError: anything else.
    """
    if not text.isdecimal() or int(text) < 1:
        raise InputError(f"{option}: '{text}' is not a whole number of 1 or more")
    return int(text)


def _indexed(device: str) -> str:
    return device if ":" in device else f"{device}:0"


def _override(text: str) -> Override:
    select, colon, wishes = text.partition(":")
    if not (select and colon and wishes):
        raise InputError(
            f"--override '{text}' is not PART:KEY=VALUE", hint="write --override transformer.blocks:home=mapped"
        )
    fields = pairs_of(tuple(wishes.split(",")), "--override")
    try:
        return Override.model_validate({"select": select, **fields}, strict=False)
    except ValidationError as error:
        raise InputError(f"--override '{text}': {explain_validation(error)}") from None
