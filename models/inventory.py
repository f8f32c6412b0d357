"""From checkpoint facts to the plan's inventory: what each stack and the fixed part weigh."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from ..plans.errors import CheckpointError
from ..plans.pipeline import Activations, Checkpoint, Component, File, LayerSize, Stack, Transform
from .checkpoint import CheckpointFacts
from .headers import packed_bytes, part_of_rank
from .layers import FoundStack, find_layers
from .transforms import transformed


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weight:
    """Bytes as stored, those of transformed tensors among them, as packed, and, with several ranks, of one's part."""

    stored: int
    transformed: int
    packed: int
    part: int | None


def component_of(
    facts: CheckpointFacts,
    *,
    name: str,
    model_root: Path,
    library: str | None,
    class_name: str | None,
    passes: int,
    activations: Activations,
    ranks: int = 1,
    transforms: Sequence[Transform] = (),
) -> Component:
    """One component of the inventory. `model_root` is what the plan's relative paths start from.

    With several `ranks` it says what each would hold if they shared the component.

    Raises:
        CheckpointError: as `checkpoint_of`.
        InputError: as `transformed`.
    """
    facts = transformed(facts, transforms, name)
    layout = find_layers(facts.tensors)
    dtypes: Counter[str] = Counter()
    for tensor, (_, entry) in facts.tensors.items():
        dtypes[facts.wanted(tensor).dtype] += entry.nbytes
    fixed = _weigh(layout.fixed, facts, ranks)
    return Component(
        name=name,
        library=library,
        class_name=class_name,
        checkpoint=checkpoint_of(facts, model_root),
        tensors=len(facts.tensors),
        dtype_bytes=dtypes,
        stacks=tuple(_stack(found, facts, ranks) for found in layout.stacks),
        fixed_bytes=fixed.stored,
        fixed_packed_bytes=fixed.packed,
        fixed_part_bytes=fixed.part,
        fixed_transformed_bytes=fixed.transformed,
        passes=passes,
        activations=activations,
        transforms=tuple(transforms),
    )


def checkpoint_of(facts: CheckpointFacts, model_root: Path) -> Checkpoint:
    """The identity of the files, with paths that hold wherever the model's folder stands.

    Raises:
        CheckpointError: a file's name is no text, so that no document can carry it.
    """
    for file in facts.files:
        try:
            str(file.path.relative_to(model_root)).encode()
        except UnicodeEncodeError:
            raise CheckpointError(f"{file.path!r}: the name is not UTF-8", hint="rename the file") from None
    return Checkpoint(
        root=facts.root.relative_to(model_root).as_posix(),
        files=tuple(
            File(
                path=file.path.relative_to(facts.root).as_posix(),
                size_bytes=file.size_bytes,
                mtime_ns=file.mtime_ns,
                header_sha256=file.header_sha256,
            )
            for file in facts.files
        ),
    )


def _weigh(names: Sequence[str], facts: CheckpointFacts, ranks: int) -> _Weight:
    packed = [facts.wanted(name) for name in names]
    return _Weight(
        stored=sum(facts.tensors[name][1].nbytes for name in names),
        transformed=sum(facts.tensors[name][1].nbytes for name in names if name in facts.transforms),
        packed=sum(packed_bytes(entry.nbytes) for entry in packed),
        part=sum(packed_bytes(part_of_rank(entry, 0, ranks).nbytes) for entry in packed) if ranks > 1 else None,
    )


def _extents(names: Iterable[str], facts: CheckpointFacts) -> int:
    """How many contiguous ranges of files hold these tensors, but for those that are transformed."""
    entries = [facts.tensors[name] for name in names if name not in facts.transforms]
    ranges = sorted((id(header), *entry.data_offsets) for header, entry in entries if entry.nbytes)
    breaks = sum(one[0] != other[0] or one[2] != other[1] for one, other in pairwise(ranges))
    return breaks + bool(ranges)


def _stack(found: FoundStack, facts: CheckpointFacts, ranks: int) -> Stack:
    """Consecutive layers of one weight become one entry."""
    runs: list[LayerSize] = []
    start, current = 0, _weigh(found.layers[0], facts, ranks)
    for number in range(1, len(found.layers) + 1):
        weight = _weigh(found.layers[number], facts, ranks) if number < len(found.layers) else None
        if weight != current:
            run = LayerSize(
                layers=(start, number),
                layer_bytes=current.stored,
                packed_bytes=current.packed,
                part_bytes=current.part,
                transformed_bytes=current.transformed,
            )
            runs.append(run)
            if weight is not None:
                start, current = number, weight
    extents = max(_extents(layer, facts) for layer in found.layers)
    return Stack(name=found.name, layers=len(found.layers), extents=extents, sizes=tuple(runs))
