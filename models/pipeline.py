"""A pipeline, discovered from files: a bare checkpoint, a transformers folder, a diffusers pipeline folder."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from ..plans.errors import CheckpointError, InputError
from ..plans.pipeline import (
    Activations,
    Component,
    GivenActivations,
    Pipeline,
    Transform,
    UnknownActivations,
    Workload,
)
from .checkpoint import CheckpointFacts, pickled_files, read_checkpoint, weight_files
from .dataflow import is_denoiser, is_generator, phase_order, usual_edges
from .inventory import component_of

ASSUMED_STEPS = 50
"""Sampling steps where the workload states none: the default of diffusers' own pipelines."""

ASSUMED_TOKENS = 128
"""Generated tokens where the workload states none."""

_T = TypeVar("_T")


class _Config(msgspec.Struct):
    architectures: list[str] | None = None
    diffusers_class: str | None = msgspec.field(default=None, name="_class_name")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """One component before it is weighed."""

    name: str
    library: str | None
    class_name: str | None
    facts: CheckpointFacts


def read_pipeline(
    path: Path,
    *,
    workload: Workload,
    passes: Mapping[str, int] | None = None,
    activation_bytes: Mapping[str, int] | None = None,
    transforms: Mapping[str, Sequence[Transform]] | None = None,
) -> Pipeline:
    """The pipeline at `path`, from headers and configuration files only.

    Args:
        path: a safetensors file, an index, a folder with either, or a folder with model_index.json.
        workload: gives each component its passes per request.
        passes: overrides of that, by component.
        activation_bytes: peak live activation bytes of one pass, by component, where they are known.
        transforms: of stored tensors on their way to the module, by component; of one tensor in their order.

    Raises:
        CheckpointError: nothing that can be read is there, or it is not sound.
        InputError: an argument names no component or tensor of the pipeline, or gives no possible number, or a tensor
            cannot be transformed so.
    """
    passes, activation_bytes, transforms = passes or {}, activation_bytes or {}, transforms or {}
    path = path.parent if path.name == "model_index.json" else path
    sources, notes = _sources(path)
    names = [source.name for source in sources]
    _check_given("passes", passes, names, least=1)
    _check_given("activation bytes", activation_bytes, names, least=0)
    _check_names("transforms", transforms, names)
    edges = usual_edges(names) if len(names) > 1 else ()
    by_name = {source.name: source for source in sources}
    root = path if path.is_dir() else path.parent
    components: list[Component] = []
    for name in phase_order(names, edges):
        source = by_name[name]
        count, note = _passes(source, workload)
        if name not in passes and note is not None:
            notes.append(note)
        components.append(
            component_of(
                source.facts,
                name=name,
                model_root=root,
                library=source.library,
                class_name=source.class_name,
                passes=passes.get(name, count),
                activations=_activations(activation_bytes.get(name)),
                ranks=workload.ranks,
                transforms=transforms.get(name, ()),
            )
        )
    return Pipeline(name=_name(path), components=tuple(components), edges=edges, notes=tuple(notes))


def _name(path: Path) -> str:
    """The folder's name, or a whole file's; a shard and an index are called after their folder."""
    whole = path.is_file() and path.name.endswith(".safetensors") and "-of-" not in path.name
    name = path.stem if whole else (path if path.is_dir() else path.parent).resolve().name
    return name.encode(errors="replace").decode()


def _activations(peak_bytes: int | None) -> Activations:
    return UnknownActivations() if peak_bytes is None else GivenActivations(peak_bytes=peak_bytes)


def _check_names(what: str, given: Iterable[str], names: list[str]) -> None:
    for name in given:
        if name not in names:
            raise InputError(
                f"{what}: there is no component '{name}'", hint=f"components are {', '.join(sorted(names))}"
            )


