import random
from collections.abc import Mapping
from pathlib import Path

import pytest
from placewise.models.dataflow import is_denoiser, phase_order, usual_edges
from placewise.models.pipeline import ASSUMED_STEPS, ASSUMED_TOKENS, read_pipeline
from placewise.plans.errors import CheckpointError, InputError
from placewise.plans.pipeline import GivenActivations, Pipeline, UnknownActivations, Workload

from .checkpoints import (
    Tensors,
    refusal,
    write_diffusers,
    write_json,
    write_safetensors,
    write_sharded,
    write_transformers,
)

T: Tensors = {"blocks.0.w": ("F32", (16,)), "blocks.1.w": ("F32", (16,)), "norm": ("F32", (3,))}
FLUX = {"text_encoder": T, "text_encoder_2": T, "transformer": T, "vae": T}
STATED = Workload(steps=4)


def passes(pipeline: Pipeline) -> dict[str, int]:
    return {component.name: component.passes for component in pipeline.components}


class TestOneComponent:
    def test_a_bare_file(self, tmp_path: Path) -> None:
        file = write_safetensors(tmp_path / "weights.safetensors", T)
        pipeline = read_pipeline(file, workload=Workload())
        (component,) = pipeline.components
        assert (pipeline.name, pipeline.edges, pipeline.notes) == ("weights", (), ())
        assert (component.name, component.library, component.class_name) == ("model", None, None)
        assert (component.checkpoint.root, component.passes) == (".", 1)
        assert component.activations == UnknownActivations()

    @pytest.mark.parametrize("given", [".", "model.safetensors.index.json"])
    def test_shards(self, tmp_path: Path, given: str) -> None:
        write_sharded(tmp_path, [T, {"b": ("U8", (1,))}])
        (component,) = read_pipeline(tmp_path / given, workload=Workload()).components
        assert component.tensors == 4
        assert len(component.checkpoint.files) == 2

    def test_a_folder_gives_its_name(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(write_transformers(tmp_path / "bert", T))
        assert read_pipeline(Path("."), workload=Workload()).name == "bert"

    def test_a_transformers_folder(self, tmp_path: Path) -> None:
        (component,) = read_pipeline(write_transformers(tmp_path, T), workload=Workload()).components
        assert (component.library, component.class_name, component.passes) == ("transformers", "BertModel", 1)

    def test_a_diffusers_component(self, tmp_path: Path) -> None:
        write_diffusers(tmp_path, {"unet": T})
        (component,) = read_pipeline(tmp_path / "unet", workload=Workload()).components
        assert (component.library, component.class_name) == ("diffusers", "Any_unet")

    @pytest.mark.parametrize("config", [{}, {"architectures": None}, {"architectures": []}])
    def test_a_configuration_that_names_no_class(self, tmp_path: Path, config: object) -> None:
        write_transformers(tmp_path, T)
        write_json(tmp_path / "config.json", config)
        (component,) = read_pipeline(tmp_path, workload=Workload()).components
        assert (component.library, component.class_name) == (None, None)

    @pytest.mark.parametrize("class_name", ["LlamaForCausalLM", "T5ForConditionalGeneration", "GPT2LMHeadModel"])
    def test_a_generator_runs_once_per_token(self, tmp_path: Path, class_name: str) -> None:
        write_transformers(tmp_path, T, class_name=class_name)
        assert passes(read_pipeline(tmp_path, workload=Workload(tokens=9, steps=3))) == {"model": 9}
        assumed = read_pipeline(tmp_path, workload=Workload())
        assert passes(assumed) == {"model": ASSUMED_TOKENS}
        assert assumed.notes == ("model: tokens to generate not stated, 128 assumed",)


class TestDiffusers:
    def test_components_in_order_of_their_phases(self, tmp_path: Path) -> None:
        pipeline = read_pipeline(write_diffusers(tmp_path, FLUX), workload=STATED)
        assert passes(pipeline) == {"text_encoder": 1, "text_encoder_2": 1, "transformer": 4, "vae": 1}
        assert [component.name for component in pipeline.components] == list(FLUX)
        assert pipeline.edges == (
            ("text_encoder", "transformer"),
            ("text_encoder_2", "transformer"),
            ("transformer", "vae"),
        )
        assert {component.checkpoint.root for component in pipeline.components} == set(FLUX)
        assert {component.class_name for component in pipeline.components} == {f"Any_{name}" for name in FLUX}
        assert pipeline.notes == ("without weights, so not placed: scheduler",)

    def test_order_of_the_index_is_no_matter(self, tmp_path: Path) -> None:
        before = read_pipeline(write_diffusers(tmp_path, FLUX), workload=STATED)
        entries: dict[str, object] = {name: ["diffusers", f"Any_{name}"] for name in reversed(FLUX)}
        write_json(tmp_path / "model_index.json", {"scheduler": ["diffusers", "Any"], **entries})
        assert read_pipeline(tmp_path, workload=STATED) == before

    @pytest.mark.parametrize(("steps", "expected"), [(0, 1), (1, 1), (50, 50)])
    def test_steps_are_the_passes_of_denoisers(self, tmp_path: Path, steps: int, expected: int) -> None:
        pipeline = read_pipeline(write_diffusers(tmp_path, {"unet": T, "vae": T}), workload=Workload(steps=steps))
        assert passes(pipeline) == {"unet": expected, "vae": 1}

    def test_steps_that_are_not_stated_are_assumed_aloud(self, tmp_path: Path) -> None:
        write_diffusers(tmp_path, {"transformer": T, "transformer_2": T}, without_weights=())
        pipeline = read_pipeline(tmp_path, workload=Workload(), passes={"transformer_2": 3})
        assert passes(pipeline) == {"transformer": ASSUMED_STEPS, "transformer_2": 3}
        assert pipeline.notes == ("transformer: sampling steps not stated, 50 assumed",)

    def test_what_the_caller_knows(self, tmp_path: Path) -> None:
        write_diffusers(tmp_path, {"unet": T, "vae": T})
        pipeline = read_pipeline(tmp_path, workload=STATED, passes={"vae": 2}, activation_bytes={"unet": 0})
        assert passes(pipeline) == {"unet": 4, "vae": 2}
        assert [component.activations for component in pipeline.components] == [
            GivenActivations(peak_bytes=0),
            UnknownActivations(),
        ]

    def test_entries_that_are_no_components(self, tmp_path: Path) -> None:
        more: dict[str, object] = {
            "image_encoder": [None, None],
            "half": ["diffusers", None],
            "boundary_ratio": 0.9,
            "flag": True,
            "three": ["a", "b", "c"],
            "_name_or_path": ["diffusers", "hidden"],
        }
        pipeline = read_pipeline(write_diffusers(tmp_path, {"unet": T}, more=more), workload=STATED)
        assert passes(pipeline) == {"unet": 4}
        assert pipeline.notes == ("without weights, so not placed: scheduler",)

    def test_all_that_has_no_weights_is_in_one_note(self, tmp_path: Path) -> None:
        write_diffusers(tmp_path, {"unet": T}, without_weights=("tokenizer", "scheduler"))
        assert read_pipeline(tmp_path, workload=STATED).notes == (
            "without weights, so not placed: scheduler, tokenizer",
        )

    def test_the_index_stands_for_its_folder(self, tmp_path: Path) -> None:
        write_diffusers(tmp_path, {"unet": T, "vae": T})
        assert read_pipeline(tmp_path / "model_index.json", workload=STATED) == read_pipeline(tmp_path, workload=STATED)


@pytest.mark.parametrize("path", ["m/model.safetensors.index.json", "m/model-00001-of-00002.safetensors", "m"])
def test_shards_are_called_after_their_folder(tmp_path: Path, path: str) -> None:
    write_sharded(tmp_path / "m", [T, {"other.weight": ("F32", (2, 2))}])
    assert read_pipeline(tmp_path / path, workload=STATED).name == "m"


class TestRefused:
    def test_a_model_without_its_weights(self, tmp_path: Path) -> None:
        write_diffusers(tmp_path, {"unet": T}, without_weights=("vae",))
        write_json(tmp_path / "vae" / "config.json", {"_class_name": "AutoencoderKL"})
        assert self.refused(tmp_path) == (
            f"{tmp_path / 'vae'}: no safetensors file in it",
            "give the folder that holds the weights, or a pipeline folder with model_index.json",
        )

    def refused(self, path: Path) -> tuple[str, str | None]:
        return refusal(lambda: read_pipeline(path, workload=STATED), CheckpointError)

    def test_no_such_path(self, tmp_path: Path) -> None:
        path = tmp_path / "ghost"
        assert self.refused(path) == (f"{path}: no such file or folder", "give a checkpoint's file or folder")

    def test_a_path_that_no_file_system_takes(self, tmp_path: Path) -> None:
        path = tmp_path / ("x" * 300)
        message, hint = self.refused(path)
        assert message.startswith(str(path))
        assert message.endswith(": File name too long")
        assert hint == "give a pipeline that can be read"

    def test_a_component_without_a_folder(self, tmp_path: Path) -> None:
        write_diffusers(tmp_path, {"unet": T}, more={"vae": ["diffusers", "AutoencoderKL"]})
        assert self.refused(tmp_path) == (
            f"{tmp_path / 'model_index.json'}: component 'vae' has no folder {tmp_path / 'vae'}",
            "download the rest of the pipeline",
        )

    @pytest.mark.parametrize("name", ["../other", "..", ".", "", "unet/below", "a\\b", "/"])
    def test_a_component_outside_the_folder(self, tmp_path: Path, name: str) -> None:
        write_safetensors(tmp_path / "other" / "model.safetensors", T)
        root = write_diffusers(tmp_path / "pipeline", {"unet": T}, more={name: ["diffusers", "Any"]})
        write_safetensors(root / "unet" / "below" / "model.safetensors", T)
        assert self.refused(root) == (
            f"{root / 'model_index.json'}: component '{name}' is no folder's name",
            "do not use this pipeline; an index names folders beside itself",
        )

    @pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.ckpt"])
    def test_pickled_weights_are_not_overlooked(self, tmp_path: Path, name: str) -> None:
        write_diffusers(tmp_path, {"unet": T})
        (tmp_path / "scheduler" / name).touch()
        assert self.refused(tmp_path) == (
            f"{tmp_path / 'scheduler'}: no safetensors file in it, only {name}",
            "convert it with safetensors.torch.save_file; pickled checkpoints cannot be mapped",
        )

    def test_weights_that_were_not_downloaded_are_not_overlooked(self, tmp_path: Path) -> None:
        write_diffusers(tmp_path, {"unet": T, "vae": T})
        file = tmp_path / "vae" / "diffusion_pytorch_model.safetensors"
        file.unlink()
        file.symlink_to("../../blobs/0")
        expected = (f"{file}: No such file or directory", "give a safetensors file that can be read")
        assert self.refused(tmp_path) == expected

    def test_nothing_has_weights(self, tmp_path: Path) -> None:
        write_diffusers(tmp_path, {})
        assert self.refused(tmp_path) == (
            f"{tmp_path}: no component of model_index.json has weights",
            "download the pipeline",
        )

    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            (b"", "Input data was truncated"),
            (b"[]", "Expected `object`, got `array`"),
            (b'{"a": "\xff"}', "Invalid UTF-8 encoded string"),
            (b'{"a": ["\\q", "b"]}', "JSON is malformed: invalid escape character in string (byte 10)"),
            (b'{"a": ' + b"[" * 100_000, "maximum recursion depth exceeded while deserializing an object"),
        ],
        ids=["empty", "array", "utf-8", "escape", "deep"],
    )
    def test_a_broken_model_index(self, tmp_path: Path, content: bytes, reason: str) -> None:
        file = tmp_path / "model_index.json"
        file.write_bytes(content)
        assert self.refused(tmp_path) == (f"{file}: not what such a file holds: {reason}", "download it again")

    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            (b"{", "Input data was truncated"),
            (b'{"architectures": "Bert"}', "Expected `array | null`, got `str` - at `$.architectures`"),
            (b'{"_class_name": 3}', "Expected `str | null`, got `int` - at `$._class_name`"),
        ],
    )
    def test_a_broken_configuration(self, tmp_path: Path, content: bytes, reason: str) -> None:
        file = write_transformers(tmp_path, T) / "config.json"
        file.write_bytes(content)
        assert self.refused(tmp_path) == (f"{file}: not what such a file holds: {reason}", "download it again")


