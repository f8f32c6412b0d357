"""What is allowed, reserved and preferred, as the plan carries it. Presets and rules live in `policies`."""

from enum import StrEnum

from pydantic import Field, NonNegativeInt, PositiveInt

from .record import Record


class Home(StrEnum):
    """Where a unit's weights rest."""

    device = "device"
    pinned = "pinned"
    pageable = "pageable"
    mapped = "mapped"
    locked = "locked"


class Hold(StrEnum):
    """How long weights stay on the compute device."""

    always = "always"
    phase = "phase"
    layer = "layer"


class Copies(StrEnum):
    """Whether weights may be copied off the checkpoint's mapping into host memory."""

    when_they_fit = "when-they-fit"
    never = "never"


class Residency(StrEnum):
    """How much of the device is filled with weights beyond what one streamed pass needs."""

    fill = "fill"
    minimal = "minimal"


class Shard(StrEnum):
    """When a component is divided over the workload's ranks: where one device cannot hold it, or in any case."""

    when_too_large = "when-too-large"
    always = "always"


class Override(Record):
    """A wish for part of the pipeline. `select` is a component or a component's stack: `vae`, `transformer.blocks`."""

    select: str
    home: Home | None = None
    hold: Hold | None = None
    compute_device: str | None = None
    shard: Shard | None = Field(default=None, exclude_if=lambda shard: shard is None)


class Policy(Record):
    """The policy in force. A reserve is the smaller of its bytes and its share of what is available.

    A small host's share is raised to what a process takes beyond its plan, which the bytes still bound.

    `pinned_max_percent` is the share of the host's available memory that may be page-locked for a device's copies.

    `slots` and `prefetch_layers` are wishes: the plan's staging says what was granted.
    """

    preset: str
    reserve_bytes: NonNegativeInt
    reserve_max_percent: int = Field(ge=0, le=100)
    device_reserve_bytes: NonNegativeInt
    device_reserve_max_percent: int = Field(ge=0, le=100)
    pinned_max_percent: int = Field(ge=0, le=100)
    copies: Copies
    residency: Residency
    slots: PositiveInt
    prefetch_layers: NonNegativeInt
    overrides: tuple[Override, ...] = ()
    rules: tuple[str, ...]
