"""A diffusion transformer over packed sequences, each of a text, a video and its sound."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import nn
from torch.nn import functional as F

from .attention import PackedAttention, Rotary, rotary_table
from .config import TransformerConfig
from .feed_forward import GatedFeedForward


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How many tokens each sequence has: of text, of video (frames, height, width), of audio."""

    text: tuple[int, ...]
    video: tuple[tuple[int, int, int], ...]
    audio: tuple[int, ...]

    def lengths(self) -> list[int]:
        """Of the parts in the order in which they are packed: the first sequence's text, video, audio, and so on."""
        return [
            length
            for text, grid, audio in zip(self.text, self.video, self.audio, strict=True)
            for length in (text, math.prod(grid), audio)
        ]

    def cu_seqlens(self) -> list[int]:
        """The bounds of the sequences."""
        return [0, *accumulate(self.lengths())][::3]

    def positions(self, device: torch.device) -> torch.Tensor:
        """Time, row and column of each token, (tokens, 3). Picture and sound begin where the text ends."""
        places: list[torch.Tensor] = []
        for text, (frames, height, width), audio in zip(self.text, self.video, self.audio, strict=True):
            for begin, count, rows, columns in ((0, text, 1, 1), (text, frames, height, width), (text, audio, 1, 1)):
                axes = (
                    torch.arange(begin, begin + count, device=device),
                    torch.arange(rows, device=device),
                    torch.arange(columns, device=device),
                )
                places.append(torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).view(-1, 3))
        return torch.cat(places)


def modulate_(x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor, cu_seqlens: Sequence[int]) -> torch.Tensor:
    """Scale and shift (sequences, hidden) each sequence's tokens where they lie."""
    for number, (start, stop) in enumerate(pairwise(cu_seqlens)):
        x[start:stop].mul_(1 + scale[number]).add_(shift[number])
    return x


def gate_(x: torch.Tensor, gate: torch.Tensor, cu_seqlens: Sequence[int]) -> torch.Tensor:
    """Multiply each sequence's tokens by its gate (sequences, hidden) where they lie."""
    for number, (start, stop) in enumerate(pairwise(cu_seqlens)):
        x[start:stop].mul_(gate[number])
    return x


class Block(nn.Module):
    """Attention and a feed-forward, each modulated by its sequence's time."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.modulation = nn.Parameter(torch.empty(6, width))
        self.attention_norm = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.attention = PackedAttention(width, config.num_heads, config.head_dim)
        self.mlp_norm = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.mlp = GatedFeedForward(width, config.intermediate_size)

    def forward(self, x: torch.Tensor, time: torch.Tensor, cu_seqlens: Sequence[int], rotary: Rotary) -> torch.Tensor:
        """From (tokens, hidden) to the same; `time` is (sequences, 6, hidden)."""
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = (self.modulation + time).unbind(1)
        inner = modulate_(self.attention_norm(x), shift, scale, cu_seqlens)
        x = x + gate_(self.attention(inner, cu_seqlens, rotary), gate, cu_seqlens)
        inner = modulate_(self.mlp_norm(x), mlp_shift, mlp_scale, cu_seqlens)
        return x + gate_(self.mlp(inner), mlp_gate, cu_seqlens)


class Head(nn.Module):
    """From one kind's tokens to its channels."""

    def __init__(self, hidden_size: int, channels: int) -> None:
        super().__init__()
        self.modulation = nn.Parameter(torch.empty(2, hidden_size))
        self.norm = nn.LayerNorm(hidden_size, eps=1e-6, elementwise_affine=False)
        self.out = nn.Linear(hidden_size, channels)

    def forward(self, x: torch.Tensor, time: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
        """From (tokens, hidden) to (tokens, channels); `time` is (sequences, hidden)."""
        shift, scale = (self.modulation + time.unsqueeze(1)).unbind(1)
        result: torch.Tensor = self.out(modulate_(self.norm(x), shift, scale, [0, *accumulate(lengths)]))
        return result


class ReferenceTransformer(nn.Module):
    """Predicts the velocity of video and audio latents at a time, given a text."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.text_norm = nn.RMSNorm(config.text_size, eps=1e-6)
        self.text_in = nn.Linear(config.text_size, width)
        self.video_in = nn.Linear(config.video_channels, width)
        self.audio_in = nn.Linear(config.audio_channels, width)
        self.time_in = nn.Linear(config.frequency_size, width)
        self.time_out = nn.Linear(width, width)
        self.time_modulation = nn.Linear(width, 6 * width)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.num_layers)])
        self.video_head = Head(width, config.video_channels)
        self.audio_head = Head(width, config.audio_channels)

    def forward(
        self, text: torch.Tensor, video: torch.Tensor, audio: torch.Tensor, times: torch.Tensor, packing: Packing
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass over all sequences.

        Args:
            text: hidden states of all texts, (tokens, text_size).
            video: latents of all videos, (tokens, video_channels).
            audio: latents of all sounds, (tokens, audio_channels).
            times: of the sequences, between 0 (data) and 1 (noise), in float32.
            packing: the lengths of each.

        Returns:
            Velocities of the shapes of `video` and `audio`.
        """
        frequencies = self._frequencies(times).to(video.dtype)
        time = self.time_out(F.silu(self.time_in(frequencies)))
        modulation = self.time_modulation(F.silu(time)).unflatten(-1, (6, -1))
        lengths, cu_seqlens = packing.lengths(), packing.cu_seqlens()
        kinds = (self.text_in(self.text_norm(text)), self.video_in(video), self.audio_in(audio))
        by_kind = [torch.split(kind, lengths[place::3]) for place, kind in enumerate(kinds)]
        x = torch.cat([part for sequence in zip(*by_kind, strict=True) for part in sequence])
        del kinds, by_kind
        rotary = rotary_table(packing.positions(x.device), self.config.head_dim, self.config.rope_theta)
        for block in self.blocks:
            x = block(x, modulation, cu_seqlens, rotary)
        ends = torch.split(x, lengths)
        return (
            self.video_head(torch.cat(ends[1::3]), time, lengths[1::3]),
            self.audio_head(torch.cat(ends[2::3]), time, lengths[2::3]),
        )

    def _frequencies(self, times: torch.Tensor) -> torch.Tensor:
        """Cosines and sines of each time, (sequences, frequency_size)."""
        half = self.config.frequency_size // 2
        exponents = torch.arange(half, dtype=torch.float32, device=times.device) / half
        angles = 1000 * times.unsqueeze(-1) * 1e4**-exponents
        return torch.cat((angles.cos(), angles.sin()), dim=-1)
