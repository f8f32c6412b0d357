"""What the greedy planner decides on small pipelines, with round numbers: no reserves unless a test says otherwise."""

import pytest
from placewise.plans.policy import Hold, Override, Residency

from .questions import (
    BARE,
    GIB,
    component_of,
    cuda,
    decision,
    fates,
    fits,
    machine_of,
    mps,
    placement,
    plan_of,
    policy_of,
    refused,
    stack_of,
)

BARE_AUTO = policy_of("auto", **BARE)
NO_HOST = 0
"""A host with no memory to spare: what is not on the device stays mapped."""


class TestDevice:
    def test_smaller_layers_fill_the_gap_that_a_big_one_leaves(self) -> None:
        """The pass needs 2 slots of 8; of the 4 that are left, no big layer can have 8, and both small ones fit."""
        part = component_of("transformer", stack_of("blocks", 8, 2, 8, 2, 8), passes=50)
        plan = plan_of(machine_of(NO_HOST, cuda(20)), part, policy=BARE_AUTO)
        assert fates(plan, "transformer") == [
            "blocks[0:1,2:3,4:5] mapped/layer",
            "blocks[1:2,3:4] device/always",
        ]
        assert fits(plan).margin_bytes["cuda:0"] == 0

    def test_all_at_once_fits_where_one_by_one_would_not(self) -> None:
        """Slots are given back when nothing is streamed any more."""
        part = component_of("transformer", stack_of("blocks", 10, 10), passes=50)
        plan = plan_of(machine_of(NO_HOST, cuda(20)), part, policy=BARE_AUTO)
        assert fates(plan, "transformer") == ["blocks[0:2] device/always"]
        assert placement(plan, "transformer").staging is None

    @pytest.mark.parametrize("first", ["text_encoder", "transformer"])
    def test_weights_used_often_come_first(self, first: str) -> None:
        """A 20 GiB encoder that runs once yields to a transformer that runs 50 times."""
        encoder = component_of("text_encoder", stack_of("layers", *[GIB] * 20), passes=1)
        transformer = component_of("transformer", stack_of("blocks", *[GIB] * 20), passes=50)
        edge = (first, "transformer" if first == "text_encoder" else "text_encoder")
        plan = plan_of(machine_of(NO_HOST, cuda(10 * GIB)), encoder, transformer, policy=BARE_AUTO, edges=[edge])
        assert fates(plan, "transformer") == ["blocks[0:8] device/always", "blocks[8:20] mapped/layer"]
        assert fates(plan, "text_encoder") == ["layers[0:20] mapped/layer"]
        link_bytes = {phase.component: phase.predicted.link_bytes for phase in plan.phases}
        assert link_bytes == {"text_encoder": 20 * GIB, "transformer": 12 * 50 * GIB}

    def test_room_that_smaller_slots_leave_goes_to_what_is_used_often(self) -> None:
        """Once the transformer's big layer is held, its slots shrink by 18 bytes; both components could use them."""
        encoder = component_of("text_encoder", stack_of("layers", *[1] * 30), passes=1)
        transformer = component_of("transformer", stack_of("blocks", 10, *[1] * 25), passes=50)
        plan = plan_of(
            machine_of(NO_HOST, cuda(30)),
            encoder,
            transformer,
            policy=BARE_AUTO,
            edges=[("text_encoder", "transformer")],
        )
        assert fates(plan, "transformer") == ["blocks[0:19] device/always", "blocks[19:26] mapped/layer"]
        assert fates(plan, "text_encoder") == ["layers[0:30] mapped/layer"]

    def test_copies_of_what_is_read_often_come_first(self) -> None:
        """10 GiB of host are for the transformer's layers, although the encoder comes first and is as large."""
        encoder = component_of("text_encoder", stack_of("layers", *[GIB] * 10), passes=1)
        transformer = component_of("transformer", stack_of("blocks", *[GIB] * 10), passes=50)
        plan = plan_of(
            machine_of(10 * GIB + 1, cuda(2 * GIB)),
            encoder,
            transformer,
            policy=BARE_AUTO,
            edges=[("text_encoder", "transformer")],
        )
        assert fates(plan, "transformer") == ["blocks[0:10] pageable/layer"]
        assert fates(plan, "text_encoder") == ["layers[0:10] mapped/layer"]

    def test_phases_share_the_device_over_time(self) -> None:
        """Each component takes the whole device while it computes, and neither stays."""
        encoder = component_of("text_encoder", stack_of("layers", *[GIB] * 10), passes=2)
        transformer = component_of("transformer", stack_of("blocks", *[GIB] * 10), passes=50)
        plan = plan_of(machine_of(NO_HOST, cuda(10 * GIB)), encoder, transformer, policy=BARE_AUTO)
        assert fates(plan, "text_encoder") == ["layers[0:10] mapped/phase"]
        assert fates(plan, "transformer") == ["blocks[0:10] mapped/phase"]
        assert [phase.predicted.peak_bytes["cuda:0"] for phase in plan.phases] == [10 * GIB, 10 * GIB]
        assert [phase.predicted.link_bytes for phase in plan.phases] == [10 * GIB, 10 * GIB]

    def test_the_fixed_part_visits_for_the_phase(self) -> None:
        part = component_of("vae", fixed=GIB)
        other = component_of("transformer", fixed=2 * GIB)
        plan = plan_of(machine_of(NO_HOST, cuda(2 * GIB)), part, other, policy=BARE_AUTO)
        assert fates(plan, "vae") == ["fixed mapped/phase"]
        assert fates(plan, "transformer") == ["fixed mapped/phase"]

    def test_each_device_has_its_own_budget(self) -> None:
        wish = Override(select="vae", compute_device="cuda:1")
        plan = plan_of(
            machine_of(NO_HOST, cuda(GIB), cuda(2 * GIB, index=1)),
            component_of("transformer", fixed=GIB),
            component_of("vae", fixed=2 * GIB),
            policy=policy_of("auto", wish, **BARE),
        )
        assert fates(plan, "transformer") == fates(plan, "vae") == ["fixed device/always"]
        assert fits(plan).margin_bytes == {"cuda:0": 0, "cuda:1": 0, "host": 0, "pinned": 0}

    def test_given_activations_take_room_in_their_phase(self) -> None:
        """Of 10 bytes 4 are for activations, and exactly 6 are left for weights."""
        plan = plan_of(
            machine_of(NO_HOST, cuda(10)),
            component_of("transformer", stack_of("blocks", 3, 3), passes=50, activations=4),
            policy=BARE_AUTO,
        )
        assert fates(plan, "transformer") == ["blocks[0:2] device/always"]
        assert fits(plan).margin_bytes["cuda:0"] == 0
        assert fits(plan).confidence == "bytes-only"


