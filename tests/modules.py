"""Small modules with everything that placement gets wrong: ties, buffers of both kinds, several and nested stacks."""

# Torch's own types are partial here.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from placewise.executor.load import LoadedPipeline, load_plan
from placewise.models.build import parameters_on_meta
from placewise.models.pipeline import read_pipeline
from placewise.planner.compile import compile_plan
from placewise.planner.measuring.accelerators import given_accelerator, given_host
from placewise.plans.document import Fits, Plan
from placewise.plans.machine import Machine
from placewise.plans.pipeline import Transform, Workload
from placewise.plans.policy import Override, Policy
from placewise.policies.presets import load_preset
from safetensors.torch import save_file
from torch import nn

SIM = "sim:1"
"""The simulated device of the executor's tests."""


class Block(nn.Module):
    """A residual layer with an inner list of its own, and a buffer that its forward writes."""

    calls: torch.Tensor
    table: torch.Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.blocks = nn.ModuleList([nn.Linear(width, width) for _ in range(2)])
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("table", torch.linspace(0, 1, width), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = self.norm(x)
        for inner in self.blocks:
            y = torch.nn.functional.gelu(inner(y))
        result: torch.Tensor = x + y * self.table
        return result


class Tower(nn.Module):
    """Embedding, a stack of blocks, and a head tied to the embedding. `order` is the blocks' order of use."""

    def __init__(self, *, width: int = 16, layers: int = 4, words: int = 11) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(layers)])
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embed.weight
        self.order: tuple[int, ...] = tuple(range(layers))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for number in self.order:
            x = self.blocks[number](x)
        logits: torch.Tensor = self.head(x)
        return logits


class Projection(nn.Module):
    """A layer whose rows are all queries, then all keys, then all values, which it multiplies."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        result: torch.Tensor = x + query * key + value
        return result


class Projections(nn.Sequential):
    """24 such layers, and nothing else."""

    def __init__(self, *, width: int = 2048) -> None:
        super().__init__(*(Projection(width) for _ in range(24)))


class Gated(nn.Module):
    """A token-wise feed-forward with a gate, wider within than without."""

    def __init__(self, width: int, wider: int = 4) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * wider * width)
        self.down = nn.Linear(wider * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.up(x).chunk(2, dim=-1)
        result: torch.Tensor = self.down(torch.nn.functional.silu(gate) * value)
        return result


class GatedBlock(nn.Module):
    """A layer that mixes tokens, and has a token-wise part."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = Gated(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + x.mean(dim=1, keepdim=True)
        result: torch.Tensor = x + self.mlp(self.norm(x))
        return result


class GatedTower(Tower):
    """A tower of such layers."""

    def __init__(self, *, width: int = 16, layers: int = 4) -> None:
        super().__init__(width=width, layers=layers)
        self.blocks = nn.ModuleList([GatedBlock(width) for _ in range(layers)])


def build(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """A module with seeded random weights, in eval mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return make().eval()


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    """The same module without weights."""
    with parameters_on_meta():
        return make().eval()


def save(module: nn.Module, path: Path) -> Path:
    """Save what a library would: each tied weight once, no transient buffer."""
    path.parent.mkdir(parents=True, exist_ok=True)
    seen: set[int] = set()
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in module.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            tensors[name] = tensor.detach().clone()
    save_file(tensors, path)
    return path


def machine(host_bytes: int, device_bytes: int | None = None) -> Machine:
    """A given host, and a given simulated device."""
    accelerators = () if device_bytes is None else (given_accelerator(SIM, device_bytes),)
    return Machine(host=given_host(host_bytes), accelerators=accelerators)


def policy(**changes: object) -> Policy:
    """The preset auto without reserves, so that budgets are exact, with changes."""
    none = {"reserve_bytes": 0, "device_reserve_bytes": 0}
    return Policy.model_validate({**load_preset("auto").model_dump(), **none, **changes})


def overridden(*overrides: Override, **changes: object) -> Policy:
    """That policy with overrides."""
    return policy(overrides=overrides, **changes)


def plan_for(
    path: Path, on: Machine, by: Policy | None = None, passes: int = 1, transforms: Sequence[Transform] = ()
) -> Plan:
    """A plan that fits, for a checkpoint of one component."""
    pipeline = read_pipeline(path, workload=Workload(), passes={"model": passes}, transforms={"model": transforms})
    plan = compile_plan(pipeline, on, by or policy(), Workload(), version="0")
    assert isinstance(plan.verdict, Fits), plan.verdict
    return plan


def load(plan: Plan, path: Path, make: Callable[[], nn.Module]) -> LoadedPipeline:
    """The plan, executed on a fresh module."""
    return load_plan(plan, path.parent, modules={"model": on_meta(make)})
