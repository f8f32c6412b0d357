"""Plan to JSON and back: canonical bytes, the digest over them, and the rules for other versions."""

import hashlib
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any, Literal, cast

from pydantic import ValidationError

from .document import FORMAT_MAJOR, FORMAT_MINOR, FORMAT_VERSION, MadeBy, Plan
from .errors import InputError, PlanFormatError
from .record import Record

_NOT_DIGESTED = ("digest", "made_by")
_VERSION = re.compile(r"(0|[1-9][0-9]{0,8})\.(0|[1-9][0-9]{0,8})")


def canonical_json(record: Record) -> str:
    """The record as JSON with sorted keys and no spaces: equal records give equal text."""
    return _canonical(record.model_dump(mode="json"))


def seal(plan: Plan) -> Plan:
    """The same plan with the digest of its own content."""
    return plan.model_copy(update={"digest": _digest(plan.model_dump(mode="json"))})


def plan_to_json(plan: Plan) -> str:
    """The document as people and version control like it: indented, in field order, with a final newline."""
    return plan.model_dump_json(indent=2) + "\n"


def plan_from_json(text: str | bytes, *, source: str = "the plan") -> Plan:
    """Read a document of this major version.

    Unknown fields are refused, but for those of a newer minor version: they are ignored. The digest is checked
    over the document as it was written, ignored fields included.

    Raises:
        PlanFormatError: not JSON, another major version, a field that is unknown, missing or of the wrong type,
            or content that does not match its digest.
    """
    document = _object(text, source)
    extra: Literal["ignore"] | None = "ignore" if _minor(document, source) > FORMAT_MINOR else None
    try:
        plan = Plan.model_validate_json(text, extra=extra)
    except ValidationError as error:
        raise PlanFormatError(
            f"{source}: {explain_validation(error)}", hint="make the plan again with `placewise plan`"
        ) from None
    if plan.digest != _digest(document):
        raise PlanFormatError(
            f"{source}: the content does not match its digest {plan.digest}",
            hint="a plan is never edited by hand: change the policy or the facts and plan again",
        )
    return plan


def read_plan(path: Path) -> Plan:
    """Read a plan file.

    Raises:
        InputError: there is no such file.
        PlanFormatError: as `plan_from_json`.
    """
    return plan_from_json(read_file(path), source=str(path))


def read_file(path: Path) -> bytes:
    """The bytes of a document.

    Raises:
        InputError: the file cannot be read; the message carries the system's reason.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}", hint="give the path of a readable file") from None


def write_file(path: Path, text: str) -> None:
    """Write a document whole or not at all: a reader never sees half of it.

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


def explain_validation(error: ValidationError) -> str:
    """The first fault of a document with its place in it, and how many more there are."""
    faults = error.errors(include_url=False)
    first, more = faults[0], len(faults) - 1
    message = "unknown field" if first["type"] == "extra_forbidden" else first["msg"]
    return f"{message} in '{_place(first['loc'])}'" + (f" (and {more} more)" if more else "")


def made_by(version: str) -> MadeBy:
    """Placewise's own mark."""
    return MadeBy(name="placewise", version=version)


def _place(location: tuple[int | str, ...]) -> str:
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    return text.removeprefix(".") or "the document"


def _object(text: str | bytes, source: str) -> dict[str, Any]:
    try:
        document = json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise PlanFormatError(
            f"{source}: not JSON: {error}", hint="give a file that `placewise plan -o` wrote"
        ) from None
    if not isinstance(document, dict):
        raise PlanFormatError(f"{source}: not a JSON object", hint="give a file that `placewise plan -o` wrote")
    return cast("dict[str, Any]", document)


def _no_number(constant: str) -> float:
    raise ValueError(f"{constant} is no number")


def _minor(document: dict[str, Any], source: str) -> int:
    version = document.get("format_version")
    parts = _VERSION.fullmatch(version) if isinstance(version, str) else None
    if parts is None:
        raise PlanFormatError(
            f"{source}: format_version is {version!r}, not a version such as '{FORMAT_VERSION}'",
            hint="give a file that `placewise plan -o` wrote",
        )
    if int(parts[1]) != FORMAT_MAJOR:
        raise PlanFormatError(
            f"{source}: format_version {version} is of another major version; this is a reader of {FORMAT_MAJOR}.x",
            hint="make the plan again with this version, or read it with the version that made it",
        )
    return int(parts[2])


def _canonical(document: object) -> str:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _digest(document: dict[str, Any]) -> str:
    content = {name: value for name, value in document.items() if name not in _NOT_DIGESTED}
    return "sha256:" + hashlib.sha256(_canonical(content).encode()).hexdigest()
