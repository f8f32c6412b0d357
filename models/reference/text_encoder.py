"""A text encoder of the Qwen-VL kind: a causal language model, with tokens of a vision tower among the words."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import nn
from torch.nn import functional as F

from .attention import PackedAttention, Rotary, rotary_table, rotated
from .config import TextEncoderConfig, VisionConfig
from .feed_forward import GatedFeedForward

Grids = Sequence[tuple[int, int]]
"""Patches of each image in height and width, both multiples of `merge_size`."""


class CausalAttention(nn.Module):
    """Attention to earlier tokens, in which groups of query heads share a key and a value."""

    def __init__(self, config: TextEncoderConfig) -> None:
        super().__init__()
        hidden, dim = config.hidden_size, config.head_dim
        self.head_dim = dim
        self.q_proj = nn.Linear(hidden, config.num_heads * dim, bias=False)
        self.k_proj = nn.Linear(hidden, config.num_kv_heads * dim, bias=False)
        self.v_proj = nn.Linear(hidden, config.num_kv_heads * dim, bias=False)
        self.o_proj = nn.Linear(config.num_heads * dim, hidden, bias=False)
        self.q_norm = nn.RMSNorm(dim, eps=1e-6)
        self.k_norm = nn.RMSNorm(dim, eps=1e-6)

    def forward(self, x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        """From (batch, tokens, hidden) to the same."""
        query, key, value = (
            project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = rotated(self.q_norm(query), rotary), rotated(self.k_norm(key), rotary)
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        result: torch.Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return result


class DecoderLayer(nn.Module):
    """Attention and a feed-forward, each behind its norm."""

    def __init__(self, config: TextEncoderConfig) -> None:
        super().__init__()
        self.input_norm = nn.RMSNorm(config.hidden_size, eps=1e-6)
        self.attention = CausalAttention(config)
        self.post_norm = nn.RMSNorm(config.hidden_size, eps=1e-6)
        self.mlp = GatedFeedForward(config.hidden_size, config.intermediate_size)

    def forward(self, x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
        """From (batch, tokens, hidden) to the same."""
        x = x + self.attention(self.input_norm(x), rotary)
        result: torch.Tensor = x + self.mlp(self.post_norm(x))
        return result


class VisionFeedForward(nn.Module):
    """Two products with a GELU between them."""

    def __init__(self, in_size: int, inner_size: int, out_size: int) -> None:
        super().__init__()
        self.up = nn.Linear(in_size, inner_size)
        self.down = nn.Linear(inner_size, out_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From (..., in_size) to (..., out_size)."""
        result: torch.Tensor = self.down(F.gelu(self.up(x)))
        return result


class VisionBlock(nn.Module):
    """Attention within each image, and a feed-forward."""

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.attention_norm = nn.LayerNorm(width, eps=1e-6)
        self.attention = PackedAttention(width, config.num_heads, width // config.num_heads)
        self.mlp_norm = nn.LayerNorm(width, eps=1e-6)
        self.mlp = VisionFeedForward(width, config.intermediate_size, width)

    def forward(self, x: torch.Tensor, cu_seqlens: Sequence[int], rotary: Rotary) -> torch.Tensor:
        """From (patches, width) to the same."""
        x = x + self.attention(self.attention_norm(x), cu_seqlens, rotary)
        result: torch.Tensor = x + self.mlp(self.mlp_norm(x))
        return result


class VisionTower(nn.Module):
    """Patches to tokens of the language model. The patches of each square that becomes one token lie together."""

    def __init__(self, config: VisionConfig, out_size: int) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = nn.Linear(config.patch_size, config.hidden_size)
        self.blocks = nn.ModuleList([VisionBlock(config) for _ in range(config.num_layers)])
        self.merger_norm = nn.LayerNorm(config.hidden_size, eps=1e-6)
        merged = config.hidden_size * config.merge_size**2
        self.merger = VisionFeedForward(merged, merged, out_size)

    def forward(self, patches: torch.Tensor, grids: Grids) -> torch.Tensor:
        """From (patches, patch_size) to (patches / merge_size squared, out_size); no image gives none, there."""
        config = self.config
        rotary = rotary_table(self._positions(grids, patches.device), config.hidden_size // config.num_heads, 1e4)
        cu_seqlens = [0, *accumulate(height * width for height, width in grids)]
        x = self.patch_embed(patches)
        for block in self.blocks:
            x = block(x, cu_seqlens, rotary)
        merged = self.merger_norm(x).view(-1, config.hidden_size * config.merge_size**2)
        result: torch.Tensor = self.merger(merged)
        return result

    def _positions(self, grids: Grids, device: torch.device) -> torch.Tensor:
        """Row and column of each patch, square by square: (patches, 2)."""
        merge = self.config.merge_size
        found = [torch.empty((0, 2), dtype=torch.int64, device=device)]
        for height, width in grids:
            rows, columns = (torch.arange(size, device=device) for size in (height, width))
            places = torch.stack(torch.meshgrid(rows, columns, indexing="ij"), dim=-1)
            squares = places.view(height // merge, merge, width // merge, merge, 2).transpose(1, 2)
            found.append(squares.reshape(-1, 2))
        return torch.cat(found)


class ReferenceTextEncoder(nn.Module):
    """Token ids, and patches of images, to hidden states."""

    def __init__(self, config: TextEncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.visual = VisionTower(config.vision, config.hidden_size)
        self.layers = nn.ModuleList([DecoderLayer(config) for _ in range(config.num_layers)])
        self.norm = nn.RMSNorm(config.hidden_size, eps=1e-6)

    def forward(self, input_ids: torch.Tensor, patches: torch.Tensor | None = None, grids: Grids = ()) -> torch.Tensor:
        """Encode.

        Args:
            input_ids: (batch, tokens), with as many `image_token_id` as the images have merged tokens.
            patches: of all images, (patches, patch_size).
            grids: of each image.

        Returns:
            (batch, tokens, hidden_size).
        """
        x = self.embed_tokens(input_ids)
        if patches is not None:
            is_image = (input_ids == self.config.image_token_id).unsqueeze(-1)
            x = x.masked_scatter(is_image, self.visual(patches, grids))
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(-1)
        rotary = rotary_table(positions, self.config.head_dim, self.config.rope_theta)
        for layer in self.layers:
            x = layer(x, rotary)
        result: torch.Tensor = self.norm(x)
        return result
