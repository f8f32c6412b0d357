"""A mixed-integer program, solved by HiGHS: one thread, a fixed seed, and so the same answer every time."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from ..plans.errors import PlacewiseError

_INFINITY = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """How far the solver looks: branch-and-bound nodes, and the relative gap at which it is done.

    Nodes and not seconds: a limit on time would make the plan depend on the machine's load.
    """

    nodes: int
    gap: float


EXACT = Search(nodes=2_000, gap=0.0)


class SolverError(PlacewiseError):
    """Our own fault: a program without a solution was set up, though a placement was found before."""


_Row = tuple[dict[int, float], float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """Values by variable, the objective, and whether nothing better exists (within the solver's tolerances)."""

    values: tuple[float, ...]
    objective: float
    optimal: bool

    def whole(self, variable: int) -> int:
        """An integer variable's value."""
        return round(self.values[variable])


@dataclass(slots=True)
class Program:
    """Variables with bounds, and rows `low <= sum(coefficient * variable) <= high`."""

    lows: list[float] = field(default_factory=list[float])
    highs: list[float] = field(default_factory=list[float])
    integer: list[int] = field(default_factory=list[int])
    rows: list[_Row] = field(default_factory=list[_Row])

    def count(self, most: int) -> int:
        """A new variable: a whole number from 0 to `most`."""
        self.integer.append(len(self.lows))
        return self.amount(most)

    def amount(self, most: float = _INFINITY) -> int:
        """A new variable: a real number from 0 to `most`."""
        self.lows.append(0.0)
        self.highs.append(float(most))
        return len(self.lows) - 1

    def at_most(self, terms: Mapping[int, float], high: float) -> None:
        """Bound a sum from above."""
        self.rows.append((dict(terms), -_INFINITY, high))

    def exactly(self, terms: Mapping[int, float], value: float) -> None:
        """Fix a sum."""
        self.rows.append((dict(terms), value, value))

    def minimise(self, objective: Mapping[int, float], how: Search = EXACT, start: Solution | None = None) -> Solution:
        """The least value of a sum, and where it is. `start` is a solution to improve on.

        Raises:
            SolverError: no values satisfy the rows.
        """
        import highspy
        import numpy as np

        # The public class greets on stdout when it is made, before it can be told not to; its base does not.
        solver: Any = cast(Any, highspy)._Highs()
        for option, value in (
            ("output_flag", False), ("threads", 1), ("random_seed", 1), ("mip_rel_gap", how.gap), ("mip_abs_gap", 0.0),
            ("mip_max_nodes", how.nodes), ("mip_feasibility_tolerance", 1e-9), ("primal_feasibility_tolerance", 1e-9),
            # Searches of smaller programs within this one take a third of the time, and it is small itself.
            ("mip_heuristic_run_rins", False), ("mip_heuristic_run_rens", False),
        ):  # fmt: skip
            solver.setOptionValue(option, value)
        solver.addVars(len(self.lows), np.array(self.lows), np.array(self.highs))
        for variable in self.integer:
            solver.changeColIntegrality(variable, highspy.HighsVarType.kInteger)
        for variable, cost in objective.items():
            solver.changeColCost(variable, cost)
        for terms, low, high in self.rows:
            used = {variable: value for variable, value in sorted(terms.items()) if value}
            solver.addRow(low, high, len(used), np.array(list(used), dtype=np.int32), np.array(list(used.values())))
        if start is not None:
            solution = highspy.HighsSolution()
            solution.col_value = list(start.values)
            solver.setSolution(solution)
        solver.run()
        status = solver.getModelStatus()
        values = tuple(solver.getSolution().col_value)
        if not values or status == highspy.HighsModelStatus.kInfeasible:
            raise SolverError(f"the placement program has no solution ({solver.modelStatusToString(status)})")
        return Solution(
            values=values,
            objective=float(solver.getInfo().objective_function_value),
            optimal=status == highspy.HighsModelStatus.kOptimal,
        )
