"""Which homes, readers, devices and chunks a plan takes, on cases that can be reckoned by hand."""

import pytest
from placewise.plans.document import Plan, Reader
from placewise.plans.machine import Disk, Machine, Unlimited
from placewise.plans.pipeline import ChunkedPeak, Component, Pipeline, TracedActivations, UnknownActivations, Workload
from placewise.plans.policy import Copies, Override
from placewise.plans.units import GIB, MIB

from .questions import (
    BARE,
    Case,
    component_of,
    cuda,
    fates,
    fits,
    host_of,
    machine_of,
    measured,
    placement,
    plan_of,
    policy_of,
    refused,
    stack_of,
)
from .timed import calibrated, computing, disk_of

EXACT = policy_of("auto", **BARE)
EIGHT = component_of("a", stack_of("blocks", *[GIB] * 8), passes=9)
LLM = computing(component_of("llm", stack_of("layers", *[128 * MIB] * 8), passes=20), 0.8)
"""A pass computes for 0.8 s, and is 1 GiB."""


def rules(plan: Plan, subject: str) -> dict[str, str]:
    """The decisions about a subject: rule by choice."""
    return {decision.choice: decision.rule for decision in plan.decisions if decision.subject == subject}


class TestLayersOnTheCpu:
    """A component larger than the cache is read into slots around what is held, where reads run beside the compute."""

    def plan(self, faults: float, direct: float | None, host: int = 700 * MIB) -> Plan:
        return plan_of(calibrated(machine_of(host), *disk_of(faults=faults, direct=direct)), LLM, policy=EXACT)

    def test_cold_layers_are_read_past_the_cache_between_those_that_are_held(self) -> None:
        plan = self.plan(faults=3e8, direct=1e9)
        assert fates(plan, "llm") == ["layers[0:1,2:3,5:6] device/always", "layers[1:2,3:5,6:8] mapped/layer"]
        staging = placement(plan, "llm").staging
        assert staging is not None
        assert (staging.reader, staging.chunk_bytes, staging.depth, staging.slots) == (Reader.direct, 4 * MIB, 4, 2)
        assert rules(plan, "llm")["reader direct"] == "reads-beat-faults"
        predicted = plan.phases[0].predicted
        assert predicted.disk_bytes == 20 * 5 * 128 * MIB
        assert predicted.peak_bytes["page_cache"] == 0
        # 5 cold layers take 0.67 s of the disk beside 0.8 s of compute, of which reads take a little.
        assert predicted.seconds == pytest.approx(20 * 0.8, rel=0.15)

    def test_in_most_of_the_reserve_layers_stay_mapped_and_cached(self) -> None:
        # 1600 MiB less the reserve, a fifth: 1280 MiB for hard bytes. A quarter of the reserve is kept from pages too.
        policy = policy_of("auto", **(BARE | {"reserve_bytes": 4 * GIB, "reserve_max_percent": 20}))
        machine = calibrated(machine_of(1600 * MIB), *disk_of(faults=3e8, direct=1e9))
        large = computing(component_of("llm", stack_of("layers", *[128 * MIB] * 16), passes=20), 0.8)
        plan = plan_of(machine, large, policy=policy)
        counts = {
            f"{segment.home}/{segment.hold}": sum(stop - start for start, stop in segment.layers)
            for segment in placement(plan, "llm").segments
        }
        assert counts == {"device/always": 7, "mapped/always": 2, "mapped/layer": 7}
        predicted = plan.phases[0].predicted
        assert predicted.disk_bytes == (2 + 20 * 7) * 128 * MIB
        unknown = large.model_copy(update={"activations": UnknownActivations()})
        assert not [fate for fate in fates(plan_of(machine, unknown, policy=policy), "llm") if "mapped/always" in fate]

    def test_reads_that_are_as_fast_as_faults_still_run_beside_the_compute(self) -> None:
        plan = self.plan(faults=1e9, direct=1e9)
        assert rules(plan, "llm")["reader direct"] == "cache-keeps-nothing"
        assert plan.phases[0].predicted.seconds == pytest.approx(20 * 0.8, rel=0.15)

    def test_without_reads_the_mapping_is_used_in_place(self) -> None:
        assert placement(self.plan(faults=1e9, direct=None), "llm").staging is None

    def test_what_fits_into_memory_is_not_read_again(self) -> None:
        plan = self.plan(faults=3e8, direct=1e9, host=4 * GIB)
        assert fates(plan, "llm") == ["layers[0:8] device/always"]

    def test_without_copies_the_slots_are_the_only_memory_spent(self) -> None:
        machine = calibrated(machine_of(700 * MIB), *disk_of(faults=3e8, direct=1e9))
        plan = plan_of(machine, LLM, policy=policy_of("auto", **BARE, copies=Copies.never))
        # Some stay in the page cache, which what is read directly does not push out.
        assert fates(plan, "llm") == ["layers[0:1,2:3,4:5] mapped/always", "layers[1:2,3:4,5:8] mapped/layer"]
        staging = placement(plan, "llm").staging
        assert staging is not None
        assert plan.phases[0].predicted.peak_bytes["host"] == staging.slots * staging.slot_bytes


