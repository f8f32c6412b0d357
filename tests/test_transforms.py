"""Weights that the module has otherwise than their file: planned, run, and refused where they cannot be."""

# Torch's own types are partial here.
# pyright: reportUnknownMemberType=false

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import placewise
import pytest
import torch
from placewise.executor.load import LoadedPipeline
from placewise.executor.mapping import Mappings
from placewise.executor.pages import PAGE_BYTES
from placewise.executor.procmaps import snapshot_maps
from placewise.executor.report import report_run
from placewise.models.checkpoint import read_checkpoint
from placewise.models.transforms import transformed
from placewise.planner.compile import compile_plan
from placewise.planner.measuring.accelerators import given_accelerator, given_host
from placewise.plans.codec import plan_from_json, plan_to_json
from placewise.plans.diff import diff_plans
from placewise.plans.document import Plan, Reader
from placewise.plans.errors import ExecutionError, InputError
from placewise.plans.machine import Machine, MemoryKind, Unlimited
from placewise.plans.patterns import matching
from placewise.plans.pipeline import Cast, Deinterleave, Transform, Transpose, Workload
from placewise.plans.policy import Copies, Hold, Home, Override, Shard
from placewise.plans.units import GIB, MIB
from torch import nn
from torch.nn import functional as F

from . import questions, readings
from .checkpoints import Tensors, write_safetensors
from .modules import build, load, on_meta, overridden, plan_for, policy, save
from .questions import BARE, component_of, decision, fates, machine_of, plan_of, policy_of, refused, stack_of
from .test_checker import complaint, segment

pytestmark = pytest.mark.usefixtures("one_thread", "no_grad")

WIDTH, HEADS, LAYERS = 64, 4, 3
QKV = "blocks.*.qkv.weight"
SPLIT = Deinterleave(tensor=QKV, groups=HEADS, parts=3)
SIM = "sim:3"
MAPPED, HERE = (Home.mapped, Hold.layer), (Home.device, Hold.always)
X = torch.linspace(-1, 1, 5 * WIDTH).reshape(1, 5, WIDTH)


class Attention(nn.Module):
    """One projection whose rows are all queries, then all keys, then all values, head by head within each."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        found: torch.Tensor = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        return x + found


class Model(nn.Module):
    """A stack of such, and a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Attention() for _ in range(LAYERS)])
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        found: torch.Tensor = self.out(x)
        return found


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """The model with the rows of each head's query, key and value together, as a fused projection is often saved."""
    module = build(Model)
    for block in module.get_submodule("blocks").children():
        weight = block.get_parameter("qkv.weight")
        weight.copy_(readings.transformed(weight, [Deinterleave(tensor="", groups=3, parts=HEADS)]))
    return save(module, tmp_path / "model.safetensors")


def expected() -> torch.Tensor:
    found: torch.Tensor = build(Model)(X)
    return found


def output(pipeline: LoadedPipeline) -> torch.Tensor:
    found: torch.Tensor = pipeline["model"](X.to(pipeline.device("model")))
    return found.cpu()


def streamed(path: Path, reader: Reader, *, on_device: bool = False) -> LoadedPipeline:
    fates = [MAPPED] * LAYERS
    plan = readings.plan_of(
        path,
        fates,
        HERE,
        reader=reader,
        chunk_bytes=8192,
        slots=1,
        ahead=0,
        on_device=on_device,
        device=SIM,
        transforms=[SPLIT],
    )
    return load(plan, path, Model)


@pytest.mark.parametrize("on_device", [False, True], ids=["cpu", "device"])
def test_b25_a_mapped_weight_that_is_not_contiguous_is_stored_by_strides(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, *, on_device: bool
) -> None:
    """Out of the file's pages into its place, to a device in pieces: there never is a whole copy beside it."""
    monkeypatch.setattr("placewise.executor.transport._PIECE_BYTES", WIDTH * WIDTH)
    pipeline = streamed(checkpoint, Reader.mapping, on_device=on_device)
    machine = pipeline.machines[SIM if on_device else "cpu"]
    copy_in: Callable[[torch.Tensor, torch.Tensor], None] = machine.copy_in
    copied: list[tuple[int, bool, str | None]] = []

    def look(target: torch.Tensor, source: torch.Tensor) -> None:
        maps = snapshot_maps()
        assert maps is not None
        assert target.is_contiguous()
        copied.append((source.nbytes, source.is_contiguous(), maps.file_at(source.data_ptr())))
        copy_in(target, source)

    monkeypatch.setattr(machine, "copy_in", look)
    assert torch.equal(output(pipeline), expected())
    weight_bytes = 3 * WIDTH * WIDTH * 4
    assert sum(count for count, _, _ in copied) == LAYERS * weight_bytes
    assert {file for _, _, file in copied} == {str(checkpoint)}
    if on_device:
        assert max(count for count, _, _ in copied) <= WIDTH * WIDTH
    else:
        assert [each[:2] for each in copied] == [(weight_bytes, False)] * LAYERS


