from collections.abc import Iterable
from pathlib import Path

import pytest
from placewise.models.checkpoint import read_checkpoint
from placewise.models.inventory import component_of
from placewise.models.layers import Layout, find_layers, layer_prefix
from placewise.plans.pipeline import Component, LayerSize, Stack, UnknownActivations

from .checkpoints import Tensors, write_safetensors, write_sharded


def stacks(names: Iterable[str]) -> dict[str, int]:
    return {stack.name: len(stack.layers) for stack in find_layers(names).stacks}


def numbered(prefix: str, numbers: Iterable[int], suffix: str = "weight") -> list[str]:
    return [f"{prefix}.{number}.{suffix}" for number in numbers]


class TestStacks:
    @pytest.mark.parametrize("name", ["model.layers", "blocks", "encoder.block", "a.b_c.D", "transformer.h"])
    def test_a_list_under_any_name(self, name: str) -> None:
        layout = find_layers([*numbered(name, range(3)), "norm.weight"])
        assert [(stack.name, len(stack.layers)) for stack in layout.stacks] == [(name, 3)]
        assert layout.fixed == ("norm.weight",)

    def test_two_lists_side_by_side(self) -> None:
        names = numbered("double_blocks", range(2)) + numbered("single_blocks", range(4))
        assert stacks(names) == {"double_blocks": 2, "single_blocks": 4}

    def test_the_component_itself_is_the_list(self) -> None:
        layout = find_layers(["1.weight", "0.weight", "0.bias"])
        assert [(stack.name, stack.layers) for stack in layout.stacks] == [
            ("", (("0.bias", "0.weight"), ("1.weight",)))
        ]
        assert layout.fixed == ()

    def test_layers_stand_by_number_and_not_by_text(self) -> None:
        (stack,) = find_layers(numbered("blocks", range(12))).stacks
        assert [layer[0] for layer in stack.layers] == numbered("blocks", range(12))

    def test_order_of_the_names_is_no_matter(self) -> None:
        names = numbered("b", range(11), "w") + numbered("a", range(3), "w") + ["z", "c.0.w"]
        assert find_layers(reversed(names)) == find_layers(names)

    def test_prefix_of_a_layer(self) -> None:
        assert (layer_prefix("blocks", 12), layer_prefix("", 3)) == ("blocks.12", "3")


class TestNested:
    def test_a_list_inside_a_layer_belongs_to_the_layer(self) -> None:
        names = [f"layers.{layer}.experts.{expert}.w" for layer in range(2) for expert in range(8)]
        (stack,) = find_layers(names).stacks
        assert stack.name == "layers"
        assert [len(layer) for layer in stack.layers] == [8, 8]

    def test_a_list_of_the_same_name_inside_is_no_stack_of_its_own(self) -> None:
        names = [f"blocks.{outer}.blocks.{inner}.w" for outer in range(3) for inner in range(2)]
        assert stacks(names) == {"blocks": 3}

    def test_a_single_element_is_looked_into(self) -> None:
        names = [f"towers.0.blocks.{number}.w" for number in range(3)] + ["towers.0.norm.w"]
        layout = find_layers(names)
        assert [(stack.name, len(stack.layers)) for stack in layout.stacks] == [("towers.0.blocks", 3)]
        assert layout.fixed == ("towers.0.norm.w",)

    def test_single_elements_all_the_way_down(self) -> None:
        assert find_layers(["0.0.0.w"]) == Layout(stacks=(), fixed=("0.0.0.w",))

    def test_two_lists_that_differ_in_a_number_above(self) -> None:
        names = [f"parts.{part}.blocks.{number}.w" for part in (1, 3) for number in range(2)]
        assert stacks(names) == {"parts.1.blocks": 2, "parts.3.blocks": 2}

    def test_lists_of_lists(self) -> None:
        assert stacks([f"0.{number}.w" for number in range(4)]) == {"0": 4}


class TestNoStack:
    @pytest.mark.parametrize("numbers", [[0, 2], [1, 2], [0, 1, 3], [5], [0, 10**8]])
    def test_gaps(self, numbers: list[int]) -> None:
        names = numbered("net", numbers)
        assert find_layers(names) == Layout(stacks=(), fixed=tuple(sorted(names)))

    @pytest.mark.parametrize(
        "names",
        [
            ["blocks.00.w", "blocks.01.w"],
            ["blocks.0.w", "blocks.01.w"],
            ["blocks.0", "blocks.1"],
            ["blocks.-1.w", "blocks.0.w"],
            ["blocks0.w", "blocks1.w"],
            ["blocks.0x.w", "blocks.1x.w"],
            ["blocks.0.w", "blocks.\u0661.w"],
            ["blocks.0.w", f"blocks.{'1' * 5000}.w"],
        ],
        ids=["zeros", "one-zero", "parameters", "negative", "glued", "suffixed", "arabic", "5000-digits"],
    )
    def test_what_is_no_number(self, names: list[str]) -> None:
        assert find_layers(names) == Layout(stacks=(), fixed=tuple(sorted(names)))

    def test_a_digit_of_another_script_is_no_digit(self) -> None:
        names = [*numbered("blocks", range(12)), "blocks.1\u0661.weight"]
        assert find_layers(names).fixed == ("blocks.1\u0661.weight",)

    def test_an_empty_word_is_no_module(self) -> None:
        assert find_layers(["0.a", "1.a", ".0.a", "b..0.a", "b..1.a"]).fixed == (".0.a", "b..0.a", "b..1.a")

    @pytest.mark.parametrize("name", ["", ".", "0", "0.", ".0.", "a..0.w"])
    def test_odd_names_stand_somewhere(self, name: str) -> None:
        assert find_layers([name]) == Layout(stacks=(), fixed=(name,))

    def test_no_names(self) -> None:
        assert find_layers([]) == Layout(stacks=(), fixed=())


