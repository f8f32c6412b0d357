"""Components that are divided over ranks: planned, and run on real processes with the outputs of one."""

import sys
from collections.abc import Callable
from math import prod
from pathlib import Path

import placewise
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from placewise.models.headers import TensorEntry, part_of_rank
from placewise.plans.document import Plan
from placewise.plans.errors import ExecutionError, InputError
from placewise.plans.pipeline import LayerSize, Pipeline, Stack, Workload
from placewise.plans.policy import Hold, Home, Override, Shard
from placewise.plans.units import MIB

# By the names that other processes import them by.
from placewise.tests.ranks import on_ranks
from placewise.tests.sharded import (
    IDS,
    Leaky,
    even,
    large,
    memory_of_sharded,
    odd,
    passes,
    passes_on_ranks,
    refused_on_ranks,
    run_sharded,
)
from torch import nn

from .modules import GatedTower, build, machine, on_meta, overridden, save
from .questions import BARE, Case, component_of, cuda, fits, machine_of, policy_of, refused

ALWAYS = Override(select="model", shard=Shard.always)


def sharded(folder: Path, make: Callable[[], nn.Module], ranks: int = 2) -> tuple[Path, Plan]:
    path = save(build(make), folder / f"{make.__name__}.safetensors")
    plan = placewise.plan(path, machine=machine(1 << 30), policy=overridden(ALWAYS), workload=Workload(ranks=ranks))
    return path, plan


def test_outputs_are_those_of_one_process_and_each_rank_has_its_part(tmp_path: Path) -> None:
    plans = {make.__name__: sharded(tmp_path, make) for make in (even, odd)}
    found = on_ranks(2, tmp_path / "ranks", run_sharded, plans)
    for name, make in {"even": even, "offloaded": even, "odd": odd}.items():
        module = build(make)
        with torch.no_grad():
            expected = module(torch.tensor(IDS))
        stored = module.state_dict()
        for rank, each in enumerate(found):
            outputs, weights = each[name]
            assert all(torch.equal(output, expected) for output in outputs)
            for weight, part in weights.items():
                whole = stored[weight]
                rows = len(whole) // 2
                own = whole if len(whole) % 2 else whole[rank * rows : (rank + 1) * rows]
                assert torch.equal(part, own)


def test_token_wise_modules_of_a_sharded_component_run_in_chunks(tmp_path: Path) -> None:
    path, plan = sharded(tmp_path, GatedTower)
    alone = in_chunks(placewise.plan(path, machine=machine(1 << 30), policy=overridden()))
    expected, _ = passes(path, alone, on_meta(GatedTower))
    for outputs, _ in on_ranks(2, tmp_path / "ranks", passes_on_ranks, path, in_chunks(plan)):
        assert all(map(torch.equal, outputs, expected))


def in_chunks(plan: Plan) -> Plan:
    placement = plan.placements[0].model_copy(update={"chunk_tokens": 2})
    return plan.model_copy(update={"placements": (placement,)})


def test_what_cannot_be_sharded_is_refused_on_every_rank(tmp_path: Path) -> None:
    plans = {"odd": sharded(tmp_path, odd), "leaky": sharded(tmp_path, Leaky), "three": sharded(tmp_path, even, 3)}
    for found in on_ranks(2, tmp_path / "ranks", refused_on_ranks, plans):
        assert {kind for kind, _ in found.values()} == {"ExecutionError"}
        assert found["ranks"][1].startswith("component 'model' is sharded over 3 ranks, and there are 2\n")
        assert "is used outside its layer too, and cannot be sharded" in found["leaky"][1]
        assert "'embed.weight' does not divide by the ranks" in found["whole"][1]
        assert "is sharded over ranks, and its weights get no new values" in found["update"][1]


