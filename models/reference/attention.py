"""Self-attention over packed sequences, whole or in chunks of tokens, and the rotary tables that go with it.

Packed sequences lie one after another in one tensor; `cu_seqlens` are their bounds, 0 first and all tokens last. They
are Python's integers, so that no device is waited for, and tensors without data can be traced.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F

from ...plans.errors import InputError
from ..tokenwise import parts

Rotary = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, each (tokens, 1, head_dim / 2), in float32."""


def rotary_table(positions: torch.Tensor, head_dim: int, theta: float) -> Rotary:
    """The table of positions (tokens, axes), on their device. The first axis has what is left of an even division."""
    half, axes = head_dim // 2, positions.shape[-1]
    angles: list[torch.Tensor] = []
    for axis in range(axes):
        count = half // axes if axis else half - (axes - 1) * (half // axes)
        exponents = torch.arange(count, dtype=torch.float32, device=positions.device) / count
        angles.append(positions[:, axis, None, None] * theta**-exponents)
    angle = torch.cat(angles, dim=-1)
    return angle.cos(), angle.sin()


def rotated(x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Heads (..., tokens, heads, head_dim) turned by their tokens' angles: in float32, given back in their dtype."""
    cos, sin = rotary
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


class PackedAttention(nn.Module):
    """Attention within each of several packed sequences.

    The rows of `qkv.weight` are interleaved as fused checkpoints have them: for each head its query's rows, its key's,
    its value's. Nothing is reordered: what a product gives is divided by views, and so is the weight.
    """

    def __init__(self, hidden_size: int, num_heads: int, head_dim: int) -> None:
        super().__init__()
        self.num_heads, self.head_dim = num_heads, head_dim
        self.chunk_tokens: int | None = None
        self.qkv = nn.Linear(hidden_size, 3 * num_heads * head_dim, bias=False)
        self.query_norm = nn.RMSNorm(head_dim, eps=1e-6)
        self.key_norm = nn.RMSNorm(head_dim, eps=1e-6)
        self.out = nn.Linear(num_heads * head_dim, hidden_size, bias=False)

    def set_chunk_tokens(self, tokens: int) -> None:
        """Take at most so many tokens at once. Keys and values of all tokens stay; queries never do."""
        self.chunk_tokens = tokens

    def forward(self, x: torch.Tensor, cu_seqlens: Sequence[int], rotary: Rotary) -> torch.Tensor:
        """Attend.

        Args:
            x: (tokens, hidden_size).
            cu_seqlens: bounds of the sequences, of which any may be empty.
            rotary: the tokens' table.

        Returns:
            (tokens, hidden_size).

        Raises:
            InputError: the bounds are not those of so many tokens.
        """
        bounds = list(pairwise(cu_seqlens))
        if not cu_seqlens or cu_seqlens[0] != 0 or cu_seqlens[-1] != len(x) or any(a > b for a, b in bounds):
            raise InputError(
                f"cu_seqlens {tuple(cu_seqlens)} do not bound {len(x)} packed tokens",
                hint="give 0, the running sums of the sequences' lengths, and with the last of them all tokens",
            )
        if self.chunk_tokens is not None and len(x) > self.chunk_tokens:
            return self._in_chunks(x, bounds, rotary, self.chunk_tokens)
        query, key, value = self.qkv(x).unflatten(-1, (self.num_heads, 3, self.head_dim)).unbind(-2)
        query, key = rotated(self.query_norm(query), rotary), rotated(self.key_norm(key), rotary)
        attended = torch.empty_like(query)
        for start, stop in bounds:
            attended[start:stop] = _attend(query[start:stop], key[start:stop], value[start:stop])
        result: torch.Tensor = self.out(attended.flatten(1))
        return result

    def _in_chunks(self, x: torch.Tensor, bounds: Sequence[tuple[int, int]], rotary: Rotary, most: int) -> torch.Tensor:
        """Keys and values of all tokens first; then each chunk's queries, attended, projected and written back."""
        rows = self.qkv.weight.view(self.num_heads, 3 * self.head_dim, -1)
        query_rows, key_value_rows = rows[:, : self.head_dim], rows[:, self.head_dim :]
        key, value = (x.new_empty(len(x), self.num_heads, self.head_dim) for _ in range(2))
        for part in parts(0, len(x), most):
            made, value[part] = _heads(x[part], key_value_rows).chunk(2, dim=-1)
            key[part] = rotated(self.key_norm(made), _at(rotary, part))
        result = torch.empty_like(x)
        for start, stop in bounds:
            for part in parts(start, stop, most):
                query = rotated(self.query_norm(_heads(x[part], query_rows)), _at(rotary, part))
                result[part] = self.out(_attend(query, key[start:stop], value[start:stop]).flatten(1))
        return result


def _heads(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Products of tokens (tokens, hidden) with each head's rows (heads, width, hidden): (tokens, heads, width)."""
    return torch.matmul(x.expand(len(rows), *x.shape), rows.mT).transpose(0, 1)


def _at(rotary: Rotary, part: slice) -> Rotary:
    return rotary[0][part], rotary[1][part]


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """One sequence; each (tokens, heads, head_dim)."""
    query, key, value = (each.transpose(0, 1).unsqueeze(0) for each in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value).squeeze(0).transpose(0, 1)