@pytest.mark.parametrize("reader", Reader)
@pytest.mark.parametrize("on_device", [False, True], ids=["cpu", "device"])
def test_what_is_transformed_comes_out_of_the_mapping_and_the_rest_by_the_reader(
    checkpoint: Path, reader: Reader, *, on_device: bool
) -> None:
    pipeline = streamed(checkpoint, reader, on_device=on_device)
    assert torch.equal(output(pipeline), expected())
    pipeline.release()
    (report,) = report_run(pipeline, {}).components
    assert report.read_bytes["mapping"] == LAYERS * 3 * WIDTH * WIDTH * 4


def machines() -> dict[str, Machine]:
    device = given_accelerator(SIM, GIB).model_copy(update={"pinned_memory": True})
    shared = device.model_copy(update={"memory": MemoryKind.unified, "streams": False, "pinned_memory": False})
    host = given_host(GIB).model_copy(update={"memlock": Unlimited(source="RLIMIT_MEMLOCK")})
    return {
        "cpu": Machine(host=host),
        "separate": Machine(host=host, accelerators=(device,)),
        "unified": Machine(host=host, accelerators=(shared,)),
    }


@pytest.mark.parametrize(
    ("machine", "home"),
    [
        *(("cpu", home) for home in (None, Home.device, Home.mapped)),
        *(("separate", home) for home in (Home.device, Home.pinned, Home.pageable, Home.mapped, Home.locked)),
        *(("unified", home) for home in (Home.device, Home.mapped)),
    ],
)
def test_a_plan_with_transforms_runs_as_the_plain_module(checkpoint: Path, machine: str, home: Home | None) -> None:
    """Planned, written, read and run; and the facts of the plan still hold."""
    by = overridden(Override(select="model", home=home)) if home else policy()
    made = placewise.plan(checkpoint, machine=machines()[machine], policy=by, transforms={"model": [SPLIT]})
    plan = plan_from_json(plan_to_json(made))
    assert plan == made
    assert plan.pipeline.components[0].transforms == (SPLIT,)
    assert placewise.check(plan, checkpoint, machine=machines()["cpu"]) == ()
    pipeline = placewise.apply(plan, checkpoint, on_meta(Model))
    assert torch.equal(output(pipeline), expected())
    weights = dict(pipeline.components["model"].weights())
    assert all(torch.equal(weights[name].cpu(), weight) for name, weight in build(Model).named_parameters())
    report = report_run(pipeline, {})
    pages = 2 * (LAYERS + 1) * PAGE_BYTES if home is Home.locked else 0  # They are locked whole.
    assert all(axis.weights_bytes <= (axis.predicted_bytes or 0) + pages for axis in report.axes)


def test_a_weight_that_is_transformed_gets_new_values_as_the_module_has_it(checkpoint: Path) -> None:
    pipeline = streamed(checkpoint, Reader.direct)
    plain, before = build(Model), checkpoint.read_bytes()
    new = torch.randn(3 * WIDTH, WIDTH, generator=torch.Generator().manual_seed(0))
    pipeline.update("model", {"blocks.1.qkv.weight": new, "blocks.2.qkv.weight": lambda old: old.neg_()})
    plain.get_parameter("blocks.1.qkv.weight").copy_(new)
    plain.get_parameter("blocks.2.qkv.weight").neg_()
    assert torch.equal(output(pipeline), plain(X))
    assert pipeline.components["model"].replaced_bytes == 2 * new.nbytes
    assert checkpoint.read_bytes() == before
    with pytest.raises(InputError, match=r"is \(192, 64\) float32, and its new value \(64, 192\) float32"):
        pipeline.update("model", {"blocks.0.qkv.weight": new.t()})


