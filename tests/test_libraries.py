"""Models and pipelines of transformers and diffusers, run by their own code over placed weights."""

# The libraries have no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import placewise
import pytest
import torch
from placewise.executor.guards import MappedWeight
from placewise.executor.load import LoadedPipeline
from placewise.plans.errors import ExecutionError
from placewise.plans.policy import Hold, Home, Override
from placewise.plans.units import GIB

from .modules import SIM, machine, overridden
from .pipelines import (
    WORDS,
    clip,
    diffusers,
    diffusion_transformer,
    llama,
    saved,
    seeded,
    stable_diffusion,
    t5,
    transformers,
    vae,
)

pytestmark = pytest.mark.usefixtures("one_thread", "no_grad")

IDS = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
IMAGE = torch.linspace(-1, 1, 3 * 16 * 16).view(1, 3, 16, 16)
PLACES = ("resident", "mapped", "phase", "layer")


def placed(folder: Path, place: str, *components: str) -> LoadedPipeline:
    """Loaded with copies on the CPU, in place on the mapping, or by way of the simulated device."""
    if place in ("resident", "mapped"):
        plan = placewise.plan(folder, machine=machine(GIB if place == "resident" else 0), policy=overridden())
    else:
        hold, home = (Hold.phase, Home.pageable) if place == "phase" else (Hold.layer, Home.mapped)
        overrides = [Override(select=component, hold=hold, home=home) for component in components or ("model",)]
        plan = placewise.plan(folder, machine=machine(GIB, GIB), policy=overridden(*overrides))
        assert {segment.hold for each in plan.placements for segment in each.segments} >= {hold}
    return placewise.load(plan, folder)


def as_placed(plain: Any, model: Any) -> Any:
    """The plain model with each weight as far from a multiple of 64 bytes as the mapped one: kernels depend on it."""
    for name, weight in plain.named_parameters():
        placed = model.get_parameter(name)
        if isinstance(placed, MappedWeight):
            buffer = torch.empty(weight.numel() + 16)
            start = (placed.data_ptr() - buffer.data_ptr()) // 4 % 16
            weight.data = buffer[start : start + weight.numel()].view(weight.shape).copy_(weight)
    return plain


