"""What ranks do with a sharded component."""

# Torch's own types are partial here.
# pyright: reportUnknownMemberType=false

from pathlib import Path

import placewise
import torch
from placewise.plans.document import Plan
from torch import nn

from .modules import Tower, on_meta

IDS = [[1, 5, 3, 3]]


def run_sharded(rank: int, path: Path, plan: Plan) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Outputs of two passes, and this rank's weights after them."""
    tower = on_meta(wide)
    pipeline = placewise.apply(plan, path, tower)
    with torch.no_grad():
        outputs = [tower(torch.tensor(IDS)) for _ in range(2)]
    return outputs, {name: weight.clone() for name, weight in pipeline.components["model"].weights()}


def wide() -> nn.Module:
    """A tower of which some weights divide by two ranks, and not by three."""
    return Tower(width=32, words=12)
