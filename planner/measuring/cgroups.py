"""Every memory cgroup that caps this process: its own and all ancestors in sight, in v1, v2 and hybrid.

Where a process is charged stands in `proc/self/cgroup`; where that hierarchy can be read stands in
`proc/self/mountinfo`. In a container the two need not agree: the mount may show only a sub-folder of the
hierarchy, and the path may be told from another cgroup namespace than the mount's. See cgroups(7) and
cgroup_namespaces(7).
"""

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from ...plans.machine import Cap, Malformed, Unmeasurable
from .cgroup_levels import V1, V2, Files, Level, caps_above, caps_of, charges_children
from .kernel_files import lines_of, quoted, read_kernel_file, shown
from .mountinfo import Mount, read_mounts


@dataclass(frozen=True, slots=True, kw_only=True)
class Caps:
    """What was found. `caps` begins at the process's own cgroup and goes up.

    A cgroup whose figures make no sense is in `malformed`, not in `caps`: while there is one, the smallest
    headroom is not known. `notes` tell what could not be seen.
    """

    caps: tuple[Cap, ...] = ()
    malformed: tuple[Malformed, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Membership:
    files: Files
    path: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    mount: Mount
    parts: tuple[str, ...]
    exact: bool


def find_caps(root: Path) -> Caps:
    """Read every cap on the memory of this process.

    Args:
        root: where the tree that holds `proc` and the cgroup mounts begins.
    """
    memberships = _read_memberships(root / "proc/self/cgroup")
    if isinstance(memberships, Malformed):
        return Caps(malformed=(memberships,))
    if isinstance(memberships, Unmeasurable):
        return Caps(notes=(f"no cgroup was read: {memberships.why}",))
    mounts = read_mounts(root)
    if isinstance(mounts, Malformed):
        return Caps(malformed=(mounts,))
    if isinstance(mounts, Unmeasurable):
        return Caps(notes=(f"no cgroup was read: {mounts.why}",))
    return _find(root, memberships, mounts)


def _read_memberships(file: Path) -> tuple[_Membership, ...] | Unmeasurable | Malformed:
    content = read_kernel_file(file)
    if not isinstance(content, bytes):
        return content
    found: list[_Membership] = []
    for line in lines_of(content):
        fields = line.split(b":", 2)
        if len(fields) != 3 or not fields[0].isdigit() or not fields[2].startswith(b"/"):
            return Malformed(source=shown(file), why=f"{quoted(line)} is not a cgroup")
        if b"memory" in fields[1].split(b","):
            found.insert(0, _Membership(files=V1, path=os.fsdecode(fields[2])))
        elif fields[0] == b"0":
            found.append(_Membership(files=V2, path=os.fsdecode(fields[2])))
    return tuple(found)


def _find(root: Path, memberships: tuple[_Membership, ...], mounts: tuple[Mount, ...]) -> Caps:
    # A controller is in one hierarchy at a time: where v1 has memory, v2 has none, and v1 comes first here.
    for membership in memberships:
        candidates = [mount for mount in mounts if _shows_memory(mount, membership.files)]
        if candidates:
            return _caps_at(root, membership, _locate(root, membership.path, candidates))
    unseen = [f"the memory cgroup {shown(each.path)} is not mounted: no cap was read" for each in memberships]
    return Caps(notes=tuple(unseen[:1]))


def _shows_memory(mount: Mount, files: Files) -> bool:
    if files is V1:
        return mount.filesystem == "cgroup" and "memory" in mount.options
    return mount.filesystem == "cgroup2"


def _locate(root: Path, path: str, mounts: list[Mount]) -> _Place:
    parts = _parts(path)
    below = [(mount, _below(mount, parts)) for mount in mounts]
    exact = [_Place(mount=mount, parts=rest, exact=True) for mount, rest in below if rest is not None]
    standing = [place for place in exact if _stands(root, place)]
    if standing:
        # Of several views of the same cgroup, the one that shows most of its ancestors.
        return max(standing, key=lambda place: len(place.parts))
    # What the path calls a folder may lie under another name above: try what is left of it, longest first.
    names = tuple(part for part in parts if part != "..")
    tails = [names[start:] for start in range(len(names))]
    for place in (_Place(mount=each, parts=tail, exact=False) for tail in tails for each in mounts):
        if _stands(root, place):
            return place
    return _Place(mount=mounts[0], parts=(), exact=False)


def _below(mount: Mount, parts: tuple[str, ...]) -> tuple[str, ...] | None:
    top = _parts(mount.root)
    rest = parts[len(top) :]
    # A path that leaves the mount upwards has no name here.
    return rest if parts[: len(top)] == top and ".." not in rest else None


def _stands(root: Path, place: _Place) -> bool:
    try:
        return stat.S_ISDIR(_folder(root, place).stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        # It is there, but closed to us: reading its files will say so.
        return True


def _caps_at(root: Path, membership: _Membership, place: _Place) -> Caps:
    levels = _levels(root, membership.files, place)
    found = [each for level in levels for each in caps_of(level)] + list(caps_above(levels[-1]))
    note = (
        f"the cgroup {shown(membership.path)} is not below {shown(place.mount.point)}: "
        f"the caps of {levels[0].path} and above were read"
    )
    return Caps(
        caps=tuple(each for each in found if isinstance(each, Cap)),
        malformed=tuple(dict.fromkeys(each for each in found if isinstance(each, Malformed))),
        notes=() if place.exact else (note,),
    )


def _levels(root: Path, files: Files, place: _Place) -> tuple[Level, ...]:
    levels: list[Level] = []
    top = _parts(place.mount.root)
    for count in range(len(place.parts), -1, -1):
        parts = place.parts[:count]
        folder = _folder(root, _Place(mount=place.mount, parts=parts, exact=place.exact))
        level = Level(files=files, folder=folder, path=shown("/" + "/".join((*top, *parts))))
        if levels and not charges_children(level):
            break
        levels.append(level)
    return tuple(levels)


def _folder(root: Path, place: _Place) -> Path:
    return root.joinpath(*_parts(place.mount.point), *place.parts)


def _parts(path: str) -> tuple[str, ...]:
    return tuple(part for part in path.split("/") if part)
