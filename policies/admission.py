"""Admission rules: what a policy does not admit on a machine, each with an id that the refusal carries."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..plans.document import Broken
from ..plans.errors import InputError
from ..plans.machine import Accelerator, Machine, Measured, MemoryKind, Unlimited
from ..plans.pipeline import Component, Pipeline, Stack, known_peak_bytes
from ..plans.policy import Hold, Home, Policy
from .selectors import Wish, Wishes, resolve_overrides

CPU = "cpu"


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A component, or one of its stacks, with the device it would compute on and what was asked of it.

    `transformed`: whether any of its weights is, on its way to the module.
    """

    subject: str
    component: Component
    compute_device: str
    wish: Wish
    transformed: bool


def default_device(machine: Machine) -> str:
    """Where a component computes when nobody says otherwise: the first accelerator, or the CPU.

    One that shares the host's memory is taken where there is no other.
    """
    shares = [each.device for each in machine.accelerators if each.memory is MemoryKind.unified]
    return next((each.device for each in machine.accelerators if each.device not in shares), [*shares, CPU][0])


def compute_device_exists(place: Place, machine: Machine, policy: Policy) -> str | None:
    """A component computes on the CPU or on an accelerator that the facts list."""
    devices = [CPU, *(accelerator.device for accelerator in machine.accelerators)]
    if place.compute_device in devices:
        return None
    return f"there is no device {place.compute_device}; the machine has {', '.join(devices)}"


def unified_device_is_alone(place: Place, machine: Machine, policy: Policy) -> str | None:
    """An accelerator that shares the host's memory is the only one that is computed on."""
    only = default_device(machine)
    for accelerator in machine.accelerators:
        if accelerator.device == place.compute_device != only and accelerator.memory is MemoryKind.unified:
            return f"{accelerator.device} shares the host's memory, so nothing computes there beside {only}"
    return None


def device_memory_is_known(place: Place, machine: Machine, policy: Policy) -> str | None:
    """Nothing is placed on an accelerator whose free memory is not known."""
    for accelerator in machine.accelerators:
        if accelerator.device == place.compute_device and not isinstance(accelerator.free, Measured):
            return f"the free memory of {accelerator.device} was not measured; give it with --device-memory"
    return None


def host_memory_is_known(place: Place, machine: Machine, policy: Policy) -> str | None:
    """No copy is promised on a host whose available memory is not known."""
    home = place.wish.home
    pool = [machine.host.available]
    pool += [accelerator.free for accelerator in machine.accelerators if accelerator.memory is MemoryKind.unified]
    hard = home not in (None, Home.mapped, Home.device) or (home is Home.device and place.compute_device == CPU)
    if not hard or any(isinstance(reading, Measured) for reading in pool):
        return None
    return f"home {home} takes memory of the host, whose available memory was not measured; give it with --host-memory"


def pinned_memory_exists(place: Place, machine: Machine, policy: Policy) -> str | None:
    """Page-locked copies are made for a device with memory of its own that knows such, and where the policy lets."""
    if place.wish.home is not Home.pinned:
        return None
    if place.compute_device == CPU:
        return None  # another rule's
    if not any(pins(each) for each in machine.accelerators if each.device == place.compute_device):
        return f"{place.compute_device} has no use for page-locked copies; say home {Home.pageable}"
    if policy.pinned_max_percent == 0:
        return f"the policy {policy.preset} lets no memory be page-locked; raise its pinned_max_percent"
    return None


def locked_memory_is_known(place: Place, machine: Machine, policy: Policy) -> str | None:
    """Nothing is locked where the process's limit is not known."""
    if place.wish.home is not Home.locked or locks(machine):
        return None
    return "how much memory this process may lock (RLIMIT_MEMLOCK) was not measured; say home mapped"


def pins(accelerator: Accelerator) -> bool:
    """Whether page-locked host copies are of use to a device."""
    return accelerator.pinned_memory and accelerator.memory is MemoryKind.separate


def locks(machine: Machine) -> bool:
    """Whether it is known how much of a mapping this process may lock in memory."""
    return isinstance(machine.host.memlock, Measured | Unlimited)


