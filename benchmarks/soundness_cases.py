"""Random cases of the soundness benchmark: a pipeline of real files, a host cap, a device, a policy.

Sizes hug the boundaries: what the host may use beyond a bare process lies between a fifth of that process and one and a
half times the weights, and a device between a fiftieth and one and a half times of them.
"""

# Torch's own types are partial here.
# pyright: reportUnknownMemberType=false

import hashlib
import json
from pathlib import Path
from typing import cast

import torch
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from placewise.planner.tracing.live_bytes import LiveBytes
from placewise.plans.record import Record
from placewise.plans.units import MIB
from placewise.policies.presets import PRESETS
from placewise.tests.modules import Tower, build, save

from .checkpoints import drop_pages

LARGEST_PART_BYTES = 160 * MIB
NAMES = ("text_encoder", "transformer")


class Part(Record):
    """One component: a tower of `layers` blocks; `half` stores and computes in bfloat16."""

    name: str
    width: int
    layers: int
    words: int
    half: bool

    def make(self) -> Tower:
        """The module, with weights as torch initialises them."""
        tower = Tower(width=self.width, layers=self.layers, words=self.words)
        return tower.to(torch.bfloat16) if self.half else tower


class Case(Record):
    """What is drawn. Percents are of the weights' bytes; a null device is the CPU. `rows` are embedded at once.

    `exact_heap` has the C library map every block of 128 KiB or more, and so give it back when it is freed. As it
    comes, glibc keeps blocks of up to 32 MiB in a heap that grows by its gaps.
    """

    parts: tuple[Part, ...]
    rows: int
    passes: int
    preset: str
    host_percent: int
    device_percent: int | None
    streams: bool
    activations_known: bool
    exact_heap: bool


class Prepared(Record):
    """A case on disk: the files, what its outputs must be, and the caps it has to run in.

    `activation_bytes` are the true ones, told to the planner or not. `budget_bytes` is what the host may hold, a bare
    process left out; on a simulated device `capacity_bytes` come on top of it, because its tensors are in the host's
    memory too. `hidden_bytes` more are in the cap, and the planner is not told of them.
    """

    case: Case
    root: str
    weight_bytes: int
    activation_bytes: dict[str, int]
    digests: dict[str, str]
    budget_bytes: int
    capacity_bytes: int | None
    hidden_bytes: int = 0


@st.composite
def parts(draw: st.DrawFn, name: str) -> Part:
    """A component of 2 to 160 MiB."""
    width, half = draw(st.sampled_from((512, 1024, 2048))), draw(st.booleans())
    most = min(12, LARGEST_PART_BYTES // (2 * width * width * (2 if half else 4)))
    return Part(
        name=name,
        width=width,
        layers=draw(st.integers(2, most)) if draw(st.booleans()) else most,
        words=draw(st.sampled_from((100, 2_000, 12_000))),
        half=half,
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """One or two components on a CPU or on a simulated device, under any preset."""
    names = draw(st.sampled_from((("model",), NAMES)))
    # Left to itself, Hypothesis repeats small numbers, and most devices would be far too small for anything.
    even = draw(st.randoms(use_true_random=True))
    device = draw(st.sampled_from((None, even.randint(2, 150), even.randint(10, 70))))
    return Case(
        parts=tuple(draw(parts(name)) for name in names),
        rows=draw(st.sampled_from((4, 64, 512, 1536))),
        passes=draw(st.integers(1, 3)),
        preset=draw(st.sampled_from((*PRESETS, "auto"))),
        host_percent=even.randint(0, 150),
        device_percent=device,
        streams=draw(st.booleans()),
        activations_known=draw(st.sampled_from((True, True, False))),
        # A simulated device's blocks have to go back when they are freed, as a device's own do.
        exact_heap=device is not None or draw(st.booleans()),
    )


def draw_cases(count: int, number: int) -> list[Case]:
    """The same cases for the same seed and the same release of Hypothesis."""
    drawn: list[Case] = []

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=(Phase.generate,),
        suppress_health_check=(HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large),
    )
    @given(case=cases())
    def collect(case: Case) -> None:
        drawn.append(case)

    collect()
    return drawn[:count]


def inputs_of(part: Part, rows: int) -> torch.Tensor:
    """The indices that a component is called with."""
    return torch.arange(rows).remainder(part.words).unsqueeze(0)


def digest_of(output: torch.Tensor) -> str:
    """A checksum of every bit of an output on the host, without a copy."""
    return hashlib.sha256(cast(bytes, output.contiguous().view(torch.uint8).numpy())).hexdigest()


def prepare(case: Case, root: Path, bare_bytes: int) -> Prepared:
    """Save the pipeline, and run it plainly, outside every cap, for the outputs to expect.

    The files' pages are dropped, so that whoever reads them next is charged for them.
    """
    digests: dict[str, str] = {}
    activations: dict[str, int] = {}
    weight_bytes = 0
    for part in case.parts:
        module = build(part.make)
        path = save(module, root / ("" if part.name == "model" else part.name) / "model.safetensors")
        drop_pages(path)
        weight_bytes += path.stat().st_size
        digests[part.name], activations[part.name] = _run_plainly(module, part, case.rows)
    if len(case.parts) > 1:
        index = {part.name: ["none", "Tower"] for part in case.parts}
        (root / "model_index.json").write_text(json.dumps(index))
    percent = case.device_percent
    return Prepared(
        case=case,
        root=str(root),
        weight_bytes=weight_bytes,
        activation_bytes=activations,
        digests=digests,
        budget_bytes=max(bare_bytes // 5, weight_bytes * case.host_percent // 100),
        capacity_bytes=None if percent is None else weight_bytes * percent // 100,
    )


def _run_plainly(module: torch.nn.Module, part: Part, rows: int) -> tuple[str, int]:
    """The checksum of the output, and the most activation bytes alive at once, with buffers as a trace has them."""
    live = LiveBytes([*module.parameters(), *module.buffers()])
    with torch.no_grad(), live:
        output = module(inputs_of(part, rows))
    return digest_of(output), live.peak + sum(buffer.nbytes for buffer in module.buffers())
