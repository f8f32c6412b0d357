"""Laws of the host's memory over trees of nested caps, against an oracle that knows only the arithmetic."""

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from placewise.plans.machine import Host, Malformed, Measured

from ..hosts import GIB, HostTree, Use, available, total, v1_tree, v2_tree

MACHINE = 256 * GIB
bytes_up_to_machine = st.integers(0, MACHINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cgroup:
    limit: int | None
    high: int | None
    use: Use


@dataclass(frozen=True, slots=True, kw_only=True)
class Nest:
    """`levels[0]` is the outermost; this process is in the last one."""

    version: str
    levels: tuple[Cgroup, ...]
    psutil_available: int


uses = st.builds(
    Use,
    anonymous=bytes_up_to_machine,
    inactive_file=bytes_up_to_machine,
    active_file=bytes_up_to_machine,
    shmem=bytes_up_to_machine,
    unevictable=bytes_up_to_machine,
)
limits = st.none() | bytes_up_to_machine
cgroups = st.builds(Cgroup, limit=limits, high=limits, use=uses)
nests = st.builds(
    Nest,
    version=st.sampled_from(["v1", "v2"]),
    levels=st.lists(cgroups, max_size=5).map(tuple),
    psutil_available=bytes_up_to_machine,
)


def caps_on(nest: Nest, level: Cgroup) -> list[int]:
    both = [level.limit] if nest.version == "v1" else [level.limit, level.high]
    return [cap for cap in both if cap is not None]


def hard(use: Use) -> int:
    return use.anonymous + use.shmem + use.unevictable


def expected_available(nest: Nest) -> int:
    headrooms = [cap - hard(level.use) for level in nest.levels for cap in caps_on(nest, level)]
    return max(0, min([nest.psutil_available, *headrooms]))


def build(nest: Nest, root: Path) -> HostTree:
    names = [f"g{depth}" for depth in range(len(nest.levels))]
    tree = HostTree(root)
    (v1_tree if nest.version == "v1" else v2_tree)(tree, "/" + "/".join(names))
    for depth, level in enumerate(nest.levels):
        path = "/" + "/".join(names[: depth + 1])
        if nest.version == "v1":
            limit = level.limit if level.limit is not None else 2**63 - 4096
            tree.v1(path, limit=limit, use=level.use, own=Use())
        else:
            limits = ["max" if cap is None else cap for cap in (level.limit, level.high)]
            tree.v2(path, limit=limits[0], high=limits[1], use=level.use)
    return tree


def measure(nest: Nest) -> Host:
    with tempfile.TemporaryDirectory() as folder:
        tree = build(nest, Path(folder))
        return tree.measure(total=MACHINE, available=nest.psutil_available)


@given(nests)
@settings(deadline=None)
def test_available_is_the_smallest_headroom(nest: Nest) -> None:
    assert available(measure(nest)) == expected_available(nest)


@given(nests)
@settings(deadline=None)
def test_never_more_than_the_machine_has(nest: Nest) -> None:
    host = measure(nest)
    assert 0 <= available(host) <= nest.psutil_available
    assert total(host) == min([MACHINE, *(cap for level in nest.levels for cap in caps_on(nest, level))])


@given(nests)
@settings(deadline=None)
def test_binding_names_the_figure_that_decided(nest: Nest) -> None:
    host = measure(nest)
    headrooms = {f"cgroup {cap.hierarchy} {cap.path} ({cap.kind})": cap.headroom_bytes for cap in host.caps}
    assert available(host) == {"psutil": nest.psutil_available, **headrooms}[host.binding]
    assert host.available == Measured(value=available(host), source=host.binding)


@given(nests.filter(lambda nest: nest.levels), st.data())
@settings(deadline=None)
def test_a_tighter_cap_never_gives_more(nest: Nest, data: st.DataObject) -> None:
    depth = data.draw(st.integers(0, len(nest.levels) - 1))
    level = nest.levels[depth]
    tighter = data.draw(st.integers(0, MACHINE if level.limit is None else level.limit))
    levels = (*nest.levels[:depth], replace(level, limit=tighter), *nest.levels[depth + 1 :])
    assert available(measure(replace(nest, levels=levels))) <= available(measure(nest))


@given(nests, st.integers(0, MACHINE))
@settings(deadline=None)
def test_page_cache_never_changes_it(nest: Nest, cached: int) -> None:
    levels = tuple(replace(level, use=replace(level.use, inactive_file=cached, active_file=0)) for level in nest.levels)
    assert available(measure(replace(nest, levels=levels))) == available(measure(nest))


@given(nests.filter(lambda nest: nest.levels), st.data(), st.binary(max_size=12))
@settings(deadline=None)
def test_a_limit_is_read_or_refused_but_never_guessed(nest: Nest, data: st.DataObject, content: bytes) -> None:
    names = [f"g{depth}" for depth in range(data.draw(st.integers(1, len(nest.levels))))]
    folder, file = (
        ("sys/fs/cgroup/memory", "memory.limit_in_bytes") if nest.version == "v1" else ("sys/fs/cgroup", "memory.max")
    )
    with tempfile.TemporaryDirectory() as root:
        tree = build(nest, Path(root))
        written = tree.root / folder / "/".join(names) / file
        written.write_bytes(content)
        host = tree.measure(total=MACHINE, available=nest.psutil_available)
    text = content.removesuffix(b"\n")
    if text.strip() == b"max" or (text.isdigit() and text.isascii()):
        assert isinstance(host.available, Measured)
    else:
        assert isinstance(host.available, Malformed)
        assert host.available.source == str(written)
