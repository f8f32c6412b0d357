"""What the optimum does on cases that can be reckoned by hand: host copies, spacing, phases, joint decisions."""

import pytest
from placewise.planner.apply import even_positions
from placewise.planner.calibrating.given import given_calibration
from placewise.plans.document import Plan
from placewise.plans.machine import Machine
from placewise.plans.units import GIB, MIB

from .questions import BARE, component_of, cuda, fates, machine_of, placement, plan_of, policy_of, stack_of

EIGHT = stack_of("blocks", *[GIB] * 8)
EXACT = policy_of("auto", **BARE)


def rated(machine: Machine) -> Machine:
    rates = given_calibration(disk_bytes_per_s=3e9, link_bytes_per_s=12e9, device="cuda:0", flops_per_s=1e14)
    return machine.model_copy(update={"calibration": rates})


class TestHostCopies:
    """Copies on the host are granted while they fit below the reserve, and not beyond."""

    def test_a_copy_that_fits_is_granted(self) -> None:
        assert fates(plan_of(machine_of(16 * GIB), component_of("a", EIGHT)), "a") == ["blocks[0:8] device/always"]

    def test_the_reserve_is_not_spent(self) -> None:
        plan = plan_of(machine_of(10 * GIB), component_of("a", EIGHT))
        assert plan.budgets[0].reserve_bytes == 2 * GIB
        assert fates(plan, "a") == ["blocks[0:7] device/always", "blocks[7:8] mapped/always"]

    def test_the_second_component_gets_what_the_first_leaves(self) -> None:
        first, second = component_of("a", fixed=6 * GIB, passes=9), component_of("b", fixed=6 * GIB)
        plan = plan_of(machine_of(8 * GIB), first, second, policy=EXACT)
        assert fates(plan, "a") == ["fixed device/always"]
        assert fates(plan, "b") == ["fixed mapped/always"]

    def test_a_cap_binds_even_the_first(self) -> None:
        assert fates(plan_of(machine_of(GIB), component_of("a", fixed=6 * GIB)), "a") == ["fixed mapped/always"]

    def test_no_bytes_need_no_grant(self) -> None:
        assert fates(plan_of(machine_of(0), component_of("a", stack_of("blocks", 0, 0))), "a") == [
            "blocks[0:2] device/always"
        ]


class TestSpacing:
    """Layers that stay stand evenly among those that are streamed, where copies overlap with the compute."""

    @pytest.mark.parametrize(
        ("chosen", "total", "expected"),
        [
            (15, 50, [0, 3, 6, 10, 13, 16, 20, 23, 26, 30, 33, 36, 40, 43, 46]),
            (1, 5, [0]),
            (5, 5, [0, 1, 2, 3, 4]),
            (2, 4, [0, 2]),
        ],
    )
    def test_even_positions(self, chosen: int, total: int, expected: list[int]) -> None:
        assert sorted(even_positions(chosen, total)) == expected

    def test_without_overlap_they_lead(self) -> None:
        machine = rated(machine_of(64 * GIB, cuda(5 * GIB, streams=False)))
        plan = plan_of(machine, component_of("a", EIGHT, passes=10, activations=0), policy=EXACT)
        assert fates(plan, "a") == ["blocks[0:4] device/always", "blocks[4:8] pageable/layer"]

    def test_one_request_of_one_pass_has_nothing_to_space(self) -> None:
        machine = rated(machine_of(64 * GIB, cuda(5 * GIB, streams=False)))
        plan = plan_of(machine, component_of("a", EIGHT, activations=0), policy=EXACT)
        assert [segment.hold for segment in placement(plan, "a").segments] == ["always", "layer"]


class TestPhases:
    """Peaks belong to phases; what one phase needs another may use."""

    def components(self) -> Plan:
        machine = machine_of(64 * GIB, cuda(5 * GIB))
        encoder = component_of("encoder", stack_of("layers", *[GIB] * 4), activations=GIB // 2)
        decoder = component_of("decoder", stack_of("layers", *[GIB] * 4), passes=30, activations=MIB)
        return plan_of(machine, encoder, decoder, policy=EXACT, edges=(("encoder", "decoder"),))

    def test_the_component_that_runs_often_is_held_and_gives_way_in_the_other_phase(self) -> None:
        plan = self.components()
        assert {segment.hold for segment in placement(plan, "decoder").segments} <= {"always", "phase"}
        assert {segment.hold for segment in placement(plan, "encoder").segments} == {"layer"}

    def test_each_phase_has_its_own_peak(self) -> None:
        plan = self.components()
        encoder, decoder = (phase.predicted.peak_bytes["cuda:0"] for phase in plan.phases)
        assert encoder is not None
        assert decoder is not None
        assert encoder != decoder
        assert max(encoder, decoder) <= 5 * GIB


class TestJointly:
    """One program for all components and axes: what no greedy order finds."""

    def test_two_small_ones_beat_a_large_one(self) -> None:
        large = component_of("a_large", fixed=6 * GIB, passes=2)
        small = [component_of(name, fixed=4 * GIB, passes=2) for name in ("b", "c")]
        plan = plan_of(machine_of(9 * GIB), large, *small, policy=EXACT)
        assert fates(plan, "a_large") == ["fixed mapped/always"]
        assert [fates(plan, name) for name in ("b", "c")] == [["fixed device/always"]] * 2

    def test_the_plan_says_by_how_much_it_beats_the_greedy_one(self) -> None:
        large = component_of("a_large", fixed=6 * GIB, passes=2)
        small = [component_of(name, fixed=4 * GIB, passes=2) for name in ("b", "c")]
        decision = plan_of(machine_of(9 * GIB), large, *small, policy=EXACT).decisions[0]
        assert (decision.rule, decision.choice) == ("least-bytes-moved", "optimum")
        assert decision.because == {"moved_bytes": 12 * GIB, "proven_optimal": 1}
        greedy = next(other for other in decision.rejected if other.choice == "greedy-with-backfill")
        assert greedy.why == "4.00 GiB more are moved, 1.33 times as much"

    def test_ties_are_broken_the_same_way_every_time(self) -> None:
        twins = [component_of(name, fixed=4 * GIB) for name in ("a", "b", "c")]
        plans = {
            tuple(fates(plan_of(machine_of(9 * GIB), *twins, policy=EXACT), name)[0] for name in "abc")
            for _ in range(5)
        }
        assert len(plans) == 1

    def test_of_equal_costs_the_one_with_fewer_hard_bytes_is_taken(self) -> None:
        """With one pass, holding a layer for the phase saves nothing over passing it through."""
        plan = plan_of(machine_of(64 * GIB, cuda(6 * GIB)), component_of("a", EIGHT, activations=0), policy=EXACT)
        assert {segment.hold for segment in placement(plan, "a").segments} == {"always", "layer"}


def test_mixed_dtypes_are_reported() -> None:
    component = component_of("a", fixed=GIB).model_copy(update={"dtype_bytes": {"BF16": GIB - 4, "F32": 4}})
    plan = plan_of(machine_of(64 * GIB), component)
    assert dict(plan.pipeline.components[0].dtype_bytes) == {"BF16": GIB - 4, "F32": 4}
