"""From checkpoint facts to the plan's inventory: what each stack and the fixed part weigh."""

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path

from ..plans.errors import CheckpointError
from ..plans.pipeline import Activations, Checkpoint, Component, File, LayerSize, Stack
from .checkpoint import CheckpointFacts
from .headers import Header, TensorEntry, packed_bytes, part_of_rank
from .layers import FoundStack, find_layers

_Tensors = Mapping[str, tuple[Header, TensorEntry]]


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
) -> Component:
    """One component of the inventory. `model_root` is what the plan's relative paths start from.

    With several `ranks` it says what each would hold if they shared the component.
    """
    layout = find_layers(facts.tensors)
    dtypes: Counter[str] = Counter()
    for _, entry in facts.tensors.values():
        dtypes[entry.dtype] += entry.nbytes
    fixed_bytes, fixed_packed, fixed_part = _weigh(layout.fixed, facts.tensors, ranks)
    return Component(
        name=name,
        library=library,
        class_name=class_name,
        checkpoint=checkpoint_of(facts, model_root),
        tensors=len(facts.tensors),
        dtype_bytes=dtypes,
        stacks=tuple(_stack(found, facts.tensors, ranks) for found in layout.stacks),
        fixed_bytes=fixed_bytes,
        fixed_packed_bytes=fixed_packed,
        fixed_part_bytes=fixed_part,
        passes=passes,
        activations=activations,
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


def _weigh(names: Iterable[str], tensors: _Tensors, ranks: int) -> tuple[int, int, int | None]:
    """Bytes as stored, packed, and, with several ranks, of one rank's part, packed."""
    entries = [tensors[name][1] for name in names]
    stored = [entry.nbytes for entry in entries]
    part = sum(packed_bytes(part_of_rank(entry, 0, ranks).nbytes) for entry in entries) if ranks > 1 else None
    return sum(stored), sum(map(packed_bytes, stored)), part


def _extents(names: Iterable[str], tensors: _Tensors) -> int:
    """How many contiguous ranges of files hold these tensors."""
    entries = [tensors[name] for name in names]
    ranges = sorted((id(header), *entry.data_offsets) for header, entry in entries if entry.nbytes)
    breaks = sum(one[0] != other[0] or one[2] != other[1] for one, other in pairwise(ranges))
    return breaks + bool(ranges)


def _stack(found: FoundStack, tensors: _Tensors, ranks: int) -> Stack:
    """Consecutive layers of one weight become one entry."""
    runs: list[LayerSize] = []
    start, current = 0, _weigh(found.layers[0], tensors, ranks)
    for number in range(1, len(found.layers) + 1):
        weight = _weigh(found.layers[number], tensors, ranks) if number < len(found.layers) else None
        if weight != current:
            stored, packed, part = current
            run = LayerSize(layers=(start, number), layer_bytes=stored, packed_bytes=packed, part_bytes=part)
            runs.append(run)
            if weight is not None:
                start, current = number, weight
    extents = max(_extents(layer, tensors) for layer in found.layers)
    return Stack(name=found.name, layers=len(found.layers), extents=extents, sizes=tuple(runs))
