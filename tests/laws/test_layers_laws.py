"""Laws of the division into layers, and of what the parts weigh."""

import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from placewise.models.checkpoint import read_checkpoint
from placewise.models.headers import PACK_ALIGNMENT
from placewise.models.inventory import component_of
from placewise.models.layers import Layout, find_layers, layer_prefix
from placewise.plans.pipeline import Component, LayerSize, UnknownActivations

from ..checkpoints import Tensors, stored_bytes, write_safetensors

# Few words and small numbers, so that stacks, gaps, nesting and names that begin others are common.
words = st.sampled_from(["a", "b", "a_b", "blocks", "block", "00", "01", "\u0661", ""])
numbers = st.integers(0, 3).map(str) | st.sampled_from(["10", "11"])
free_names = st.lists(words | numbers, max_size=6).map(".".join) | st.text(max_size=8)


@st.composite
def repeated(draw: st.DrawFn) -> list[str]:
    """The names of a list of layers, with a name of its own and some layers unlike the others."""
    prefix = draw(st.lists(words | numbers, max_size=2))
    parameters = draw(st.lists(st.lists(words | numbers, min_size=1, max_size=3), min_size=1, max_size=3))
    layers = range(draw(st.integers(1, 12)))
    names = [".".join([*prefix, str(layer), *parameter]) for layer in layers for parameter in parameters]
    return draw(st.lists(st.sampled_from(names), max_size=3)) if draw(st.integers(0, 4)) == 0 else names


@st.composite
def name_sets(draw: st.DrawFn) -> list[str]:
    lists = draw(st.lists(repeated(), max_size=3))
    free = draw(st.lists(free_names, max_size=8))
    return draw(st.permutations(sorted({*free, *(name for names in lists for name in names)})))


sizes = st.one_of(
    st.tuples(st.sampled_from(["U8", "BOOL"]), st.tuples(st.integers(0, 200))),
    st.tuples(st.sampled_from(["F32", "BF16", "F8_E4M3"]), st.lists(st.integers(0, 9), max_size=3).map(tuple)),
    st.just(("F4", (64,))),
)


@st.composite
def tensor_sets(draw: st.DrawFn) -> Tensors:
    return {name: draw(sizes) for name in draw(name_sets()) if name != "__metadata__"}


def layers_of(layout: Layout) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each layer's prefix and names."""
    for stack in layout.stacks:
        for number, names in enumerate(stack.layers):
            yield layer_prefix(stack.name, number), names


def weighed(tensors: Tensors) -> Component:
    with tempfile.TemporaryDirectory() as folder:
        write_safetensors(Path(folder) / "model.safetensors", tensors)
        return component_of(
            read_checkpoint(Path(folder)),
            name="model",
            model_root=Path(folder),
            library=None,
            class_name=None,
            passes=1,
            activations=UnknownActivations(),
        )


def runs_of(component: Component) -> list[LayerSize]:
    return [run for stack in component.stacks for run in stack.sizes]


def count(run: LayerSize) -> int:
    return run.layers[1] - run.layers[0]


@given(name_sets())
@settings(deadline=None)
def test_every_name_stands_in_exactly_one_place(names: list[str]) -> None:
    layout = find_layers(names)
    placed = [name for _, layer in layers_of(layout) for name in layer]
    assert sorted([*placed, *layout.fixed]) == sorted(names)


@given(name_sets(), st.randoms(use_true_random=False))
@settings(deadline=None)
def test_order_of_the_names_does_not_matter(names: list[str], chance: Random) -> None:
    shuffled = list(names)
    chance.shuffle(shuffled)
    assert find_layers(shuffled) == find_layers(names)


@given(name_sets())
@settings(deadline=None)
def test_a_layer_holds_all_names_below_its_prefix_and_no_others(names: list[str]) -> None:
    for prefix, layer in layers_of(find_layers(names)):
        assert layer
        assert sorted(layer) == sorted(name for name in names if name.startswith(prefix + "."))


@given(name_sets())
@settings(deadline=None)
def test_stacks_have_at_least_two_layers_and_names_of_their_own(names: list[str]) -> None:
    stacks = find_layers(names).stacks
    assert all(len(stack.layers) >= 2 for stack in stacks)
    assert len({stack.name for stack in stacks}) == len(stacks)


@given(name_sets())
@settings(deadline=None)
def test_no_stack_stands_in_a_layer_of_another(names: list[str]) -> None:
    layout = find_layers(names)
    prefixes = [prefix + "." for prefix, _ in layers_of(layout)]
    for stack in layout.stacks:
        assert not any((stack.name + ".").startswith(prefix) for prefix in prefixes)


@given(tensor_sets())
@settings(deadline=None, max_examples=60)
def test_stored_bytes_of_the_parts_are_those_of_the_tensors(tensors: Tensors) -> None:
    component = weighed(tensors)
    total = sum(stored_bytes(*spec) for spec in tensors.values())
    assert sum(run.layer_bytes * count(run) for run in runs_of(component)) + component.fixed_bytes == total
    assert sum(component.dtype_bytes.values()) == total
    assert component.tensors == len(tensors)


@given(tensor_sets())
@settings(deadline=None, max_examples=60)
def test_packing_adds_less_than_one_boundary_per_tensor(tensors: Tensors) -> None:
    component = weighed(tensors)
    stored = sum(stored_bytes(*spec) for spec in tensors.values())
    runs = runs_of(component)
    packed = sum(run.packed_bytes * count(run) for run in runs) + component.fixed_packed_bytes
    assert stored <= packed <= stored + (PACK_ALIGNMENT - 1) * len(tensors)
    assert all(run.packed_bytes % PACK_ALIGNMENT == 0 for run in runs)


@given(tensor_sets())
@settings(deadline=None, max_examples=60)
def test_runs_cover_a_stack_and_neighbours_differ(tensors: Tensors) -> None:
    for stack in weighed(tensors).stacks:
        assert stack.sizes[0].layers[0] == 0
        assert stack.sizes[-1].layers[1] == stack.layers
        for before, after in pairwise(stack.sizes):
            assert before.layers[1] == after.layers[0]
            assert (before.layer_bytes, before.packed_bytes) != (after.layer_bytes, after.packed_bytes)
