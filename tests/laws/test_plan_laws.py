"""Laws of every plan that fits, against an oracle that reads nothing but the document."""

from collections import Counter

import networkx as nx
from hypothesis import assume, given
from placewise.models.dataflow import phase_order
from placewise.plans.document import Plan
from placewise.plans.graph import graph_of
from placewise.plans.pipeline import Pipeline
from placewise.plans.policy import Copies

from .. import oracle
from ..questions import fits
from ..strategies import fitting_plans, pipelines


@given(fitting_plans())
def test_i1_no_axis_is_over_budget_in_any_phase(plan: Plan) -> None:
    assert [budget.axis for budget in plan.budgets] == oracle.axes(plan)
    for axis in oracle.measured_axes(plan):
        assert max(oracle.peaks(plan, axis)) <= oracle.usable(plan, axis)


@given(fitting_plans())
def test_i1_budgets_are_what_is_available_less_the_reserve(plan: Plan) -> None:
    for budget in plan.budgets:
        available = oracle.available(plan, budget.axis)
        assert budget.available_bytes == available
        assert budget.usable_bytes == (0 if available is None else oracle.usable(plan, budget.axis))


@given(fitting_plans())
def test_i1_predicted_peaks_are_the_oracles(plan: Plan) -> None:
    assert [phase.component for phase in plan.phases] == [part.name for part in plan.pipeline.components]
    for phase in plan.phases:
        expected = {axis: oracle.peak(plan, phase.component, axis) for axis in oracle.axes(plan)}
        expected["page_cache"] = oracle.page_cache(plan, phase.component)
        assert phase.predicted.peak_bytes == expected


@given(fitting_plans())
def test_i1_margin_is_what_is_left_at_the_highest_peak(plan: Plan) -> None:
    left: dict[str, int | None] = dict.fromkeys(oracle.axes(plan))
    for axis in oracle.measured_axes(plan):
        left[axis] = oracle.usable(plan, axis) - max(oracle.peaks(plan, axis))
    assert fits(plan).margin_bytes == left


@given(fitting_plans())
def test_i1_the_binding_axis_has_the_least_left(plan: Plan) -> None:
    for phase in plan.phases:
        peaks = phase.predicted.peak_bytes
        known = [axis for axis in oracle.measured_axes(plan) if peaks[axis] or axis not in ("pinned", "locked")]
        left = {axis: oracle.usable(plan, axis) - oracle.peak(plan, phase.component, axis) for axis in known}
        if phase.binding is None:
            assert not left
        else:
            assert left[phase.binding] == min(left.values())


@given(fitting_plans())
def test_link_bytes_are_what_one_request_moves(plan: Plan) -> None:
    for phase, part in zip(plan.phases, plan.pipeline.components, strict=True):
        assert phase.passes == part.passes
        assert phase.predicted.link_bytes == oracle.link_bytes(plan, part.name, part.passes)


@given(fitting_plans())
def test_slots_hold_the_largest_streamed_layer(plan: Plan) -> None:
    streamed = [unit for unit in oracle.residents(plan) if unit.hold == "layer"]
    for placement in plan.placements:
        sizes = [unit.packed for unit in streamed if unit.name[0] == placement.component]
        assert (placement.staging is None) == (not sizes)
        if placement.staging is not None:
            slots, ahead = placement.staging.slots, placement.staging.prefetch_layers
            # On the CPU a slot that is read into holds whole blocks of each of a layer's few file ranges.
            in_blocks = placement.compute_device == "cpu" and placement.staging.reader != "mapping"
            assert max(sizes) <= placement.staging.slot_bytes <= max(sizes) + (8 * 4096 if in_blocks else 0)
            assert 1 <= slots <= min(len(sizes), plan.policy.slots)
            assert ahead <= min(slots - 1, plan.policy.prefetch_layers)


@given(fitting_plans())
def test_i2_what_stays_mapped_would_not_fit_as_a_copy_or_would_move_no_less(plan: Plan) -> None:
    if plan.policy.copies is Copies.never:
        return
    left = 0
    if "host" in oracle.measured_axes(plan):
        left = oracle.usable(plan, "host") - max(oracle.peaks(plan, "host"))
    in_bytes = any(each.rule == "least-bytes-moved" for each in plan.decisions)
    for unit in oracle.residents(plan):
        may_be_copied = (unit.on_cpu and unit.hold != "layer") or unit.compute_pool != "host"
        if unit.home == "mapped" and may_be_copied and not oracle.home_was_asked(plan, unit):
            # A copy also takes from the page cache, and may cost more reads there than it saves.
            moves_less = oracle.moved_bytes(plan, copied=unit.name) < oracle.moved_bytes(plan)
            assert unit.packed > left or not (in_bytes and moves_less)


