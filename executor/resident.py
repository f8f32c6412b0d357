"""One component's weights on its compute device: what is bound now, and the life of each layer.

A layer is absent, ready or in use. Absent weights are placeholders. Any order of use is right: a layer that is called
is fetched first, wherever the last one was; what was fetched ahead and not used gives up its slot when one is needed.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from ..plans.document import Staging
from ..plans.errors import ExecutionError
from ..plans.policy import Hold, Home
from .guards import MappedWeight, ReleasedWeight
from .machine import Machine
from .names import Binding
from .units import Unit


class Resident:
    """Binds, fetches and releases the units of one component.

    Args:
        name: the component, for errors.
        machine: its compute device.
        units: with their homes; those held `always` are bound at once.
        bindings: the component's parameters, by the stored name that fills them.
        staging: slots for layers; null when none is streamed.
    """

    def __init__(
        self,
        name: str,
        machine: Machine,
        units: Sequence[Unit],
        bindings: Mapping[str, Binding],
        staging: Staging | None,
    ) -> None:
        self.name = name
        self.machine = machine
        self.peak_weight_bytes = 0
        self.bindings = bindings
        self._staging = staging
        self.always_bytes = 0
        self._held = [unit for unit in units if unit.hold is Hold.phase]
        self._streamed = [unit for unit in units if unit.hold is Hold.layer]
        self._after = {id(unit): position + 1 for position, unit in enumerate(self._streamed)}
        self._entered = False
        self._held_bytes = 0
        self._slots: list[torch.Tensor] = []
        self._slot_of: dict[int, int] = {}  # By id of the unit; the oldest first.
        self._users: dict[int, int] = {}
        for unit in units:
            if unit.hold is Hold.always:
                self.always_bytes += unit.layout.nbytes if unit.home is Home.device else 0
                self._bind(unit, unit.source)
            else:
                self._unbind(unit)
        self._note_peak()

    @property
    def weight_bytes(self) -> int:
        """Bytes that weights take on the compute device now, slots included."""
        return self.always_bytes + self._held_bytes + sum(slot.numel() for slot in self._slots)

    def enter(self) -> None:
        """Begin the phase: fetch what is held for it, and make the slots. Nothing stays in use from before.

        Raises:
            DeviceMemoryError: the device has not enough left; then nothing of the phase is there.
            ExecutionError: gradients are on, and a weight that leaves again requires one.
        """
        self._refuse_training(self._held)
        self._users.clear()
        for unit in self._resident_units():
            self._drop(unit)
        if self._entered:
            return
        try:
            for unit in self._held:
                self._fetch(unit, self.machine.allocate(unit.layout.nbytes))
                self._held_bytes += unit.layout.nbytes
            for _ in range(self._staging.slots if self._staging else 0):
                self._slots.append(self.machine.allocate(self._staging.slot_bytes if self._staging else 0))
        except BaseException:
            self.leave()
            raise
        self._entered = True
        self._note_peak()

    def leave(self) -> None:
        """End the phase: everything but what is held always goes back to its home."""
        for unit in (*self._held, *self._resident_units()):
            self._unbind(unit)
        self._slot_of.clear()
        self._slots.clear()
        self._held_bytes = 0
        self._entered = False
        self.machine.synchronize()
        self.machine.empty_cache()

    def acquire(self, unit: Unit) -> None:
        """Have a layer's weights there until `release`, and those after it fetched ahead as the plan says.

        Raises:
            ExecutionError: every slot is in use by another layer, or gradients are on and the layer requires them.
        """
        self._refuse_training((unit,))
        if id(unit) not in self._slot_of:
            self._fetch_into_slot(unit)
        self._users[id(unit)] = self._users.get(id(unit), 0) + 1
        ahead = self._staging.prefetch_layers if self._staging else 0
        position = self._after[id(unit)]
        for following in self._streamed[position : position + ahead]:
            if id(following) not in self._slot_of and len(self._slot_of) < len(self._slots):
                self._fetch_into_slot(following)

    def release(self, unit: Unit) -> None:
        """End one use; after the last one the weights are placeholders again. Harmless where nothing is in use."""
        users = self._users.pop(id(unit), 0)
        if users > 1:
            self._users[id(unit)] = users - 1
        elif id(unit) in self._slot_of:
            self._drop(unit)

    def _resident_units(self) -> list[Unit]:
        return [unit for unit in self._streamed if id(unit) in self._slot_of]

    def _fetch_into_slot(self, unit: Unit) -> None:
        taken = set(self._slot_of.values())
        free = next((index for index in range(len(self._slots)) if index not in taken), None)
        if free is None:
            idle = next((other for other in self._resident_units() if not self._users.get(id(other))), None)
            if idle is None:
                raise ExecutionError(
                    f"component '{self.name}': layer '{unit.label}' finds none of {len(self._slots)} slots free",
                    hint="its layers are used within one another: plan with more slots, or hold them for the phase",
                )
            free = self._slot_of[id(idle)]
            self._drop(idle)
        self._fetch(unit, self._slots[free])
        self._slot_of[id(unit)] = free

    def _fetch(self, unit: Unit, buffer: torch.Tensor) -> None:
        weights = unit.layout.views(buffer)
        for name, weight in weights.items():
            self.machine.copy_in(weight, unit.source[name])
        self._bind(unit, weights)

    def _drop(self, unit: Unit) -> None:
        # The slot is written again next: what still reads it must be done.
        self.machine.synchronize()
        self._unbind(unit)
        del self._slot_of[id(unit)]

    def _bind(self, unit: Unit, weights: Mapping[str, torch.Tensor]) -> None:
        in_place = unit.home is Home.mapped and unit.hold is Hold.always
        for stored, weight in weights.items():
            binding = self.bindings[stored]
            _assign(binding, MappedWeight.of(binding.name, weight) if in_place else nn.Parameter(weight, False))

    def _unbind(self, unit: Unit) -> None:
        for stored, weight in unit.source.items():
            binding = self.bindings[stored]
            _assign(binding, ReleasedWeight.of(binding.name, weight, self.machine.device))

    def _refuse_training(self, units: Iterable[Unit]) -> None:
        """Gradients of a weight that is about to leave would be lost without a word."""
        if torch.is_grad_enabled():
            for name in (name for unit in units for name in unit.source):
                if self.bindings[name].places[0].get().requires_grad:
                    raise ExecutionError(
                        f"component '{self.name}': weight '{self.bindings[name].name}' requires a gradient, "
                        "and does not stay on its device to keep it",
                        hint="run under torch.no_grad(), or call requires_grad_(False) on the module",
                    )

    def _note_peak(self) -> None:
        self.peak_weight_bytes = max(self.peak_weight_bytes, self.weight_bytes)


def _assign(binding: Binding, weight: torch.Tensor) -> None:
    """Bind everywhere. Whether it requires a gradient is kept: on the CPU torch chooses kernels by that."""
    weight.requires_grad_(binding.places[0].get().requires_grad)
    for place in binding.places:
        place.put(weight)


def entries_of(layer: nn.Module) -> Iterable[nn.Module]:
    """The modules whose forward is the layer's use: itself, or the members of a list that has no forward."""
    if isinstance(layer, (nn.ModuleList, nn.ModuleDict)):
        return [entry for child in layer.children() for entry in entries_of(child)]
    return [layer]
