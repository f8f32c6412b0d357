"""Decisions: for every segment of the plan the rule that chose it, the numbers, and what was not taken."""

from collections.abc import Iterator, Sequence

from ..plans.document import Decision, Reader, Rejected, Segment
from ..plans.pipeline import TracedActivations
from ..plans.policy import Copies, Hold, Home, Policy, Residency, Shard
from ..plans.subjects import subject_of
from ..plans.units import GIB, format_bytes
from ..policies.selectors import Wish
from .budgets import HOST, whole_bytes
from .costs import is_cached
from .draft import Draft, Ledger, Reads
from .outcome import placement_of
from .search import Candidate, Found
from .seats import chunk_options


def decisions_of(found: Found, policy: Policy, pin_s_per_gib: float | None) -> tuple[Decision, ...]:
    """One for the placement as a whole, one per segment, and one per component whose layers pass through slots."""
    ledger = found.ledger
    parts = (decision for draft in ledger.drafts for decision in _component(draft, found, policy, pin_s_per_gib))
    return (*_whole(found), *parts)


def _whole(found: Found) -> Iterator[Decision]:
    """Which placement was taken, and by how much it beats the others on the same schedule."""
    if found.chosen is None:
        return
    if found.seatings:
        yield _seating(found)
    yield Decision(
        rule="least-seconds" if found.timed else "least-bytes-moved",
        subject="request",
        choice=found.chosen.name,
        because=_cost(found.chosen, found) | _proof(found),
        rejected=tuple(
            Rejected(choice=other.name, why=_why(other.cost, found), predicted_seconds=_seconds(other.cost, found))
            for other in found.others
        ),
    )


def _seating(found: Found) -> Decision:
    """Which devices and chunks were taken, and what others were tried."""
    assert found.chosen is not None
    return Decision(
        rule="seats-of-least-cost",
        subject="request",
        choice=_seated([(draft.compute_device, draft.chunk_tokens) for draft in found.ledger.drafts], found),
        because=_cost(found.chosen, found) | {"tried": 1 + len(found.seatings)},
        rejected=tuple(
            Rejected(
                choice=_seated([(seat.device, seat.chunk_tokens) for seat in seating], found),
                why="does not fit" if cost is None else _why(cost, found),
                predicted_seconds=None if cost is None else _seconds(cost, found),
            )
            for seating, cost in found.seatings
        ),
    )


def _seated(seats: Sequence[tuple[str, int | None]], found: Found) -> str:
    names = (draft.component.name for draft in found.ledger.drafts)
    return ", ".join(
        f"{name} on {device}" + (f" in chunks of {chunk} tokens" if chunk is not None else "")
        for name, (device, chunk) in zip(names, seats, strict=True)
    )


def _cost(candidate: Candidate, found: Found) -> dict[str, int | None]:
    return {"microseconds": round(candidate.cost * 1e6)} if found.timed else {"moved_bytes": round(candidate.cost)}


def _proof(found: Found) -> dict[str, int | None]:
    """Whether the placement is the optimum; if not, the cost that none is below."""
    if found.proven or found.bound is None:
        return {"proven_optimal": int(found.proven)}
    bound = {"bound_microseconds": round(found.bound * 1e6)} if found.timed else {"bound_bytes": round(found.bound)}
    return {"proven_optimal": 0, **bound}


def _seconds(cost: float, found: Found) -> float | None:
    return round(cost, 6) if found.timed else None


def _why(cost: float, found: Found) -> str:
    assert found.chosen is not None
    more = cost - found.chosen.cost
    if more <= found.chosen.cost * 1e-9:
        return "costs the same, and takes no less memory" if more > -1e-9 else "does not cost less"
    times = f", {cost / found.chosen.cost:.2f} times as much" if found.chosen.cost else ""
    return (f"{more:.3f} s more" if found.timed else f"{format_bytes(round(more))} more are moved") + times


def _component(draft: Draft, found: Found, policy: Policy, pin_s_per_gib: float | None) -> Iterator[Decision]:
    for segment in placement_of(draft).segments:
        yield _segment(draft, segment, found.ledger, policy, pin_s_per_gib)
    if draft.chunk_tokens is not None or chunk_options(draft.component):
        yield _chunks(draft)
    if any(unit.transformed for unit in draft.units):
        yield _transforms(draft)
    if draft.reads is not None and draft.streams_mapped:
        yield _reader(draft, draft.reads, found)
    if draft.streamed:
        yield Decision(
            rule=_slots_rule(draft, policy),
            subject=draft.component.name,
            choice="1 slot" if draft.slots == 1 else f"{draft.slots} slots",
            because={
                "wished_slots": policy.slots,
                "slot_bytes": draft.slot_bytes,
                "streamed_layers": draft.streamed,
                "prefetch_layers": draft.prefetch_layers,
            },
        )


