"""Decoders of latents: to video, by 3-d convolutions that look at no later frame, and to sound, by 1-d ones."""

# Torch's own types are partial here.
# pyright: reportUnknownMemberType=false

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F

from .config import AudioDecoderConfig, VideoDecoderConfig


class CausalConv3d(nn.Conv3d):
    """A 3 x 3 x 3 convolution of the same size; in time it takes the frame and the two before it."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, out_channels, kernel_size=3, padding=(0, 1, 1))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """From (batch, in_channels, frames, height, width)."""
        return super().forward(F.pad(input, (0, 0, 0, 0, 2, 0)))


class ChannelNorm(nn.Module):
    """Root mean square over channels alone, so that no frame is told of another."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From (batch, channels, ...) to the same."""
        return F.rms_norm(x.movedim(1, -1), self.weight.shape, self.weight, 1e-6).movedim(-1, 1)


class Residual(nn.Module):
    """Two convolutions around which the input goes, for either number of dimensions."""

    def __init__(self, channels: int, convolution: type[nn.Module]) -> None:
        super().__init__()
        self.first_norm, self.second_norm = ChannelNorm(channels), ChannelNorm(channels)
        self.first, self.second = convolution(channels, channels), convolution(channels, channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From (batch, channels, ...) to the same."""
        y = self.first(F.silu(self.first_norm(x)))
        result: torch.Tensor = x + self.second(F.silu(self.second_norm(y)))
        return result


class VideoBlock(nn.Module):
    """Residuals, and a convolution of what was enlarged."""

    def __init__(self, in_channels: int, out_channels: int, *, doubles_time: bool) -> None:
        super().__init__()
        self.doubles_time = doubles_time
        self.residuals = nn.ModuleList([Residual(in_channels, CausalConv3d) for _ in range(2)])
        self.up = CausalConv3d(in_channels, out_channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From (batch, in_channels, frames, height, width); the first frame stays one."""
        for residual in self.residuals:
            x = residual(x)
        if self.doubles_time:
            x = x.repeat_interleave(2, dim=2)[:, :, 1:]
        result: torch.Tensor = self.up(F.interpolate(x, scale_factor=(1, 2, 2)))
        return result


class ReferenceVideoDecoder(nn.Module):
    """Latents to frames."""

    def __init__(self, config: VideoDecoderConfig) -> None:
        super().__init__()
        self.config = config
        channels = config.block_channels
        self.conv_in = CausalConv3d(config.latent_channels, channels[0])
        self.blocks = nn.ModuleList(
            [
                VideoBlock(before, after, doubles_time=number < config.time_doublings)
                for number, (before, after) in enumerate(_steps(channels))
            ]
        )
        self.norm_out = ChannelNorm(channels[-1])
        self.conv_out = CausalConv3d(channels[-1], 3)

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        """From (batch, latent_channels, frames, height, width) to (batch, 3, ...), frames and sizes multiplied."""
        x = self.conv_in(latents)
        for block in self.blocks:
            x = block(x)
        return torch.tanh(self.conv_out(F.silu(self.norm_out(x))))


class Conv1d(nn.Conv1d):
    """A convolution of seven samples, of the same length."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__(in_channels, out_channels, kernel_size=7, padding=3)


class AudioBlock(nn.Module):
    """A transposed convolution that lengthens, and residuals."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose1d(in_channels, out_channels, 2 * stride, stride=stride, padding=stride // 2)
        self.residuals = nn.ModuleList([Residual(out_channels, Conv1d) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From (batch, in_channels, samples) to `stride` times as many."""
        x = self.up(F.silu(x))
        for residual in self.residuals:
            x = residual(x)
        return x


class ReferenceAudioDecoder(nn.Module):
    """Latents to samples."""

    def __init__(self, config: AudioDecoderConfig) -> None:
        super().__init__()
        self.config = config
        channels = config.block_channels
        self.conv_in = Conv1d(config.latent_channels, channels[0])
        self.blocks = nn.ModuleList(
            [
                AudioBlock(before, after, stride)
                for (before, after), stride in zip(_steps(channels), config.strides, strict=True)
            ]
        )
        self.conv_out = Conv1d(channels[-1], config.out_channels)

    def forward(self, latents: torch.Tensor) -> torch.Tensor:
        """From (batch, latent_channels, latents) to (batch, out_channels, samples)."""
        x = self.conv_in(latents)
        for block in self.blocks:
            x = block(x)
        return torch.tanh(self.conv_out(F.silu(x)))


def _steps(channels: Sequence[int]) -> list[tuple[int, int]]:
    """Each block's channels and the next one's; the last keeps its own."""
    return list(pairwise((*channels, channels[-1])))
