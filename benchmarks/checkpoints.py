"""Sparse checkpoints of real shape: sound headers and no data, so that any size takes a few MiB of disk."""

import json
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from placewise.models.reference.components import components_of, write_index

GIB = 1 << 30

MODIFIED_S = 1_700_000_000
"""The files' modification time: it is part of a plan, and plans made from these files are compared."""


def write_sparse(path: Path, tensors: Iterable[tuple[str, str, tuple[int, ...], int]]) -> int:
    """Write a safetensors file of (name, dtype, shape, bytes); returns its size in bytes."""
    entries: dict[str, object] = {}
    end = 0
    for name, dtype, shape, count in tensors:
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": (end, end + count)}
        end += count
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + end)
    return 8 + len(header) + end


def mixture_of_experts(folder: Path, *, tensors: int = 100_000, shards: int = 163, layers: int = 61) -> None:
    """A mixture-of-experts language model of that many bf16 tensors, with its index."""
    folder.mkdir(parents=True, exist_ok=True)
    names = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    experts = (tensors - len(names)) // (3 * layers)
    for layer in range(layers):
        for expert in range(experts):
            prefix = f"model.layers.{layer}.mlp.experts.{expert}"
            names += [f"{prefix}.{part}_proj.weight" for part in ("gate", "up", "down")]
    names += [f"model.layers.{layer % layers}.extra_{layer}.weight" for layer in range(tensors - len(names))]
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        mine = names[shard * len(names) // shards : (shard + 1) * len(names) // shards]
        write_sparse(folder / file, [(name, "BF16", (2048, 1536), 2048 * 1536 * 2) for name in mine])
        weight_map |= dict.fromkeys(mine, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps({"architectures": ["MixtralForCausalLM"]}))


@dataclass(frozen=True, kw_only=True)
class Part:
    """A component of the video pipeline: its class, its stack of equal bf16 layers, and its sizes."""

    library: str
    class_name: str
    stack: str
    layers: int
    total_bytes: int
    fixed_bytes: int


VIDEO_PIPELINE = {
    "text_encoder": Part(
        library="transformers",
        class_name="Qwen3VLForConditionalGeneration",
        stack="model.language_model.layers",
        layers=64,
        total_bytes=int(62.13 * GIB),
        fixed_bytes=4 * GIB,
    ),
    "transformer": Part(
        library="diffusers",
        class_name="H3Transformer3DModel",
        stack="blocks",
        layers=60,
        total_bytes=int(61.73 * GIB),
        fixed_bytes=GIB,
    ),
    "video_vae": Part(
        library="diffusers",
        class_name="H3VideoVAE",
        stack="decoder.up_blocks",
        layers=4,
        total_bytes=2 * GIB,
        fixed_bytes=GIB,
    ),
    "audio_vae": Part(
        library="diffusers",
        class_name="H3AudioVAE",
        stack="decoder.blocks",
        layers=4,
        total_bytes=GIB // 2,
        fixed_bytes=GIB // 4,
    ),
}
"""An H3-sized pipeline. The encoder's and the transformer's totals are published figures; layer counts, fixed parts and
both VAEs are assumptions, chosen to be of the usual order."""


def video_pipeline(folder: Path, *, without: str | None = None, shard_bytes: int = 5 * GIB) -> None:
    """Write that pipeline as a diffusers folder of sparse, sharded checkpoints with a fixed modification time.

    Args:
        folder: is made.
        without: a component that is left out.
        shard_bytes: the most that a file has.
    """
    scheduler = ["diffusers", "FlowMatchEulerDiscreteScheduler"]
    index: dict[str, object] = {"_class_name": "H3Pipeline", "scheduler": scheduler}
    (folder / "scheduler").mkdir(parents=True)
    for name, part in VIDEO_PIPELINE.items():
        if name == without:
            continue
        index[name] = [part.library, part.class_name]
        (folder / name).mkdir()
        key = "architectures" if part.library == "transformers" else "_class_name"
        config = {key: [part.class_name] if key == "architectures" else part.class_name}
        (folder / name / "config.json").write_text(json.dumps(config))
        _write_shards(folder / name, _tensors(part), shard_bytes)
    (folder / "model_index.json").write_text(json.dumps(index))
    for file in folder.rglob("*.safetensors"):
        os.utime(file, (MODIFIED_S, MODIFIED_S))


def reference_pipeline(folder: Path) -> None:
    """Write the reference pipeline of the size `full`: real names and shapes, each component one sparse file."""
    write_index(folder, "full")
    for name, module in components_of("full").items():
        shapes = ((key, tuple(weight.shape), 2 * weight.numel()) for key, weight in module.named_parameters())
        write_sparse(folder / name / "model.safetensors", [(key, "BF16", shape, size) for key, shape, size in shapes])


def _tensors(part: Part) -> list[tuple[str, int]]:
    """Names and bytes: four tensors a layer, and one for the fixed part."""
    layer = (part.total_bytes - part.fixed_bytes) // part.layers // 512 * 512
    weights = ("attn.qkv", "attn.out", "mlp.up", "mlp.down")
    tensors = [
        (f"{part.stack}.{number}.{weight}.weight", layer // 4) for number in range(part.layers) for weight in weights
    ]
    return [*tensors, ("embed.weight", (part.total_bytes - layer * part.layers) // 512 * 512)]


def _write_shards(folder: Path, tensors: list[tuple[str, int]], shard_bytes: int) -> None:
    shards: list[list[tuple[str, int]]] = [[]]
    for name, count in tensors:
        if shards[-1] and sum(size for _, size in shards[-1]) + count > shard_bytes:
            shards.append([])
        shards[-1].append((name, count))
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        write_sparse(folder / file, [(name, "BF16", (count // 2,), count) for name, count in shard])
        weight_map |= {name: file for name, _ in shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def drop_pages(path: Path) -> None:
    """Take a file out of the page cache, so that whoever reads it next pays for that, and is charged."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
