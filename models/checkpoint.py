"""A checkpoint: the files of one component, found from a file, an index or a folder of shards."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import msgspec

from ..plans.errors import CheckpointError
from ..plans.pipeline import Transform
from .headers import Header, TensorEntry, read_header

_INDEX_SUFFIX = ".safetensors.index.json"
_STEMS = ("model", "diffusion_pytorch_model", "pytorch_model")
"""The names that transformers and diffusers save under, in the order in which they are looked for."""

_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d+)-of-(?P<count>\d+)\.safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformed:
    """What becomes of a stored tensor, step by step, and its entry then, whose offsets are no place in a file."""

    steps: tuple[Transform, ...]
    entry: TensorEntry


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFacts:
    """What the headers say. `tensors` maps each name to its file and entry; every name stands in one file.

    `root` is the folder that the files' relative paths start from. `transforms` has the tensors that the module does
    not have as they are stored.
    """

    root: Path
    files: tuple[Header, ...]
    tensors: dict[str, tuple[Header, TensorEntry]]
    transforms: dict[str, Transformed] = field(default_factory=dict[str, Transformed])

    def wanted(self, name: str) -> TensorEntry:
        """A tensor as the module has it: dtype, shape and bytes."""
        return self.transforms[name].entry if name in self.transforms else self.tensors[name][1]

    @property
    def aliases(self) -> dict[str, str]:
        """Names that share another's storage and were saved once, with the name that was kept."""
        return {name: kept for file in self.files for name, kept in file.aliases.items() if name not in self.tensors}


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def read_checkpoint(path: Path) -> CheckpointFacts:
    """Read all headers of a checkpoint: a `.safetensors` file, an index file, or the folder of either.

    Raises:
        CheckpointError: no such path, nothing to read in it, more than one candidate, an index that does not
            fit its shards, or a file that is not sound.
    """
    try:
        return _read(path)
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or path}: {error.strerror}", hint="give a checkpoint that can be read"
        ) from None


def _read(path: Path) -> CheckpointFacts:
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder", hint="give a checkpoint's file or folder")
    if path.is_dir():
        path = _find(path)
    if path.name.endswith(_INDEX_SUFFIX):
        return _read_indexed(path)
    if path.suffix != ".safetensors":
        raise CheckpointError(
            f"{path}: not a safetensors file",
            hint="convert it with safetensors.torch.save_file; pickled checkpoints cannot be mapped",
        )
    return _facts(path.parent, [read_header(file) for file in _shards_of(path)])


def read_files(root: Path, paths: Iterable[str]) -> CheckpointFacts:
    """Read the headers of files that are known by name, relative to `root`.

    Raises:
        CheckpointError: a file is missing or not sound, or two of them hold the same tensor.
    """
    return _facts(root, [read_header(root / path) for path in paths])


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files and indexes that stand in a folder itself."""
    return _files(folder, (".safetensors", _INDEX_SUFFIX))


def pickled_files(folder: Path) -> list[Path]:
    """The files in a folder itself that hold weights in a form that cannot be mapped."""
    return _files(folder, (".bin", ".pt", ".pth", ".ckpt"))


def _files(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """Links that lead nowhere among them: to skip what was not downloaded would be to weigh it as nothing."""
    return sorted(
        file for file in folder.iterdir() if file.name.endswith(suffixes) and (file.is_file() or file.is_symlink())
    )


def _find(folder: Path) -> Path:
    """The one file that stands for the folder. A library's own name comes first, and what stands beside it is spare."""
    found = {file.name: file for file in weight_files(folder)}
    for stem in _STEMS:
        # One of both is stale, and the libraries do not agree which they take.
        if own := [found[name] for name in (stem + _INDEX_SUFFIX, stem + ".safetensors") if name in found]:
            return _only(folder, own)
    indexes = [file for name, file in found.items() if name.endswith(_INDEX_SUFFIX)]
    wholes = [file for name, file in found.items() if not _SHARD.fullmatch(name) and file not in indexes]
    sharded = {
        (shard["stem"], shard["count"]): file
        for name, file in reversed(found.items())
        if (shard := _SHARD.fullmatch(name))
    }
    for candidates in (indexes, wholes + sorted(sharded.values())):
        if candidates:
            return _only(folder, candidates)
    pickled = pickled_files(folder)
    raise CheckpointError(
        f"{folder}: no safetensors file in it" + (f", only {pickled[0].name}" if pickled else ""),
        hint="convert it with safetensors.torch.save_file; pickled checkpoints cannot be mapped"
        if pickled
        else "give the folder that holds the weights, or a pipeline folder with model_index.json",
    )


