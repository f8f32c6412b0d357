"""One component's weights on its compute device: what is bound now, and the life of each layer.

A layer is absent, on its way, or in use. Weights that are not in use are placeholders. Any order of use is right: a
layer that is called is fetched first, wherever the last one was; what was fetched ahead and not used gives up its slot
when one is needed. The phase begins with the first use of what it holds, whichever method of the module that is in.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from time import perf_counter
from weakref import ref

import torch
from torch import nn

from ..plans.document import Staging
from ..plans.errors import ExecutionError
from ..plans.policy import Hold, Home
from .fetching import Fetcher
from .guards import Loan, MappedWeight, ReleasedWeight, unguarded
from .lent import Lent, is_same
from .machine import Machine, Mark
from .names import Binding
from .slots import Slots, Span, SpanKind
from .transport import Weights, fetch
from .units import Unit
from .updates import Value, Writer, check_value


class Stage:
    """Whose phase it is: one component at a time has its phase's weights on the device. It keeps none alive.

    Args:
        has_phases: whether weights of any component leave their device.
    """

    def __init__(self, *, has_phases: bool) -> None:
        self.has_phases = has_phases
        self._current: ref[Resident] | None = None

    def enter(self, resident: "Resident") -> None:
        """Begin a component's phase, after the end of another's."""
        if self._of() is not resident:
            self.clear()
        self._current = ref(resident)
        resident.open()

    def clear(self) -> None:
        """End the phase that is going on."""
        if (current := self._of()) is not None:
            current.leave()
        self._current = None

    def _of(self) -> "Resident | None":
        return self._current() if self._current else None


class Resident:
    """Binds, fetches and releases the units of one component.

    Args:
        name: the component, for errors.
        machine: its compute device.
        units: with their homes; those held `always` are bound at once.
        bindings: the component's parameters, by the stored name that fills them.
        staging: slots for layers; null when none is streamed.
        fetcher: brings to the device what is not at home there.
        writer: writes new values at home.
        stage: tells the component whose phase is going on that it ends.
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
        writer: Writer,
        stage: Stage,
        *,
        repeats: bool = False,
    ) -> None:
        self.name = name
        self.machine = machine
        self.peak_weight_bytes = 0
        self.bindings = bindings
        self.fetcher = fetcher
        self._writer = writer
        self._units = tuple(units)
        self._lent: dict[str, Lent] = {}
        self._staging = staging
        self._stage = stage
        self._repeats = repeats
        self.is_sharded = False  # If so, FSDP2 exchanges the parameters, and what stands for them is no new value.
        self.always_bytes = 0
        self._held = [unit for unit in units if unit.hold is Hold.phase]
        self._streamed = [unit for unit in units if unit.hold is Hold.layer]
        self._position = {id(unit): position for position, unit in enumerate(self._streamed)}
        self._entered = False
        self._held_bytes = 0
        self._held_s = 0.0
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

    @property
    def stall_s(self) -> float:
        """Seconds in which the computing thread waited for weights: at the begin of phases, and for layers."""
        return self._held_s + self._slots.stall_s

    def record(self, spans: list[Span] | None) -> None:
        """Have fetches and waits go to a list from now on; nowhere if null."""
        self._slots.spans = spans

    def enter(self) -> None:
        """Begin a pass of the whole component. Nothing stays in use from one that was interrupted.

        Raises:
            DeviceMemoryError: the device has not enough left; then nothing of the phase is there.
            ExecutionError: gradients are on, and a weight that leaves again requires one.
        """
        for unit in [unit for unit in self._slots.units() if self._users.get(id(unit))]:
            self._drop(unit)
        self._users.clear()
        self.begin()

    def begin(self) -> None:
        """Begin the phase unless it is going on, by the first use of any part of the component. Raises as `enter`."""
        self._refuse_training(self._held)
        if not self._entered:
            self._stage.enter(self)
        self.machine.wait(self._held_there)

    def open(self) -> None:
        """Fetch what is held for the phase, and make the slots."""
        try:
            # Weights outlive the forward that they are fetched for, so its inference mode is not theirs.
            with torch.inference_mode(mode=False):
                self.fetcher.open()
                for unit in self._held:
                    self.gather((unit,))
                    self._hold(unit)
                self._slots.open()
        except BaseException:
            self.leave()
            raise
        self._entered = True
        self._note_peak()

    def leave(self) -> None:
        """End the phase: everything but what is held always goes back to its home.

        Raises:
            InputError, ExecutionError: as `gather`; the phase has ended all the same.
        """
        try:
            self.gather((*self._held, *self._streamed))
        finally:
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
            ExecutionError: every slot is in use by another layer, or gradients are on and the layer requires them.
        """
        self._use(unit)
        self._fetch_ahead(unit)

    def release(self, unit: Unit) -> None:
        """End one use; after the last one the weights are placeholders again. Harmless where nothing is in use."""
        if self._end_use(unit):
            self._drop(unit)

    def lend(self, unit: Unit, stored: str) -> Loan:
        """One weight for a function that is called on it outside of its layer's forward. Raises as `acquire`."""
        if unit.hold is Hold.phase:
            self.begin()
            return Loan(self.bindings[stored].places[0].get())
        self._use(unit)
        return Loan(self.bindings[stored].places[0].get(), partial(self._give_back, unit))

    def _give_back(self, unit: Unit) -> None:
        """End a loan. The slot stays the layer's until another needs it: more of the layer is likely to be called."""
        if self._end_use(unit):
            try:
                self.gather((unit,))
            except BaseException:
                self._slots.free(unit)  # It has what home does not get.
                raise
            finally:
                self._unbind(unit)

    def _use(self, unit: Unit) -> None:
        self._refuse_training((unit,))
        if not self._entered:
            self.begin()
        users = self._users.get(id(unit), 0)
        if not users:
            self.gather((unit,))
            weights = self._slots.weights(unit, self._users)
            if weights is None:
                raise ExecutionError(
                    f"component '{self.name}': layer '{unit.label}' finds none of"
                    f" {self._staging.slots if self._staging else 0} slots free",
                    hint="its layers are used within one another: plan with more slots, or hold them for the phase",
                )
            self._bind(weights)
        self._users[id(unit)] = users + 1

    def _end_use(self, unit: Unit) -> bool:
        """Whether that was the last use."""
        users = self._users.pop(id(unit), 0)
        if users > 1:
            self._users[id(unit)] = users - 1
        return users == 1

    def update(self, values: Mapping[str, Value]) -> None:
        """Give weights new values, at home and where they are now; one weight after the other, unit by unit.

        Args:
            values: by the weights' names. Tensors are checked before anything is written, and what a function returns
                when it is made.

        Raises:
            InputError: a value has another shape or dtype than its weight.
            ExecutionError: a layer is in use by a forward, the plan left too little of the host, or the component is
                sharded.
        """
        if self.is_sharded and values:
            raise ExecutionError(
                f"component '{self.name}' is sharded over ranks, and its weights get no new values",
                hint="give them to a checkpoint, and plan that",
            )
        chosen = [
            (unit, stored, values[name])
            for unit in self._units
            for stored in unit.source
            if (name := self.bindings[stored].name) in values
        ]
        for unit, stored, value in chosen:
            if self._users.get(id(unit)):
                raise ExecutionError(
                    f"component '{self.name}': layer '{unit.label}' is in use, so its weights cannot be updated",
                    hint="update between forwards; release() ends a use that an interrupt left behind",
                )
            if not callable(value):
                check_value(self.name, self.bindings[stored].name, unit.like(stored), value)
        # What is replaced whole is not asked what it was.
        self._take_over((unit, stored) for unit, stored, value in chosen if callable(value))
        with torch.inference_mode(mode=False), torch.no_grad():
            self._write(chosen)

    def gather(self, units: Iterable[Unit] | None = None) -> None:
        """Take over what plain torch has put in the place of weights, or written into copies that go away again.

        Args:
            units: where to look; everywhere if null.

        Raises:
            InputError: it has another shape or dtype, or is only in one place of a tied weight.
            ExecutionError: the plan left too little of the host.
        """
        self._take_over((unit, stored) for unit in (self._units if units is None else units) for stored in unit.source)

    def _take_over(self, weights: Iterable[tuple[Unit, str]]) -> None:
        if self.is_sharded:
            return
        found = [
            (unit, stored, value)
            for unit, stored in weights
            if (value := self._lent[stored].changed(self.name, self.bindings[stored], unit)) is not None
        ]
        for unit, stored, value in found:
            if unit.hold is Hold.always:
                # It stays bound, and is as good a home as any.
                unit.source[stored] = value.detach()
                unit.replaced.add(stored)
                self._lent[stored] = Lent(value)
            else:
                check_value(self.name, self.bindings[stored].name, unit.like(stored), value)
        if leaving := [each for each in found if each[0].hold is not Hold.always]:
            with torch.inference_mode(mode=False), torch.no_grad():
                self._write(leaving)

    def _write(self, chosen: Sequence[tuple[Unit, str, Value]]) -> None:
        self._writer.check_room((unit, stored) for unit, stored, _ in chosen)
        self.machine.synchronize()  # Copies may still read what is about to be written.
        for unit, stored, value in self._apart(chosen):
            self._slots.forget(unit)
            if callable(value):
                value = value(self.fetcher.home_value(unit, stored))
                check_value(self.name, self.bindings[stored].name, unit.like(stored), value)
            self._writer.write(unit, stored, value)
            self._refresh(unit, stored)
            self.machine.synchronize()

    def _apart(self, chosen: Sequence[tuple[Unit, str, Value]]) -> list[tuple[Unit, str, Value]]:
        """The same with values in memory of their own that are views of what is about to be written."""
        lent = {stored: self._lent[stored].weight for _, stored, _ in chosen}
        written = {unit.source[stored].untyped_storage().data_ptr() for unit, stored, _ in chosen}
        written |= {each.untyped_storage().data_ptr() for each in lent.values() if not isinstance(each, ReleasedWeight)}
        return [
            (unit, stored, value)
            if callable(value) or value is lent[stored] or value.untyped_storage().data_ptr() not in written
            else (unit, stored, value.clone())
            for unit, stored, value in chosen
        ]

    def _refresh(self, unit: Unit, stored: str) -> None:
        """Let what is bound have the value at home."""
        weight, source = self._lent[stored].weight, unit.source[stored]
        if unit.hold is Hold.always:
            if not is_same(weight, source):
                weight = nn.Parameter(source, False)
        elif not isinstance(weight, ReleasedWeight):
            self.machine.copy_in(weight, source)
        self._bind({stored: weight})

    def _fetch_ahead(self, unit: Unit) -> None:
        """The layers after this one in the order of the stacks; after the last comes the first, of the next pass."""
        ahead = self._staging.prefetch_layers if self._staging else 0
        for step in range(1, ahead + 1):
            position = self._position[id(unit)] + step
            if position < len(self._streamed) or self._repeats:
                self._slots.fetch_ahead(self._streamed[position % len(self._streamed)])

    def _hold(self, unit: Unit) -> None:
        began = perf_counter()
        place = self.fetcher.packed(unit, self.machine.allocate(unit.layout.nbytes))
        # What it was allocated from may be in use until now.
        self._held_there = fetch(self.machine, place, (self.machine.mark(),))
        if (spans := self._slots.spans) is not None:
            self.machine.reach(self._held_there)
        ended = perf_counter()
        self._held_s += ended - began
        if spans is not None:
            for kind in (SpanKind.fetch, SpanKind.wait):
                spans.append(Span(kind=kind, layer=unit.label, begin_s=began, end_s=ended))
        self._held_bytes += unit.layout.nbytes
        self._bind(place.weights)

    def _drop(self, unit: Unit) -> None:
        try:
            self.gather((unit,))
        finally:
            self._unbind(unit)
            self._slots.free(unit)

    def _unbind(self, unit: Unit) -> None:
        self._bind(self._placeholders[id(unit)])

    def _bind(self, weights: Weights) -> None:
        """Bind everywhere. Whether one requires a gradient is kept: on the CPU torch chooses kernels by that."""
        with unguarded():
            for stored, weight in weights.items():
                places = self.bindings[stored].places
                before = places[0].find()
                if before is not None and before.requires_grad != weight.requires_grad:
                    weight.requires_grad_(before.requires_grad)
                for place in places:
                    place.put(weight)
                self._lent[stored] = Lent(weight)

    def _at_home(self, unit: Unit) -> Weights:
        if unit.strided:
            raise ExecutionError(
                f"component '{self.name}': {unit.label} is {unit.home}/{unit.hold}, and the module does not have "
                f"'{self.bindings[min(unit.strided)].name}' as the file has it",
                hint="plan it with home device, or its layers with hold layer",
            )
        in_place = unit.home in (Home.mapped, Home.locked)
        return {
            stored: MappedWeight.of(self.bindings[stored].name, weight) if in_place else nn.Parameter(weight, False)
            for stored, weight in unit.source.items()
        }

    def _released(self, unit: Unit) -> Weights:
        """They keep nothing alive: this component lives as long as its module's hooks."""
        with torch.inference_mode(mode=False):
            return {
                stored: ReleasedWeight.of(
                    self.bindings[stored].name,
                    unit.like(stored),
                    self.machine.device,
                    partial(_lend, ref(self), unit, stored),
                )
                for stored in unit.source
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
                if (bound := self.bindings[name].places[0].find()) is not None and bound.requires_grad:
                    raise ExecutionError(
                        f"component '{self.name}': weight '{self.bindings[name].name}' requires a gradient, "
                        "and does not stay on its device to keep it",
                        hint="run under torch.no_grad(), or call requires_grad_(False) on the module",
                    )

    def _note_peak(self) -> None:
        self.peak_weight_bytes = max(self.peak_weight_bytes, self.weight_bytes)


def _lend(of: "ref[Resident]", unit: Unit, stored: str) -> Loan | None:
    resident = of()
    return resident.lend(unit, stored) if resident else None


def entries_of(layer: nn.Module) -> Iterable[nn.Module]:
    """The modules whose forward is the layer's use: itself, or the members of a list that has no forward."""
    if isinstance(layer, (nn.ModuleList, nn.ModuleDict)):
        return [entry for child in layer.children() for entry in entries_of(child)]
    return [layer]
