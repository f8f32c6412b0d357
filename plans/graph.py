"""A plan as a graph of networkx, for what walks, draws or checks graphs."""

from typing import TYPE_CHECKING

from .document import Plan

if TYPE_CHECKING:
    from networkx import DiGraph


def graph_of(plan: Plan) -> "DiGraph[str]":
    """The components and the data flow between them, in the order of the phases.

    Each node has the plan's records of its component as attributes: `component`, and in a plan that fits `placement`
    and `phase`.
    """
    import networkx as nx  # takes longer to import than most plans take to be made

    graph: nx.DiGraph[str] = nx.DiGraph()
    for component in plan.pipeline.components:
        graph.add_node(component.name, component=component)
    for placement in plan.placements:
        graph.add_node(placement.component, placement=placement)
    for phase in plan.phases:
        graph.add_node(phase.component, phase=phase)
    graph.add_edges_from(plan.pipeline.edges)
    return graph
