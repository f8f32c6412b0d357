"""The mounts that this process sees, from `<root>/proc/self/mountinfo` (proc_pid_mountinfo(5))."""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from ...plans.machine import Malformed, Unmeasurable
from .kernel_files import lines_of, quoted, read_kernel_file, shown

_ESCAPE = re.compile(rb"\\([0-7]{3})")
# id, parent, device, root, mount point and options stand before the optional fields and their end, a hyphen.
_FIELDS_BEFORE_OPTIONAL = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """One mount. `root` is the folder of the file system that shows up at `point`; only a container's view,
    or a bind mount, has another than `/`. `options` are those of the file system, not those of the mount.
    """

    root: str
    point: str
    filesystem: str
    options: frozenset[str]


def read_mounts(root: Path) -> tuple[Mount, ...] | Unmeasurable | Malformed:
    """All mounts; of several on one point only the last, which hides the others."""
    file = root / "proc/self/mountinfo"
    content = read_kernel_file(file)
    if not isinstance(content, bytes):
        return content
    mounts: dict[str, Mount] = {}
    for line in lines_of(content):
        mount = _parse(line)
        if mount is None:
            return Malformed(source=shown(file), why=f"{quoted(line)} is not a mount")
        mounts[mount.point] = mount
    return tuple(mounts.values())


def _parse(line: bytes) -> Mount | None:
    # Split at each single space: a mount without a source leaves an empty field, which must stay one.
    fields = line.split(b" ")
    try:
        end = fields.index(b"-", _FIELDS_BEFORE_OPTIONAL)
        filesystem, _source, options = fields[end + 1 :]
    except ValueError:
        return None
    return Mount(
        root=_decode(fields[3]),
        point=_decode(fields[4]),
        filesystem=_decode(filesystem),
        options=frozenset(_decode(options).split(",")),
    )


def _decode(field: bytes) -> str:
    return os.fsdecode(_ESCAPE.sub(lambda match: bytes([int(match[1], 8) & 0xFF]), field))