def test_a_file_that_was_cut_is_an_error_where_it_is_copied_by_strides(checkpoint: Path) -> None:
    """Whether layers are read or not: touching pages beyond the file's end would end the process."""
    for reader in (Reader.mapping, Reader.buffered):
        pipeline = streamed(checkpoint, reader)
        size = checkpoint.stat().st_size
        whole = checkpoint.read_bytes()
        os.truncate(checkpoint, size // 2)
        with pytest.raises(ExecutionError, match="ends at byte"):
            output(pipeline)
        checkpoint.write_bytes(whole)


def test_a_buffer_is_transformed_too(tmp_path: Path) -> None:
    class Table(nn.Module):
        table: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, 3))
            self.register_buffer("table", torch.arange(6.0).reshape(3, 2))

    module = build(Table)
    module.register_buffer("table", module.get_buffer("table").t().double().contiguous())
    path = save(module, tmp_path / "model.safetensors")
    steps: list[Transform] = [Transpose(tensor="table"), Cast(tensor="table", dtype="F32")]
    pipeline = load(plan_for(path, Machine(host=given_host(MIB)), transforms=steps), path, Table)
    assert torch.equal(pipeline["model"].get_buffer("table"), torch.arange(6.0).reshape(3, 2))


STORED: Tensors = {
    "blocks.0.qkv.weight": ("BF16", (12, 4)),
    "blocks.1.qkv.weight": ("BF16", (12, 4)),
    "blocks.0.norm": ("F32", (4,)),
    "blocks.1.norm": ("F32", (4,)),
    "ids": ("I64", (4,)),
    "scaled": ("F8_E4M3", (4, 4)),
    "packed": ("F4", (4, 4)),
}


class TestRefusedInput:
    @pytest.mark.parametrize(
        ("transforms", "message", "hint"),
        [
            (
                [Transpose(tensor="blocks.*.kqv.weight")],
                "no stored tensor matches 'blocks.*.kqv.weight', for transpose",
                "did you mean blocks.*.qkv.weight",
            ),
            ([Transpose(tensor="qkv")], "no stored tensor matches 'qkv', for transpose", "did you mean"),
            (
                [Deinterleave(tensor=QKV, groups=5, parts=3)],
                "tensor 'blocks.0.qkv.weight' of BF16 [12, 4] has no rows that divide into 5 groups of 3 parts",
                "leave it out of the pattern",
            ),
            (
                [Transpose(tensor=QKV), Deinterleave(tensor=QKV, groups=4, parts=3)],
                "tensor 'blocks.0.qkv.weight' of BF16 [12, 4] has no rows that divide into 4 groups of 3 parts",
                "leave it out of the pattern",
            ),
            (
                [Transpose(tensor="blocks.*.norm")],
                "tensor 'blocks.0.norm' of F32 [4] cannot be transposed: it has no two axes",
                "leave it out of the pattern",
            ),
            (
                [Cast(tensor="*", dtype="BF16")],
                "tensor 'ids' of I64 [4] cannot be cast: only F16, BF16, F32, F64 are",
                "leave it out of the pattern",
            ),
            (
                [Cast(tensor="scaled", dtype="BF16")],
                "tensor 'scaled' of F8_E4M3 [4, 4] cannot be cast: only F16, BF16, F32, F64 are",
                "leave it out of the pattern",
            ),
            (
                [Transpose(tensor="packed")],
                "tensor 'packed' of F4 [4, 4] is not transformed: its elements share bytes",
                "leave it out of the pattern",
            ),
            (
                [Cast(tensor=QKV, dtype="F32"), Cast(tensor="blocks.1.qkv.weight", dtype="F16")],
                "tensor 'blocks.1.qkv.weight' of BF16 [12, 4] is given cast 2 times",
                "say it once",
            ),
        ],
    )
    def test_what_cannot_be_transformed_so(
        self, tmp_path: Path, transforms: Sequence[Transform], message: str, hint: str
    ) -> None:
        path = write_safetensors(tmp_path / "model.safetensors", STORED)
        with pytest.raises(InputError) as caught:
            plan_for(path, Machine(host=given_host(MIB)), transforms=transforms)
        assert caught.value.message == f"component 'model': {message}"
        assert (caught.value.hint or "").startswith(hint)

    def test_a_component_that_is_not_there(self, checkpoint: Path) -> None:
        with pytest.raises(InputError, match="transforms: there is no component 'unet'"):
            placewise.plan(checkpoint, transforms={"unet": [SPLIT]})

    def test_a_cast_to_its_own_dtype_is_no_transform(self, tmp_path: Path) -> None:
        path = write_safetensors(tmp_path / "model.safetensors", {"a": ("BF16", (2,)), "b": ("F32", (2,))})
        facts = transformed(read_checkpoint(path), [Cast(tensor="*", dtype="BF16")], "model")
        assert list(facts.transforms) == ["b"]
        assert Mappings(facts).value("b").dtype == torch.bfloat16


