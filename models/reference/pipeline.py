"""The reference pipeline: text encoder, transformer in steps, and both decoders, wherever each of them computes."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import torch
from torch import nn

from ...plans.errors import InputError
from .config import TextEncoderConfig, TransformerConfig
from .text_encoder import Grids
from .transformer import Packing


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferencePipeline:
    """Token ids to video and sound.

    Attributes:
        components: `text_encoder`, `transformer`, `video_vae` and `audio_vae`, plain or bound to a plan.
        devices: where each of them computes.
    """

    components: Mapping[str, nn.Module]
    devices: Mapping[str, torch.device]

    @torch.no_grad()
    def __call__(
        self,
        token_ids: torch.Tensor,
        *,
        patches: torch.Tensor | None = None,
        grids: Grids = (),
        height: int,
        width: int,
        frames: int,
        steps: int,
        seed: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Make one video with sound for each text; all of them are one packed pass.

        Args:
            token_ids: (texts, tokens), on the CPU.
            patches: of the images that the texts hold, (patches, patch_size), in the weights' dtype.
            grids: of each image.
            height: of the videos in pixels; as `width`, a multiple of `pixels_per_latent`.
            width: in pixels.
            frames: one more than a multiple of `frames_per_latent`.
            steps: of Euler's method from noise to data.
            seed: of the noise, which is made on the CPU, so that it is the same on each device.

        Returns:
            Video (texts, 3, frames, height, width) and sound (texts, channels, samples), where the decoders compute.

        Raises:
            InputError: a size cannot be had, or texts and images do not go together.
        """
        config = cast(TransformerConfig, self.components["transformer"].config)
        grid = _latent_grid(config, height, width, frames)
        if steps < 1:
            raise InputError(f"{steps} steps", hint="give 1 or more")
        self._check_images(token_ids, patches, grids)
        texts, tokens = token_ids.shape
        packing = Packing(
            text=(tokens,) * texts, video=(grid,) * texts, audio=(grid[0] * config.audio_per_latent,) * texts
        )
        states = self._run("text_encoder", token_ids, patches, grids).flatten(0, 1)
        generator = torch.Generator().manual_seed(seed)
        video = torch.randn(sum(packing.lengths()[1::3]), config.video_channels, generator=generator)
        audio = torch.randn(sum(packing.lengths()[2::3]), config.audio_channels, generator=generator)
        states, video, audio = (each.to(self.devices["transformer"]) for each in (states, video, audio))
        for time, later in pairwise(1 - step / steps for step in range(steps + 1)):
            times = torch.full((texts,), time, device=video.device)
            velocities = self.components["transformer"](
                states, video.to(states.dtype), audio.to(states.dtype), times, packing
            )
            video, audio = (
                x + (later - time) * velocity.float() for x, velocity in zip((video, audio), velocities, strict=True)
            )
        video, audio = (each.to(states.dtype).view(texts, -1, each.shape[-1]).mT for each in (video, audio))
        return self._run("video_vae", video.view(*video.shape[:2], *grid)), self._run("audio_vae", audio)

    def _run(self, name: str, first: torch.Tensor, *others: object) -> torch.Tensor:
        """A component on its device, to which its inputs are moved."""
        moved = [each.to(self.devices[name]) if isinstance(each, torch.Tensor) else each for each in (first, *others)]
        result: torch.Tensor = self.components[name](*moved)
        return result

    def _check_images(self, token_ids: torch.Tensor, patches: torch.Tensor | None, grids: Grids) -> None:
        config = cast(TextEncoderConfig, self.components["text_encoder"].config)
        merge = config.vision.merge_size
        if any(height % merge or width % merge for height, width in grids):
            raise InputError(f"grids {tuple(grids)} are not of whole squares", hint=f"give multiples of {merge}")
        count = sum(height * width for height, width in grids)
        places = int((token_ids == config.image_token_id).sum())
        given = 0 if patches is None else len(patches)
        if (count, places * merge**2) != (given, given):
            raise InputError(
                f"the images have {given} patches, their grids {count}, and the texts hold {places} places for them",
                hint=f"give one token {config.image_token_id} for each square of {merge} x {merge} patches",
            )


def _latent_grid(config: TransformerConfig, height: int, width: int, frames: int) -> tuple[int, int, int]:
    pixels, period = config.pixels_per_latent, config.frames_per_latent
    if min(height, width, frames) < 1 or height % pixels or width % pixels or (frames - 1) % period:
        raise InputError(
            f"{frames} frames of {height} x {width} pixels are no whole latents",
            hint=f"give multiples of {pixels} pixels, and one frame more than a multiple of {period}",
        )
    return 1 + (frames - 1) // period, height // pixels, width // pixels
