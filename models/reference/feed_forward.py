"""The feed-forward that text encoder and transformer share."""

import torch
from torch import nn
from torch.nn import functional as F


class GatedFeedForward(nn.Module):
    """Three products: the gate's and the value's, multiplied, and the one back."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """From (..., hidden_size) to the same."""
        result: torch.Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return result
