"""What a maker of inputs knows of the pass that is asked for, and where it writes down what it assumes.

Torch is imported with this module.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ...plans.pipeline import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Latents:
    """How many pixels and frames one latent stands for, by the pipeline's autoencoder."""

    spatial: int
    temporal: int


@dataclass(slots=True, kw_only=True)
class Ask:
    """What a maker knows, and where it writes down what it assumes."""

    module: Any
    workload: Workload
    latents: Latents | None
    batch: int
    dtype: torch.dtype
    assumed: list[str] = field(default_factory=list[str])

    @property
    def config(self) -> Any:
        """The module's own configuration."""
        return self.module.config

    @property
    def spatial(self) -> int:
        """Pixels to a latent, in height and in width."""
        return 8 if self.latents is None else self.latents.spatial

    def floats(self, *shape: int) -> torch.Tensor:
        """An input in the module's own dtype."""
        return torch.zeros(shape, dtype=self.dtype)

    def ints(self, *shape: int) -> torch.Tensor:
        """An input of ids, classes or a mask."""
        return torch.ones(shape, dtype=torch.int64)

    def tokens(self, otherwise: int) -> int:
        """Tokens of a text."""
        if self.workload.tokens is None:
            self.assumed.append(f"tokens not stated, {otherwise} assumed")
        return self.workload.tokens or otherwise

    def frames(self, otherwise: int) -> int:
        """Frames in latents: the first stands for itself."""
        if self.workload.frames is None:
            self.assumed.append(f"frames not stated, {otherwise} assumed")
        return 1 + ((self.workload.frames or otherwise) - 1) // (4 if self.latents is None else self.latents.temporal)

    def size(self, height: int, width: int, scale: int | None = None) -> tuple[int, int]:
        """Height and width in latents; `height` and `width` are the pixels that are assumed where none are stated."""
        scale = scale or self.spatial
        if self.workload.height is None or self.workload.width is None:
            self.assumed.append(f"height or width not stated, {height} x {width} assumed")
        return (self.workload.height or height) // scale, (self.workload.width or width) // scale

    def guided(self) -> int:
        """The batch of a class whose pipelines usually compute the guided and the unguided half together."""
        self.assumed.append("guidance assumed, which doubles the batch")
        return 2 * self.batch


Maker = Callable[[Ask], dict[str, object]]
"""Makes the arguments of one pass, by name."""