@given(
    dtype=st.sampled_from(("F4", "U8", "BF16", "F64")),
    shape=st.lists(st.integers(0, 8), max_size=3).map(tuple),
    ranks=st.integers(1, 8),
)
def test_parts_are_a_tensors_rows_in_order_or_all_of_it(dtype: str, shape: tuple[int, ...], ranks: int) -> None:
    bits = prod(shape) * {"F4": 4, "U8": 8, "BF16": 16, "F64": 64}[dtype]
    assume(bits % 8 == 0)
    entry = TensorEntry(dtype=dtype, shape=shape, data_offsets=(3, 3 + bits // 8))
    parts = [part_of_rank(entry, rank, ranks) for rank in range(ranks)]
    if parts[0] == entry:
        assert all(part == entry for part in parts)
        assert ranks == 1 or not shape or shape[0] % ranks or entry.nbytes % ranks or entry.nbytes == 0
    else:
        assert [part.data_offsets[0] for part in parts] == [3, *(part.data_offsets[1] for part in parts[:-1])]
        assert parts[-1].data_offsets[1] == entry.data_offsets[1]
        assert {part.shape for part in parts} == {(shape[0] // ranks, *shape[1:])}


def test_a_single_process_is_no_rank(tmp_path: Path) -> None:
    path, plan = sharded(tmp_path, even)
    with pytest.raises(ExecutionError, match="this process is no rank"):
        placewise.apply(plan, path, build(even))


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells what is anonymous, and what was read")
def test_no_rank_reads_or_holds_the_whole_component(tmp_path: Path) -> None:
    """It reads and holds its part, and in a pass what the plan says is gathered."""
    small, (path, plan) = sharded(tmp_path, even), sharded(tmp_path, large)
    placement = plan.placements[0]
    assert placement.sharding is not None
    part = sum(segment.packed_bytes for segment in placement.segments)
    assert part <= path.stat().st_size // 2 + MIB
    for loading, running, read in on_ranks(2, tmp_path / "ranks", memory_of_sharded, small, (path, plan)):
        assert part - MIB < loading < part + 4 * MIB
        assert part - MIB < read < part + MIB
        assert running < part + placement.sharding.gathered_bytes + 4 * MIB


SIZE = LayerSize(layers=(0, 40), layer_bytes=400, packed_bytes=400, part_bytes=200)
WHOLE, PART, GATHERED = 16_100, 8_050, 100 + 3 * 400
WHEN_TOO_LARGE = Override(select="dit", shard=Shard.when_too_large)


def planned(*overrides: Override, memory: int = WHOLE - 1, ranks: int = 2, host: int = 1 << 20) -> Plan:
    stack = Stack(name="blocks", layers=40, extents=1, sizes=(SIZE,))
    component = component_of("dit", stack, fixed=100).model_copy(update={"fixed_part_bytes": 50})
    return Case(
        pipeline=Pipeline(name="toy", components=(component,), edges=()),
        machine=machine_of(host, cuda(memory)),
        policy=policy_of("auto", *overrides, **BARE),
        workload=Workload(ranks=ranks),
    ).compile()


@pytest.mark.parametrize(
    ("wishes", "memory", "ranks", "divided"),
    [
        ((), WHOLE - 1, 2, False),
        ((WHEN_TOO_LARGE,), WHOLE, 2, False),
        ((WHEN_TOO_LARGE,), WHOLE - 1, 2, True),
        ((WHEN_TOO_LARGE,), WHOLE - 1, 1, False),
        ((WHEN_TOO_LARGE,), PART + GATHERED, 2, True),
        ((WHEN_TOO_LARGE,), PART + GATHERED - 1, 2, False),  # layers go one by one then
        ((Override(select="dit", shard=Shard.always),), WHOLE, 2, True),
    ],
)
def test_what_one_device_cannot_hold_is_divided_where_the_policy_lets_it_be(
    wishes: tuple[Override, ...], memory: int, ranks: int, *, divided: bool
) -> None:
    plan = planned(*wishes, memory=memory, ranks=ranks)
    fits(plan)
    assert (plan.placements[0].sharding is not None) == divided
    if divided:
        rules = {decision.subject: (decision.choice, decision.rule) for decision in plan.decisions}
        assert rules["dit (fixed)"] == rules["dit.blocks[0:40]"] == ("device/always", "sharded-over-ranks")
        assert plan.phases[0].predicted.peak_bytes["cuda:0"] == PART + GATHERED
        assert plan.phases[0].predicted.seconds is None


def test_parts_that_rest_on_the_host_are_each_ranks_own() -> None:
    wish = Override(select="dit", home=Home.pageable, shard=Shard.always)
    plan = planned(wish, memory=WHOLE // 4, host=2 * PART + 1)
    fits(plan)
    homes = {(segment.home, segment.hold) for segment in plan.placements[0].segments}
    assert homes == {(Home.pageable, Hold.phase), (Home.pageable, Hold.layer)}
    assert plan.phases[0].predicted.peak_bytes["host"] == PART
    assert {short.axis for short in refused(planned(wish, memory=WHOLE // 4, host=2 * PART)).short} == {"host"}


@pytest.mark.parametrize(
    ("wish", "ranks", "message"),
    [
        (Override(select="dit", shard=Shard.always), 1, "the override of 'dit' shards over ranks, and there is one"),
        (Override(select="dit.blocks", shard=Shard.always), 2, "the override of 'dit.blocks' shards a stack, or"),
        (Override(select="dit", home=Home.mapped, shard=Shard.always), 2, "the override of 'dit' shards a stack, or"),
        (Override(select="dit", hold=Hold.phase, shard=Shard.always), 2, "the override of 'dit' shards a stack, or"),
    ],
)
def test_what_cannot_be_divided_so_is_bad_input(wish: Override, ranks: int, message: str) -> None:
    with pytest.raises(InputError) as caught:
        planned(wish, ranks=ranks)
    assert caught.value.message.startswith(message)
    assert caught.value.hint is not None
