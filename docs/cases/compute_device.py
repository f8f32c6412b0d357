"""Case 1: the device of a module is where it computes, wherever its weights rest."""

import tempfile
from pathlib import Path
from typing import Any

import placewise
import torch
from placewise.models.reference.components import save
from placewise.planner.measuring.accelerators import given_accelerator, given_host
from placewise.plans.machine import Machine
from placewise.plans.units import GIB


def request(pipeline: Any) -> torch.Tensor:
    """Encode a text; its ids are made where the encoder says that it is."""
    encoder = pipeline["text_encoder"]
    device = next(encoder.parameters()).device
    states: torch.Tensor = encoder(torch.tensor([[1, 2, 3, 4]], device=device))
    return states


def main() -> None:
    """Plan, check before anything is loaded, load, and run the code that was checked."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save(folder, "tiny", seed=0)
        accelerators = (given_accelerator("sim:0", GIB),)
        # Every layer is streamed: the parameters rest on the checkpoint's mapping, and the forward runs on sim:0.
        machine = Machine(host=given_host(GIB), accelerators=accelerators)
        plan = placewise.plan(folder, machine=machine, policy="layerwise")
        for at_rest in (True, False):
            found = placewise.check_devices(plan, folder, request, at_rest=at_rest)
            print("a weight says where it", "rests:" if at_rest else "computes:", f"{len(found.mixed)} mistakes")
            print(*(f"  {each}\n" for each in found.mixed), sep="", end="")
        loaded = placewise.load(plan, folder)
        resting = {str(weight.device) for _, weight in loaded.components["text_encoder"].weights()}
        answers = {str(each.device) for each in loaded["text_encoder"].parameters()}
        plain = placewise.plan(folder, machine=Machine(host=given_host(GIB), accelerators=()))
        with torch.no_grad():
            states, expected = request(loaded), request(placewise.load(plain, folder))
        print(f"loaded: weights rest on {', '.join(resting)}, and say {', '.join(answers)}")
        print(f"the states are on {states.device}, the CPU's to the bit: {torch.equal(states.cpu(), expected)}")


if __name__ == "__main__":
    main()