def generated(model: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and, step by step, logits."""
    result = model.generate(
        IDS.to(model.device),
        max_new_tokens=4,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **options,
    )
    return result.sequences.cpu(), torch.stack(result.logits).cpu()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("make", [llama, t5])
def test_generation_gives_the_plain_tokens_and_logits(tmp_path: Path, make: Callable[[], Any], place: str) -> None:
    model = placed(saved(seeded(make), tmp_path), place).library()
    plain = as_placed(seeded(make), model)
    assert (str(model.device), model.dtype) == (SIM if place in ("phase", "layer") else "cpu", torch.float32)
    for options in ({}, {"num_beams": 2}):
        for found, expected in zip(generated(model, **options), generated(plain, **options), strict=True):
            assert torch.equal(found, expected)


def test_generation_is_configured_as_the_folder_says(tmp_path: Path) -> None:
    model = seeded(llama)
    model.generation_config.max_length = 7
    model.generation_config.suppress_tokens = [WORDS - 1]
    loaded = placed(saved(model, tmp_path), "mapped").library()
    assert loaded.generation_config.to_dict() == (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path).generation_config.to_dict()
    )


ENTRIES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "decode": (vae, lambda model: model.decode(IMAGE[:, :1, :8, :8].repeat(1, 4, 1, 1).to(model.device)).sample),
    "encode": (vae, lambda model: model.encode(IMAGE.to(model.device)).latent_dist.mode()),
    "tiled decode": (vae, lambda model: tiled(model).decode(IMAGE.repeat(1, 2, 1, 1)[:, :4].to(model.device)).sample),
    "text features": (clip, lambda model: model.get_text_features(IDS.to(model.device)).pooler_output),
    "image features": (clip, lambda model: model.get_image_features(IMAGE.to(model.device)).pooler_output),
    "language model": (llama, lambda model: model.model(IDS.to(model.device)).last_hidden_state),
    "head": (llama, lambda model: model.lm_head(torch.linspace(-1, 1, 32, device=model.device))),
    "looked up": (llama, lambda model: model(inputs_embeds=model.get_input_embeddings()(IDS.to(model.device))).logits),
    "encoder": (t5, lambda model: model.get_encoder()(IDS.to(model.device)).last_hidden_state),
}


def tiled(model: Any) -> Any:
    model.enable_tiling()
    return model


@pytest.mark.parametrize("place", ["mapped", "phase", "layer"])
@pytest.mark.parametrize("name", ENTRIES)
def test_methods_other_than_forward_find_their_weights(tmp_path: Path, name: str, place: str) -> None:
    """diffusers 5060, 3182, 11443, 2026, 11086: a component used outside of its forward had its weights elsewhere."""
    make, call = ENTRIES[name]
    model = placed(saved(seeded(make), tmp_path), place).library()
    assert torch.equal(call(model).cpu(), call(as_placed(seeded(make), model)))


def painted(pipe: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    options = {"num_inference_steps": 3, "output_type": "np", "generator": torch.Generator().manual_seed(1)}
    if hasattr(pipe, "tokenizer"):
        return pipe("a cat", height=16, width=16, **options).images
    return pipe([1, 3], **options).images


@pytest.fixture(scope="module", params=[stable_diffusion, diffusion_transformer])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved pipeline."""
    path: Path = seeded(request.param, tmp_path_factory.mktemp(request.param.__name__))
    return path


@pytest.fixture(scope="module")
def plain(folder: Path) -> tuple[Any, Any]:
    """The library's own pipeline of that folder, and its images."""
    pipe = diffusers.DiffusionPipeline.from_pretrained(folder)
    return pipe, painted(pipe)


def components_of(folder: Path) -> list[str]:
    return [name for name in ("text_encoder", "transformer", "unet", "vae") if (folder / name).is_dir()]


@pytest.mark.parametrize("place", PLACES)
def test_a_pipeline_of_diffusers_gives_the_plain_images(folder: Path, plain: tuple[Any, Any], place: str) -> None:
    """Also diffusers 13488: what the scheduler makes is on the device that computes."""
    pipeline, images = plain
    loaded = placed(folder, place, *components_of(folder))
    pipe = loaded.library()
    assert type(pipe) is type(pipeline)
    assert pipe.components.keys() == pipeline.components.keys()
    device = torch.device(SIM if place in ("phase", "layer") else "cpu")
    assert (pipe._execution_device, pipe.device, pipe.dtype) == (device, device, torch.float32)
    for _ in range(2):
        assert (painted(pipe) == images).all()
    if "unet" in pipe.components:  # The other pipeline's own code hands its scheduler no device.
        assert pipe.scheduler.timesteps.device == device
    loaded.release()
    assert all(each.resident.weight_bytes == each.resident.always_bytes for each in loaded.components.values())


def test_each_library_object_has_a_scheduler_of_its_own(folder: Path) -> None:
    loaded = placed(folder, "mapped")
    one, other = loaded.library(), loaded.library()
    assert one.scheduler is not other.scheduler
    assert one.vae is other.vae is loaded["vae"]


def test_a_pipeline_stays_on_its_device(tmp_path: Path) -> None:
    """Moving it where it is changes nothing; moving it elsewhere is refused."""
    folder = seeded(diffusion_transformer, tmp_path)
    pipe = placed(folder, "layer", *components_of(folder)).library()
    expected = painted(pipe)
    assert (painted(pipe.to(SIM)) == expected).all()
    with pytest.raises(ExecutionError, match="is released, and to would move it"):
        pipe.to("cpu")


def test_components_on_several_devices_are_no_pipeline_of_diffusers(tmp_path: Path) -> None:
    """diffusers 9450 and PR 14739: its code moves inputs to one device, whichever component they are for."""
    folder = seeded(stable_diffusion, tmp_path)
    loaded = placed(folder, "phase", *components_of(folder))
    first, *others = loaded.plan.placements
    assert first.component == "text_encoder"
    elsewhere = first.model_copy(update={"compute_device": "cpu"})
    plan = loaded.plan.model_copy(update={"placements": (elsewhere, *others)})
    with pytest.raises(ExecutionError) as caught:
        placewise.load(plan, folder).library()
    assert str(caught.value) == (
        f"the pipeline's components compute on cpu, {SIM}, and diffusers' own code on one\n"
        "hint: plan them all on one device, or call the components yourself"
    )


def test_what_diffusers_cannot_build_is_said_with_the_folder(tmp_path: Path) -> None:
    folder = seeded(stable_diffusion, tmp_path)
    loaded = placed(folder, "mapped")
    shutil.rmtree(folder / "scheduler")
    with pytest.raises(ExecutionError) as caught:
        loaded.library()
    message = str(caught.value)
    assert message.startswith(f"diffusers cannot build the pipeline {folder}: ")
    assert message.endswith("\nhint: build it yourself over the modules: PipelineClass(unet=loaded['unet'], ...)")
