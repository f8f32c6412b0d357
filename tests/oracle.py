"""A naive second opinion: what a plan means for memory and links, re-derived unit by unit from the document alone."""

from dataclasses import dataclass, replace

from placewise.plans.document import Placement, Plan, Segment
from placewise.plans.pipeline import Component

from .brute import cached_in_reserve

Name = tuple[str, str | None, int]
"""A unit: component, stack (null for the fixed part) and layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Resident:
    """One unit with its fate. `pools` are where its own bytes rest for good; none is the page cache alone."""

    name: Name
    stored: int
    transformed: int
    packed: int
    home: str
    hold: str
    pools: tuple[str, ...]
    compute_pool: str
    on_cpu: bool

    @property
    def moved(self) -> int:
        """Bytes that go to a device: as many as the module has where it does not have what is stored."""
        return self.packed if self.transformed else self.stored


def unit_sizes(component: Component) -> dict[Name, tuple[int, int, int]]:
    """Every unit of a component with its bytes as stored, those of them that are transformed, and packed."""
    sizes: dict[Name, tuple[int, int, int]] = {}
    if component.fixed_bytes:
        fixed = (component.fixed_bytes, component.fixed_transformed_bytes, component.fixed_packed_bytes)
        sizes[component.name, None, 0] = fixed
    for stack in component.stacks:
        for layer in range(stack.layers):
            (size,) = [size for size in stack.sizes if size.layers[0] <= layer < size.layers[1]]
            of_layer = (size.layer_bytes, size.transformed_bytes, size.packed_bytes)
            sizes[component.name, stack.name, layer] = of_layer
    return sizes


def units_of(component: str, segment: Segment) -> list[Name]:
    """The units that a segment names."""
    if segment.stack is None:
        return [(component, None, 0)]
    return [(component, segment.stack, layer) for run in segment.layers for layer in range(run[0], run[1])]


def pool_of(plan: Plan, device: str) -> str:
    """The memory that a device draws on."""
    separate = [a.device for a in plan.machine.accelerators if a.memory == "separate"]
    return device if device in separate else "host"


def residents(plan: Plan) -> list[Resident]:
    """All units of a plan that fits, in the order of its segments."""
    found: list[Resident] = []
    components = {component.name: component for component in plan.pipeline.components}
    for placement in plan.placements:
        sizes = unit_sizes(components[placement.component])
        compute_pool = pool_of(plan, placement.compute_device)
        for segment in placement.segments:
            pools = {"device": (compute_pool,), "pageable": ("host",), "pinned": ("host", "pinned")}
            for name in units_of(placement.component, segment):
                stored, transformed, packed = sizes[name]
                found.append(
                    Resident(
                        name=name,
                        stored=stored,
                        transformed=transformed,
                        packed=packed,
                        home=segment.home,
                        hold=segment.hold,
                        pools=("locked",) if segment.home == "locked" else pools.get(segment.home, ()),
                        compute_pool=compute_pool,
                        on_cpu=placement.compute_device == "cpu",
                    )
                )
    return found


def axes(plan: Plan) -> list[str]:
    """The pools of the machine, by name, and the parts of the host that may be page-locked."""
    devices = {pool_of(plan, a.device) for a in plan.machine.accelerators}
    pinned = {"pinned" for a in plan.machine.accelerators if a.memory == "separate" and a.pinned_memory}
    locked = {"locked"} if plan.machine.host.memlock.kind == "measured" else set[str]()
    return sorted({"host"} | devices | pinned | locked)


def available(plan: Plan, axis: str) -> int | None:
    """What was measured of an axis, or null. Of two figures for one pool the smaller."""
    unified = [a.free for a in plan.machine.accelerators if a.memory == "unified"]
    readings = [a.free for a in plan.machine.accelerators if a.device == axis]
    if axis in ("host", "pinned"):
        readings = [plan.machine.host.available, *unified]
    if axis == "locked":
        readings = [plan.machine.host.memlock]
    return min((reading.value for reading in readings if reading.kind == "measured"), default=None)


def measured_axes(plan: Plan) -> list[str]:
    """The axes that have a budget."""
    return [axis for axis in axes(plan) if available(plan, axis) is not None]


def usable(plan: Plan, axis: str) -> int:
    """What is available less the policy's reserve; on the host one byte less, for there the bound is excluded."""
    found = available(plan, axis)
    assert found is not None
    policy = plan.policy
    if axis == "host":
        return max(0, found - _host_reserve(plan, found) - 1)
    if axis == "pinned":
        return found * policy.pinned_max_percent // 100
    if axis == "locked":
        return found
    return found - min(policy.device_reserve_bytes, found * policy.device_reserve_max_percent // 100)


def _host_reserve(plan: Plan, found: int) -> int:
    """On a small host 24 MiB, or 48 where the whole pipeline as copies does not fit; no more than the policy's."""
    whole = max(_activations(plan, part.name) for part in plan.pipeline.components)
    whole += sum(packed for part in plan.pipeline.components for *_, packed in unit_sizes(part).values())
    reserve = 0
    for least in (24 << 20, 48 << 20):
        reserve = max(least, found * plan.policy.reserve_max_percent // 100)
        reserve = min(reserve, plan.policy.reserve_bytes, found)
        if found - reserve - 1 >= whole * plan.workload.ranks:
            break
    return reserve


def home_was_asked(plan: Plan, unit: Resident) -> bool:
    """Whether an override says where a unit rests."""
    component, stack, _ = unit.name
    selects = {component} if stack is None else {component, f"{component}.{stack}"}
    return any(override.select in selects and override.home for override in plan.policy.overrides)


def peak(plan: Plan, component: str, axis: str) -> int:
    """The most bytes that an axis bears while a component computes."""
    (placement,) = [placement for placement in plan.placements if placement.component == component]
    everything = residents(plan)
    resting = sum(unit.packed for unit in everything if axis in unit.pools)
    if axis == "host":
        resting += -(-sum(unit.packed for unit in everything if unit.home == "locked") // plan.workload.ranks)
    if axis == "host" and placement.compute_device != "cpu" and placement.staging is not None:
        resting += (placement.staging.chunk_bytes or 0) * (placement.staging.depth or 0)
    if pool_of(plan, placement.compute_device) != axis:
        return resting
    visiting = sum(unit.packed for unit in everything if unit.name[0] == component and unit.hold == "phase")
    return resting + visiting + _slots(placement) + _activations(plan, component)


def peaks(plan: Plan, axis: str) -> list[int]:
    """An axis' peak in each phase, in order."""
    return [peak(plan, placement.component, axis) for placement in plan.placements]


def moved_bytes(plan: Plan, *, copied: Name | None = None) -> int:
    """Bytes that a request copies to devices and reads off the mapping; as if one more unit were a host copy.

    What is mapped is read once where all of a component's fits beside what the host needs in that phase, most of the
    reserve included, and in every pass where it does not; so are layers that the CPU has read into slots.
    """
    units = [_as_copy(unit) if unit.name == copied else unit for unit in residents(plan)]
    always = _on_host(units, plan)
    cacheable = usable(plan, "host") + cached_in_reserve(plan) if "host" in measured_axes(plan) else -1
    total = 0
    for component in plan.pipeline.components:
        own = [unit for unit in units if unit.name[0] == component.name]
        phase = peak(plan, component.name, "host") - _on_host(residents(plan), plan)
        mapped = sum(unit.stored for unit in own if unit.home == "mapped")
        cached = mapped + always + phase <= cacheable
        for unit in own:
            reads = 1 if unit.hold == "phase" else component.passes
            total += unit.moved * reads if not unit.on_cpu and unit.hold != "always" else 0
            past_cache = unit.on_cpu and unit.hold == "layer" and _reader(plan, component.name) != "mapping"
            total += unit.stored * (1 if cached and not past_cache else reads) if unit.home == "mapped" else 0
    return total


def _reader(plan: Plan, component: str) -> str | None:
    """How a component's slots are filled; null where it has none."""
    (placement,) = [placement for placement in plan.placements if placement.component == component]
    return None if placement.staging is None else placement.staging.reader


def _as_copy(unit: Resident) -> Resident:
    return replace(unit, home="device" if unit.on_cpu else "pageable", pools=("host",))


def _on_host(units: list[Resident], plan: Plan) -> int:
    locked = sum(unit.packed for unit in units if unit.home == "locked")
    return sum(unit.packed for unit in units if "host" in unit.pools) + -(-locked // plan.workload.ranks)


def page_cache(plan: Plan, component: str) -> int:
    """Bytes of the checkpoint's mapping that a phase reads: soft, the kernel may drop them.

    Direct reads go past it, but nothing that is transformed is read so.
    """
    direct = _reader(plan, component) == "direct"
    mapped = [unit for unit in residents(plan) if unit.name[0] == component and unit.home == "mapped"]
    return sum(unit.transformed if direct and unit.hold == "layer" else unit.stored for unit in mapped)


def link_bytes(plan: Plan, component: str, passes: int) -> int:
    """Bytes that one request moves from the host to the component's compute device."""
    times = {"always": 0, "phase": 1, "layer": passes}
    units = [unit for unit in residents(plan) if unit.name[0] == component and not unit.on_cpu]
    return sum(unit.moved * times[unit.hold] for unit in units)


def _slots(placement: Placement) -> int:
    return 0 if placement.staging is None else placement.staging.slots * placement.staging.slot_bytes


def _activations(plan: Plan, component: str) -> int:
    (found,) = [part.activations for part in plan.pipeline.components if part.name == component]
    return 0 if found.kind == "unknown" else found.peak_bytes
