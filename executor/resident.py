"""One component's weights on its compute device: what is bound now, and the life of each layer.

A layer is absent, on its way, or in use. Weights that are not in use are placeholders. Any order of use is right: a
layer that is called is fetched first, wherever the last one was; what was fetched ahead and not used gives up its slot
when one is needed.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from ..plans.document import Staging
from ..plans.errors import ExecutionError
from ..plans.policy import Hold, Home
from .fetching import Fetcher
from .guards import MappedWeight, ReleasedWeight, unguarded
from .machine import Machine, Mark
from .names import Binding
from .slots import Slots
from .transport import Weights, fetch
from .units import Unit


class Resident:
    """Binds, fetches and releases the units of one component.

    Args:
        name: the component, for errors.
        machine: its compute device.
        units: with their homes; those held `always` are bound at once.
        bindings: the component's parameters, by the stored name that fills them.
        staging: slots for layers; null when none is streamed.
        fetcher: brings to the device what is not at home there.
        repeats: whether a request runs the component more than once, so that its first layer follows its last.
    """

    def __init__(
        self,
        name: str,
        machine: Machine,
        units: Sequence[Unit],
        bindings: Mapping[str, Binding],
        staging: Staging | None,
        fetcher: Fetcher,
        *,
        repeats: bool = False,
    ) -> None:
        self.name = name
        self.machine = machine
        self.peak_weight_bytes = 0
        self.bindings = bindings
        self.fetcher = fetcher
        self._staging = staging
        self._repeats = repeats
        self.always_bytes = 0
        self._held = [unit for unit in units if unit.hold is Hold.phase]
        self._streamed = [unit for unit in units if unit.hold is Hold.layer]
        self._position = {id(unit): position for position, unit in enumerate(self._streamed)}
        self._entered = False
        self._held_bytes = 0
        self._slots = Slots(machine, fetcher, staging.slots if staging else 0, staging.slot_bytes if staging else 0)
        self._check_slots(staging)
        self._users: dict[int, int] = {}
        self._held_there: Mark = None  # The mark behind which what is held for the phase is there.
        self._placeholders: dict[int, Weights] = {}
        for unit in units:
            if unit.hold is Hold.always:
                self.always_bytes += unit.layout.nbytes if unit.home is Home.device else 0
                self._bind(self._at_home(unit))
            else:
                self._placeholders[id(unit)] = self._released(unit)
                self._unbind(unit)
        self._note_peak()

    @property
    def weight_bytes(self) -> int:
        """Bytes that weights take on the compute device now, slots included."""
        return self.always_bytes + self._held_bytes + self._slots.nbytes

    @property
    def reader_broke(self) -> bool:
        """Whether fetching ahead failed once, and layers are fetched when they are needed ever since."""
        return self._slots.reader_broke

    def enter(self) -> None:
        """Begin the phase: fetch what is held for it, and make the slots. Nothing stays in use from before.

        Raises:
            DeviceMemoryError: the device has not enough left; then nothing of the phase is there.
            ExecutionError: gradients are on, and a weight that leaves again requires one.
        """
        self._refuse_training(self._held)
        for unit in [unit for unit in self._slots.units() if self._users.get(id(unit))]:
            self._drop(unit)
        self._users.clear()
        if not self._entered:
            try:
                # Weights outlive the forward that they are fetched for, so its inference mode is not theirs.
                with torch.inference_mode(mode=False):
                    self.fetcher.open()
                    for unit in self._held:
                        self._hold(unit)
                    self._slots.open()
            except BaseException:
                self.leave()
                raise
            self._entered = True
            self._note_peak()
        self.machine.wait(self._held_there)

    def leave(self) -> None:
        """End the phase: everything but what is held always goes back to its home."""
        self._slots.close()
        self.fetcher.close()
        for unit in (*self._held, *self._streamed):
            self._unbind(unit)
        self._users.clear()
        self._held_bytes, self._held_there = 0, None
        self._entered = False
        self.machine.empty_cache()

    def acquire(self, unit: Unit) -> None:
        """Have a layer's weights there until `release`, and those after it on their way as the plan says.

        Raises:
            ExecutionError: it is not the component's phase, every slot is in use by another layer, or gradients are on
                and the layer requires them.
        """
        self._refuse_training((unit,))
        users = self._users.get(id(unit), 0)
        if not users:
            weights = self._slots.weights(unit, self._users)
            if weights is None:
                raise self._no_slot(unit)
            self._bind(weights)
        self._users[id(unit)] = users + 1
        self._fetch_ahead(unit)

    def release(self, unit: Unit) -> None:
        """End one use; after the last one the weights are placeholders again. Harmless where nothing is in use."""
        users = self._users.pop(id(unit), 0)
        if users > 1:
            self._users[id(unit)] = users - 1
        elif users:
            self._drop(unit)

    def _no_slot(self, unit: Unit) -> ExecutionError:
        where = f"component '{self.name}': layer '{unit.label}'"
        if not self._entered:
            return ExecutionError(
                f"{where} is called outside its component's phase",
                hint=f"call the component itself, or `enter('{self.name}')` of the loaded pipeline before",
            )
        return ExecutionError(
            f"{where} finds none of {self._staging.slots if self._staging else 0} slots free",
            hint="its layers are used within one another: plan with more slots, or hold them for the phase",
        )

    def _fetch_ahead(self, unit: Unit) -> None:
        """The layers after this one in the order of the stacks; after the last comes the first, of the next pass."""
        ahead = self._staging.prefetch_layers if self._staging else 0
        for step in range(1, ahead + 1):
            position = self._position[id(unit)] + step
            if position < len(self._streamed) or self._repeats:
                self._slots.fetch_ahead(self._streamed[position % len(self._streamed)])

    def _hold(self, unit: Unit) -> None:
        place = self.fetcher.packed(unit, self.machine.allocate(unit.layout.nbytes))
        # What it was allocated from may be in use until now.
        self._held_there = fetch(self.machine, place, (self.machine.mark(),))
        self._held_bytes += unit.layout.nbytes
        self._bind(place.weights)

    def _drop(self, unit: Unit) -> None:
        self._unbind(unit)
        self._slots.free(unit)

    def _unbind(self, unit: Unit) -> None:
        self._bind(self._placeholders[id(unit)])

    def _bind(self, weights: Weights) -> None:
        """Bind everywhere. Whether one requires a gradient is kept: on the CPU torch chooses kernels by that."""
        with unguarded():
            for stored, weight in weights.items():
                places = self.bindings[stored].places
                weight.requires_grad_(places[0].get().requires_grad)
                for place in places:
                    place.put(weight)

    def _at_home(self, unit: Unit) -> Weights:
        in_place = unit.home in (Home.mapped, Home.locked)
        return {
            stored: MappedWeight.of(self.bindings[stored].name, weight) if in_place else nn.Parameter(weight, False)
            for stored, weight in unit.source.items()
        }

    def _released(self, unit: Unit) -> Weights:
        return {
            stored: ReleasedWeight.of(self.bindings[stored].name, weight, self.machine.device)
            for stored, weight in unit.source.items()
        }

    def _check_slots(self, staging: Staging | None) -> None:
        """A slot that is too small would be found out in the middle of a forward."""
        for unit in self._streamed:
            need = self.fetcher.slot_layout(unit).nbytes
            if staging is None or need > staging.slot_bytes:
                have = "no slots" if staging is None else f"slots of {staging.slot_bytes} bytes"
                raise ExecutionError(
                    f"component '{self.name}': layer '{unit.label}' takes {need} bytes, and the plan has {have}",
                    hint="plan again with this version",
                )

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


def entries_of(layer: nn.Module) -> Iterable[nn.Module]:
    """The modules whose forward is the layer's use: itself, or the members of a list that has no forward."""
    if isinstance(layer, (nn.ModuleList, nn.ModuleDict)):
        return [entry for child in layer.children() for entry in entries_of(child)]
    return [layer]