class TestPlanned:
    """A fixed part of 8 bytes and layers of 10, all transformed, on hosts without a reserve."""

    PART = component_of(
        "dit", questions.transformed(stack_of("blocks", *[10] * 4)), fixed=8, fixed_transformed=8, passes=3
    )

    def planned(self, host: int, *overrides: Override, **changes: Any) -> Plan:
        return plan_of(machine_of(host), self.PART, policy=policy_of("auto", *overrides, **{**BARE, **changes}))

    def test_on_the_cpu_all_is_copied_where_it_fits(self) -> None:
        plan = self.planned(49)
        assert fates(plan, "dit") == ["fixed device/always", "blocks[0:4] device/always"]
        rejected = [each.choice for each in decision(plan, "dit.blocks[0:4]").rejected]
        assert rejected == ["mapped/layer"]

    def test_else_layers_take_turns_in_a_slot_and_the_rest_is_there_for_the_phase(self) -> None:
        plan = self.planned(19, copies=Copies.never)
        assert fates(plan, "dit") == ["fixed mapped/phase", "blocks[0:4] mapped/layer"]
        assert plan.phases[0].predicted.peak_bytes["host"] == 18
        (why,) = (each for each in plan.decisions if each.rule == "transformed-on-the-way")
        assert (why.subject, why.choice) == ("dit", "cast and deinterleave and transpose")
        assert why.because == {"bytes": 48, "packed_bytes": 48, "transformed_bytes": 48}
        assert [each.choice for each in why.rejected] == ["mapped/always", "copies before they are placed"]

    def test_hold_layer_is_said_of_layers_alone(self) -> None:
        plan = self.planned(49, Override(select="dit", hold=Hold.layer))
        assert fates(plan, "dit") == ["fixed device/always", "blocks[0:4] mapped/layer"]

    def test_below_that_nothing_fits(self) -> None:
        (short,) = refused(self.planned(18)).short
        assert (short.axis, short.need_bytes, short.have_bytes) == ("host", 18, 17)

    @pytest.mark.parametrize(
        "override",
        [
            Override(select="dit", home=Home.locked),
            Override(select="dit", home=Home.mapped, hold=Hold.always),
            Override(select="dit.blocks", hold=Hold.always),
        ],
    )
    def test_what_asks_for_use_in_place_is_refused_by_name(self, override: Override) -> None:
        found = refused(self.planned(1000, override)).broken
        (broken,) = (each for each in found if each.rule == "hold-suits-home")
        assert broken.subject == override.select
        assert broken.why.startswith("weights that are transformed are not used where they rest in the file")

    def test_what_is_not_transformed_may_be_used_in_place_beside_them(self) -> None:
        part = component_of("dit", questions.transformed(stack_of("blocks", 10, 10)), fixed=8)
        plan = plan_of(machine_of(11), part, policy=policy_of("auto", copies=Copies.never, **BARE))
        assert fates(plan, "dit") == ["fixed mapped/always", "blocks[0:2] mapped/layer"]
        wish = Override(select="dit.blocks", home=Home.mapped)
        above = Override(select="dit", home=Home.mapped, hold=Hold.always)
        (broken,) = refused(plan_of(machine_of(99), part, policy=policy_of("auto", wish, above, **BARE))).broken
        assert broken.subject == "dit.blocks"

    def test_layers_of_one_size_are_told_apart(self) -> None:
        stack = stack_of("blocks", 10, 10)
        sizes = (stack.sizes[0], stack.sizes[1].model_copy(update={"transformed_bytes": 10}))
        part = component_of("dit", stack.model_copy(update={"sizes": sizes}))
        plan = plan_of(machine_of(11), part, policy=policy_of("auto", copies=Copies.never, **BARE))
        assert fates(plan, "dit") == ["blocks[0:1] mapped/always", "blocks[1:2] mapped/layer"]

    def test_sharding_is_refused(self) -> None:
        wish = Override(select="dit", shard=Shard.always)
        case = questions.Case(
            pipeline=self.planned(49).pipeline,
            machine=machine_of(49),
            policy=policy_of("auto", wish, **BARE),
            workload=Workload(ranks=2),
        )
        with pytest.raises(InputError, match="shards it, and its weights are transformed on their way"):
            case.compile()

    @pytest.mark.parametrize(("home", "hold"), [("mapped", "always"), ("locked", "always")])
    def test_the_checker_finds_use_in_place(self, home: str, hold: str) -> None:
        plan = self.planned(49)
        found = complaint(lambda document: segment(document, 1).update(home=home, hold=hold), plan)
        assert found == f"dit: {home}/{hold} on cpu"

    def test_the_checker_finds_a_slot_without_room_behind_what_is_read(self) -> None:
        def spoil(document: Any) -> None:
            document["placements"][0]["staging"].update(reader="direct", chunk_bytes=4096, depth=1, slot_bytes=4105)

        assert complaint(spoil, self.planned(19)) == "dit: slots of 4105 bytes, a layer needs 4106"

    def test_planned_again_they_are_kept_and_a_difference_is_named(self, checkpoint: Path) -> None:
        both: list[Sequence[Transform]] = [[SPLIT], [SPLIT, Transpose(tensor="out.weight")]]
        on = machines()["cpu"]
        one, other = (placewise.plan(checkpoint, machine=on, transforms={"model": steps}) for steps in both)
        assert one == compile_plan(one.pipeline, on, one.policy, one.workload, version=one.made_by.version)
        assert "pipeline: components differ" in diff_plans(one, other).causes


