"""Every placement of a tiny pipeline, tried: the oracle of the planner's optimum. It shares no code with the planner.

Costs are bytes: those copied to a device in a request, and once more those of the mapping each time they may have to be
read. It knows devices that copy nothing beside their compute, so that one slot is all that is ever of use.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from placewise.plans.document import Plan
from placewise.plans.pipeline import Component

Fate = tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """One component with a fate for each unit; fixed part first where there is one."""

    component: Component
    pool: str
    on_cpu: bool
    stored: tuple[int, ...]
    moved: tuple[int, ...]
    packed: tuple[int, ...]
    fates: tuple[Fate, ...]

    def always(self) -> dict[str, int]:
        """Bytes that are there in every phase, by pool."""
        spent: dict[str, int] = {}
        for size, (home, _) in zip(self.packed, self.fates, strict=True):
            if home in ("device", "pageable"):
                axis = self.pool if home == "device" else "host"
                spent[axis] = spent.get(axis, 0) + size
        return spent

    def phase(self) -> int:
        """Bytes that its phase adds in its pool."""
        held = sum(size for size, (_, hold) in zip(self.packed, self.fates, strict=True) if hold == "phase")
        slot = max(
            (size for size, (_, hold) in zip(self.packed, self.fates, strict=True) if hold == "layer"), default=0
        )
        activations = self.component.activations
        return held + slot + (0 if activations.kind == "unknown" else activations.peak_bytes)

    def cost(self, *, cached: bool) -> int:
        """Bytes moved in a request."""
        total = 0
        for size, moved, (home, hold) in zip(self.stored, self.moved, self.fates, strict=True):
            reads = {"always": self.component.passes, "layer": self.component.passes, "phase": 1}[hold]
            if not self.on_cpu and hold != "always":
                total += moved * reads
            if home == "mapped":
                total += size * (1 if cached else reads)
        return total

    def mapped(self) -> int:
        """Stored bytes that rest on the mapping."""
        return sum(size for size, (home, _) in zip(self.stored, self.fates, strict=True) if home == "mapped")


def least_cost(plan: Plan) -> int | None:
    """The least bytes that any placement moves which keeps to the plan's budgets; null where none does."""
    usable = {budget.axis: budget.usable_bytes for budget in plan.budgets}
    cacheable = usable["host"] + cached_in_reserve(plan)
    every = [list(_tries(component, plan)) for component in plan.pipeline.components]
    costs = (cost for combination in product(*every) if (cost := _cost(combination, usable, cacheable)) is not None)
    return min(costs, default=None)


def _cost(combination: tuple[Tried, ...], usable: dict[str, int], cacheable: int) -> int | None:
    always = {axis: sum(tried.always().get(axis, 0) for tried in combination) for axis in usable}
    peaks = dict(always)
    for tried in combination:
        peaks[tried.pool] = max(peaks[tried.pool], always[tried.pool] + tried.phase())
    if any(peaks[axis] > usable[axis] for axis in usable):
        return None
    return sum(tried.cost(cached=_is_cached(tried, always["host"], cacheable)) for tried in combination)


def cached_in_reserve(plan: Plan) -> int:
    """Bytes of the host's reserve in which mapped pages may stay: three quarters, and all but 48 MiB of it at most.

    None where the reserve has to cover activations that are unknown. Of each rank its part.
    """
    if any(component.activations.kind == "unknown" for component in plan.pipeline.components):
        return 0
    (reserve,) = (budget.reserve_bytes for budget in plan.budgets if budget.axis == "host")
    return max(0, min(reserve - reserve // 4, reserve - (48 << 20))) // plan.workload.ranks


def _is_cached(tried: Tried, always: int, cacheable: int) -> bool:
    """The cache has what the host does not need in this very phase."""
    return tried.mapped() + always + (tried.phase() if tried.pool == "host" else 0) <= cacheable


def _tries(component: Component, plan: Plan) -> Iterator[Tried]:
    accelerators = {accelerator.device: accelerator.memory for accelerator in plan.machine.accelerators}
    device = next(iter(accelerators), "cpu")
    pool = device if accelerators.get(device) == "separate" else "host"
    fixed_part = (component.fixed_bytes, component.fixed_transformed_bytes, component.fixed_packed_bytes, True)
    units = [fixed_part] if component.fixed_bytes else []
    for stack in component.stacks:
        for size in stack.sizes:
            layer = (size.layer_bytes, size.transformed_bytes, size.packed_bytes, False)
            units += [layer] * (size.layers[1] - size.layers[0])
    open_fates = [
        _open(fixed, transformed > 0, on_cpu=device == "cpu", shared=pool == "host")
        for _, transformed, _, fixed in units
    ]
    for fates in product(*open_fates):
        yield Tried(
            component=component,
            pool=pool,
            on_cpu=device == "cpu",
            stored=tuple(stored for stored, *_ in units),
            moved=tuple(packed if transformed else stored for stored, transformed, packed, _ in units),
            packed=tuple(packed for _, _, packed, _ in units),
            fates=fates,
        )


def _open(fixed: bool, transformed: bool, *, on_cpu: bool, shared: bool) -> list[Fate]:  # noqa: FBT001 - a unit is or not
    if on_cpu:
        in_turn = "phase" if fixed else "layer"
        return [("mapped", in_turn if transformed else "always"), ("device", "always")]
    homes = ["mapped"] if shared else ["mapped", "pageable"]
    holds = ["phase"] if fixed else ["layer", "phase"]
    return [("device", "always"), *product(homes, holds)]
