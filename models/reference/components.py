"""Components of the reference pipeline by class name: from their configuration, and saved with seeded weights."""

# Safetensors' types are partial.
# pyright: reportUnknownVariableType=false

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

import torch
from pydantic import ValidationError
from safetensors.torch import save_file
from torch import nn

from ...plans.errors import InputError
from .config import SIZES, AudioDecoderConfig, Config, TextEncoderConfig, TransformerConfig, VideoDecoderConfig
from .decoders import ReferenceAudioDecoder, ReferenceVideoDecoder
from .text_encoder import ReferenceTextEncoder
from .transformer import ReferenceTransformer

LIBRARY = "placewise"
"""What model_index.json names as the library of these classes."""


class _Kind(NamedTuple):
    module: type[nn.Module]
    config: type[Config]


_KINDS: Mapping[str, _Kind] = {
    "text_encoder": _Kind(ReferenceTextEncoder, TextEncoderConfig),
    "transformer": _Kind(ReferenceTransformer, TransformerConfig),
    "video_vae": _Kind(ReferenceVideoDecoder, VideoDecoderConfig),
    "audio_vae": _Kind(ReferenceAudioDecoder, AudioDecoderConfig),
}


def from_folder(class_name: str, folder: Path) -> nn.Module:
    """A component from its config.json, with whatever weights its classes begin with.

    Raises:
        InputError: there is no such class, or no such configuration of it.
    """
    kind = next((kind for kind in _KINDS.values() if kind.module.__name__ == class_name), None)
    if kind is None:
        raise InputError(
            f"Placewise has no class {class_name}",
            hint=f"its own are {', '.join(each.module.__name__ for each in _KINDS.values())}",
        )
    try:
        return kind.module(kind.config.model_validate_json((folder / "config.json").read_bytes()))
    except (OSError, ValidationError) as error:
        raise InputError(f"{folder / 'config.json'}: not a {class_name}'s: {error}", hint="save it again") from error


def components_of(size: str) -> dict[str, nn.Module]:
    """The components of a named size by name, on meta.

    Raises:
        InputError: no size has this name.
    """
    if size not in SIZES:
        raise InputError(f"the reference pipeline has no size '{size}'", hint=f"sizes are {', '.join(SIZES)}")
    with torch.device("meta"):
        return {name: _KINDS[name].module(config) for name, config in SIZES[size].items()}


def write_index(directory: Path, size: str) -> None:
    """Write model_index.json, and each component's folder with its config.json."""
    directory.mkdir(parents=True, exist_ok=True)
    index: dict[str, object] = {"_class_name": "ReferencePipeline"}
    for name, config in SIZES[size].items():
        index[name] = [LIBRARY, _KINDS[name].module.__name__]
        (directory / name).mkdir(exist_ok=True)
        (directory / name / "config.json").write_text(config.model_dump_json(indent=2))
    (directory / "model_index.json").write_text(json.dumps(index, indent=2))


def save(
    directory: Path, size: str, seed: int, *, dtype: torch.dtype = torch.bfloat16, shard_bytes: int = 1 << 30
) -> None:
    """Write a pipeline of a named size, with weights that depend on the seed and on their names alone.

    Args:
        directory: a folder, made where there is none.
        size: a name of `SIZES`.
        seed: of the weights.
        dtype: of all of them.
        shard_bytes: the most that one file holds, but for a single tensor that is larger; as much memory is taken.

    Raises:
        InputError: no size has this name.
    """
    components = components_of(size)
    write_index(directory, size)
    for name, module in components.items():
        _write_shards(directory / name, name, dict(module.named_parameters()), seed, dtype, shard_bytes)


def _write_shards(
    folder: Path, component: str, parameters: Mapping[str, torch.Tensor], seed: int, dtype: torch.dtype, most: int
) -> None:
    shards: list[list[str]] = [[]]
    left = most
    for name, parameter in parameters.items():
        left -= parameter.numel() * dtype.itemsize
        if left < 0 and shards[-1]:
            shards.append([])
            left = most - parameter.numel() * dtype.itemsize
        shards[-1].append(name)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
        weights = {name: _weight(f"{seed} {component} {name}", parameters[name].shape, dtype) for name in names}
        save_file(weights, folder / file)
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def _weight(key: str, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """Normals: in products and convolutions scaled by what these sum over, in norms about one, in biases about zero."""
    normals = torch.randn(shape, generator=torch.Generator().manual_seed(crc32(key.encode())))
    if normals.ndim > 1:
        normals /= normals[0].numel() ** 0.5
    else:
        normals = normals / 10 + (not key.endswith("bias"))
    return normals.to(dtype)
