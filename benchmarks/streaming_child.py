"""One contender of the streaming benchmark, in its cap: it loads the model, then passes whenever a line tells it to.

Answers are lines of JSON on stdout: `Loaded` once, and then a `Pass` for each line that is read.
"""

# The libraries' own types are partial.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import contextlib
import importlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from placewise import api
from placewise.plans.document import Placement
from placewise.plans.pipeline import Workload
from placewise.plans.policy import Hold, Home, Override, Policy
from placewise.plans.record import Record
from placewise.plans.units import format_bytes
from placewise.policies.presets import load_preset

from .soundness_cases import digest_of

TOKENS, PASSES = 8, 20
NAME = "model"
OFFLOAD = "offload"
"""The folder beside the weights into which a library may write them anew; empty when it starts."""

_LLAMA = ("transformers.models.llama.modeling_llama", "transformers.models.auto.modeling_auto")


class Placed(Record):
    """What a plan chose, in words, and the bytes that it does not hold: each pass has to fetch them."""

    words: tuple[str, ...]
    unheld_bytes: int


class Loaded(Record):
    """The model is ready. `placed` is null where nothing was planned."""

    load_s: float
    placed: Placed | None


class Pass(Record):
    """One pass: its time, what the process read from the disk meanwhile, and a checksum of the logits."""

    seconds: float
    disk_bytes: int
    digest: str


Model = tuple[Callable[..., Any], Placed | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A way to run the model.

    Attributes:
        title: for the table.
        load: makes the model ready, from its folder, with a variant, in a cap of so many bytes.
        plan: plans it, in the cap and before the clock starts, and gives what loads the plan; then `load` is not used.
        variants: all are tried, and the one with the shortest turn is measured.
        imports: what it needs beside torch, imported before the clock starts.
    """

    title: str
    load: Callable[[Path, str, int], Model] | None = None
    plan: Callable[[Path], Callable[[], Model]] | None = None
    variants: tuple[str, ...] = ("",)
    imports: tuple[str, ...] = _LLAMA


def _plan(folder: Path, policy: Policy) -> Callable[[], Model]:
    """Plan many passes, and give what loads the plan; a server loads one that was made before."""
    plan = api.plan(folder, policy=policy, workload=Workload(tokens=TOKENS), passes={NAME: PASSES}, trace=True)
    (placement,) = plan.placements

    def load() -> Model:
        return api.load(plan, folder)[NAME], _placed(placement)

    return load


def _placed(placement: Placement) -> Placed:
    words = [
        f"{segment.stack or 'fixed part'}: {sum(stop - start for start, stop in segment.layers) or 'all'} "
        f"{segment.home}/{segment.hold}, {format_bytes(segment.bytes)}"
        for segment in placement.segments
    ]
    if staging := placement.staging:
        reads = f" of {format_bytes(staging.chunk_bytes)}, {staging.depth} at once" if staging.chunk_bytes else ""
        words.append(f"reader {staging.reader}{reads}, {staging.slots} slots, {staging.prefetch_layers} ahead")
    streamed = (each for each in placement.segments if each.home is Home.mapped and each.hold is not Hold.phase)
    return Placed(words=tuple(words), unheld_bytes=sum(segment.bytes for segment in streamed))


def _ours(folder: Path) -> Callable[[], Model]:
    return _plan(folder, load_preset("auto"))


def _mapped(folder: Path) -> Callable[[], Model]:
    everything = Override(select=NAME, home=Home.mapped, hold=Hold.always)
    return _plan(folder, load_preset("low-memory").model_copy(update={"overrides": (everything,)}))


def _pretrained(folder: Path, **how: object) -> Any:
    return importlib.import_module("transformers").AutoModelForCausalLM.from_pretrained(folder, **how)


def _plain(folder: Path, variant: str, limit_bytes: int) -> Model:
    return _pretrained(folder), None


def _device_map(folder: Path, variant: str, limit_bytes: int) -> Model:
    most = {"cpu": limit_bytes * int(variant.removesuffix("%")) // 100}
    return _pretrained(folder, device_map="auto", max_memory=most, offload_folder=folder / OFFLOAD), None


def _group_offload(folder: Path, variant: str, limit_bytes: int) -> Model:
    model = _pretrained(folder)
    importlib.import_module("diffusers.hooks").apply_group_offloading(
        model,
        onload_device="cpu",
        offload_type=variant,
        num_blocks_per_group=1,
        block_modules=["model"],
        offload_to_disk_path=str(folder / OFFLOAD),
    )
    return model, None


def _in_memory(folder: Path, variant: str, limit_bytes: int) -> Model:
    model = _pretrained(folder)
    for weight in model.parameters():
        weight.data = weight.data.clone()  # What is loaded may be a view of the file.
    return model, None


CONTENDERS = {
    "ours": Contender(title="placewise, policy auto", plan=_ours, imports=("placewise.executor.load", *_LLAMA)),
    "mapped": Contender(
        title="mapped without control: placewise, all mapped/always",
        plan=_mapped,
        imports=("placewise.executor.load", *_LLAMA),
    ),
    "plain": Contender(title="transformers, `from_pretrained`", load=_plain),
    "device_map": Contender(
        title="accelerate, `device_map` with disk offload", load=_device_map, variants=("80%", "60%", "40%", "20%")
    ),
    "group_offload": Contender(
        title="diffusers, group offload to disk",
        load=_group_offload,
        variants=("block_level", "leaf_level"),
        imports=("diffusers.hooks", *_LLAMA),
    ),
    "memory": Contender(title="in memory, without a cap", load=_in_memory),
}


def turn(model: Callable[..., Any]) -> Pass:
    """Two passes in a row, of which the second counts: it finds what a pass leaves behind, read ahead or cached."""
    tokens = torch.arange(TOKENS).unsqueeze(0)
    with torch.no_grad():
        model(tokens, use_cache=False)
        before, started = _read_bytes(), time.perf_counter()
        output = model(tokens, use_cache=False).logits
        seconds, after = time.perf_counter() - started, _read_bytes()
    return Pass(seconds=seconds, disk_bytes=after - before, digest=digest_of(output))


def _read_bytes() -> int:
    """What this process, with all its threads, made the disk read."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("read_bytes")).split()[1])


def main() -> None:
    """Load the contender that the command line names, and take turns."""
    name, folder, variant, limit_bytes = sys.argv[1:]
    contender = CONTENDERS[name]
    for module in contender.imports:
        importlib.import_module(module)
    answers = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):
        load = contender.plan(Path(folder)) if contender.plan else None
        if load is None and contender.load is not None:
            load = partial(contender.load, Path(folder), variant, int(limit_bytes))
        assert load is not None
        started = time.perf_counter()
        model, placed = load()
        print(Loaded(load_s=time.perf_counter() - started, placed=placed).model_dump_json(), file=answers, flush=True)
        for _ in sys.stdin:
            print(turn(model).model_dump_json(), file=answers, flush=True)


if __name__ == "__main__":
    main()
