"""What safetensors' own reader says of a file: an oracle for ours, and the one home of what it leaves untyped."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

import safetensors
import torch
from placewise.models.headers import read_header
from safetensors import SafetensorError


class _Slice(Protocol):
    def get_dtype(self) -> str: ...
    def get_shape(self) -> Sequence[int]: ...


class _File(Protocol):
    def keys(self) -> Sequence[str]: ...
    def get_slice(self, name: str) -> _Slice: ...
    def get_tensor(self, name: str) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    dtype: str
    shape: tuple[int, ...]
    data: bytes


def _open(path: Path) -> AbstractContextManager[_File]:
    opened: object = safetensors.safe_open(path, "pt")  # pyright: ignore[reportUnknownMemberType]
    return cast("AbstractContextManager[_File]", opened)


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def safetensors_reads(path: Path) -> bool:
    """Whether it takes the file as sound."""
    try:
        with _open(path):
            return True
    except SafetensorError:
        return False


def their_dtypes(path: Path) -> dict[str, str]:
    with _open(path) as file:
        return {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118


def theirs(path: Path) -> dict[str, Stored]:
    with _open(path) as file:
        return {
            name: Stored(
                dtype=file.get_slice(name).get_dtype(),
                shape=tuple(file.get_slice(name).get_shape()),
                data=tensor_bytes(file.get_tensor(name)),
            )
            for name in file.keys()  # noqa: SIM118
        }


def ours(path: Path) -> dict[str, Stored]:
    """The same by our header and the file's own bytes."""
    header, content = read_header(path), path.read_bytes()
    return {
        name: Stored(
            dtype=entry.dtype,
            shape=entry.shape,
            data=content[header.data_start :][slice(*entry.data_offsets)],
        )
        for name, entry in header.tensors.items()
    }
