"""The plan: the one document that planner, executor, servers and tests share."""

from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from .machine import Machine
from .pipeline import Pipeline, Run, Workload
from .policy import Hold, Home, Policy
from .record import KnownNumbers, Record

FORMAT_MAJOR = 1
FORMAT_MINOR = 0
FORMAT_VERSION = f"{FORMAT_MAJOR}.{FORMAT_MINOR}"


class MadeBy(Record):
    """Who wrote the document; not part of its digest."""

    name: str
    version: str


class Confidence(StrEnum):
    """What the verdict rests on. `activations-unknown` is covered by the device reserve alone."""

    calibrated = "calibrated"
    bytes_only = "bytes-only"
    activations_unknown = "activations-unknown"


class Fits(Record):
    """There is a placement. `margin_bytes` is what is left of each axis' budget at its highest peak."""

    kind: Literal["fits"] = "fits"
    confidence: Confidence
    margin_bytes: KnownNumbers


class Short(Record):
    """One axis that ran out, and for whom."""

    axis: str
    component: str
    need_bytes: NonNegativeInt
    have_bytes: NonNegativeInt


class Broken(Record):
    """One admission rule that does not admit what was asked."""

    rule: str
    subject: str
    why: str


class Change(Record):
    """Grow an axis' available bytes to this figure."""

    axis: str
    to_available_bytes: NonNegativeInt


class Refused(Record):
    """There is no placement. All causes are listed; the `nearest` changes, made together, make it fit."""

    kind: Literal["refused"] = "refused"
    short: tuple[Short, ...]
    broken: tuple[Broken, ...]
    nearest: tuple[Change, ...]


Verdict = Annotated[Fits | Refused, Field(discriminator="kind")]


class Reader(StrEnum):
    """How a slot is filled from a mapped home: out of the mapping, or by reads through or around the page cache."""

    mapping = "mapping"
    buffered = "buffered"
    direct = "direct"


class Staging(Record):
    """The way from home to compute device. `prefetch_layers` of the `slots` are filled ahead of use.

    `chunk_bytes` is the size of one read, and `depth` how many are under way at once; both are null for the reader
    `mapping`, which copies tensors whole. On the CPU a read goes straight into its slot; to another device it goes
    through `depth` host buffers of `chunk_bytes`.
    """

    device: str
    reader: Reader
    slots: PositiveInt
    slot_bytes: PositiveInt
    chunk_bytes: PositiveInt | None
    depth: PositiveInt | None
    prefetch_layers: NonNegativeInt

    @model_validator(mode="after")
    def _checked(self) -> Self:
        reads = self.reader is not Reader.mapping
        if (self.chunk_bytes is not None, self.depth is not None) != (reads, reads):
            raise ValueError(f"reader {self.reader}: chunk_bytes and depth go with reads, and only with them")
        return self


class Segment(Record):
    """Units of one fate. `stack: null` is the component's fixed part, which has no layer runs."""

    stack: str | None
    layers: tuple[Run, ...]
    home: Home
    hold: Hold
    bytes: NonNegativeInt
    packed_bytes: NonNegativeInt


class Sharding(Record):
    """How a component is divided over ranks: `mesh` is their number along each axis of the device mesh.

    A weight is divided along `dimension` where that divides by the ranks, and whole on each rank where it does not. In
    a pass the compute device holds at most `gathered_bytes` of weights that were gathered from all ranks.
    """

    mesh: tuple[PositiveInt, ...]
    dimension: NonNegativeInt
    gathered_bytes: NonNegativeInt


class Placement(Record):
    """Where one component's weights rest and where it computes. `chunk_tokens: null` is the whole sequence at once.

    Of a sharded component the segments are one rank's part, and so are their bytes, all of them packed.
    """

    component: str
    compute_device: str
    chunk_tokens: PositiveInt | None = None
    sharding: Sharding | None = Field(default=None, exclude_if=lambda sharding: sharding is None)
    staging: Staging | None
    segments: tuple[Segment, ...]


class Predicted(Record):
    """What one phase is predicted to cost. Null is not known, and is never zero.

    `transfer_s` are the seconds that moving weights takes, were the compute to take none.
    """

    seconds: float | None
    transfer_s: float | None
    stall_s: float | None
    disk_bytes: NonNegativeInt | None
    link_bytes: NonNegativeInt | None
    peak_bytes: KnownNumbers


class Phase(Record):
    """An interval in which one component computes. `binding` is the axis with the least left."""

    component: str
    passes: PositiveInt
    predicted: Predicted
    binding: str | None


class Rejected(Record):
    """An alternative that was not taken, and why."""

    choice: str
    why: str
    predicted_seconds: float | None = None


class Decision(Record):
    """One choice: about what, by which rule, from which numbers, against which alternatives."""

    rule: str
    subject: str
    choice: str
    because: KnownNumbers
    rejected: tuple[Rejected, ...] = ()


class Budget(Record):
    """An axis that the plan must stay within. Null `available_bytes` was not measurable, and then nothing is spent."""

    axis: str
    available_bytes: NonNegativeInt | None
    reserve_bytes: NonNegativeInt
    usable_bytes: NonNegativeInt


class Plan(Record):
    """A placement of a pipeline on a machine under a policy, with its reasons."""

    format_version: str
    made_by: MadeBy
    digest: str
    verdict: Verdict
    pipeline: Pipeline
    workload: Workload
    machine: Machine
    policy: Policy
    budgets: tuple[Budget, ...]
    placements: tuple[Placement, ...]
    phases: tuple[Phase, ...]
    decisions: tuple[Decision, ...]
    notes: tuple[str, ...]
