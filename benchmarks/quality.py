"""How much the optimum is worth: predicted request time beside three simple placements under the same budgets.

    PYTHONPATH=.src .venv/bin/python -m benchmarks.quality

All four are judged by the same simulated schedule; the simple ones are the rejected alternatives in each plan's first
decision. Compute is left out, so that seconds are those of moving weights; they are what a placement changes.
"""

from dataclasses import dataclass
from itertools import pairwise

from placewise.planner.calibrating.given import given_calibration
from placewise.planner.compile import compile_plan
from placewise.planner.measuring.accelerators import given_accelerator, given_host
from placewise.plans.document import Fits, Plan
from placewise.plans.machine import Machine
from placewise.plans.pipeline import Checkpoint, Component, LayerSize, Pipeline, Stack, UnknownActivations, Workload
from placewise.plans.units import GIB, MIB
from placewise.policies.presets import load_preset

from .header import print_header

BASELINES = ("greedy-prefix", "component-offload", "everything-streamed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A pipeline on a machine."""

    name: str
    pipeline: Pipeline
    host_bytes: int
    device_bytes: int
    link_bytes_per_s: float
    unified: bool = False


def stack(name: str, *sizes: int) -> Stack:
    """A stack of layers of these bytes."""
    runs = (LayerSize(layers=(at, at + 1), layer_bytes=size, packed_bytes=size) for at, size in enumerate(sizes))
    return Stack(name=name, layers=len(sizes), extents=1, sizes=tuple(runs))


def component(name: str, *stacks: Stack, fixed: int, passes: int = 1) -> Component:
    """A component of no files: plans need weights and passes alone."""
    layers = sum(size.layer_bytes for each in stacks for size in each.sizes)
    return Component(
        name=name,
        library=None,
        class_name=None,
        checkpoint=Checkpoint(root=name, files=()),
        tensors=1,
        dtype_bytes={"BF16": layers + fixed},
        stacks=stacks,
        fixed_bytes=fixed,
        fixed_packed_bytes=fixed,
        passes=passes,
        activations=UnknownActivations(),
    )


def flow(name: str, *components: Component) -> Pipeline:
    """Components one after another."""
    names = [each.name for each in components]
    return Pipeline(name=name, components=components, edges=tuple(pairwise(names)))


H3 = flow(
    "H3-sized video",
    component("text_encoder", stack("layers", *[930 * MIB] * 64), fixed=4 * GIB),
    component("transformer", stack("blocks", *[1036 * MIB] * 60), fixed=GIB, passes=50),
    component("video_vae", stack("up_blocks", *[256 * MIB] * 4), fixed=GIB),
    component("audio_vae", stack("blocks", *[64 * MIB] * 4), fixed=256 * MIB),
)
LM = flow("70B language model", component("model", stack("layers", *[1632 * MIB] * 80), fixed=4 * GIB, passes=128))
SDXL = flow(
    "SDXL-sized image",
    component("text_encoder", stack("layers", *[14 * MIB] * 12), fixed=73 * MIB),
    component("text_encoder_2", stack("layers", *[40 * MIB] * 32), fixed=124 * MIB),
    component(
        "unet",
        stack("down_blocks", 20 * MIB, 330 * MIB, 1450 * MIB),
        stack("up_blocks", 2250 * MIB, 540 * MIB, 40 * MIB),
        fixed=320 * MIB,
        passes=30,
    ),
    component("vae", stack("up_blocks", 28 * MIB, 28 * MIB, 17 * MIB, 5 * MIB), fixed=80 * MIB),
)
WAN = flow(
    "14B video",
    component("text_encoder", stack("block", *[420 * MIB] * 24), fixed=2 * GIB),
    component("transformer", stack("blocks", *[670 * MIB] * 40), fixed=400 * MIB, passes=50),
    component("vae", stack("up_blocks", *[30 * MIB] * 4), fixed=120 * MIB),
)
PAIRS = (
    Pair(name="12 + 32 GiB", pipeline=H3, host_bytes=32 * GIB, device_bytes=12 * GIB, link_bytes_per_s=12e9),
    Pair(name="24 + 64 GiB", pipeline=H3, host_bytes=64 * GIB, device_bytes=24 * GIB, link_bytes_per_s=12e9),
    Pair(name="80 + 256 GiB", pipeline=H3, host_bytes=256 * GIB, device_bytes=80 * GIB, link_bytes_per_s=50e9),
    Pair(
        name="unified 64 GiB",
        pipeline=H3,
        host_bytes=64 * GIB,
        device_bytes=48 * GIB,
        link_bytes_per_s=50e9,
        unified=True,
    ),
    Pair(name="16 + 32 GiB", pipeline=LM, host_bytes=32 * GIB, device_bytes=16 * GIB, link_bytes_per_s=12e9),
    Pair(name="24 + 192 GiB", pipeline=LM, host_bytes=192 * GIB, device_bytes=24 * GIB, link_bytes_per_s=25e9),
    Pair(name="4 + 8 GiB", pipeline=SDXL, host_bytes=8 * GIB, device_bytes=4 * GIB, link_bytes_per_s=12e9),
    Pair(name="6 + 12 GiB", pipeline=SDXL, host_bytes=12 * GIB, device_bytes=6 * GIB, link_bytes_per_s=12e9),
    Pair(name="16 + 64 GiB", pipeline=WAN, host_bytes=64 * GIB, device_bytes=16 * GIB, link_bytes_per_s=12e9),
    Pair(name="24 + 32 GiB", pipeline=WAN, host_bytes=32 * GIB, device_bytes=24 * GIB, link_bytes_per_s=25e9),
)


def plan_of(pair: Pair) -> Plan:
    """The plan of a pair, with a disk of 3 GB/s."""
    device = "mps:0" if pair.unified else "cuda:0"
    rates = given_calibration(disk_bytes_per_s=3e9, link_bytes_per_s=pair.link_bytes_per_s, device=device)
    machine = Machine(
        host=given_host(pair.host_bytes),
        accelerators=(given_accelerator(device, pair.device_bytes),),
        calibration=rates,
    )
    return compile_plan(pair.pipeline, machine, load_preset("auto"), Workload(), version="0")


def main() -> None:
    """Print the table, and fail if any simple placement is predicted faster."""
    print_header("Quality of plans", "python -m benchmarks.quality")
    print("Predicted seconds of moving weights per request; in brackets, times as long as the plan's.\n")
    print("| pipeline | device + host | plan | " + " | ".join(BASELINES) + " |")
    print("|---|---|---|---|---|---|")
    for pair in PAIRS:
        plan = plan_of(pair)
        if not isinstance(plan.verdict, Fits):
            raise SystemExit(f"{pair.pipeline.name} on {pair.name} does not fit")
        decision = plan.decisions[0]
        ours = (decision.because["microseconds"] or 0) / 1e6
        others = {rejected.choice: rejected.predicted_seconds or 0.0 for rejected in decision.rejected}
        if min(others.values()) < ours * (1 - 1e-6):
            raise SystemExit(
                f"{pair.pipeline.name} on {pair.name}: a simple placement is faster: {others} against {ours}"
            )
        cells = " | ".join(f"{others[name]:.1f} ({others[name] / ours:.2f}x)" for name in BASELINES)
        print(f"| {pair.pipeline.name} | {pair.name} | {ours:.1f} | {cells} |")


if __name__ == "__main__":
    main()
