"""Ranks of one host share one plan, made from the least that any of them has."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from placewise.planner.measuring.ranks import RankFacts, machine_of_ranks
from placewise.plans.calibration import Calibration, LinkRate
from placewise.plans.document import Plan
from placewise.plans.errors import FactsError
from placewise.plans.machine import Accelerator, Machine, Measured, Reading, Unlimited, Unmeasurable
from placewise.plans.policy import Home

# By the names that other processes import them by.
from placewise.tests.ranks import on_ranks
from placewise.tests.sharing import IDS, facts, measure_together, run_shared

from .modules import Tower, build, save
from .questions import accelerator_of, host_of, measured


def test_ranks_run_one_plan(tmp_path: Path) -> None:
    path = save(build(Tower), tmp_path / "tower.safetensors")
    with torch.no_grad():
        expected = build(Tower)(torch.tensor(IDS))
    found = on_ranks(3, tmp_path / "ranks", run_shared, path)
    plan: Plan = found[0][0]
    assert plan.workload.ranks == 3
    assert plan.machine == facts(2)
    homes = {segment.home for placement in plan.placements for segment in placement.segments}
    assert homes == {Home.device, Home.mapped}  # what one rank could copy whole, three cannot
    for rank, (theirs, outputs, wrong) in enumerate(found):
        assert theirs == plan
        assert torch.equal(outputs, expected)
        (model_kind, model), (kind, traits) = wrong["model"], wrong["kind"]
        assert kind == "FactsError" if rank == 0 else kind == "ExecutionError"
        assert "rank 1 computes on the CPU, rank 0 on given sim (sim:1)" in traits
        assert model_kind == ("CheckpointError" if rank == 0 else "ExecutionError")
        assert "missing.safetensors" in model


def test_ranks_measure_each_for_itself(tmp_path: Path) -> None:
    path = save(build(Tower), tmp_path / "tower.safetensors")
    one, other = on_ranks(2, tmp_path / "ranks", measure_together, path)
    assert one == other
    assert one.workload.ranks == 2


readings: st.SearchStrategy[Reading] = st.one_of(
    st.integers(0, 99).map(measured), st.just(Unlimited(source="x")), st.just(Unmeasurable(why="x"))
)


@given(data=st.data(), ranks=st.integers(1, 5))
def test_no_rank_has_less_than_the_machine_of_all(data: st.DataObject, ranks: int) -> None:
    machines = [
        Machine(
            host=host_of(data.draw(readings), data.draw(readings)),
            accelerators=(accelerator_of(f"cuda:{rank}", data.draw(readings)),),
        )
        for rank in range(ranks)
    ]
    found = machine_of_ranks([RankFacts(machine=each, identity=str(rank)) for rank, each in enumerate(machines)])
    for least, of_all in zip(figures(found), zip(*map(figures, machines), strict=True), strict=True):
        if any(isinstance(each, Unmeasurable) for each in of_all):
            assert isinstance(least, Unmeasurable)
        else:
            values = [each.value for each in of_all if isinstance(each, Measured)]
            assert (least.value if isinstance(least, Measured) else None) == min(values, default=None)


def figures(machine: Machine) -> tuple[Reading, ...]:
    return machine.host.available, machine.host.memlock, machine.accelerators[0].free


def test_accelerators_of_different_numbers_are_each_ranks_current_one() -> None:
    rates = Calibration(
        measured_at="2026-01-01T00:00:00+00:00",
        fingerprint="sha256:" + "0" * 64,
        links=(LinkRate(device="cuda:0", source="pageable", bytes_per_s=1e9),),
    )
    shared = machine_of_ranks([with_one("cuda:0", rates), with_one("cuda:1")])
    assert shared.accelerators[0].device == "cuda"
    assert shared.calibration is not None
    assert shared.calibration.links[0].device == "cuda"
    assert machine_of_ranks([with_one("cuda:0"), with_one("cuda:0")]).accelerators[0].device == "cuda:0"


def with_one(device: str, rates: Calibration | None = None, **told: str) -> RankFacts:
    machine = Machine(host=host_of(measured(9)), accelerators=(one(device),), calibration=rates)
    return RankFacts(machine=machine, **told)


def one(device: str) -> Accelerator:
    return accelerator_of(device, measured(9))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (with_one("cuda:1", host="b"), "rank 1 is on b, rank 0 on a: one plan is for the ranks of one host"),
        (with_one("cuda:0", host="a", identity="x"), "ranks 0 and 1 compute on the same"),
        (
            RankFacts(
                host="a", machine=Machine(host=host_of(measured(9)), accelerators=(one("cuda:0"), one("cuda:1")))
            ),
            "rank 1 has 2 accelerators",
        ),
        (RankFacts(host="a", machine=Machine(host=host_of(measured(9)))), "rank 1 computes on the CPU, rank 0 on"),
    ],
)
def test_ranks_that_cannot_share_a_plan_are_named(other: RankFacts, message: str) -> None:
    with pytest.raises(FactsError) as caught:
        machine_of_ranks([with_one("cuda:0", host="a", identity="x"), other])
    assert caught.value.message.startswith(message)
    assert caught.value.hint is not None