@given(fitting_plans())
def test_i2_what_is_copied_fits(plan: Plan) -> None:
    copied = [unit for unit in oracle.residents(plan) if "host" in unit.pools and unit.packed]
    if copied:
        assert sum(unit.packed for unit in copied) <= oracle.usable(plan, "host")


@given(fitting_plans(overridden=False))
def test_i2_no_copy_is_made_where_none_may_be(plan: Plan) -> None:
    """Neither under a policy of no copies, nor where host and device are one memory."""
    for unit in oracle.residents(plan):
        if plan.policy.copies is Copies.never or (unit.compute_pool == "host" and not unit.on_cpu):
            assert unit.home not in ("pageable", "pinned", "locked")
        if plan.policy.copies is Copies.never and unit.on_cpu and unit.packed:
            assert unit.home == "mapped"


@given(fitting_plans())
def test_i3_every_unit_stands_in_exactly_one_segment(plan: Plan) -> None:
    expected: Counter[oracle.Name] = Counter()
    for component in plan.pipeline.components:
        expected.update(oracle.unit_sizes(component).keys())
    assert Counter(unit.name for unit in oracle.residents(plan)) == expected


@given(fitting_plans())
def test_i3_segments_add_up_to_the_checkpoint(plan: Plan) -> None:
    stored = {part.name: part.checkpoint.files[0].size_bytes for part in plan.pipeline.components}
    for placement in plan.placements:
        assert sum(segment.bytes for segment in placement.segments) == stored[placement.component]
        packed = [unit.packed for unit in oracle.residents(plan) if unit.name[0] == placement.component]
        assert sum(segment.packed_bytes for segment in placement.segments) == sum(packed)


@given(fitting_plans())
def test_every_segment_has_a_decision(plan: Plan) -> None:
    """With the numbers that decided, and an alternative wherever weights are not always where they are used."""
    assert plan.decisions[0].subject == "request"
    decisions = (
        decision
        for decision in plan.decisions
        if decision.subject != "request"
        and not decision.choice.startswith("reader ")
        and decision.rule != "transformed-on-the-way"
    )
    for placement in plan.placements:
        for segment in placement.segments:
            decision = next(decisions)
            assert decision.subject.startswith(placement.component)
            assert decision.choice == f"{segment.home}/{segment.hold}"
            assert decision.because["bytes"] == segment.bytes
            assert decision.rejected or segment.home == "device" or decision.rule == "override"
        if placement.staging is not None:
            decision = next(decisions)
            assert decision.subject == placement.component
            assert decision.choice.split()[0] == str(placement.staging.slots)
    assert next(decisions, None) is None


@given(fitting_plans())
def test_moved_bytes_are_the_oracles(plan: Plan) -> None:
    """Where bytes are what decides, for want of rates."""
    decided = next(each for each in plan.decisions if each.rule.startswith("least-"))
    assume(decided.rule == "least-bytes-moved")
    assert decided.because["moved_bytes"] == oracle.moved_bytes(plan)


@given(fitting_plans())
def test_the_phases_are_a_topological_order_of_the_plans_graph(plan: Plan) -> None:
    graph = graph_of(plan)
    order = list(graph)
    assert order == [phase.component for phase in plan.phases]
    assert all(order.index(source) < order.index(target) for source, target in graph.edges)
    assert set(graph.edges) == set(plan.pipeline.edges)
    for name, attributes in graph.nodes(data=True):
        assert {each.component for each in (attributes["placement"], attributes["phase"])} == {name}
        assert attributes["component"].name == name


@given(pipelines())
def test_phases_of_any_flow_are_in_networkxs_lexicographical_order(pipeline: Pipeline) -> None:
    graph: nx.DiGraph[str] = nx.DiGraph(pipeline.edges)
    graph.add_nodes_from(names := [component.name for component in pipeline.components])
    assert list(phase_order(names, pipeline.edges)) == list(nx.lexicographical_topological_sort(graph))
