"""Reading the small text files in which the kernel tells one figure, or a few, without ever guessing.

What is there and makes no sense comes back as `Malformed`, which names the file and shows its content; what
is not there comes back as `Unmeasurable`. Neither turns into a number here.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path

from ...plans.machine import Malformed, Measured, Unlimited, Unmeasurable

# cgroup v1 writes "no limit" as the largest whole number of pages, which differs with the page size.
NO_CAP_BYTES = 1 << 62

_SHOWN_CHARACTERS = 40
# ASCII digits alone: int() would also take '1_000', ' 5' and digits of other scripts.
_NUMBER = re.compile(rb"[0-9]{1,20}")


def read_kernel_file(file: Path) -> bytes | Unmeasurable | Malformed:
    """The content of `file`; `Unmeasurable` where it does not exist, `Malformed` where it cannot be read."""
    try:
        return file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return Unmeasurable(why=f"{shown(file)} does not exist")
    except OSError as error:
        return Malformed(source=shown(file), why=f"cannot be read: {error.strerror}")


def read_limit(file: Path) -> Measured | Unlimited | Unmeasurable | Malformed:
    """A cap in bytes. `max` and anything from 2**62 up is no cap."""
    content = read_kernel_file(file)
    if not isinstance(content, bytes):
        return content
    if content.strip() == b"max":
        return Unlimited(source=shown(file))
    return _limit(content, source=shown(file))


def read_count(file: Path) -> Measured | Unmeasurable | Malformed:
    """A number of bytes in use, for which `max` would make no sense."""
    content = read_kernel_file(file)
    return _count(content, source=shown(file)) if isinstance(content, bytes) else content


class Statistics:
    """A file of `name value` lines, such as memory.stat. Only the lines asked for must make sense."""

    def __init__(self, content: bytes, *, source: str) -> None:
        pairs = (line.partition(b" ") for line in lines_of(content))
        self._values = {name.decode(errors="backslashreplace"): value for name, _, value in pairs}
        self._source = source

    def count(self, names: Sequence[str]) -> Measured | Unmeasurable | Malformed:
        """The figure under the first of `names` that the file has; `Unmeasurable` where it has none."""
        for name in names:
            if name in self._values:
                return _count(self._values[name], source=f"{self._source} ({name})")
        return Unmeasurable(why=f"{self._source} has no {' or '.join(names)}")

    def limit(self, name: str) -> Measured | Unlimited | Unmeasurable | Malformed:
        """The cap under `name`, read as `read_limit` reads one."""
        if name not in self._values:
            return Unmeasurable(why=f"{self._source} has no {name}")
        return _limit(self._values[name], source=f"{self._source} ({name})")


def read_statistics(file: Path) -> Statistics | Unmeasurable | Malformed:
    """The `name value` lines of `file`."""
    content = read_kernel_file(file)
    return Statistics(content, source=shown(file)) if isinstance(content, bytes) else content


def lines_of(content: bytes) -> list[bytes]:
    """The lines of `content`, split at newlines alone: a path may hold any other control character."""
    return [line for line in content.split(b"\n") if line]


def shown(path: Path | str) -> str:
    """`path` as text that can go to JSON: bytes that are not UTF-8 are written as escapes."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def quoted(content: bytes) -> str:
    """The beginning of `content`, for a message."""
    text = content.decode("utf-8", "backslashreplace")
    return repr(text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "…")


def _limit(content: bytes, *, source: str) -> Measured | Unlimited | Malformed:
    count = _count(content, source=source)
    if isinstance(count, Measured) and count.value >= NO_CAP_BYTES:
        return Unlimited(source=source)
    return count


def _count(content: bytes, *, source: str) -> Measured | Malformed:
    text = content.removesuffix(b"\n")
    if _NUMBER.fullmatch(text) is None:
        why = f"{quoted(content)} is not a number of bytes" if text else "is empty"
        return Malformed(source=source, why=why)
    return Measured(value=int(text), source=source)