def _only(folder: Path, candidates: list[Path]) -> Path:
    if len(candidates) > 1:
        names = ", ".join(file.name for file in candidates)
        raise CheckpointError(f"{folder}: more than one checkpoint: {names}", hint="give the file that you mean")
    return candidates[0]


def _shards_of(path: Path) -> list[Path]:
    """All shards when `path` is one of `name-00001-of-00004.safetensors`; else `path` alone."""
    shard = _SHARD.fullmatch(path.name)
    if shard is None:
        return [path]
    width, count = len(shard["number"]), int(shard["count"])
    if not 1 <= int(shard["number"]) <= count:
        raise CheckpointError(
            f"{path}: no shard has this number: {count} shards are numbered from 1 to {count}",
            hint="give the file another name if it is a whole checkpoint",
        )
    shards: list[Path] = []
    for number in range(1, count + 1):
        name = f"{shard['stem']}-{number:0{width}}-of-{shard['count']}.safetensors"
        if not (path.parent / name).exists():
            raise CheckpointError(
                f"{path.parent}: shard {name} of {count} is missing",
                hint="download the rest of the checkpoint",
            )
        shards.append(path.parent / name)
    return shards


def _read_indexed(index: Path) -> CheckpointFacts:
    weight_map = _weight_map(index)
    # Few files are named by very many tensors: each file is looked at once.
    first_in = {file: name for name, file in reversed(weight_map.items())}
    for file, name in sorted(first_in.items()):
        _check_beside(index, file, name)
    headers = {file: read_header(index.parent / file) for file in sorted(first_in)}
    for name, file in weight_map.items():
        if name not in headers[file].tensors:
            raise CheckpointError(
                f"{index}: tensor '{name}' is said to be in {file}, which does not hold it",
                hint="index and shards are of different checkpoints: download both again",
            )
    return _facts(index.parent, list(headers.values()))


def _check_beside(index: Path, file: str, tensor: str) -> None:
    path = PurePosixPath(file)
    if ".." in path.parts or path.is_absolute() or "\\" in file or not path.parts:
        raise CheckpointError(
            f"{index}: tensor '{tensor}' is said to be in '{file}', outside the checkpoint's folder",
            hint="do not use this checkpoint; an index names files beside itself",
        )
    if not (index.parent / path).is_file():
        raise CheckpointError(
            f"{index}: names {file}, which does not exist", hint="download the rest of the checkpoint"
        )


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    except OSError as error:
        raise CheckpointError(f"{index}: {error.strerror}", hint="give an index that can be read") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise CheckpointError(f"{index}: not an index: {error}", hint="download it again") from None
    if not weight_map:
        raise CheckpointError(f"{index}: names no tensor", hint="download it again")
    return weight_map


def _facts(root: Path, headers: list[Header]) -> CheckpointFacts:
    tensors: dict[str, tuple[Header, TensorEntry]] = {}
    for header in headers:
        for name, entry in header.tensors.items():
            if name in tensors:
                raise CheckpointError(
                    f"{root}: tensor '{name}' stands in both {tensors[name][0].path.name} and {header.path.name}",
                    hint="leave one checkpoint in the folder, or name the file that you mean",
                )
            tensors[name] = (header, entry)
    return CheckpointFacts(root=root, files=tuple(headers), tensors=tensors)
