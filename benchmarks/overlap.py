"""Streaming on the simulated accelerator with a modelled link: how close a pass comes to its longest resource.

    PYTHONPATH=.src .venv/bin/python -m benchmarks.overlap

A stack of linear layers is streamed whole, with one slot and with two. The link's bandwidth is chosen so that copying
takes 0.5, 1 and 2 times as long as the compute, which is measured first, resident on the same device.
"""

# Torch's own types are partial here.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

import platform
import statistics
import subprocess
import tempfile
import time
from datetime import date
from pathlib import Path

import torch
from placewise.executor.load import LoadedPipeline, load_plan
from placewise.executor.machine import Capabilities
from placewise.executor.simulation.accelerator import simulated_device
from placewise.executor.simulation.machine import SimulatedMachine
from placewise.models.build import parameters_on_meta
from placewise.models.pipeline import read_pipeline
from placewise.planner.compile import compile_plan
from placewise.planner.measuring.accelerators import given_accelerator, given_host
from placewise.plans.machine import Machine
from placewise.plans.pipeline import Workload
from placewise.plans.policy import Hold, Override
from placewise.plans.units import GIB
from placewise.policies.presets import load_preset
from safetensors.torch import save_file
from torch import nn

LAYERS, WIDTH, ROWS, PASSES = 24, 1024, 1024, 5


def stack() -> nn.Module:
    """The model: linear layers, one after another."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def loaded(path: Path, *, slots: int, link_bytes_per_s: float | None) -> LoadedPipeline:
    """The stack on a device of that link; every layer is streamed unless `slots` is zero."""
    override = (Override(select="model.", hold=Hold.layer),) if slots else ()
    policy = load_preset("auto").model_copy(
        update={"overrides": override, "slots": max(1, slots), "prefetch_layers": max(0, slots - 1)}
    )
    machine = Machine(host=given_host(8 * GIB), accelerators=(given_accelerator("sim:0", 4 * GIB),))
    pipeline = read_pipeline(path, workload=Workload(), passes={"model": 2})
    plan = compile_plan(pipeline, machine, policy, Workload(), version="0")
    device = SimulatedMachine(
        simulated_device(0, capacity_bytes=4 * GIB, link_bytes_per_s=link_bytes_per_s),
        capabilities=Capabilities(pinned_memory=False, streams=slots > 1, unified=False),
    )
    with parameters_on_meta():
        module = stack().eval()
    return load_plan(plan, path.parent, modules={"model": module}, machines={"sim:0": device})


def seconds_per_pass(pipeline: LoadedPipeline) -> float:
    """The median over passes, after one that warms up."""
    x = torch.randn(ROWS, WIDTH).to("sim:0")
    taken: list[float] = []
    with torch.no_grad():
        for _ in range(PASSES + 1):
            started = time.perf_counter()
            pipeline["model"](x)
            taken.append(time.perf_counter() - started)
    pipeline.release()
    return statistics.median(taken[1:])


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)  # The other core is the reader's.
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save_file({name: tensor.contiguous() for name, tensor in stack().state_dict().items()}, path)
        weights = LAYERS * (WIDTH + 1) * WIDTH * 4
        compute = seconds_per_pass(loaded(path, slots=0, link_bytes_per_s=None))
        rows: list[str] = []
        for share in (0.5, 1.0, 2.0):
            rate = weights / (compute * share)
            one, two = (seconds_per_pass(loaded(path, slots=slots, link_bytes_per_s=rate)) for slots in (1, 2))
            bound = max(compute, compute * share)
            times = " | ".join(f"{seconds * 1e3:.1f}" for seconds in (compute, compute * share, one, two))
            rows.append(f"| {share:.1f} | {times} | {one / (compute * (1 + share)):.2f} | {two / bound:.2f} |")
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    print(f"# Overlap on the simulated accelerator, {date.today().isoformat()}\n")
    print(f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}, 1 compute thread;")
    print(f"commit {commit.stdout.strip()}; `python -m benchmarks.overlap`; medians of {PASSES} passes, ms.\n")
    print("| link / compute | compute | link | 1 slot | 2 slots | 1 slot / sum | 2 slots / max |")
    print("|---|---|---|---|---|---|---|")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