def _check_given(what: str, given: Mapping[str, int], names: list[str], *, least: int) -> None:
    _check_names(what, given, names)
    for name, number in given.items():
        if number < least:
            raise InputError(f"{what} of '{name}': {number}", hint=f"give {least} or more")


def _passes(source: _Source, workload: Workload) -> tuple[int, str | None]:
    """How often a component's forward runs in a request, and what was assumed for it."""
    if is_denoiser(source.name):
        if workload.steps is None:
            return ASSUMED_STEPS, f"{source.name}: sampling steps not stated, {ASSUMED_STEPS} assumed"
        return max(1, workload.steps), None
    if source.name == "model" and is_generator(source.class_name):
        if workload.tokens is None:
            return ASSUMED_TOKENS, f"{source.name}: tokens to generate not stated, {ASSUMED_TOKENS} assumed"
        return workload.tokens, None
    return 1, None


def _sources(path: Path) -> tuple[list[_Source], list[str]]:
    """The components at `path`, and notes on what was skipped."""
    try:
        if (path / "model_index.json").is_file():
            return _diffusers_sources(path)
        return [_single(path)], []
    except OSError as error:
        raise CheckpointError(
            f"{error.filename or path}: {error.strerror}", hint="give a pipeline that can be read"
        ) from None


def _single(path: Path) -> _Source:
    """A checkpoint that is a pipeline of one component."""
    facts = read_checkpoint(path)
    library, class_name = _class_of(facts.root)
    return _Source(name="model", library=library, class_name=class_name, facts=facts)


def _class_of(folder: Path) -> tuple[str | None, str | None]:
    """Library and class by the folder's config.json, or by the index of its pipeline; nulls where neither names one."""
    file, index = folder / "config.json", folder.resolve().parent / "model_index.json"
    config = _decode(file, _Config) if file.is_file() else _Config()
    if config.diffusers_class is not None:
        return "diffusers", config.diffusers_class
    if config.architectures:
        return "transformers", config.architectures[0]
    if file.is_file() and index.is_file():
        return _component_entry(_decode(index, dict[str, object]).get(folder.resolve().name)) or (None, None)
    return None, None


def _diffusers_sources(root: Path) -> tuple[list[_Source], list[str]]:
    """The components of model_index.json that have weights, and a note on those that have none."""
    index = _decode(root / "model_index.json", dict[str, object])
    sources: list[_Source] = []
    weightless: list[str] = []
    for name, value in sorted(index.items()):
        entry = _component_entry(value) if not name.startswith("_") else None
        if entry is None:
            continue
        folder = root / name
        if name in ("", ".", "..") or "/" in name or "\\" in name:
            raise CheckpointError(
                f"{root / 'model_index.json'}: component '{name}' is no folder's name",
                hint="do not use this pipeline; an index names folders beside itself",
            )
        if not folder.is_dir():
            raise CheckpointError(
                f"{root / 'model_index.json'}: component '{name}' has no folder {folder}",
                hint="download the rest of the pipeline",
            )
        # A model's folder has config.json; tokenizers and schedulers have files of other names, and no weights.
        if weight_files(folder) or pickled_files(folder) or (folder / "config.json").is_file():
            library, class_name = entry
            sources.append(_Source(name=name, library=library, class_name=class_name, facts=read_checkpoint(folder)))
        else:
            weightless.append(name)
    if not sources:
        raise CheckpointError(f"{root}: no component of model_index.json has weights", hint="download the pipeline")
    return sources, [f"without weights, so not placed: {', '.join(weightless)}"] if weightless else []


def _component_entry(value: object) -> tuple[str, str] | None:
    """`["diffusers", "AutoencoderKL"]`; anything else, `[null, null]` among it, is no component."""
    match value:
        case [str(library), str(class_name)]:
            return library, class_name
        case _:
            return None


def _decode(file: Path, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}", hint="give a folder that can be read") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise CheckpointError(f"{file}: not what such a file holds: {error}", hint="download it again") from None
