"""The planner's front: facts, pipeline and policy in; a sealed and checked plan out. A pure function."""

from ..models.dataflow import phase_order
from ..plans.codec import made_by, seal
from ..plans.document import FORMAT_VERSION, Change, Confidence, Fits, Plan, Refused, Short, Verdict
from ..plans.machine import Machine
from ..plans.pipeline import Pipeline, UnknownActivations, Workload, activations_are_known
from ..plans.policy import Policy
from ..policies.admission import broken_rules
from ..policies.selectors import resolve_overrides
from .budgets import HOST, available_for, budgets_of, copied_bytes_of, gives_back
from .checker import check_plan
from .draft import Ledger, draft_of, ledger_of
from .explain import decisions_of
from .outcome import margins, phases_of, placement_of
from .rates import rates_of
from .search import Found, search
from .seats import Seating, seatings


def compile_plan(pipeline: Pipeline, machine: Machine, policy: Policy, workload: Workload, *, version: str) -> Plan:
    """The plan for a pipeline on a machine. Equal arguments give equal bytes; nothing is measured here.

    A plan that does not fit is a plan too: its verdict is `refused`, with every cause and the nearest change, and it
    has no placements.

    Args:
        pipeline: what is placed; the order of its components, stacks and edges does not matter.
        machine: measured or given facts.
        policy: what is allowed and reserved; the order of its overrides does not matter.
        workload: carried into the plan; the pipeline's passes were derived from it.
        version: Placewise's own, for the plan's mark.

    Raises:
        InputError: the data flow has a cycle, an override matches nothing, or the policy names an unknown rule.
    """
    pipeline, policy = _in_phase_order(pipeline), _in_order(policy)
    copied_bytes = copied_bytes_of(pipeline.components)
    budgets = budgets_of(machine, policy, copied_bytes=copied_bytes, ranks=workload.ranks)
    wishes = resolve_overrides(policy, pipeline)
    broken = broken_rules(pipeline, machine, policy)
    placed = () if broken else pipeline.components

    seated = seatings(placed, machine, wishes)
    touches = gives_back(budgets[HOST], policy, pipeline.components, copied_bytes, workload.ranks)
    rates = {
        seat.device: rates_of(machine.calibration, seat.device, fresh=touches) for seating in seated for seat in seating
    }

    def fresh(seating: Seating) -> Ledger:
        drafts = (
            draft_of(component, seat, machine, wishes, rates, budgets, workload.ranks)
            for component, seat in zip(placed, seating, strict=True)
        )
        return ledger_of(tuple(drafts), budgets, workload.ranks)

    found = search(fresh, seated, rates, policy)
    ledger, drafts = found.ledger, found.ledger.drafts
    fits = not broken and not found.short
    pinning = None if machine.calibration is None else machine.calibration.pin_s_per_gib
    verdict: Verdict = (
        Fits(confidence=_confidence(pipeline, found), margin_bytes=margins(ledger))
        if fits
        else Refused(
            short=found.short, broken=broken, nearest=_nearest(found.short, policy, copied_bytes, workload.ranks)
        )
    )
    plan = seal(
        Plan(
            format_version=FORMAT_VERSION,
            made_by=made_by(version),
            digest="",
            verdict=verdict,
            pipeline=pipeline,
            workload=workload,
            machine=machine,
            policy=policy,
            budgets=tuple(budget for _, budget in sorted(budgets.items())),
            placements=tuple(map(placement_of, drafts)) if fits else (),
            phases=phases_of(ledger, found.costs) if fits else (),
            decisions=decisions_of(found, policy, pinning) if fits else (),
            notes=_notes(pipeline, machine, found),
        )
    )
    check_plan(plan)
    return plan


def _in_phase_order(pipeline: Pipeline) -> Pipeline:
    by_name = {
        component.name: component.model_copy(
            update={"stacks": tuple(sorted(component.stacks, key=lambda stack: stack.name))}
        )
        for component in pipeline.components
    }
    order = phase_order(by_name, pipeline.edges)
    return pipeline.model_copy(
        update={
            "components": tuple(by_name[name] for name in order),
            "edges": tuple(sorted(set(pipeline.edges))),
        }
    )


def _in_order(policy: Policy) -> Policy:
    overrides = sorted(policy.overrides, key=lambda override: override.select)
    return policy.model_copy(update={"overrides": tuple(overrides)})


def _confidence(pipeline: Pipeline, found: Found) -> Confidence:
    if not activations_are_known(pipeline.components):
        return Confidence.activations_unknown
    return Confidence.calibrated if found.timed else Confidence.bytes_only


def _nearest(short: tuple[Short, ...], policy: Policy, copied_bytes: int, ranks: int) -> tuple[Change, ...]:
    return tuple(
        Change(
            axis=cause.axis,
            to_available_bytes=available_for(cause.axis, cause.need_bytes, policy, copied_bytes, ranks),
        )
        for cause in short
    )


def _notes(pipeline: Pipeline, machine: Machine, found: Found) -> tuple[str, ...]:
    """What a reader should know that no decision says: what was assumed, and what was not measured."""
    unknown = {
        component.name: component.activations.why
        for component in pipeline.components
        if isinstance(component.activations, UnknownActivations)
    }
    notes = [*pipeline.notes, *machine.host.notes]
    if unknown:
        notes.append(f"activation memory is not known for {', '.join(unknown)}: only the reserve covers it")
    notes += [f"{name}: activations not traced: {why}" for name, why in unknown.items() if why is not None]
    for axis, budget in sorted(found.ledger.budgets.items()):
        if budget.available_bytes is None:
            notes.append(f"the memory of {axis} was not measured: nothing is spent there")
    if not found.timed:
        notes.append("not calibrated: seconds are unknown, and bytes decide")
    elif not all(costs.compute_known for costs in found.costs.values()):
        notes.append("compute time is not known: the plan minimises the time of moving weights")
    if sharded := [draft.component.name for draft in found.ledger.drafts if draft.sharding is not None]:
        notes.append(f"the rate between ranks is not known: no figure has the time of gathering {', '.join(sharded)}")
    if found.chosen is not None and found.bound is None:
        notes.append("too many kinds of layers for an exact solution: the placement fits, and a better one may exist")
    return tuple(notes)
