"""Sparse checkpoints of real shape: sound headers and no data, so that any size takes a few MiB of disk."""

import json
import struct
from collections.abc import Iterable
from pathlib import Path

GIB = 1 << 30


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


def video_dit(path: Path, *, blocks: int = 60, gib: float = 61.73) -> int:
    """One bf16 file of equal blocks and a fixed part, of that size; returns its bytes."""
    hidden = 6144
    block = [("attn.qkv.weight", (3 * hidden, hidden)), ("attn.out.weight", (hidden, hidden))]
    left = int(gib * GIB) - blocks * sum(2 * rows * columns for _, (rows, columns) in block)
    rows = left // (2 * 2 * hidden) // blocks
    block += [("mlp.up.weight", (rows, hidden)), ("mlp.down.weight", (hidden, rows))]
    shapes = [(f"blocks.{number}.{name}", shape) for number in range(blocks) for name, shape in block]
    shapes.append(("final.weight", (64, hidden)))
    return write_sparse(path, [(name, "BF16", shape, 2 * shape[0] * shape[1]) for name, shape in shapes])
