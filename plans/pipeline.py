"""What is placed, as the plan carries it: components, their files, their stacks of layers, the data flow."""

from collections.abc import Iterable
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt, model_validator

from .record import Numbers, Record


def _checked_run(run: tuple[int, int]) -> tuple[int, int]:
    if not 0 <= run[0] < run[1]:
        raise ValueError("a layer run is [start, stop) with 0 <= start < stop")
    return run


def _check_packed(stored: int, packed: int, transformed: int) -> None:
    if packed < stored - transformed:
        raise ValueError(f"{packed} packed bytes cannot hold {stored - transformed} stored ones")
    if transformed > stored:
        raise ValueError(f"{transformed} of {stored} stored bytes cannot be transformed")


def _check_distinct(what: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ValueError(f"two {what} are named '{name}'")
        seen.add(name)


Run = Annotated[tuple[int, int], AfterValidator(_checked_run)]
"""Consecutive layers, half-open: `[start, stop)`."""


class File(Record):
    """One weight file and its identity. `path` is relative to the component's root, with forward slashes."""

    path: str
    size_bytes: NonNegativeInt
    mtime_ns: NonNegativeInt
    header_sha256: str


class Checkpoint(Record):
    """A component's files. `root` is relative to the model's root; `.` is that root itself."""

    root: str
    files: tuple[File, ...]


class Deinterleave(Record):
    """Rows, along the first axis, lie as (groups, parts, width) in the file; the module has (parts, groups, width).

    So 48 heads with the rows of query, key and value each become all queries, all keys, all values: 48 groups, 3 parts.
    """

    kind: Literal["deinterleave"] = "deinterleave"
    tensor: str
    groups: int = Field(ge=2)
    parts: int = Field(ge=2)


class Transpose(Record):
    """The last two axes are exchanged."""

    kind: Literal["transpose"] = "transpose"
    tensor: str


class Cast(Record):
    """Floating values become those of another dtype, by its name in the file format."""

    kind: Literal["cast"] = "cast"
    tensor: str
    dtype: Literal["F16", "BF16", "F32", "F64"]


Transform = Annotated[Deinterleave | Transpose | Cast, Field(discriminator="kind")]
"""What becomes of stored tensors on their way to the module. `tensor` is a name, or a pattern of names (`patterns`)."""


class LayerSize(Record):
    """Equal consecutive layers: `layer_bytes` as stored, `packed_bytes` with each tensor at a 64-byte boundary.

    Stored tensors of `transformed_bytes` are transformed on the way; packed ones are as the module has them.
    `part_bytes` is the same of what one of the workload's ranks holds of a layer that is sharded; absent with one rank.
    """

    layers: Run
    layer_bytes: NonNegativeInt
    packed_bytes: NonNegativeInt
    part_bytes: NonNegativeInt | None = Field(default=None, exclude_if=lambda part: part is None)
    transformed_bytes: NonNegativeInt = Field(default=0, exclude_if=lambda count: count == 0)

    @model_validator(mode="after")
    def _checked(self) -> Self:
        _check_packed(self.layer_bytes, self.packed_bytes, self.transformed_bytes)
        return self


class Stack(Record):
    """A module list whose elements are streamed as one: `blocks` holds `blocks.0` to `blocks.{layers - 1}`.

    `sizes` cover the layers in order, each once: a layer whose size is missing is an error. `extents` is how many
    contiguous ranges of files one layer's bytes lie in at most, but for those that are transformed.
    """

    name: str
    layers: PositiveInt
    extents: NonNegativeInt
    sizes: tuple[LayerSize, ...]

    @model_validator(mode="after")
    def _checked(self) -> Self:
        bounds = [0, *(bound for size in self.sizes for bound in size.layers), self.layers]
        if any(before != after for before, after in zip(bounds[::2], bounds[1::2], strict=True)):
            raise ValueError(f"the sizes of '{self.name}' do not cover its {self.layers} layers in order, each once")
        return self


class UnknownActivations(Record):
    """Nobody measured them. Lowers the verdict's confidence; is never read as zero.

    `why` says what kept them from being traced; absent where nobody tried.
    """

    kind: Literal["unknown"] = "unknown"
    why: str | None = Field(default=None, exclude_if=lambda why: why is None)


class GivenActivations(Record):
    """The caller stated the peak of live activation bytes of one pass."""

    kind: Literal["given"] = "given"
    peak_bytes: NonNegativeInt


class StackFlops(Record):
    """Floating point operations of all layers of one stack in one pass."""

    stack: str
    flops: NonNegativeInt


class RowFlops(Record):
    """Operations of matrix products in one pass, by the rows of the operand that meets the weights: tokens, mostly."""

    rows: PositiveInt
    flops: NonNegativeInt


class ChunkedPeak(Record):
    """The peak of live activation bytes of one pass when token-wise modules take so many tokens at a time."""

    chunk_tokens: PositiveInt
    peak_bytes: NonNegativeInt


class TracedActivations(Record):
    """Counted in one pass on tensors without data, at the workload's shapes.

    `peak_bytes` is the most that is alive at once: inputs, outputs and all between them, and the module's own buffers,
    which are copied to where it computes; without parameters and the scratch memory inside kernels. Buffers stay after
    the pass, and those of other components are not in it. `flops` counts matrix products, convolutions and attention, a
    multiplication and its addition as two; `layer_flops` is the part of each stack that has any.
    `row_flops` is the part of it in matrix products, by their rows. Where a request's later passes take fewer
    tokens than its first, as those of a model that generates, `later_row_flops` is theirs; else it is empty.
    `moved_bytes` are what all other operations of the pass read and write, such as norms and sums; absent where that
    was not counted. `fresh_bytes` are what it takes of memory in blocks of 1 MiB or more, those taken again included.
    `chunked` has the peaks of chunked passes that were traced too, of fewer tokens at a time first.
    """

    kind: Literal["traced"] = "traced"
    peak_bytes: NonNegativeInt
    flops: NonNegativeInt
    layer_flops: tuple[StackFlops, ...] = ()
    row_flops: tuple[RowFlops, ...] = ()
    later_row_flops: tuple[RowFlops, ...] = ()
    moved_bytes: NonNegativeInt | None = Field(default=None, exclude_if=lambda moved: moved is None)
    fresh_bytes: NonNegativeInt | None = Field(default=None, exclude_if=lambda fresh: fresh is None)
    chunked: tuple[ChunkedPeak, ...] = ()


Activations = Annotated[UnknownActivations | GivenActivations | TracedActivations, Field(discriminator="kind")]


def known_peak_bytes(activations: Activations) -> int | None:
    """The peak of live activation bytes of one pass; null where nobody knows it."""
    return None if isinstance(activations, UnknownActivations) else activations.peak_bytes


class Component(Record):
    """One module with its own checkpoint.

    `library` and `class_name` say what builds it (`transformers`, `BertModel`); both are null for bare files, to
    which the caller brings the module. `passes` is how often its forward runs in one request. `dtype_bytes` are
    the stored bytes by the file format's dtype names. `fixed_*` is what is in no layer; `fixed_part_bytes` is one
    rank's part of it, as that of a layer.
    """

    name: str
    library: str | None
    class_name: str | None
    checkpoint: Checkpoint
    tensors: NonNegativeInt
    dtype_bytes: Numbers
    stacks: tuple[Stack, ...]
    fixed_bytes: NonNegativeInt
    fixed_packed_bytes: NonNegativeInt
    fixed_part_bytes: NonNegativeInt | None = Field(default=None, exclude_if=lambda part: part is None)
    fixed_transformed_bytes: NonNegativeInt = Field(default=0, exclude_if=lambda count: count == 0)
    passes: PositiveInt
    activations: Activations
    transforms: tuple[Transform, ...] = Field(default=(), exclude_if=lambda transforms: not transforms)

    @model_validator(mode="after")
    def _checked(self) -> Self:
        _check_packed(self.fixed_bytes, self.fixed_packed_bytes, self.fixed_transformed_bytes)
        _check_distinct(f"stacks of '{self.name}'", (stack.name for stack in self.stacks))
        return self


class Pipeline(Record):
    """Named components and the data flow between them, `[from, to]` by name."""

    name: str
    components: tuple[Component, ...]
    edges: tuple[tuple[str, str], ...]
    notes: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _checked(self) -> Self:
        _check_distinct("components", (component.name for component in self.components))
        return self


def activations_are_known(components: Iterable[Component]) -> bool:
    """Whether somebody traced or told what a pass of each of them has alive."""
    return all(known_peak_bytes(part.activations) is not None for part in components)


def most_activation_bytes(components: Iterable[Component]) -> int:
    """The most that a pass of any of them has alive, as far as it is known."""
    return max((known_peak_bytes(part.activations) or 0 for part in components), default=0)


class Workload(Record):
    """What one request asks. Null is not stated. `ranks` is how many processes on this host run the pipeline."""

    batch: PositiveInt = 1
    ranks: PositiveInt = 1
    steps: NonNegativeInt | None = None
    tokens: PositiveInt | None = None
    height: PositiveInt | None = None
    width: PositiveInt | None = None
    frames: PositiveInt | None = None
