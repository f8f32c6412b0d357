"""What the command line's options mean: a machine, a policy, a workload, pairs."""

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from .planner.accelerators import given_accelerator, given_host, with_given
from .planner.facts import measure_machine, read_machine
from .plans.codec import explain_validation, read_file
from .plans.errors import InputError
from .plans.machine import Accelerator, Machine
from .plans.pipeline import Workload
from .plans.policy import Override, Policy
from .policies.presets import PRESETS, load_preset, policy_from_json

CPU = "cpu"


def machine_of(
    model: Path, facts: Path | None, host_memory: int | None, device_memory: int | None, device: str | None
) -> Machine:
    """The machine to plan for: measured here, read from facts, or with parts of it given.

    Raises:
        InputError: the options contradict each other, or the facts cannot be read.
    """
    if device == CPU and device_memory is not None:
        raise InputError("--device cpu has no --device-memory", hint="give --host-memory")
    if device not in (None, CPU) and device_memory is None:
        raise InputError(f"--device {device} goes with --device-memory", hint="say how much memory is free there")
    given: tuple[Accelerator, ...] | None = () if device == CPU else None
    if device_memory is not None:
        given = (given_accelerator(_indexed(device or "cuda:0"), device_memory),)
    machine = read_machine(facts) if facts is not None else measure_machine(model, accelerators=given is None)
    host = None if host_memory is None else given_host(host_memory)
    return with_given(machine, host=host, accelerators=given)


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


def workload_of(options: Mapping[str, int | None]) -> Workload:
    """The workload that was stated; what was not is null."""
    return Workload(**{name: value for name, value in options.items() if value is not None})


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


def whole_number(text: str, option: str) -> int:
    """A number of at least 1.

    Raises:
        InputError: anything else.
    """
    if not text.isdecimal() or int(text) < 1:
        raise InputError(f"{option}: '{text}' is not a whole number of 1 or more")
    return int(text)


def write_whole(path: Path, text: str) -> None:
    """Write a file whole or not at all: a reader never sees half a plan.

    Raises:
        InputError: the folder cannot be written to; the message carries the system's reason.
    """
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            Path(name).chmod(0o644)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}", hint="give a path that can be written") from None


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