def _chunks(draft: Draft) -> Decision:
    activations = draft.component.activations
    assert isinstance(activations, TracedActivations)
    peaks: dict[int | None, int] = {
        None: activations.peak_bytes,
        **{each.chunk_tokens: each.peak_bytes for each in activations.chunked},
    }
    return Decision(
        rule="whole-sequence-costs-least" if draft.chunk_tokens is None else "chunks-make-room",
        subject=draft.component.name,
        choice=_chunk(draft.chunk_tokens),
        because={"peak_bytes": peaks[draft.chunk_tokens], "whole_peak_bytes": activations.peak_bytes},
        rejected=tuple(
            Rejected(choice=_chunk(chunk), why=f"activations of {format_bytes(peak)}")
            for chunk, peak in peaks.items()
            if chunk != draft.chunk_tokens
        ),
    )


def _chunk(chunk_tokens: int | None) -> str:
    return "all tokens at once" if chunk_tokens is None else f"{chunk_tokens} tokens at a time"


def _transforms(draft: Draft) -> Decision:
    """What the module does not have as the file has it, and what it takes there."""
    units = [unit for unit in draft.units if unit.transformed]
    count = sum(unit.transformed for unit in units)
    in_place = Rejected(choice="mapped/always", why="the file does not have them as the module does")
    copy = Rejected(choice="copies before they are placed", why=f"would take {format_bytes(count)} more of the host")
    return Decision(
        rule="transformed-on-the-way",
        subject=draft.component.name,
        choice=" and ".join(sorted({transform.kind for transform in draft.component.transforms})),
        because={
            "transformed_bytes": count,
            "bytes": sum(unit.bytes for unit in units),
            "packed_bytes": sum(unit.packed for unit in units),
        },
        rejected=(in_place, copy) if draft.on_cpu else (copy,),
    )


def _reader(draft: Draft, reads: Reads, found: Found) -> Decision:
    """How slots are filled off the mapping: by reads past the cache, or out of it."""
    costs = found.costs[draft.component.name]
    because: dict[str, int | None] = {
        "passes": draft.component.passes,
        "chunk_bytes": reads.chunk_bytes,
        "depth": reads.depth,
    }
    faster = found.timed and costs.read < costs.fault
    if faster:
        because |= {"fault_bytes_per_s": round(1 / costs.fault), "read_bytes_per_s": round(1 / costs.read)}
    if draft.reading:
        rule, choice = "reads-beat-faults" if faster else "cache-keeps-nothing", reads.reader
        why = "page by page is slower" if faster else "the disk is read in every pass anyway"
        rejected = Rejected(choice="reader mapping", why=why)
    else:
        cached, choice = is_cached(draft, found.ledger), Reader.mapping
        rule = "cached-after-first-pass" if cached else "no-room-for-buffers"
        why = "would read in every pass" if cached else f"needs {format_bytes(reads.buffer_bytes)} of the host"
        rejected = Rejected(choice=f"reader {reads.reader}", why=why)
    return Decision(
        rule=rule, subject=draft.component.name, choice=f"reader {choice}", because=because, rejected=(rejected,)
    )


def _slots_rule(draft: Draft, policy: Policy) -> str:
    if draft.slots == policy.slots:
        return "slots-as-wished"
    if not draft.overlaps:
        return "one-slot-without-overlap"
    return "slots-for-layers" if draft.slots == draft.streamed else "slots-within-device"