class TestPinned:
    """Page-locked copies are taken where the link is faster from there, as far as they may be."""

    TRANSFORMER = computing(component_of("transformer", stack_of("blocks", *[GIB] * 8), passes=50), 0.1)

    def plan(self, percent: int, **links: float) -> Plan:
        machine = calibrated(machine_of(100 * GIB, cuda(4 * GIB)), *disk_of(faults=1e9, direct=2e9), **links)
        return plan_of(machine, self.TRANSFORMER, policy=policy_of("auto", **BARE, pinned_max_percent=percent))

    def homes(self, plan: Plan) -> dict[str, int]:
        return {str(segment.home): segment.packed_bytes // GIB for segment in placement(plan, "transformer").segments}

    def test_a_faster_link_is_taken(self) -> None:
        plan = self.plan(75, pageable=8e9, pinned=16e9)
        assert self.homes(plan) == {"device": 2, "pinned": 6}
        (rule,) = {each.rule for each in plan.decisions if each.choice == "pinned/layer"}
        assert rule == "pinned-copy-fits"

    def test_no_more_is_pinned_than_may_be(self) -> None:
        assert self.homes(self.plan(4, pageable=8e9, pinned=16e9))["pinned"] == 4
        assert "pinned" not in self.homes(self.plan(0, pageable=8e9, pinned=16e9))

    def test_what_is_no_faster_is_not_pinned(self) -> None:
        assert set(self.homes(self.plan(75, pageable=8e9, pinned=8e9))) == {"device", "pageable"}
        assert set(self.homes(self.plan(75, pageable=8e9))) == {"device", "pageable"}


class TestLocked:
    """Ranks on one host share the pages that are locked, which a copy for each would not."""

    def plan(self, ranks: int, memlock: int | None = None) -> Plan:
        limit = Unlimited(source="RLIMIT_MEMLOCK") if memlock is None else measured(memlock)
        machine = machine_of(host_of(measured(4 * GIB), limit))
        pipeline = Pipeline(name="toy", components=(component_of("llm", fixed=3 * GIB),), edges=())
        return Case(pipeline=pipeline, machine=machine, policy=EXACT, workload=Workload(ranks=ranks)).compile()

    def test_alone_a_copy_is_as_good(self) -> None:
        assert fates(self.plan(1), "llm") == ["fixed device/always"]

    def test_ranks_share_what_is_locked(self) -> None:
        plan = self.plan(3)
        assert fates(plan, "llm") == ["fixed locked/always"]
        assert plan.phases[0].predicted.peak_bytes["host"] == GIB
        assert rules(plan, "llm (fixed)") == {"locked/always": "shared-by-ranks"}

    def test_the_limit_of_the_process_is_kept(self) -> None:
        assert fates(self.plan(3, memlock=3 * GIB - 1), "llm") == ["fixed mapped/always"]
        assert fates(self.plan(3, memlock=3 * GIB), "llm") == ["fixed locked/always"]


class TestReader:
    """To a device, reads past the cache go through host buffers, which are counted."""

    def machine(self, host: int) -> Machine:
        return calibrated(machine_of(host, cuda(3 * GIB)), *disk_of(faults=1e9, direct=2e9))

    def test_reads_where_the_cache_would_keep_nothing(self) -> None:
        plan = plan_of(self.machine(200 * MIB), EIGHT, policy=EXACT)
        staging = placement(plan, "a").staging
        assert staging is not None
        assert (staging.reader, staging.chunk_bytes, staging.depth) == (Reader.direct, 4 * MIB, 4)
        assert plan.phases[0].predicted.peak_bytes["host"] == 16 * MIB

    def test_out_of_the_cache_where_it_keeps_all(self) -> None:
        policy = policy_of("auto", **BARE, copies=Copies.never)
        plan = plan_of(self.machine(32 * GIB), EIGHT, policy=policy)
        assert rules(plan, "a")["reader mapping"] == "cached-after-first-pass"

    def test_out_of_the_mapping_where_buffers_have_no_room(self) -> None:
        plan = plan_of(self.machine(15 * MIB), EIGHT, policy=EXACT)
        assert rules(plan, "a")["reader mapping"] == "no-room-for-buffers"

    def test_a_network_is_never_read_page_by_page(self) -> None:
        machine = machine_of(GIB, cuda(3 * GIB)).model_copy(update={"disk": Disk(filesystem="nfs4", network=True)})
        plan = plan_of(machine, EIGHT, policy=EXACT)
        staging = placement(plan, "a").staging
        assert staging is not None
        assert (staging.reader, staging.depth) == (Reader.buffered, 4)


class TestDevices:
    """Components are spread over the accelerators so that a request takes least."""

    def test_a_component_goes_where_there_is_room_for_it(self) -> None:
        parts = [component_of(name, fixed=size * GIB) for name, size in (("a", 50), ("b", 45), ("c", 30), ("d", 30))]
        plan = plan_of(machine_of(512 * GIB, cuda(60 * GIB), cuda(120 * GIB, index=1)), *parts, policy=EXACT)
        fits(plan)
        assert {part.compute_device for part in plan.placements} == {"cuda:0", "cuda:1"}
        assert [fates(plan, name) for name in "abcd"] == [["fixed device/always"]] * 4

    def test_an_override_says_where(self) -> None:
        wish = Override(select="a", compute_device="cuda:0")
        machine = machine_of(512 * GIB, cuda(GIB), cuda(GIB, index=1))
        plan = plan_of(
            machine, component_of("a", fixed=GIB), component_of("b", fixed=GIB), policy=policy_of("auto", wish, **BARE)
        )
        assert [part.compute_device for part in plan.placements] == ["cuda:0", "cuda:1"]

    def test_equal_devices_are_not_tried_twice(self) -> None:
        machine = machine_of(512 * GIB, cuda(GIB), cuda(GIB, index=1))
        plan = plan_of(machine, component_of("a", fixed=GIB), component_of("b", fixed=GIB), policy=EXACT)
        seats = [decision for decision in plan.decisions if decision.rule == "seats-of-least-cost"]
        assert [seat.because["tried"] for seat in seats] == [2]

    def test_many_components_are_spread_without_trying_all(self) -> None:
        parts = [component_of(f"part{index}", fixed=GIB) for index in range(8)]
        plan = plan_of(machine_of(64 * GIB, cuda(4 * GIB), cuda(4 * GIB, index=1)), *parts, policy=EXACT)
        assert all(fates(plan, part.name) == ["fixed device/always"] for part in parts)


class TestChunks:
    """Chunks are taken where the whole sequence does not fit, or leaves too little room for weights."""

    def component(self, peak: int, *chunked: tuple[int, int]) -> Component:
        peaks = tuple(ChunkedPeak(chunk_tokens=tokens, peak_bytes=each) for tokens, each in sorted(chunked))
        traced = TracedActivations(peak_bytes=peak, flops=10**9, chunked=peaks)
        plain = component_of("dit", stack_of("blocks", *[GIB] * 8), passes=50)
        return plain.model_copy(update={"activations": traced})

    def test_the_largest_that_fits(self) -> None:
        part = self.component(20 * GIB, (1024, 9 * GIB), (512, 3 * GIB), (128, 2 * GIB))
        plan = plan_of(machine_of(GIB, cuda(5 * GIB)), part, policy=policy_of("auto", **BARE, copies=Copies.never))
        assert placement(plan, "dit").chunk_tokens in (128, 512)
        assert plan.phases[0].predicted.peak_bytes["cuda:0"] is not None

    def test_none_where_all_is_held_anyway(self) -> None:
        part = self.component(2 * GIB, (128, GIB))
        plan = plan_of(machine_of(64 * GIB, cuda(80 * GIB)), part, policy=EXACT)
        assert placement(plan, "dit").chunk_tokens is None

    def test_room_for_weights_is_worth_it(self) -> None:
        part = self.component(8 * GIB, (128, GIB))
        plan = plan_of(machine_of(64 * GIB, cuda(10 * GIB)), part, policy=EXACT)
        assert placement(plan, "dit").chunk_tokens == 128
        assert fates(plan, "dit") == ["blocks[0:8] device/always"]
        chunks = next(each for each in plan.decisions if each.rule == "chunks-make-room")
        assert (chunks.because["peak_bytes"], chunks.because["whole_peak_bytes"]) == (GIB, 8 * GIB)

    def test_a_refusal_asks_for_the_least(self) -> None:
        plan = plan_of(machine_of(GIB, cuda(2 * GIB)), self.component(20 * GIB, (128, 2 * GIB)), policy=EXACT)
        (change,) = refused(plan).nearest
        assert change.to_available_bytes == 3 * GIB