class TestSlots:
    @pytest.mark.parametrize(
        ("free", "slots", "ahead", "rule", "choice"),
        [
            (10, 1, 0, "slots-within-device", "1 slot"),
            (19, 1, 0, "slots-within-device", "1 slot"),
            (20, 2, 1, "slots-within-device", "2 slots"),
            (29, 2, 1, "slots-within-device", "2 slots"),
            (30, 3, 2, "slots-as-wished", "3 slots"),
            (39, 3, 2, "slots-as-wished", "3 slots"),
        ],
    )
    def test_degrade_on_a_small_device(self, free: int, slots: int, ahead: int, rule: str, choice: str) -> None:
        part = component_of("transformer", stack_of("blocks", *[10] * 8), passes=50)
        plan = plan_of(machine_of(NO_HOST, cuda(free)), part, policy=policy_of("low-latency", **BARE))
        staging = placement(plan, "transformer").staging
        assert staging is not None
        assert (staging.slots, staging.slot_bytes, staging.prefetch_layers) == (slots, 10, ahead)
        why = decision(plan, "transformer")
        assert (why.rule, why.choice) == (rule, choice)
        assert why.because == {
            "wished_slots": 3,
            "slot_bytes": 10,
            "streamed_layers": 8,
            "prefetch_layers": ahead,
        }

    def test_are_no_more_than_there_are_layers(self) -> None:
        wish = Override(select="transformer", hold=Hold.layer)
        part = component_of("transformer", stack_of("blocks", 10, 10), passes=50)
        plan = plan_of(machine_of(NO_HOST, cuda(100)), part, policy=policy_of("low-latency", wish, **BARE))
        staging = placement(plan, "transformer").staging
        assert staging is not None
        assert (staging.slots, staging.prefetch_layers) == (2, 1)
        assert decision(plan, "transformer").rule == "slots-for-layers"

    def test_without_streams_one_is_enough(self) -> None:
        part = component_of("transformer", stack_of("blocks", *[10] * 8), passes=50)
        plan = plan_of(machine_of(NO_HOST, cuda(35, streams=False)), part, policy=policy_of("low-latency", **BARE))
        staging = placement(plan, "transformer").staging
        assert staging is not None
        assert (staging.slots, staging.prefetch_layers) == (1, 0)
        assert decision(plan, "transformer").rule == "one-slot-without-overlap"


