"""Laws of new values: any sequence of updates and passes is that of the plain module, and the files never change."""

import hashlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from unittest.mock import patch

import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from placewise.executor.layout import Stored, as_stored, extents, pack
from placewise.executor.load import LoadedPipeline
from placewise.executor.transport import Route, leave_out
from placewise.models.headers import READ_ALIGNMENT
from placewise.plans.policy import Home
from torch import nn

from ..modules import build, load
from .test_reader_laws import Case, cases, planned, save, stored_layers


class Way(Enum):
    """How a weight comes by a new value."""

    tensor = auto()
    function = auto()
    parameter = auto()


@dataclass(frozen=True, kw_only=True)
class Update:
    """New values for weights, chosen by numbers that are taken modulo how many there are."""

    weights: tuple[int, ...]
    way: Way
    seed: int


PASS, RELEASE = "pass", "release"
STEPS = st.lists(
    st.one_of(
        st.just(PASS),
        st.just(PASS),
        st.just(RELEASE),
        st.builds(
            Update,
            weights=st.lists(st.integers(0, 40), min_size=1, max_size=4).map(tuple),
            way=st.sampled_from(Way),
            seed=st.integers(0, 99),
        ),
    ),
    min_size=2,
    max_size=7,
)


def new_value(old: torch.Tensor, seed: int) -> torch.Tensor:
    return torch.randn(old.shape, generator=torch.Generator().manual_seed(seed)).to(old.dtype)


def doubled(old: torch.Tensor) -> torch.Tensor:
    """Writes what it is given, as a merge may."""
    return old.copy_((old.to(torch.float64) * 2).to(old.dtype))


def names_of(module: nn.Module) -> dict[str, list[str]]:
    """All names of each weight, by the first."""
    names: dict[int, list[str]] = {}
    for name, weight in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(weight), []).append(name)
    return {each[0]: each for each in names.values()}


def put(module: nn.Module, names: list[str], value: torch.Tensor) -> None:
    """Assign a new parameter at all names of a weight."""
    parameter = nn.Parameter(value, requires_grad=False)
    for name in names:
        owner, _, attribute = name.rpartition(".")
        module.get_submodule(owner).register_parameter(attribute, parameter)


def pipeline_name(pipeline: LoadedPipeline, stored: str) -> str:
    return pipeline.components["model"].resident.bindings[stored].name


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@given(case=cases(), steps=STEPS)
@settings(max_examples=40, deadline=None)
def test_any_sequence_of_updates_and_passes_is_that_of_the_plain_module(case: Case, steps: list[str | Update]) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        torch.no_grad(),
        patch("placewise.executor.transport.in_page_cache", return_value=case.cached),
    ):
        path = save(case, Path(folder))
        before = digests(path.parent)
        plain, x = build(case.make), torch.ones(2, dtype=torch.float64)
        pipeline = load(planned(case, path), path, case.make)
        device, names = pipeline.device("model"), names_of(plain)
        ever_changed = set[str]()
        for step in [*steps, PASS]:
            if step == PASS:
                assert torch.equal(pipeline["model"](x.to(device)).cpu(), plain(x))
            elif isinstance(step, Update):
                changed = {list(names)[number % len(names)] for number in step.weights}
                ever_changed |= changed
                event(step.way.name)
                changes: dict[str, torch.Tensor | Callable[[torch.Tensor], torch.Tensor]] = {}
                for name in sorted(changed):
                    old = plain.get_parameter(name)
                    new = doubled(old.clone()) if step.way is Way.function else new_value(old, step.seed)
                    old.copy_(new)
                    changes[name] = doubled if step.way is Way.function else new
                    if step.way is Way.parameter:
                        put(pipeline["model"], names[name], new.to(device, copy=True))
                if step.way is not Way.parameter:
                    pipeline.update("model", changes)
            else:
                pipeline.release()
        found = dict(pipeline.components["model"].weights())
        assert found.keys() == names.keys()
        for name, weight in found.items():
            assert torch.equal(weight.cpu().to(torch.float64), plain.get_parameter(name).to(torch.float64))
        for unit in pipeline.components["model"].units:
            changed_here = {name for name in unit.source if pipeline_name(pipeline, name) in ever_changed}
            if unit.home in (Home.mapped, Home.locked):
                assert unit.replaced == changed_here
                assert set(unit.on_file) == set(unit.source) - changed_here
        assert digests(path.parent) == before


@given(case=stored_layers(), data=st.data())
@settings(max_examples=200)
def test_what_is_left_out_is_read_only_with_what_it_shares_blocks_with(
    case: tuple[Stored, list[str], list[str]], data: st.DataObject
) -> None:
    stored, _, own = case
    packed = pack({name: entry for name, (_, entry) in stored.items()}, own)
    reads = extents(packed, stored)
    layout = as_stored(packed, stored, reads)
    assert layout is not None
    first = st.integers(0, len(own)).map(lambda count: set(own[:count]))
    names = data.draw(first | st.sets(st.sampled_from(own)) if own else first)
    rest = leave_out(Route(layout=layout, reads=reads, in_blocks=True), stored, names)
    left = [name for name in own if name not in names]
    assert [(read.path, read.offset, read.nbytes) for read in rest.reads] == [
        (read.path, read.offset, read.nbytes)
        for read in extents(pack({name: entry for name, (_, entry) in stored.items()}, left), stored)
    ]
    # Each byte that is read comes to where the whole route would have brought it.
    for read in rest.reads:
        (whole,) = (
            each for each in reads if each.path == read.path and each.offset <= read.offset < each.offset + each.nbytes
        )
        assert read.at - whole.at == read.offset - whole.offset
        assert read.at % READ_ALIGNMENT == 0
    assert bool(rest.reads) == any(stored[name][1].nbytes for name in left)