@pytest.mark.parametrize(
    ("given", "activations", "message", "hint"),
    [
        ({"dit": 2}, {}, "passes: there is no component 'dit'", "components are unet, vae"),
        ({"un": 2}, {}, "passes: there is no component 'un'", "components are unet, vae"),
        ({"scheduler": 2}, {}, "passes: there is no component 'scheduler'", "components are unet, vae"),
        ({}, {"unet_2": 2}, "activation bytes: there is no component 'unet_2'", "components are unet, vae"),
        ({"unet": 0}, {}, "passes of 'unet': 0", "give 1 or more"),
        ({}, {"vae": -1}, "activation bytes of 'vae': -1", "give 0 or more"),
    ],
)
def test_what_the_caller_gave_is_checked(
    tmp_path: Path, given: Mapping[str, int], activations: Mapping[str, int], message: str, hint: str
) -> None:
    write_diffusers(tmp_path, {"vae": T, "unet": T})
    expected = (message, hint)
    assert expected == refusal(
        lambda: read_pipeline(tmp_path, workload=STATED, passes=given, activation_bytes=activations), InputError
    )


class TestDataFlow:
    @pytest.mark.parametrize(
        ("names", "edges"),
        [
            (["a"], ()),
            (["vae", "text_encoder"], (("text_encoder", "vae"),)),
            (["text_encoder", "text_encoder_2"], ()),
            (["unet", "prior"], (("prior", "unet"),)),
            (["transformer_2", "transformer", "vae"], (("transformer", "transformer_2"), ("transformer_2", "vae"))),
            (["image_encoder", "unet", "vae"], (("image_encoder", "unet"), ("unet", "vae"))),
            (["unet_encoder", "unet"], (("unet", "unet_encoder"),)),
        ],
    )
    def test_usual_edges(self, names: list[str], edges: tuple[tuple[str, str], ...]) -> None:
        assert usual_edges(names) == edges

    @pytest.mark.parametrize("name", ["unet", "transformer", "transformer_2", "dit", "prior"])
    def test_denoisers(self, name: str) -> None:
        assert is_denoiser(name)

    @pytest.mark.parametrize("name", ["transformer_22", "my_unet", "unets", "vae", "dit_text", ""])
    def test_names_that_only_contain_a_denoiser(self, name: str) -> None:
        assert not is_denoiser(name)

    def test_ties_go_by_name(self) -> None:
        assert phase_order(["z", "b", "a", "c"], [("z", "a")]) == ("b", "c", "z", "a")

    def test_a_cycle(self) -> None:
        names = ["a", "b", "c", "d"]
        edges = [("d", "b"), ("b", "c"), ("c", "b"), ("a", "b")]
        for seed in range(6):
            random.Random(seed).shuffle(names)
            random.Random(seed).shuffle(edges)
            assert refusal(lambda: phase_order(names, edges), InputError) == (
                "the data flow has a cycle: b -> c -> b",
                "give edges that lead one way",
            )

    def test_an_edge_to_itself(self) -> None:
        expected = ("the data flow has a cycle: a -> a", "give edges that lead one way")
        assert refusal(lambda: phase_order(["a"], [("a", "a")]), InputError) == expected

    def test_an_edge_of_an_unknown_component(self) -> None:
        expected = ("the data flow names 'vae', which is no component", "components are ['b', 'unet']")
        assert refusal(lambda: phase_order(["unet", "b"], [("unet", "vae")]), InputError) == expected