class TestUnifiedMemory:
    def test_is_one_pool_with_one_slot_and_no_copies(self) -> None:
        encoder = component_of("text_encoder", fixed=2)
        transformer = component_of("transformer", stack_of("blocks", *[10] * 8), fixed=5, passes=50)
        plan = plan_of(machine_of(1000, mps(46)), encoder, transformer, policy=BARE_AUTO)
        assert [(budget.axis, budget.available_bytes) for budget in plan.budgets] == [("host", 46)]
        assert fates(plan, "transformer") == [
            "fixed device/always",
            "blocks[0:3] device/always",
            "blocks[3:8] mapped/layer",
        ]
        staging = placement(plan, "transformer").staging
        assert staging is not None
        assert (staging.slots, staging.prefetch_layers) == (1, 0)
        assert fits(plan).margin_bytes == {"host": 0}
        why = decision(plan, "transformer.blocks[3:8]")
        assert why.rule == "one-pool"
        assert [other.why for other in why.rejected] == [
            "0 B of host are left beyond the highest phase",
            "device and host are one memory: it would be held twice",
        ]

    def test_nothing_is_held_twice_however_much_there_is(self) -> None:
        part = component_of("transformer", stack_of("blocks", 10, 10), fixed=5, passes=50)
        policy = policy_of("auto", residency=Residency.minimal, **BARE)
        plan = plan_of(machine_of(1000, mps(1000)), part, policy=policy)
        assert fates(plan, "transformer") == ["fixed mapped/phase", "blocks[0:2] mapped/layer"]

    def test_the_smaller_of_two_figures_for_the_pool_counts(self) -> None:
        plan = plan_of(machine_of(46, mps(1000)), component_of("vae", fixed=2), policy=BARE_AUTO)
        assert [(budget.axis, budget.available_bytes) for budget in plan.budgets] == [("host", 46)]


class TestPresets:
    def test_low_memory_holds_no_more_than_a_pass_needs(self) -> None:
        part = component_of("transformer", stack_of("blocks", *[GIB] * 8), fixed=GIB, passes=50)
        plan = plan_of(machine_of(512 * GIB, cuda(80 * GIB)), part, policy=policy_of("low-memory"))
        assert fates(plan, "transformer") == ["fixed mapped/phase", "blocks[0:8] mapped/layer"]
        staging = placement(plan, "transformer").staging
        assert staging is not None
        assert (staging.slots, staging.prefetch_layers) == (1, 0)
        assert plan.phases[0].predicted.peak_bytes == {"cuda:0": 2 * GIB, "host": 0, "page_cache": 9 * GIB, "pinned": 0}
        why = decision(plan, "transformer.blocks[0:8]")
        assert why.rule == "copies-never"
        assert [(other.choice, other.why) for other in why.rejected] == [
            ("device/always", "the policy low-memory holds no more than a pass needs"),
            ("pageable/layer", "the policy low-memory makes no copies"),
        ]

    def test_low_latency_spends_more_of_the_device(self) -> None:
        """Its reserve is half a GiB, where auto keeps one: 79.5 GiB fit one and not the other."""
        part = component_of("vae", fixed=79 * GIB + GIB // 2)
        machine = machine_of(512 * GIB, cuda(80 * GIB))
        assert fates(plan_of(machine, part, policy=policy_of("low-latency")), "vae") == ["fixed device/always"]
        short = refused(plan_of(machine, part, policy=policy_of("auto"))).short
        assert [(one.axis, one.component) for one in short] == [("cuda:0", "vae")]
        assert (short[0].need_bytes, short[0].have_bytes) == (79 * GIB + GIB // 2, 79 * GIB)
