"""Case 2: where device and host are one memory, layers pass through one slot, and tokens in chunks."""

import tempfile
from pathlib import Path

import placewise
import torch
from placewise.models.reference.components import save
from placewise.planner.measuring.accelerators import given_accelerator, given_host
from placewise.plans.document import Refused
from placewise.plans.machine import Machine, MemoryKind
from placewise.plans.pipeline import Workload
from placewise.plans.policy import Hold, Override
from placewise.plans.units import KIB, format_bytes
from placewise.policies.presets import load_preset

TOKENS, HEIGHT, WIDTH, FRAMES = 1024, 8, 8, 5
LAYERWISE = load_preset("layerwise").model_copy(update={"reserve_bytes": 0})


def machine(memory_bytes: int) -> Machine:
    """A simulated device that shares the host's memory, as Apple's does."""
    shares = {"memory": MemoryKind.unified, "streams": False}
    device = given_accelerator("sim:0", memory_bytes).model_copy(update=shares)
    return Machine(host=given_host(memory_bytes), accelerators=(device,))


def main() -> None:
    """Plan for ample memory and for little, run both, and ask for what the preset refuses."""
    workload = Workload(tokens=TOKENS, height=HEIGHT, width=WIDTH, frames=FRAMES)
    with tempfile.TemporaryDirectory() as name:
        folder, sounds = Path(name), list[torch.Tensor]()
        save(folder, "tiny", seed=0)
        for memory in (8192 * KIB, 2048 * KIB):
            plan = placewise.plan(folder, machine=machine(memory), policy=LAYERWISE, workload=workload, trace=True)
            slots = {placed.staging.slots for placed in plan.placements if placed.staging}
            chunk = next(placed.chunk_tokens for placed in plan.placements if placed.component == "transformer")
            pipeline = placewise.load(plan, folder)
            request = {"height": HEIGHT, "width": WIDTH, "frames": FRAMES, "steps": 1, "seed": 0}
            sounds.append(pipeline.library()(torch.arange(TOKENS).view(1, -1) % 90, **request)[1].cpu())
            predicted = max(phase.predicted.peak_bytes["host"] or 0 for phase in plan.phases)
            observed = pipeline.machines["sim:0"].memory().peak_bytes
            print(
                f"{format_bytes(memory)} in all: {max(slots)} slot, transformer in chunks of {chunk or 'all'} tokens,"
            )
            print(f"  peak predicted {format_bytes(predicted)}, observed {format_bytes(observed)}")
            del pipeline  # so that the device is empty
        print("the same sound to the bit:", torch.equal(*sounds))
        kept = (Override(select="transformer", hold=Hold.phase), Override(select="video_vae", hold=Hold.phase))
        wished = LAYERWISE.model_copy(update={"overrides": kept})
        verdict = placewise.plan(folder, machine=machine(8192 * KIB), policy=wished).verdict
        assert isinstance(verdict, Refused)
        print(*(f"refused: {broken.subject}: {broken.why}" for broken in verdict.broken), sep="\n")


if __name__ == "__main__":
    main()
