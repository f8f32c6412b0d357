"""The checker rejects a plan that was spoiled after the planner had finished it."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from placewise.planner.checker import UnsoundPlanError, check_plan
from placewise.plans.codec import plan_to_json
from placewise.plans.document import Plan
from placewise.plans.policy import Override

from .questions import BARE, component_of, cuda, fates, fits, machine_of, mps, plan_of, policy_of, refused, stack_of

Spoil = Callable[[Any], object]


def sound() -> Plan:
    """Held, streamed and visiting weights on a device that is full, with copies on a host that is."""
    plan = plan_of(
        machine_of(31, cuda(36)),
        component_of("transformer", stack_of("blocks", 10, 10, 10, 10), fixed=6, passes=50),
        component_of("vae", fixed=7, activations=1),
        policy=policy_of("auto", **BARE),
        edges=[("transformer", "vae")],
    )
    assert fates(plan, "transformer") == [
        "fixed device/always",
        "blocks[0:1] device/always",
        "blocks[1:4] pageable/layer",
    ]
    assert fates(plan, "vae") == ["fixed mapped/phase"]
    assert fits(plan).margin_bytes == {"cuda:0": 0, "host": 0, "pinned": 23}
    return plan


def on_cpu() -> Plan:
    wish = Override(select="vae", compute_device="cpu")
    return plan_of(machine_of(31), component_of("vae", fixed=7), policy=policy_of("auto", wish, **BARE))


def complaint(spoil: Spoil, plan: Plan) -> str:
    """What the checker says of the plan after its document was changed in place."""
    document: Any = json.loads(plan_to_json(plan))
    spoil(document)
    spoiled = Plan.model_validate_json(json.dumps(document))
    with pytest.raises(UnsoundPlanError) as caught:
        check_plan(spoiled)
    return str(caught.value)


def segment(document: Any, at: int, *, of: int = 0) -> Any:
    return document["placements"][of]["segments"][at]


def test_a_sound_plan_passes() -> None:
    check_plan(sound())
    check_plan(on_cpu())


COVERAGE: dict[str, tuple[Spoil, str]] = {
    "a unit twice in a segment": (
        lambda plan: segment(plan, 1).update(layers=[[0, 1], [0, 1]], bytes=20, packed_bytes=20),
        "transformer: not every unit stands in exactly one segment",
    ),
    "a unit in two segments": (
        lambda plan: segment(plan, 1).update(layers=[[0, 2]], bytes=20, packed_bytes=20),
        "transformer: not every unit stands in exactly one segment",
    ),
    "the fixed part twice": (
        lambda plan: plan["placements"][0]["segments"].append(segment(plan, 0)),
        "transformer: not every unit stands in exactly one segment",
    ),
    "a unit missing from a segment": (
        lambda plan: segment(plan, 2).update(layers=[[1, 3]], bytes=20, packed_bytes=20),
        "transformer: not every unit stands in exactly one segment",
    ),
    "a segment missing": (
        lambda plan: plan["placements"][0]["segments"].pop(0),
        "transformer: not every unit stands in exactly one segment",
    ),
    "a unit that is not there": (
        lambda plan: segment(plan, 2).update(layers=[[1, 5]]),
        "transformer: not every unit stands in exactly one segment",
    ),
    "a stack that is not there": (
        lambda plan: segment(plan, 2).update(stack="block", bytes=0, packed_bytes=0),
        "transformer: not every unit stands in exactly one segment",
    ),
    "wrong bytes": (
        lambda plan: segment(plan, 2).update(bytes=29),
        "transformer: a segment of 'blocks' states 29 bytes wrongly",
    ),
    "wrong packed bytes": (
        lambda plan: segment(plan, 0).update(packed_bytes=5),
        "transformer: a segment of 'None' states 5 bytes wrongly",
    ),
}

HOLDS: dict[str, tuple[Spoil, str]] = {
    "at home on the device for a phase": (
        lambda plan: segment(plan, 0).update(hold="phase"),
        "transformer: device/phase on cuda:0",
    ),
    "always there and at home on the host": (
        lambda plan: segment(plan, 2).update(hold="always"),
        "transformer: pageable/always on cuda:0",
    ),
    "a fixed part as a layer": (
        lambda plan: segment(plan, 0, of=1).update(hold="layer"),
        "vae: mapped/layer on cuda:0",
    ),
    "a visitor on the CPU": (
        lambda plan: plan["placements"][1].update(compute_device="cpu"),
        "vae: mapped/phase on cpu",
    ),
}

STAGING: dict[str, tuple[Spoil, str]] = {
    "missing": (
        lambda plan: plan["placements"][0].update(staging=None),
        "transformer: staging goes with streamed layers, and only with them",
    ),
    "for nothing": (
        lambda plan: plan["placements"][1].update(staging=plan["placements"][0]["staging"]),
        "vae: staging goes with streamed layers, and only with them",
    ),
    "slots too small": (
        lambda plan: plan["placements"][0]["staging"].update(slot_bytes=9),
        "transformer: slots of 9 bytes, a layer needs 10",
    ),
    "all slots filled ahead": (
        lambda plan: plan["placements"][0]["staging"].update(prefetch_layers=2),
        "transformer: all 2 slots are filled ahead of use",
    ),
}

PLACED = "each component is placed exactly once, in the order of the phases"
PHASED = "each component has exactly one phase, in the order of the data flow"
ORDER: dict[str, tuple[Spoil, str]] = {
    "placements misordered": (lambda plan: plan["placements"].reverse(), PLACED),
    "a placement missing": (lambda plan: plan["placements"].pop(), PLACED),
    "a placement twice": (lambda plan: plan["placements"].append(plan["placements"][0]), PLACED),
    "phases misordered": (lambda plan: plan["phases"].reverse(), PHASED),
    "a phase missing": (lambda plan: plan["phases"].pop(), PHASED),
    "a phase twice": (lambda plan: plan["phases"].append(plan["phases"][0]), PHASED),
    "wrong passes": (lambda plan: plan["phases"][0].update(passes=49), PHASED),
}


def peaks(document: Any, phase: int) -> Any:
    return document["phases"][phase]["predicted"]["peak_bytes"]


BUDGETS: dict[str, tuple[Spoil, str]] = {
    "a device exceeded by a byte": (
        lambda plan: plan["budgets"][0].update(usable_bytes=35),
        "transformer: 36 bytes on cuda:0, usable are 35",
    ),
    "the host exceeded by a byte": (
        lambda plan: plan["budgets"][1].update(usable_bytes=29),
        "transformer: 30 bytes on host, usable are 29",
    ),
    "a third slot": (
        lambda plan: (plan["placements"][0]["staging"].update(slots=3), peaks(plan, 0).update({"cuda:0": 46})),
        "transformer: 46 bytes on cuda:0, usable are 36",
    ),
    "a peak that is not the sum": (
        lambda plan: peaks(plan, 1).update({"cuda:0": 23}),
        "vae: predicted peak of cuda:0 is not 24 bytes",
    ),
    "a peak that is not told": (
        lambda plan: peaks(plan, 0).pop("host"),
        "transformer: predicted peak of host is not 30 bytes",
    ),
    "a device that was not measured": (
        lambda plan: plan["budgets"][0].update(available_bytes=None),
        "transformer: 36 bytes on cuda:0, which was not measured",
    ),
}

SPOILED = COVERAGE | HOLDS | STAGING | ORDER | BUDGETS


@pytest.mark.parametrize(("spoil", "message"), SPOILED.values(), ids=SPOILED.keys())
def test_a_spoiled_plan_is_rejected(spoil: Spoil, message: str) -> None:
    assert complaint(spoil, sound()) == message


def test_nothing_visits_the_cpu() -> None:
    assert complaint(lambda plan: segment(plan, 0).update(hold="phase"), on_cpu()) == "vae: device/phase on cpu"


def test_a_refused_plan_places_nothing() -> None:
    plan = plan_of(machine_of(0, cuda(0)), component_of("vae", fixed=7))
    assert refused(plan).short
    check_plan(plan)
    placements = json.loads(plan_to_json(sound()))["placements"]
    assert complaint(lambda spoiled: spoiled.update(placements=placements), plan) == "a refused plan places nothing"


def test_two_slots_with_unified_memory_are_unsound() -> None:
    """Copies never run beside the compute there, so that a second slot only takes memory."""
    plan = plan_of(
        machine_of(1000, mps(46)),
        component_of("transformer", stack_of("blocks", *[10] * 8), fixed=5),
        policy=policy_of("auto", **BARE),
    )
    check_plan(plan)

    def spoil(document: Any) -> None:
        document["placements"][0]["staging"].update(slots=2, prefetch_layers=1)

    assert complaint(spoil, plan) == "transformer: 2 slots with unified memory"
