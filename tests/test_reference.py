"""The reference pipeline: what it computes, its files, and that a plan changes none of its bits."""

# Torch's own types are partial here, and safetensors'.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import placewise
import psutil
import pytest
import torch
from placewise.benchmarks.checkpoints import reference_pipeline
from placewise.executor.guards import MappedWeight, plain
from placewise.executor.procmaps import snapshot_maps
from placewise.executor.report import run_samples
from placewise.models.pipeline import read_pipeline
from placewise.models.reference.components import components_of, from_folder, save
from placewise.models.reference.config import SIZES, TransformerConfig
from placewise.models.reference.pipeline import ReferencePipeline
from placewise.planner.tracing.trace import trace_pipeline
from placewise.plans.document import Fits, Plan
from placewise.plans.errors import ExecutionError, InputError
from placewise.plans.pipeline import TracedActivations, Workload
from placewise.plans.policy import Hold, Home, Override
from placewise.plans.units import GIB, KIB, MIB
from placewise.policies.presets import PRESETS
from safetensors.torch import load_file
from torch import nn

from .modules import SIM, machine, overridden
from .questions import measured

pytestmark = pytest.mark.usefixtures("no_grad", "one_thread")

NAMES = ("text_encoder", "transformer", "video_vae", "audio_vae")
IDS = torch.tensor([[1, 95, 3, 4, 5], [6, 7, 8, 95, 95]])
IMAGES: dict[str, Any] = {
    "patches": torch.linspace(-1, 1, 12 * 48).view(12, 48).bfloat16(),
    "grids": ((2, 4), (2, 2)),
}
SIZE: dict[str, Any] = {"height": 8, "width": 12, "frames": 5, "steps": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("reference") / "tiny"
    save(made, "tiny", seed=3)
    return made


def plain_pipeline(folder: Path) -> ReferencePipeline:
    """Ordinary modules with ordinary weights."""
    index: dict[str, list[str]] = json.loads((folder / "model_index.json").read_text())
    modules: dict[str, nn.Module] = {}
    for name in NAMES:
        modules[name] = from_folder(index[name][1], folder / name).bfloat16().eval()
        modules[name].load_state_dict(load_file(folder / name / "model.safetensors"))
    return ReferencePipeline(components=modules, devices=dict.fromkeys(NAMES, torch.device("cpu")))


@pytest.fixture(scope="module")
def expected(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    return plain_pipeline(folder)(IDS, **IMAGES, **SIZE, seed=7)


def test_shapes_and_what_the_outputs_depend_on(folder: Path, expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    pipeline = plain_pipeline(folder)
    video, sound = expected
    assert (video.shape, video.dtype) == ((2, 3, 5, 8, 12), torch.bfloat16)
    assert (sound.shape, sound.dtype) == ((2, 2, 3 * 2 * 8), torch.bfloat16)
    assert all(0.05 < each.float().std() < 0.95 for each in expected)
    again = pipeline(IDS, **IMAGES, **SIZE, seed=7)
    others = (
        pipeline(IDS, **IMAGES, **SIZE, seed=8),
        pipeline(IDS.flip(1), **IMAGES, **SIZE, seed=7),
        pipeline(IDS, patches=-IMAGES["patches"], grids=IMAGES["grids"], **SIZE, seed=7),
    )
    for number, each in enumerate(expected):
        assert torch.equal(again[number], each)
        assert not any(torch.equal(other[number], each) for other in others)


def test_packed_sequences_do_not_see_one_another(folder: Path, expected: tuple[torch.Tensor, torch.Tensor]) -> None:
    """The first text with another companion: its noise is the same, and so is what becomes of it."""
    ids = torch.cat((IDS[:1], torch.full((1, 5), 9)))
    found = plain_pipeline(folder)(ids, patches=IMAGES["patches"][:4], grids=((2, 2),), **SIZE, seed=7)
    assert not torch.equal(found[0][1], expected[0][1])
    images = plain_pipeline(folder)(IDS, patches=IMAGES["patches"][:12], grids=((2, 2),) * 3, **SIZE, seed=7)
    torch.testing.assert_close(found[0][0], images[0][0])
    torch.testing.assert_close(found[1][0], images[1][0])


def test_no_frame_and_no_word_depends_on_a_later_one(folder: Path) -> None:
    components = plain_pipeline(folder).components
    latents = torch.randn(1, 8, 4, 2, 3).bfloat16()
    later = latents.clone()
    later[:, :, 2:] += 1
    whole, changed = (components["video_vae"](each) for each in (latents, later))
    assert whole.shape[2] == 7
    assert torch.equal(whole[:, :, :3], changed[:, :, :3])
    assert not torch.equal(whole[:, :, 3], changed[:, :, 3])
    ids = IDS[1:].clone()
    ids[0, 2] = 9
    first, second = (components["text_encoder"](each) for each in (IDS[1:], ids))
    assert torch.equal(first[:, :2], second[:, :2])
    assert (first[:, 2:] != second[:, 2:]).any(-1).all()


def test_no_image_is_nothing_of_the_right_shape_where_the_input_is(folder: Path) -> None:
    plan = placewise.plan(folder, machine=machine(GIB, 8 * MIB), policy="auto")
    encoder: Any = placewise.load(plan, folder)["text_encoder"]
    ids = IDS[:, 2:3].to(SIM)
    empty = encoder.visual(torch.empty((0, 48), dtype=torch.bfloat16, device=SIM), ())
    assert (empty.shape, empty.dtype, str(empty.device)) == ((0, 64), torch.bfloat16, SIM)
    assert torch.equal(encoder(ids, empty.new_empty((0, 48)), ()).cpu(), encoder(ids).cpu())


def test_weights_depend_on_seed_and_name_alone(folder: Path, tmp_path: Path) -> None:
    save(tmp_path / "sharded", "tiny", seed=3, shard_bytes=100 * KIB)
    save(tmp_path / "other", "tiny", seed=4)
    for name in NAMES:
        whole = load_file(folder / name / "model.safetensors")
        shards = sorted((tmp_path / "sharded" / name).glob("*.safetensors"))
        assert len(shards) > 1 or name == "audio_vae"
        assert all(shard.stat().st_size < 108 * KIB or len(load_file(shard)) == 1 for shard in shards)
        joined = {key: weight for shard in shards for key, weight in load_file(shard).items()}
        assert joined.keys() == whole.keys()
        assert all(torch.equal(joined[key], whole[key]) for key in whole)
        other = load_file(tmp_path / "other" / name / "model.safetensors")
        assert not any(torch.equal(other[key], whole[key]) for key in whole)
    sizes = [read_pipeline(path, workload=Workload()) for path in (folder, tmp_path / "sharded")]
    assert [part.dtype_bytes for part in sizes[0].components] == [part.dtype_bytes for part in sizes[1].components]


def planned(folder: Path, host: int, device: int | None, *overrides: Override) -> Plan:
    given = machine(host, device)
    lockable = given.host.model_copy(update={"memlock": measured(64 * MIB)})
    found = placewise.plan(
        folder,
        machine=given.model_copy(update={"host": lockable}),
        policy=overridden(*overrides),
        activation_bytes=dict.fromkeys(NAMES, 300 * KIB),
    )
    assert isinstance(found.verdict, Fits), found.verdict
    return found


def all_of(home: Home, hold: Hold) -> list[Override]:
    return [Override(select=name, home=home, hold=hold) for name in NAMES]


PLANS: Mapping[str, tuple[int, int | None, list[Override]]] = {
    "copies": (GIB, None, []),
    "a host that is too small": (600 * KIB, None, []),
    "mapped in place": (GIB, None, all_of(Home.mapped, Hold.always)),
    "locked": (GIB, None, all_of(Home.locked, Hold.always)),
    "read into slots": (GIB, None, all_of(Home.mapped, Hold.layer)),
    "a large device": (GIB, 8 * MIB, []),
    "a small device": (GIB, 700 * KIB, []),
    "a small device and no host": (300 * KIB, 700 * KIB, []),
    "component offload": (GIB, 8 * MIB, all_of(Home.pageable, Hold.phase)),
    "two devices": (GIB, 8 * MIB, [Override(select="text_encoder", compute_device="cpu")]),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_changes_no_bit(folder: Path, expected: tuple[torch.Tensor, torch.Tensor], name: str) -> None:
    host, device, overrides = PLANS[name]
    check_bits(planned(folder, host, device, *overrides), folder, expected, SIM if device else "cpu")


@pytest.mark.parametrize("device", [None, MIB], ids=["cpu", "simulated"])
@pytest.mark.parametrize("preset", PRESETS)
def test_i9_no_preset_changes_a_bit(
    folder: Path, expected: tuple[torch.Tensor, torch.Tensor], preset: str, device: int | None
) -> None:
    room: dict[str, int] = dict.fromkeys(NAMES, 300 * KIB)
    plan = placewise.plan(folder, machine=machine(GIB, device), policy=preset, activation_bytes=room)
    check_bits(plan, folder, expected, SIM if device else "cpu")


def check_bits(plan: Plan, folder: Path, expected: tuple[torch.Tensor, torch.Tensor], device: str) -> None:
    """Two requests of a loaded plan are the plain pipeline's, on the plan's device."""
    pipeline = placewise.load(plan, folder).library()
    assert isinstance(pipeline, ReferencePipeline)
    for _ in range(2):
        found = pipeline(IDS, **IMAGES, **SIZE, seed=7)
        for one, other in zip(found, expected, strict=True):
            assert str(one.device) == device
            assert torch.equal(one.cpu(), other)


def test_interleaved_rows_are_a_view_of_the_file(folder: Path) -> None:
    loaded = placewise.load(planned(folder, GIB, None, *all_of(Home.mapped, Hold.always)), folder)
    maps = snapshot_maps()
    assert maps is not None
    weight = loaded["transformer"].get_parameter("blocks.1.attention.qkv.weight")
    rows = weight.view(4, 3, 16, -1)[:, 1]
    assert isinstance(rows, MappedWeight)
    assert maps.file_at(plain(rows).data_ptr()) == str(folder / "transformer" / "model.safetensors")
    stored = load_file(folder / "transformer" / "model.safetensors")["blocks.1.attention.qkv.weight"]
    assert torch.equal(
        plain(rows).flatten(0, 1), torch.cat([stored[48 * head + 16 : 48 * head + 32] for head in range(4)])
    )


def test_the_full_size_is_planned_from_headers_alone(tmp_path: Path) -> None:
    reference_pipeline(tmp_path)
    found = placewise.plan(tmp_path, machine=machine(32 * GIB, 12 * GIB), policy="auto", workload=Workload(steps=50))
    assert isinstance(found.verdict, Fits)
    parts = {part.name: part for part in found.pipeline.components}
    for name, gib in (("text_encoder", 62.13), ("transformer", 61.73)):
        assert parts[name].dtype_bytes["BF16"] == pytest.approx(gib * GIB, rel=0.01)
    transformer = components_of("full")["transformer"]
    fused = sum(2 * weight.numel() for name, weight in transformer.named_parameters() if "qkv" in name)
    assert fused == pytest.approx(11.2 * GIB, rel=0.01)
    stacks = {(part.name, stack.name): stack.layers for part in parts.values() for stack in part.stacks}
    assert stacks == {
        ("text_encoder", "layers"): 64,
        ("text_encoder", "visual.blocks"): 27,
        ("transformer", "blocks"): 60,
        ("video_vae", "blocks"): 4,
        ("audio_vae", "blocks"): 4,
    }
    assert parts["transformer"].passes == 50
    _check_binds(tmp_path)


def _check_binds(full: Path) -> None:
    """On a CPU it binds to its files, and nothing of 125 GiB is copied."""
    overrides = overridden(*all_of(Home.mapped, Hold.always))
    plan = placewise.plan(full, machine=machine(12 * GIB), policy=overrides)
    before = psutil.Process().memory_full_info().uss
    loaded = placewise.load(plan, full)
    assert psutil.Process().memory_full_info().uss - before < 64 * MIB
    for name in NAMES:
        assert all(isinstance(weight, MappedWeight) for weight in loaded[name].parameters())


@pytest.mark.parametrize("size", SIZES)
def test_the_components_of_a_size_go_together(size: str) -> None:
    configs: Mapping[str, Any] = SIZES[size]
    encoder, transformer, video, audio = (configs[name] for name in NAMES)
    assert isinstance(transformer, TransformerConfig)
    assert transformer.text_size == encoder.hidden_size
    assert (transformer.video_channels, transformer.audio_channels) == (video.latent_channels, audio.latent_channels)
    assert transformer.pixels_per_latent == 2 ** len(video.block_channels)
    assert transformer.frames_per_latent == 2**video.time_doublings == audio.frames_per_latent
    assert transformer.audio_per_latent == audio.audio_per_latent
    assert all(stride % 2 == 0 for stride in audio.strides)
    assert encoder.image_token_id < encoder.vocab_size


def test_every_component_is_traced_at_the_shapes_that_the_pipeline_has(folder: Path) -> None:
    workload = Workload(batch=2, tokens=5, height=8, width=12, frames=5, steps=2)
    found = trace_pipeline(read_pipeline(folder, workload=workload), folder, workload)
    peaks = {part.name: part.activations for part in found.components}
    assert all(isinstance(each, TracedActivations) for each in peaks.values())
    assert found.notes == ("text_encoder: traced with text alone for its activations",)


@pytest.mark.parametrize("workload", [Workload(), Workload(batch=2, tokens=5, height=8, width=12, frames=5)])
def test_a_run_passes_through_every_component(folder: Path, workload: Workload) -> None:
    """What the workload states not is small."""
    plan = placewise.plan(folder, machine=machine(GIB, 64 * MIB), workload=workload)
    loaded = placewise.load(plan, folder)
    shapes: dict[str, list[torch.Size]] = {name: [] for name in NAMES}
    for name in NAMES:

        def see(_: object, __: object, output: Any, name: str = name) -> None:
            first: Any = output[0] if isinstance(output, tuple) else output
            shapes[name].append(first.shape)

        loaded[name].register_forward_hook(see)
    ran = run_samples(loaded, 2, record=True)
    assert all(len(ran[name].seconds) == 2 and ran[name].spans for name in NAMES)
    batch, tokens, frames, height, width = (2, 5, 5, 8, 12) if workload.tokens else (1, 16, 9, 64, 64)
    latents = batch * (1 + (frames - 1) // 2) * (height // 4) * (width // 4)
    assert [shapes["text_encoder"][0][:2], shapes["transformer"][0][0]] == [(batch, tokens), latents]
    assert shapes["video_vae"] == [(batch, 3, frames, height, width)] * 2


@pytest.mark.parametrize("name", NAMES)
def test_a_component_alone_is_known_by_its_pipelines_index(folder: Path, name: str) -> None:
    whole = {part.name: part for part in read_pipeline(folder, workload=Workload()).components}
    (alone,) = read_pipeline(folder / name, workload=Workload()).components
    assert (alone.library, alone.class_name) == ("placewise", whole[name].class_name)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"height": 9}, "5 frames of 9 x 12 pixels are no whole latents"),
        ({"frames": 4}, "4 frames of 8 x 12 pixels are no whole latents"),
        ({"frames": -1}, "-1 frames of 8 x 12 pixels are no whole latents"),
        ({"steps": 0}, "0 steps"),
        ({"patches": None}, "the images have 0 patches, their grids 12, and the texts hold 3 places for them"),
        ({"grids": ((2, 3), (2, 3))}, "grids ((2, 3), (2, 3)) are not of whole squares"),
    ],
)
def test_what_cannot_be_made_is_said(folder: Path, changes: dict[str, Any], error: str) -> None:
    with pytest.raises(InputError) as caught:
        plain_pipeline(folder)(IDS, **{**IMAGES, **SIZE, **changes}, seed=7)
    assert caught.value.message == error


def test_a_wrong_size_class_or_configuration_is_said(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no size 'huge'\nhint: sizes are tiny, small, full"):
        save(tmp_path, "huge", seed=0)
    with pytest.raises(InputError, match="Placewise has no class Pipeline"):
        from_folder("Pipeline", folder / "transformer")
    with pytest.raises(InputError, match="not a ReferenceTransformer's"):
        from_folder("ReferenceTransformer", folder / "video_vae")
    (tmp_path / "model_index.json").write_text((folder / "model_index.json").read_text())
    for name in NAMES:
        (tmp_path / name).symlink_to(folder / name)
    plan = placewise.plan(tmp_path, machine=machine(GIB), policy="auto")
    parts = [part.model_copy(update={"library": "elsewhere"}) for part in plan.pipeline.components]
    changed = plan.model_copy(update={"pipeline": plan.pipeline.model_copy(update={"components": tuple(parts)})})
    with pytest.raises(ExecutionError, match="does not say how it is built"):
        placewise.load(changed, tmp_path)
