"""Where components compute, and in how large chunks: every seating that is worth a search.

Several accelerators are tried in every combination while those are few. Beyond that each component goes where the least
is computed yet. Accelerators that are equal in all but their name are told apart by order alone, so that no combination
is tried twice.
"""

from collections.abc import Iterator, Sequence
from itertools import product

from ..plans.machine import Accelerator, Machine, MemoryKind
from ..plans.pipeline import Component, TracedActivations
from ..policies.admission import default_device
from ..policies.selectors import Wishes
from .draft import Seat

MOST_SEATINGS = 32
"""More combinations of devices than these are not tried: each costs a solution of the program."""

Seating = tuple[Seat, ...]
"""A seat for each component."""


def seatings(components: Sequence[Component], machine: Machine, wishes: Wishes) -> list[Seating]:
    """Every combination of devices with whole sequences; then each again in chunks, large ones first."""
    on_devices = _on_devices(components, machine, wishes)
    options = [chunk_options(component) for component in components]
    found = [tuple(Seat(device=device) for device in devices) for devices in on_devices]
    for level in range(max(map(len, options), default=0)):
        chunks = [sizes[min(level, len(sizes) - 1)] if sizes else None for sizes in options]
        found += [
            tuple(Seat(device=device, chunk_tokens=chunk) for device, chunk in zip(devices, chunks, strict=True))
            for devices in on_devices
        ]
    return found


def chunk_options(component: Component) -> list[int]:
    """The chunks whose peaks are known, large ones first; none where only the whole pass is."""
    activations = component.activations
    chunked = activations.chunked if isinstance(activations, TracedActivations) else ()
    return sorted((each.chunk_tokens for each in chunked), reverse=True)


def _on_devices(components: Sequence[Component], machine: Machine, wishes: Wishes) -> list[tuple[str, ...]]:
    asked = [wishes.of(component.name, None).compute_device for component in components]
    every = [each.device for each in machine.accelerators if each.memory is MemoryKind.separate]
    every = every or [default_device(machine)]
    open_to = [[device] if device is not None else every for device in asked]
    combinations = 1
    for devices in open_to:
        combinations *= len(devices)
    first = tuple(devices[0] for devices in open_to)
    if combinations > MOST_SEATINGS:
        return [first, tuple(_spread(components, open_to))]
    kinds = {each.device: _twin_of(each) for each in machine.accelerators if each.device in every}
    taken = {device for device in asked if device is not None}
    return list({_canonical(devices, kinds, taken): devices for devices in reversed([*product(*open_to)])}.values())[
        ::-1
    ]


def _twin_of(accelerator: Accelerator) -> Accelerator:
    """All of an accelerator but its name and where its figures come from."""
    return accelerator.model_copy(update={"device": "", "name": ""})


def _canonical(devices: tuple[str, ...], kinds: dict[str, Accelerator], taken: set[str]) -> tuple[object, ...]:
    """The same for combinations that differ by an exchange of equal accelerators that no override names."""
    numbers: dict[str, int] = {}
    marks: list[object] = []
    for device in devices:
        if device in taken or device not in kinds:
            marks.append(device)
        else:
            marks.append((numbers.setdefault(device, len(numbers)), repr(kinds[device])))
    return tuple(marks)


def _spread(components: Sequence[Component], open_to: Sequence[Sequence[str]]) -> Iterator[str]:
    """Each component, the heaviest first, to the device that has the least to hold for its passes."""
    weights = [component.passes * sum(component.dtype_bytes.values()) for component in components]
    load: dict[str, int] = {device: 0 for devices in open_to for device in devices}
    chosen: dict[int, str] = {}
    for index in sorted(range(len(components)), key=lambda index: -weights[index]):
        chosen[index] = min(open_to[index], key=lambda device: load[device])
        load[chosen[index]] += weights[index]
    return (chosen[index] for index in range(len(components)))
