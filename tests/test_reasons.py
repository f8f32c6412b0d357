"""What a plan says of itself: why each segment is where it is, and what a refused one lacks."""

import pytest
from placewise.plans.errors import InputError
from placewise.plans.policy import Home, Override

from .questions import (
    BARE,
    GIB,
    component_of,
    cuda,
    decision,
    fates,
    fits,
    machine_of,
    plan_of,
    policy_of,
    refused,
    stack_of,
)

BARE_AUTO = policy_of("auto", **BARE)
NO_HOST = 0
"""A host with no memory to spare: what is not on the device stays mapped."""


class TestReasons:
    def test_a_held_segment_has_the_numbers_of_its_axis(self) -> None:
        plan = plan_of(machine_of(NO_HOST, cuda(80 * GIB)), component_of("vae", fixed=GIB, passes=3))
        why = decision(plan, "vae (fixed)")
        assert (why.rule, why.choice, why.rejected) == ("fits-on-device", "device/always", ())
        assert why.because == {
            "bytes": GIB,
            "passes": 3,
            "available_bytes": 80 * GIB,
            "reserve_bytes": GIB,
            "usable_bytes": 79 * GIB,
            "left_bytes": 78 * GIB,
        }

    def test_a_streamed_segment_says_why_it_is_neither_held_nor_mapped(self) -> None:
        part = component_of("transformer", stack_of("blocks", *[10] * 8), passes=50)
        plan = plan_of(machine_of(1000, cuda(35)), part, policy=BARE_AUTO)
        assert fates(plan, "transformer") == ["blocks[0:1] device/always", "blocks[1:8] pageable/layer"]
        why = decision(plan, "transformer.blocks[1:8]")
        assert why.rule == "copy-fits"
        assert [(other.choice, other.why) for other in why.rejected] == [
            ("device/always", "5 B of cuda:0 are left beyond the highest phase"),
            ("mapped/layer", "a copy is never dropped from memory"),
        ]

    def test_a_stack_that_is_the_component_itself(self) -> None:
        plan = plan_of(machine_of(NO_HOST), component_of("experts", stack_of("", 1, 1)))
        assert decision(plan, "experts[0:2]").choice == "mapped/always"

    def test_notes_say_what_was_assumed(self) -> None:
        plan = plan_of(machine_of(NO_HOST), component_of("b", fixed=1), component_of("a", fixed=1))
        assert plan.notes == (
            "activation memory is not known for a, b: only the reserve covers it",
            "not calibrated: seconds are unknown, and bytes decide",
        )
        assert fits(plan).confidence == "activations-unknown"


class TestRefusal:
    def test_names_the_component_that_asks_most(self) -> None:
        """A copy that was asked for weighs more than the activations in the other's phase."""
        wish = Override(select="big", home=Home.device)
        plan = plan_of(
            machine_of(10),
            component_of("activated", activations=3),
            component_of("big", fixed=9),
            policy=policy_of("auto", wish, **BARE),
        )
        (short,) = refused(plan).short
        assert (short.axis, short.component, short.need_bytes, short.have_bytes) == ("host", "big", 12, 9)
        assert [(change.axis, change.to_available_bytes) for change in refused(plan).nearest] == [("host", 13)]

    @pytest.mark.parametrize(
        ("need", "reserve", "percent", "available"),
        [
            (13, 0, 0, 13),
            (13, 5, 100, 18),
            (13, 5, 10, 14),
            (90, 50, 10, 99),
            (90, 5, 10, 95),
            (1, 50, 100, 51),
        ],
    )
    def test_the_nearest_change_is_the_least(self, need: int, reserve: int, percent: int, available: int) -> None:
        """The reserve grows with the device up to its share: 10 % of 99, rounded down, leave 90."""
        policy = policy_of(device_reserve_bytes=reserve, device_reserve_max_percent=percent)
        plan = plan_of(machine_of(NO_HOST, cuda(0)), component_of("vae", fixed=need), policy=policy)
        (change,) = refused(plan).nearest
        assert (change.axis, change.to_available_bytes) == ("cuda:0", available)


def test_a_cycle_is_an_error() -> None:
    with pytest.raises(InputError) as caught:
        plan_of(machine_of(0), component_of("a", fixed=1), component_of("b", fixed=1), edges=[("a", "b"), ("b", "a")])
    assert str(caught.value) == "the data flow has a cycle: a -> b -> a\nhint: give edges that lead one way"


def test_an_edge_to_nowhere_is_an_error() -> None:
    with pytest.raises(InputError) as caught:
        plan_of(machine_of(0), component_of("a", fixed=1), edges=[("a", "vae")])
    assert str(caught.value) == "the data flow names 'vae', which is no component\nhint: components are ['a']"
