"""What ranks do with a sharded component."""

# Torch's own types are partial here.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownLambdaType=false

import re
from pathlib import Path

import placewise
import torch
from placewise.plans.document import Plan
from placewise.plans.policy import Home
from torch import nn

from .modules import Block, GatedTower, Tower, on_meta
from .ranks import refused

IDS = [[1, 5, 3, 3]]
WIDTH, LAYERS, WORDS = 1024, 6, 64
"""Of a tower that is large beside what a process takes anyway."""


def even() -> nn.Module:
    """All its weights divide by two ranks."""
    return Tower(words=12)


def odd() -> nn.Module:
    """Its tied embedding does not."""
    return Tower(words=11)


def large() -> nn.Module:
    return Tower(width=WIDTH, layers=LAYERS, words=WORDS)


class Leaky(Tower):
    """A layer's weight is used outside its layer too."""

    def __init__(self) -> None:
        super().__init__()
        block = self.blocks[0]
        assert isinstance(block, Block)
        self.again = block.norm


def passes(path: Path, plan: Plan, module: nn.Module) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Outputs of two passes, and this rank's weights after them."""
    pipeline = placewise.apply(plan, path, module)
    with torch.no_grad():
        outputs = [module(torch.tensor(IDS)) for _ in range(2)]
    return outputs, {name: weight.clone() for name, weight in pipeline.components["model"].weights()}


def passes_on_ranks(rank: int, path: Path, plan: Plan) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    return passes(path, plan, on_meta(GatedTower))


def offloaded(plan: Plan) -> Plan:
    """The plan with its parts on the host: on the CPU that changes who gathers them, and nothing else."""
    placement = plan.placements[0]
    segments = tuple(segment.model_copy(update={"home": Home.pageable}) for segment in placement.segments)
    return plan.model_copy(update={"placements": (placement.model_copy(update={"segments": segments}),)})


def run_sharded(
    rank: int, plans: dict[str, tuple[Path, Plan]]
) -> dict[str, tuple[list[torch.Tensor], dict[str, torch.Tensor]]]:
    """Two passes of each tower, and of one with its parts on the host."""
    path, plan = plans["even"]
    return {
        "even": passes(path, plan, on_meta(even)),
        "offloaded": passes(path, offloaded(plan), on_meta(even)),
        "odd": passes(*plans["odd"], on_meta(odd)),
    }


def refused_on_ranks(rank: int, plans: dict[str, tuple[Path, Plan]]) -> dict[str, tuple[str, str]]:
    """What each rank hears of what cannot be sharded."""
    path, plan = plans["odd"]
    return {
        "ranks": refused(lambda: passes(*plans["three"], on_meta(even))),
        "leaky": refused(lambda: passes(*plans["leaky"], on_meta(Leaky))),
        "whole": refused(lambda: passes(path, offloaded(plan), on_meta(odd))),
        "update": refused(
            lambda: placewise.apply(plan, path, on_meta(odd)).update("model", {"embed.weight": torch.neg})
        ),
    }


def anonymous_bytes() -> int:
    """This process's own memory, without pages of files."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def bytes_read() -> int:
    """What this process has read by system calls, from the page cache or not."""
    return int(Path("/proc/self/io").read_text().split()[1])


def memory_of_sharded(rank: int, small: tuple[Path, Plan], big: tuple[Path, Plan]) -> tuple[int, int, int]:
    """Anonymous bytes that a large tower adds at most, after each unit that is loaded, and within two passes.

    And the bytes that loading read.
    """
    passes(*small, on_meta(even))  # what torch takes for the first time
    path, plan = big
    module = on_meta(large)
    before, read, seen = anonymous_bytes(), bytes_read(), [0]
    pipeline = placewise.load(
        plan, path, modules={"model": module}, progress=lambda _: seen.append(anonymous_bytes() - before)
    )
    seen.append(anonymous_bytes() - before)
    read, peak = bytes_read() - read, list[int]()
    for name, layer in pipeline["model"].named_modules():
        if name.startswith("blocks."):
            layer.register_forward_hook(lambda *_: peak.append(anonymous_bytes() - before))
    with torch.no_grad():
        for _ in range(2):
            module(torch.tensor(IDS))
    return max(seen), max(peak), read
