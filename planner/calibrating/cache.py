"""Calibrations kept between runs, one file per fingerprint, in the user's cache folder."""

import contextlib
import hashlib
import json
import os
import re
import sys
from pathlib import Path

from pydantic import ValidationError

from ...plans.calibration import Calibration
from ...plans.codec import explain_validation, read_file, write_file
from ...plans.errors import InputError
from ...plans.machine import Machine, Measured, Reading
from ...plans.record import Record
from ..measuring.cores import available_cores
from ..measuring.kernel_files import lines_of, read_kernel_file

FORMAT_VERSION = 1

_FINGERPRINT = re.compile(r"sha256:[0-9a-f]{64}")
_REMEDY = "delete the file and run `placewise calibrate` again"


class _Version(Record):
    format_version: int


class _Stored(_Version):
    calibration: Calibration


def fingerprint_of(machine: Machine, model: Path, *, root: Path = Path("/")) -> str:
    """A digest of what makes rates comparable: `sha256:` and 64 digits.

    It covers the processor's name, the cores that this process may use, the total memory, the accelerators' names
    and memory, and the file system of the model with its device number. What is free now is no part of it, and no
    name of the host, of a user or of a folder is.

    Args:
        machine: the facts, with all accelerators.
        model: the checkpoint.
        root: where the tree that holds `proc` begins.

    Raises:
        InputError: `model` does not exist or cannot be read.
    """
    try:
        device = model.stat().st_dev
    except OSError as error:
        raise InputError(f"{model}: {error.strerror}", hint="give the path of a checkpoint that can be read") from None
    facts = {
        "processor": _processor(root),
        "cores": available_cores(root),
        "memory": _figure(machine.host.total),
        "accelerators": [[each.device, each.name, _figure(each.total)] for each in machine.accelerators],
        "filesystem": None if machine.disk is None else machine.disk.filesystem,
        "disk": [os.major(device), os.minor(device)] if hasattr(os, "major") else device,
    }
    text = json.dumps(facts, sort_keys=True, separators=(",", ":"))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def load_calibration(fingerprint: str, cache_dir: Path | None = None) -> Calibration | None:
    """The calibration of this fingerprint and of no other; None where there is none.

    Args:
        fingerprint: from `fingerprint_of`.
        cache_dir: the folder of the files; the user's cache folder where it is not given.

    Raises:
        InputError: the file is malformed, of another version, of another fingerprint, or cannot be read.
    """
    file = _file_of(fingerprint, cache_dir)
    if not file.exists():
        return None
    content = read_file(file)
    _check_version(content, file)
    try:
        stored = _Stored.model_validate_json(content)
    except ValidationError as error:
        raise InputError(f"{file}: {explain_validation(error)}", hint=_REMEDY) from None
    if stored.calibration.fingerprint != fingerprint:
        raise InputError(f"{file}: it holds the calibration of another machine", hint=_REMEDY)
    return stored.calibration


def save_calibration(calibration: Calibration, cache_dir: Path | None = None) -> Path:
    """Write a calibration for its fingerprint, whole or not at all, in place of an earlier one; tells the file.

    Raises:
        InputError: the calibration was given and not measured, or the folder cannot be written to.
    """
    file = _file_of(calibration.fingerprint, cache_dir)
    text = _Stored(format_version=FORMAT_VERSION, calibration=calibration).model_dump_json(indent=2) + "\n"
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"{file}: {error.strerror}", hint="give a cache folder that can be written to") from None
    write_file(file, text)
    return file


def default_cache_dir() -> Path:
    """Where calibrations are kept: below `XDG_CACHE_HOME` if that is absolute, else where the platform keeps caches."""
    stated = os.environ.get("XDG_CACHE_HOME", "")
    if Path(stated).is_absolute():
        base = Path(stated)
    elif sys.platform == "darwin":
        base = Path.home() / "Library/Caches"
    elif sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData/Local")
    else:
        base = Path.home() / ".cache"
    return base / "placewise" / "calibration"


def _file_of(fingerprint: str, cache_dir: Path | None) -> Path:
    if _FINGERPRINT.fullmatch(fingerprint) is None:
        raise InputError(
            f"'{fingerprint}' is not a machine's fingerprint, so no calibration is kept for it",
            hint="only measured calibrations are kept: run `placewise calibrate`",
        )
    return (default_cache_dir() if cache_dir is None else cache_dir) / f"{fingerprint.replace(':', '-')}.json"


def _check_version(content: bytes, file: Path) -> None:
    """Refuse another version for what it is, and not for the first field that differs."""
    with contextlib.suppress(ValidationError):
        version = _Version.model_validate_json(content, extra="ignore").format_version
        if version != FORMAT_VERSION:
            raise InputError(f"{file}: format_version {version}; this is a reader of {FORMAT_VERSION}", hint=_REMEDY)


def _processor(root: Path) -> str:
    content = read_kernel_file(root / "proc/cpuinfo")
    if isinstance(content, bytes):
        for line in lines_of(content):
            name, _, value = line.partition(b":")
            # Other architectures tell no name, but the implementer and the part.
            if name.strip() in (b"model name", b"CPU part", b"cpu model"):
                return value.strip().decode("utf-8", "replace")
    import platform

    return platform.processor() or platform.machine()


def _figure(reading: Reading) -> int | str:
    return reading.value if isinstance(reading, Measured) else reading.kind
