"""The first invariant, to the byte: a copy that would not fit beside the reserve stays on the checkpoint's mapping."""

from pathlib import Path

import pytest
from placewise.plans.document import Plan
from placewise.plans.machine import Machine, Unmeasurable
from placewise.plans.units import MIB

from .hosts import HostTree, Use, v2_tree
from .questions import (
    GIB,
    component_of,
    cuda,
    decision,
    fates,
    fits,
    host_of,
    machine_of,
    plan_of,
    policy_of,
    stack_of,
)

RESERVE = 4 * GIB


def encoder_on(available: int, size: int, *, packed: int | None = None) -> Plan:
    """A plan for one part of this size on a CPU."""
    return plan_of(machine_of(available), component_of("encoder", fixed=size, fixed_packed=packed))


def is_copied(plan: Plan) -> bool:
    (fate,) = fates(plan, "encoder")
    assert fate in ("fixed device/always", "fixed mapped/always")
    return fate == "fixed device/always"


def test_62_gib_do_not_fit_a_host_of_32() -> None:
    plan = encoder_on(32 * GIB, 62 * GIB)
    assert not is_copied(plan)
    why = decision(plan, "encoder (fixed)")
    assert (why.rule, why.choice) == ("copy-would-not-fit", "mapped/always")
    assert why.because == {
        "bytes": 62 * GIB,
        "passes": 1,
        "available_bytes": 32 * GIB,
        "reserve_bytes": RESERVE,
        "usable_bytes": 28 * GIB - 1,
        "left_bytes": 28 * GIB - 1,
    }
    assert [(other.choice, other.why) for other in why.rejected] == [
        ("device/always", "the smallest unit needs 62.0 GiB more, 28.0 GiB are left")
    ]
    assert fits(plan).margin_bytes == {"host": 28 * GIB - 1}


def test_20_gib_are_copied_on_a_host_of_128() -> None:
    plan = encoder_on(128 * GIB, 20 * GIB)
    assert is_copied(plan)
    why = decision(plan, "encoder (fixed)")
    assert (why.rule, why.choice) == ("copy-fits", "device/always")
    assert why.because["left_bytes"] == 104 * GIB - 1
    assert [(other.choice, other.why) for other in why.rejected] == [
        ("mapped/always", "a copy is never dropped from memory")
    ]
    assert fits(plan).margin_bytes == {"host": 104 * GIB - 1}


@pytest.mark.parametrize("available", [20 * GIB, 32 * GIB, 32 * GIB + 1, 128 * GIB])
def test_the_boundary_is_excluded(available: int) -> None:
    """Bytes of `available - reserve` do not fit; one less do."""
    assert not is_copied(encoder_on(available, available - RESERVE))
    assert is_copied(encoder_on(available, available - RESERVE - 1))


def test_packing_counts_not_storage() -> None:
    """A copy takes its packed bytes, whole lines of 64: stored bytes below the boundary may yet not fit."""
    boundary = 32 * GIB - RESERVE
    assert not is_copied(encoder_on(32 * GIB, boundary - 1, packed=boundary))
    assert is_copied(encoder_on(32 * GIB, boundary - 64, packed=boundary - 64))


@pytest.mark.parametrize("available", [0, 1, RESERVE, 32 * GIB])
def test_no_bytes_always_fit(available: int) -> None:
    plan = plan_of(machine_of(available), component_of("encoder", stack_of("blocks", 0, 0)))
    assert fates(plan, "encoder") == ["blocks[0:2] device/always"]
    assert decision(plan, "encoder.blocks[0:2]").rule == "nothing-to-place"


@pytest.mark.parametrize(("available", "reserve"), [(10 * GIB, 2 * GIB), (20 * GIB, RESERVE), (21 * GIB, RESERVE)])
def test_the_reserve_is_at_most_a_fifth_of_a_small_host(available: int, reserve: int) -> None:
    assert not is_copied(encoder_on(available, available - reserve))
    plan = encoder_on(available, available - reserve - 1)
    assert is_copied(plan)
    assert plan.budgets[0].reserve_bytes == reserve


@pytest.mark.parametrize("available", [25 * MIB, 60 * MIB, 119 * MIB])
def test_a_small_host_keeps_24_mib_or_48_where_weights_stay_mapped(available: int) -> None:
    for size, reserve in ((available - 24 * MIB - 1, 24 * MIB), (available - 24 * MIB, min(available, 48 * MIB))):
        plan = encoder_on(available, size)
        assert is_copied(plan) == (reserve == 24 * MIB)
        assert plan.budgets[0].reserve_bytes == reserve
        assert plan.budgets[0].usable_bytes == max(0, available - reserve - 1)


def test_a_reserve_that_was_asked_for_is_not_raised() -> None:
    part = component_of("encoder", fixed=MIB)
    assert is_copied(plan_of(machine_of(MIB + 2), part, policy=policy_of(reserve_bytes=1, reserve_max_percent=100)))


def test_a_cgroups_cap_decides(tmp_path: Path) -> None:
    """The machine has 128 GiB available, this process' group 24 of 32."""
    tree = v2_tree(HostTree(tmp_path), "/job")
    tree.v2("/job", limit=32 * GIB, use=Use(anonymous=8 * GIB, inactive_file=5 * GIB))
    host = tree.measure(total=256 * GIB, available=128 * GIB)
    for size, copied in ((20 * GIB, False), (20 * GIB - 1, True)):
        plan = plan_of(machine_of(host), component_of("encoder", fixed=size))
        assert is_copied(plan) == copied
        assert decision(plan, "encoder (fixed)").because["available_bytes"] == 24 * GIB


def test_what_is_available_decides_below_a_looser_cap(tmp_path: Path) -> None:
    tree = v2_tree(HostTree(tmp_path), "/job")
    tree.v2("/job", limit=200 * GIB)
    host = tree.measure(total=256 * GIB, available=32 * GIB)
    assert not is_copied(plan_of(machine_of(host), component_of("encoder", fixed=28 * GIB)))


def test_an_unknown_host_is_never_copied_to() -> None:
    unknown = Machine(host=host_of(Unmeasurable(why="this platform does not tell")))
    plan = plan_of(unknown, component_of("encoder", fixed=64))
    assert not is_copied(plan)
    why = decision(plan, "encoder (fixed)")
    assert why.rule == "host-unmeasured"
    assert [(other.choice, other.why) for other in why.rejected] == [("device/always", "nobody knows whether it fits")]
    assert "the memory of host was not measured: nothing is spent there" in plan.notes


def test_a_policy_may_forbid_copies() -> None:
    plan = plan_of(machine_of(128 * GIB), component_of("encoder", fixed=GIB), policy=policy_of("low-memory"))
    assert not is_copied(plan)
    assert decision(plan, "encoder (fixed)").rule == "copies-never"


def test_host_copies_of_a_devices_weights_obey_it_too() -> None:
    """Layer by layer: a transformer of 62 GiB beside a device of 12 and a host of 32 is copied as far as that goes."""
    transformer = component_of("transformer", stack_of("blocks", *[GIB] * 62), passes=50)
    plan = plan_of(machine_of(32 * GIB, cuda(12 * GIB)), transformer)
    copied = sum(segment.packed_bytes for segment in plan.placements[0].segments if segment.home == "pageable")
    assert copied == 27 * GIB
    assert fits(plan).margin_bytes["host"] == GIB - 1
