"""Laws of running a plan: outputs, homes, budgets and the files, whatever the budgets and the order of use."""

import hashlib
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from placewise.executor.load import LoadedPipeline
from placewise.executor.procmaps import snapshot_maps
from placewise.models.pipeline import read_pipeline
from placewise.planner.compile import compile_plan
from placewise.plans.document import Fits, Plan
from placewise.plans.patterns import matching
from placewise.plans.pipeline import Cast, Deinterleave, Transform, Transpose, Workload
from placewise.plans.policy import Copies, Policy, Residency
from placewise.plans.units import KIB
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]  # partial there

from ..modules import SIM, GatedTower, Tower, build, load, machine, policy, save
from ..readings import transformed

ACTIVATIONS = 256 * KIB
"""More than the towers' activations: they are unknown to the plan, so its reserve has to cover them."""


LINEARS = "blocks.*.blocks.*.weight"
TRANSFORMS = st.sampled_from(
    [
        (Deinterleave(tensor=LINEARS, groups=2, parts=2), Transpose(tensor=LINEARS), Cast(tensor=LINEARS, dtype="F32")),
        (Transpose(tensor="embed.weight"),),
    ]
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A tower, its order of layers, what its file has otherwise, and a machine that may be too small."""

    width: int
    layers: int
    order: tuple[int, ...]
    host_bytes: int
    device_bytes: int | None
    streams: bool
    passes: int
    policy: Policy
    transforms: tuple[Transform, ...]

    def make(self) -> Tower:
        tower = Tower(width=self.width, layers=self.layers)
        tower.order = self.order
        return tower


@st.composite
def cases(draw: st.DrawFn) -> Case:
    layers = draw(st.integers(2, 6))
    slots = draw(st.integers(1, 4))
    width = draw(st.sampled_from((3, 8, 16)))
    return Case(
        width=width,
        layers=layers,
        order=tuple(draw(st.lists(st.integers(0, layers - 1), min_size=1, max_size=8))),
        host_bytes=draw(st.integers(0, 30 * KIB)),
        device_bytes=draw(st.none() | st.integers(ACTIVATIONS, ACTIVATIONS + 30 * KIB)),
        streams=draw(st.booleans()),
        passes=draw(st.integers(1, 3)),
        policy=policy(
            device_reserve_bytes=ACTIVATIONS,
            device_reserve_max_percent=100,
            slots=slots,
            prefetch_layers=draw(st.integers(0, slots - 1)),
            residency=draw(st.sampled_from(Residency)),
            copies=draw(st.sampled_from(Copies)),
        ),
        transforms=tuple(
            step
            for steps in draw(st.lists(TRANSFORMS, max_size=2, unique=True))
            for step in steps
            if width % 4 == 0 or step.kind != "deinterleave"
        ),
    )


def saved(case: Case, folder: Path) -> Path:
    """The tower's file, with what is transformed as it was before."""
    tensors = dict(build(case.make).state_dict())
    del tensors["head.weight"]  # tied
    for step in reversed(case.transforms):
        for name in matching(step.tensor, tensors):
            tensors[name] = transformed(tensors[name], [before(step)]).contiguous()
    save_file(tensors, folder / "model.safetensors")
    return folder / "model.safetensors"


def before(step: Transform) -> Transform:
    """What a transform takes back."""
    match step:
        case Deinterleave(groups=groups, parts=parts):
            return step.model_copy(update={"groups": parts, "parts": groups})
        case Cast():
            return step.model_copy(update={"dtype": "F64"})
        case Transpose():
            return step


def planned(case: Case, path: Path) -> Plan:
    on = machine(case.host_bytes, case.device_bytes)
    if on.accelerators:
        streaming = on.accelerators[0].model_copy(update={"streams": case.streams})
        on = on.model_copy(update={"accelerators": (streaming,)})
    pipeline = read_pipeline(
        path, workload=Workload(), passes={"model": case.passes}, transforms={"model": case.transforms}
    )
    return compile_plan(pipeline, on, case.policy, Workload(), version="0")


def files_digest(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).digest()


def check_homes(pipeline: LoadedPipeline, path: Path) -> None:
    """Each weight at home: on the checkpoint's pages, in memory of its own, or on the device; every one is seen."""
    maps = snapshot_maps()
    assert maps is not None
    for unit in pipeline.components["model"].units:
        for weight in unit.source.values():
            on_file = weight.device.type == "cpu" and maps.file_at(weight.data_ptr()) == str(path)
            assert on_file == (unit.home == "mapped")


@given(case=cases())
@settings(max_examples=60)
def test_streamed_output_equals_resident_output_and_no_budget_is_exceeded(case: Case) -> None:
    """Also: nothing is ever written to the file, and the compute device does not depend on homes."""
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        path = saved(case, Path(folder))
        before = files_digest(path)
        ids = torch.arange(10).reshape(2, 5)
        expected = build(case.make)(ids)
        plan = planned(case, path)
        for segment in (segment for placement in plan.placements for segment in placement.segments):
            event(f"{segment.home}/{segment.hold}")
        if not isinstance(plan.verdict, Fits):
            event("refused")
            return
        pipeline = load(plan, path, case.make)
        check_homes(pipeline, path)
        device = torch.device(plan.placements[0].compute_device)
        for _ in range(case.passes):
            assert {parameter.device for parameter in pipeline["model"].parameters()} == {device}
            assert torch.equal(pipeline["model"](ids.to(device)).cpu(), expected)
        resident = pipeline.components["model"].resident
        predicted = plan.phases[0].predicted.peak_bytes
        axis = SIM if case.device_bytes is not None else "host"
        assert resident.peak_weight_bytes <= (predicted[axis] or 0)
        assert pipeline.machines["cpu"].memory().peak_bytes <= (predicted["host"] or 0)
        assert files_digest(path) == before


@given(case=cases(), chunk_tokens=st.integers(1, 12))
@settings(max_examples=20)
def test_chunked_output_is_the_plain_one_but_for_rounding(case: Case, chunk_tokens: int) -> None:
    """Where a chunk holds all ten tokens it is the same to the bit."""

    def make() -> Tower:
        tower = GatedTower(width=case.width, layers=case.layers)
        tower.order = case.order
        return tower

    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        path = save(build(make), Path(folder) / "model.safetensors")
        case = replace(case, transforms=())
        ids = torch.arange(10).reshape(2, 5)
        expected = build(make)(ids)
        plan = planned(case, path)
        if not isinstance(plan.verdict, Fits):
            event("refused")
            return
        (placement,) = plan.placements
        chunked = placement.model_copy(update={"chunk_tokens": chunk_tokens})
        pipeline = load(plan.model_copy(update={"placements": (chunked,)}), path, make)
        for _ in range(case.passes):
            found = pipeline["model"](ids.to(pipeline.device("model"))).cpu()
            assert torch.equal(found, expected) or (chunk_tokens < 10 and close(found, expected))


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """To within 1e-5 of the largest value: some rounding of 32 bits, over at most eight layers."""
    return bool((found - expected).abs().max() <= 1e-5 * expected.abs().max())


@given(case=cases())
@settings(max_examples=30)
def test_iteration_sees_every_weight_whatever_its_home(case: Case) -> None:
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        path = saved(case, Path(folder))
        plan = planned(case, path)
        if not isinstance(plan.verdict, Fits):
            return
        pipeline = load(plan, path, case.make)
        weights = dict(pipeline.components["model"].weights())
        plain = dict(build(case.make).named_parameters())
        assert weights.keys() == plain.keys()
        assert all(torch.equal(weight.cpu(), plain[name]) for name, weight in weights.items())
