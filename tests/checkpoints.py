"""Checkpoints on disk, written by hand: a right header, and data that is a hole in a sparse file."""

import json
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TypeAlias

import pytest
from placewise.plans.errors import InputError

TensorSpec: TypeAlias = tuple[str, tuple[int, ...]]
"""The format's dtype name, and the shape."""

Tensors: TypeAlias = Mapping[str, TensorSpec]


def stored_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """By the number in the dtype's name, which is its bits: an oracle that shares no table with the reader."""
    number = re.search(r"\d+", dtype)
    bits = prod(shape) * (int(number[0]) if number else 8)
    assert bits % 8 == 0, f"{dtype} {shape} does not end at a byte"
    return bits // 8


def entries(tensors: Tensors) -> dict[str, object]:
    """The header's entries for tensors that lie one after another in the given order."""
    parts: dict[str, object] = {}
    begin = 0
    for name, (dtype, shape) in tensors.items():
        end = begin + stored_bytes(dtype, shape)
        parts[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
        begin = end
    return parts


def header_json(parts: object, *, alignment: int = 8) -> bytes:
    """JSON, padded with spaces so that the data after it begins at the alignment."""
    raw = json.dumps(parts).encode()
    return raw + b" " * (-(8 + len(raw)) % alignment)


def write_raw(path: Path, header: bytes, data: int | bytes = 0, *, length: int | None = None) -> Path:
    """Any header, right or wrong, with so many bytes of data. `length` is a false header length."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header) if length is None else length) + header)
        if isinstance(data, bytes):
            file.write(data)
        else:
            file.truncate(8 + len(header) + data)
    return path


def write_safetensors(
    path: Path,
    tensors: Tensors,
    *,
    metadata: Mapping[str, str] | None = None,
    data: bytes | None = None,
    alignment: int = 8,
) -> Path:
    """A sound file. Without `data` it takes a few KiB on disk, however large its tensors are."""
    parts = entries(tensors)
    if metadata is not None:
        parts = {"__metadata__": dict(metadata), **parts}
    size = sum(stored_bytes(*spec) for spec in tensors.values())
    assert data is None or len(data) == size
    return write_raw(path, header_json(parts, alignment=alignment), size if data is None else data)


def shard_name(stem: str, number: int, count: int) -> str:
    return f"{stem}-{number:05}-of-{count:05}.safetensors"


def write_sharded(
    folder: Path, shards: Sequence[Tensors], *, stem: str = "model", index: Mapping[str, str] | None = None
) -> Path:
    """Shards with an index of what they hold, or with the given one instead; an empty one is not written."""
    names = [shard_name(stem, number, len(shards)) for number in range(1, len(shards) + 1)]
    for name, tensors in zip(names, shards, strict=True):
        write_safetensors(folder / name, tensors)
    true_index = {tensor: name for name, tensors in zip(names, shards, strict=True) for tensor in tensors}
    weight_map = true_index if index is None else dict(index)
    if weight_map:
        write_json(folder / f"{stem}.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})
    return folder


def write_json(path: Path, value: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
    return path


def write_transformers(folder: Path, tensors: Tensors, *, class_name: str = "BertModel") -> Path:
    write_safetensors(folder / "model.safetensors", tensors)
    write_json(folder / "config.json", {"architectures": [class_name], "model_type": "any"})
    return folder


def write_diffusers(
    folder: Path,
    components: Mapping[str, Tensors],
    *,
    without_weights: Sequence[str] = ("scheduler",),
    more: Mapping[str, object] | None = None,
) -> Path:
    """A pipeline folder. `more` is added to model_index.json as it is."""
    index: dict[str, object] = {"_class_name": "AnyPipeline", "_diffusers_version": "0.36.0"}
    for name in without_weights:
        index[name] = ["diffusers", "AnyScheduler"]
        write_json(folder / name / f"{name}_config.json", {})
    for name, tensors in components.items():
        index[name] = ["diffusers", f"Any_{name}"]
        write_json(folder / name / "config.json", {"_class_name": f"Any_{name}"})
        write_safetensors(folder / name / "diffusion_pytorch_model.safetensors", tensors)
    write_json(folder / "model_index.json", {**index, **(more or {})})
    return folder


def refusal(read: Callable[[], object], kind: type[InputError]) -> tuple[str, str | None]:
    """Message and hint of the one error that `read` ends with, with no other error behind it."""
    with pytest.raises(InputError) as caught:
        read()
    assert type(caught.value) is kind
    assert caught.value.__cause__ is None
    return caught.value.message, caught.value.hint
