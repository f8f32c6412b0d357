"""What ranks that share a plan do with it."""

# Torch's own types are partial here.
# pyright: reportUnknownMemberType=false

from pathlib import Path

import placewise
import torch
from placewise.plans.document import Plan
from placewise.plans.machine import Machine

from .modules import Tower, machine, on_meta, policy
from .ranks import refused

IDS = [[1, 5, 3, 3]]


def facts(rank: int) -> Machine:
    """The higher the rank, the less it has: together too little for copies of all."""
    return machine((20 << 10) - rank * 64)


def run_shared(rank: int, path: Path) -> tuple[Plan, torch.Tensor, dict[str, tuple[str, str]]]:
    """The plan for all, this rank's outputs under it, and what it hears of wrong calls."""
    plan = placewise.plan_together(path, machine=facts(rank), policy=policy(), passes={"model": 3})
    tower = on_meta(Tower)
    pipeline = placewise.apply(plan, path, tower)
    with torch.no_grad():
        outputs = tower(torch.tensor(IDS, device=pipeline.device("model"))).cpu()
    missing = path.with_name("missing.safetensors")
    wrong = {
        "model": refused(lambda: placewise.plan_together(missing, machine=facts(rank))),
        "kind": refused(lambda: placewise.plan_together(path, machine=machine(1 << 20, None if rank else 1 << 20))),
    }
    return plan, outputs, wrong


def measure_together(rank: int, path: Path) -> Plan:
    """A plan from what is measured here."""
    return placewise.plan_together(path)