@pytest.mark.parametrize(
    ("pattern", "matched"),
    [
        ("a.*.w", ["a.0.w", "a.0.b.w"]),
        ("*", ["a.w", "a.0.w", "a.0.b.w", "ba.0.w", "a.0.wv"]),
        ("a.0.w", ["a.0.w"]),
        ("*.0.w", ["a.0.w", "ba.0.w"]),
        ("a.0.*", ["a.0.w", "a.0.b.w", "a.0.wv"]),
        ("a.?.w", []),
        ("a*.w", []),
    ],
)
def test_a_star_stands_for_whole_segments(pattern: str, matched: list[str]) -> None:
    assert matching(pattern, ["a.w", "a.0.w", "a.0.b.w", "ba.0.w", "a.0.wv"]) == matched


def test_a_cast_is_weighed_as_the_module_has_it(tmp_path: Path) -> None:
    """What goes to the device, and what is held there, is half of what is stored."""
    path = write_safetensors(tmp_path / "model.safetensors", {f"blocks.{n}.w": ("F32", (1024, 16)) for n in range(2)})
    machine = machines()["separate"]
    wish = overridden(Override(select="model", home=Home.mapped, hold=Hold.layer))
    steps = {"model": [Cast(tensor="blocks.*.w", dtype="BF16")]}
    plan = placewise.plan(path, machine=machine, policy=wish, transforms=steps)
    (component,) = plan.pipeline.components
    (size,) = component.stacks[0].sizes
    assert (size.layer_bytes, size.packed_bytes, size.transformed_bytes) == (65536, 32768, 65536)
    assert component.dtype_bytes == {"BF16": 131072}
    assert (plan.phases[0].predicted.link_bytes, plan.phases[0].predicted.disk_bytes) == (65536, 131072)


def test_a_plan_for_use_in_place_is_not_carried_out(checkpoint: Path) -> None:
    plan = readings.plan_of(checkpoint, [(Home.mapped, Hold.always)] * LAYERS, HERE, transforms=[SPLIT])
    with pytest.raises(ExecutionError, match=r"blocks\.0 is mapped/always, and the module does not have"):
        load(plan, checkpoint, Model)


def test_transforms_that_give_another_shape_than_the_modules_are_refused(checkpoint: Path) -> None:
    plan = plan_for(checkpoint, Machine(host=given_host(MIB)), transforms=[Transpose(tensor=QKV)])
    message = (
        r"'blocks.0.qkv.weight' is transformed to \[64, 192\], and 'blocks.0.qkv.weight' of the module is \[192, 64\]"
    )
    with pytest.raises(ExecutionError, match=message):
        load(plan, checkpoint, Model)


def test_without_transforms_the_document_has_no_word_of_them(checkpoint: Path) -> None:
    assert "transform" not in json.dumps(json.loads(plan_to_json(plan_for(checkpoint, machines()["cpu"]))))