def hold_suits_home(place: Place, machine: Machine, policy: Policy) -> str | None:
    """On the CPU weights are used where they rest; elsewhere only weights at home on the device are always there."""
    home, hold = place.wish.home, place.wish.hold
    if place.compute_device == CPU:
        if home in (Home.pageable, Home.pinned):
            return f"home {home} on the CPU is the device's own memory; say home device"
        if hold is Hold.phase:
            return "hold phase needs an accelerator; on the CPU weights are used where they rest"
        if hold is Hold.layer and home not in (None, Home.mapped):
            return f"hold layer on the CPU reads layers off the disk in turn; with home {home} they are there always"
        in_place = home is Home.locked or (hold is Hold.always and home is not Home.device)
        if in_place and place.transformed:
            return "weights that are transformed are not used where they rest in the file; say home device, or no hold"
        return None
    if home is not None and hold is not None and (home is Home.device) != (hold is Hold.always):
        pairs = "device goes with always, the others with phase or layer"
        return f"home {home} and hold {hold} contradict each other; {pairs}"
    return None


def components_are_layerwise(place: Place, machine: Machine, policy: Policy) -> str | None:
    """Whatever has layers streams them all, and nothing is without."""
    if place.compute_device == CPU:
        return None  # weights are used where they rest
    if not place.component.stacks:
        return "it has no layers that could be streamed"
    if place.wish.hold in (None, Hold.layer) and place.wish.home is not Home.device:
        return None
    kept = f"home {Home.device}" if place.wish.home is Home.device else f"hold {place.wish.hold}"
    return f"{kept} keeps layers on {place.compute_device}, and each must be streamed; say hold {Hold.layer}"


def activations_are_known(place: Place, machine: Machine, policy: Policy) -> str | None:
    """What a pass takes beside the weights is told or traced: only then is it certain that it fits."""
    if known_peak_bytes(place.component.activations) is not None:
        return None
    return "nobody knows what a pass takes beside the weights; trace it, or give it with --activations"


Rule = Callable[[Place, Machine, Policy], str | None]

RULES: dict[str, Rule] = {
    "compute-device-exists": compute_device_exists,
    "unified-device-is-alone": unified_device_is_alone,
    "device-memory-is-known": device_memory_is_known,
    "host-memory-is-known": host_memory_is_known,
    "pinned-memory-exists": pinned_memory_exists,
    "locked-memory-is-known": locked_memory_is_known,
    "hold-suits-home": hold_suits_home,
}
"""In force under every policy."""

CHOSEN_RULES: dict[str, Rule] = {
    "components-are-layerwise": components_are_layerwise,
    "activations-are-known": activations_are_known,
}
"""In force where a policy names them."""


def broken_rules(pipeline: Pipeline, machine: Machine, policy: Policy) -> tuple[Broken, ...]:
    """Every rule in force that some place breaks.

    Raises:
        InputError: the policy names a rule that does not exist, or leaves one out, or has an override that matches
            nothing.
    """
    rules = RULES | CHOSEN_RULES
    for rule in policy.rules:
        if rule not in rules:
            raise InputError(f"there is no rule '{rule}'", hint=f"rules are {', '.join(rules)}")
    for rule in RULES:
        if rule not in policy.rules:
            raise InputError(
                f"the policy leaves out the rule '{rule}', without which no plan is sound", hint="add it to its rules"
            )
    wishes = resolve_overrides(policy, pipeline)
    places = sorted(_places(pipeline, machine, wishes), key=lambda place: place.subject)
    return tuple(
        Broken(rule=rule, subject=place.subject, why=why)
        for rule in policy.rules
        for place in places
        if (why := rules[rule](place, machine, policy)) is not None
    )


def _places(pipeline: Pipeline, machine: Machine, wishes: Wishes) -> Iterator[Place]:
    for component in pipeline.components:
        wish = wishes.of(component.name, None)
        device = wish.compute_device or default_device(machine)
        apart = [stack for stack in component.stacks if (component.name, stack.name) in wishes.by_place]
        rest = (stack for stack in component.stacks if stack not in apart)
        yield Place(
            subject=component.name,
            component=component,
            compute_device=device,
            wish=wish,
            transformed=component.fixed_transformed_bytes > 0 or any(map(_is_transformed, rest)),
        )
        for stack in apart:
            yield Place(
                subject=f"{component.name}.{stack.name}",
                component=component,
                compute_device=device,
                wish=wishes.of(component.name, stack.name),
                transformed=_is_transformed(stack),
            )


def _is_transformed(stack: Stack) -> bool:
    return any(size.transformed_bytes for size in stack.sizes)
