"""Case 4: weights whose copy would not fit stay views of the checkpoint, and take no memory of their own."""

import tempfile
from importlib import import_module
from pathlib import Path

import placewise
import torch
from placewise.benchmarks.checkpoints import reference_pipeline
from placewise.planner.measuring.accelerators import given_host
from placewise.plans.document import Plan
from placewise.plans.machine import Machine
from placewise.plans.units import GIB, format_bytes


def anonymous_bytes() -> int:
    """What this process holds that is no file's."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) * 1024


def by_home(plan: Plan) -> str:
    """Each home of a plan, with what rests there."""
    found: dict[str, int] = {}
    for segment in (segment for placement in plan.placements for segment in placement.segments):
        found[segment.home] = found.get(segment.home, 0) + segment.bytes
    return ", ".join(f"{home} {format_bytes(size)}" for home, size in sorted(found.items()))


def main() -> None:
    """Plan 125 GiB for three hosts, and load them under a plan that copies nothing."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        reference_pipeline(folder)  # sparse files: real headers, no disk
        for gib in (256, 32, 12):
            machine = Machine(host=given_host(gib * GIB), accelerators=())
            print(f"host of {gib} GiB: {by_home(placewise.plan(folder, machine=machine))}")
        plan = placewise.plan(folder, machine=machine, policy="low-memory")
        print(f"  which copies nothing: {by_home(plan)}")
        import_module("placewise.executor.load")  # not what is measured
        before = anonymous_bytes()
        pipeline = placewise.load(plan, folder)
        loaded = anonymous_bytes()
        with torch.no_grad():
            pipeline["transformer"].get_submodule("blocks.0.mlp")(torch.ones(1, 5760, dtype=torch.bfloat16))
        used = anonymous_bytes()
        print(f"loaded: {format_bytes(max(0, loaded - before))} more of anonymous memory")
        print(f"after a part of a layer has computed: {format_bytes(max(0, used - before))}")


if __name__ == "__main__":
    main()