def _segment(draft: Draft, segment: Segment, ledger: Ledger, policy: Policy, pin_s_per_gib: float | None) -> Decision:
    units = [unit for unit in draft.units if unit.stack == segment.stack]
    wish = units[0].wish
    because: dict[str, int | None] = {"bytes": segment.bytes, "passes": draft.component.passes}
    rejected: tuple[Rejected, ...] = ()
    if segment.packed_bytes == 0:
        rule = "nothing-to-place"
    elif draft.sharding is not None:
        rule, rejected = "sharded-over-ranks", (_rejected_whole(draft, wish),)
        because |= {
            "ranks": draft.ranks,
            "gathered_bytes": draft.sharding.gathered_bytes,
            **_budget(draft.axis, ledger),
        }
    elif wish.home is segment.home or wish.hold is segment.hold:
        rule = "override"
    elif segment.home is Home.device and not draft.on_cpu:
        rule = "fits-on-device"
        because |= _budget(draft.axis, ledger)
    else:
        rule, rejected = _host_rule(draft, segment, ledger, policy)
        because |= _budget(HOST, ledger)
        if segment.home is Home.pinned and pin_s_per_gib is not None:
            because |= {"pinning_microseconds": round(segment.packed_bytes / GIB * pin_s_per_gib * 1e6)}
    if not draft.on_cpu and segment.hold is not Hold.always and draft.sharding is None:
        rejected = (_rejected_device(draft, wish, ledger, policy), *rejected)
    return Decision(
        rule=rule,
        subject=subject_of(draft.component.name, segment.stack, segment.layers),
        choice=f"{segment.home}/{segment.hold}",
        because=because,
        rejected=rejected,
    )


def _host_rule(draft: Draft, segment: Segment, ledger: Ledger, policy: Policy) -> tuple[str, tuple[Rejected, ...]]:
    """Why weights that rest on the host are a copy, or stay on the checkpoint's mapping."""
    copy = "device/always" if draft.on_cpu else f"pageable/{segment.hold}"
    if segment.home is Home.locked:
        return "shared-by-ranks", (Rejected(choice=copy, why=f"each of {draft.ranks} ranks would have its own"),)
    if segment.home is Home.pinned:
        return "pinned-copy-fits", (Rejected(choice=copy, why="copies to the device are slower from there"),)
    if segment.home is not Home.mapped:
        mapped = f"mapped/{_hold_if_mapped(draft, segment)}"
        return "copy-fits", (Rejected(choice=mapped, why="a copy is never dropped from memory"),)
    if policy.copies is Copies.never:
        return "copies-never", (Rejected(choice=copy, why=f"the policy {policy.preset} makes no copies"),)
    if draft.axis == HOST and not draft.on_cpu:
        return "one-pool", (Rejected(choice=copy, why="device and host are one memory: it would be held twice"),)
    if ledger.budgets[HOST].available_bytes is None:
        return "host-unmeasured", (Rejected(choice=copy, why="nobody knows whether it fits"),)
    least = min(unit.packed for unit in draft.units if unit.stack == segment.stack and unit.home is Home.mapped)
    why = f"the smallest unit needs {format_bytes(least)} more, {format_bytes(ledger.left(HOST))} are left"
    return "copy-would-not-fit", (Rejected(choice=copy, why=why),)


def _hold_if_mapped(draft: Draft, segment: Segment) -> Hold:
    """The hold of a segment's units without their copy: on the CPU what is transformed cannot be used in place."""
    fate = (segment.stack, segment.home, segment.hold)
    if draft.on_cpu and any(unit.transformed for unit in draft.units if (unit.stack, unit.home, unit.hold) == fate):
        return Hold.phase if segment.stack is None else Hold.layer
    return segment.hold


def _rejected_device(draft: Draft, wish: Wish, ledger: Ledger, policy: Policy) -> Rejected:
    if wish.home is not None or wish.hold is not None:
        return Rejected(choice="device/always", why="an override asks otherwise")
    if policy.residency is Residency.minimal:
        return Rejected(choice="device/always", why=f"the policy {policy.preset} holds no more than a pass needs")
    left = format_bytes(ledger.left(draft.axis))
    return Rejected(choice="device/always", why=f"{left} of {draft.axis} are left beyond the highest phase")


def _rejected_whole(draft: Draft, wish: Wish) -> Rejected:
    if wish.shard is Shard.always:
        return Rejected(choice="whole on each rank", why="an override asks otherwise")
    size = format_bytes(whole_bytes(draft.component))
    return Rejected(choice="whole on each rank", why=f"{size} do not fit {draft.axis}, or not beside a pass")


def _budget(axis: str, ledger: Ledger) -> dict[str, int | None]:
    budget = ledger.budgets[axis]
    return {
        "available_bytes": budget.available_bytes,
        "reserve_bytes": budget.reserve_bytes,
        "usable_bytes": budget.usable_bytes,
        "left_bytes": None if budget.available_bytes is None else ledger.left(axis),
    }