class TestBoundaries:
    def test_a_name_that_begins_another(self) -> None:
        names = numbered("block", range(2)) + numbered("blocks", range(3)) + ["block.norm", "blocks_norm.weight"]
        layout = find_layers(names)
        assert stacks(names) == {"block": 2, "blocks": 3}
        assert layout.fixed == ("block.norm", "blocks_norm.weight")

    def test_a_dot_and_an_underscore(self) -> None:
        assert stacks(numbered("a.b", range(2)) + numbered("a_b", range(3))) == {"a.b": 2, "a_b": 3}

    def test_numbers_that_begin_others(self) -> None:
        (stack,) = find_layers(numbered("blocks", range(11))).stacks
        assert stack.layers[1] == ("blocks.1.weight",)

    def test_a_list_and_a_list_below_its_owner(self) -> None:
        names = numbered("a", range(2)) + numbered("a.b", range(2))
        assert stacks(names) == {"a": 2, "a.b": 2}


def component(folder: Path) -> Component:
    return component_of(
        read_checkpoint(folder),
        name="model",
        model_root=folder,
        library=None,
        class_name=None,
        passes=1,
        activations=UnknownActivations(),
    )


class TestInventory:
    def test_weights_of_layers_and_of_the_rest(self, tmp_path: Path) -> None:
        tensors: Tensors = {
            "embed": ("F32", (10,)),
            "empty": ("F32", (0,)),
            "layers.0.a": ("BF16", (5,)),
            "layers.0.b": ("BOOL", (65,)),
            "layers.1.a": ("BF16", (5,)),
            "layers.1.b": ("BOOL", (65,)),
        }
        write_safetensors(tmp_path / "model.safetensors", tensors)
        found = component(tmp_path)
        assert found.stacks == (
            Stack(
                name="layers",
                layers=2,
                extents=1,
                sizes=(LayerSize(layers=(0, 2), layer_bytes=75, packed_bytes=64 + 128),),
            ),
        )
        assert (found.fixed_bytes, found.fixed_packed_bytes, found.tensors) == (40, 64, 6)
        assert dict(found.dtype_bytes) == {"BF16": 20, "BOOL": 130, "F32": 40}

    def test_unequal_layers_are_runs(self, tmp_path: Path) -> None:
        widths = [64, 64, 128, 64, 64, 64, 63]
        tensors: Tensors = {f"blocks.{number}.w": ("U8", (width,)) for number, width in enumerate(widths)}
        write_safetensors(tmp_path / "model.safetensors", tensors)
        (stack,) = component(tmp_path).stacks
        assert [(run.layers, run.layer_bytes, run.packed_bytes) for run in stack.sizes] == [
            ((0, 2), 64, 64),
            ((2, 3), 128, 128),
            ((3, 6), 64, 64),
            ((6, 7), 63, 64),
        ]

    def test_layers_of_one_size_that_pack_differently_are_two_runs(self, tmp_path: Path) -> None:
        tensors: Tensors = {
            "blocks.0.w": ("U8", (128,)),
            "blocks.1.v": ("U8", (1,)),
            "blocks.1.w": ("U8", (127,)),
        }
        write_safetensors(tmp_path / "model.safetensors", tensors)
        (stack,) = component(tmp_path).stacks
        assert [(run.layer_bytes, run.packed_bytes) for run in stack.sizes] == [(128, 128), (128, 192)]

    def test_a_layer_across_two_shards(self, tmp_path: Path) -> None:
        write_sharded(tmp_path, [{"b.0.w": ("U8", (64,)), "b.1.w": ("U8", (60,))}, {"b.1.v": ("U8", (4,))}])
        (stack,) = component(tmp_path).stacks
        assert [(run.layers, run.layer_bytes, run.packed_bytes) for run in stack.sizes] == [
            ((0, 1), 64, 64),
            ((1, 2), 64, 128),
        ]

    def test_the_files_and_where_they_are(self, tmp_path: Path) -> None:
        facts = read_checkpoint(write_sharded(tmp_path / "unet", [{"a": ("U8", (1,))}, {"b": ("U8", (2,))}]))
        found = component_of(
            facts,
            name="unet",
            model_root=tmp_path,
            library="diffusers",
            class_name="UNet",
            passes=7,
            activations=UnknownActivations(),
        )
        assert found.checkpoint.root == "unet"
        assert [(file.path, file.size_bytes, file.mtime_ns, file.header_sha256) for file in found.checkpoint.files] == [
            (header.path.name, header.size_bytes, header.mtime_ns, header.header_sha256) for header in facts.files
        ]
        assert (found.library, found.class_name, found.passes) == ("diffusers", "UNet", 7)
