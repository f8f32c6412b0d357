"""One component, loaded: its module bound to the plan, with hooks that keep the right weights there."""

# Torch's modules keep these tables and switches underscored, and its stubs leave them untyped.
# pyright: reportPrivateUsage=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final
from weakref import WeakSet

import torch
from torch import nn
from torch._C._dynamo import eval_frame

from ..models.checkpoint import CheckpointFacts
from ..models.layers import layer_prefix
from ..models.tokenwise import run_in_chunks, token_wise
from ..plans.document import Placement, Reader, Staging
from ..plans.errors import ExecutionError
from ..plans.policy import Hold, Home
from .fetching import Fetcher
from .homes import Homes
from .machine import Machine
from .mapping import Mappings
from .names import Binding, Bindings, match_names
from .procmaps import MapsSnapshot, snapshot_maps
from .reads import FileReader, can_read
from .resident import Resident, Stage, entries_of
from .units import Progress, Unit, UnitKey, ignore, keys_of, misplaced, units_of
from .updates import Allowance, Value, Writer, check_value, resolve

_INTERPRETED: Final = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT)

_PLACED: Final[WeakSet[nn.Module]] = WeakSet()
"""Modules that carry a plan's weights and hooks, each component's with all its children."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedComponent:
    """A bound module and what loading found.

    Attributes:
        module: the module, bound. Its parameters' device is the compute device, wherever the weights rest.
        resident: what is on the compute device.
        units: every unit at its home.
        layers: the dotted name of each layer's module, by the layer's own.
        load_s: seconds that binding took, and bringing units home.
        buffer_bytes: buffers, which are owned copies on the compute device whatever the homes.
        host_bytes: copies that rest on the host.
        page_locked_bytes: what is pinned or locked on the host.
        notes: what could not be had as the plan says, when it was loaded.
        unused: stored tensors that the module has no place for.
        as_built: persistent buffers that no file has.
        homes_verified: whether the homes of host weights could be told apart here.
    """

    module: nn.Module
    resident: Resident
    units: tuple[Unit, ...]
    layers: Mapping[str, str]
    load_s: float
    buffer_bytes: int
    host_bytes: int
    page_locked_bytes: int
    notes: tuple[str, ...]
    unused: tuple[str, ...]
    as_built: tuple[str, ...]
    homes_verified: bool

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every weight under its name in the module, read from its home, whatever is bound now. Not to be written."""
        self.resident.gather()
        for unit in self.units:
            for stored, weight in unit.source.items():
                value = self.resident.fetcher.home_value(unit, stored) if stored in unit.strided else weight
                yield self.resident.bindings[stored].name, value

    def update(self, changes: Mapping[str, Value]) -> None:
        """Give weights and buffers new values; see `LoadedPipeline.update`."""
        weights = {place.name: binding.name for binding in self.resident.bindings.values() for place in binding.places}
        buffers = dict(self.module.named_buffers(remove_duplicate=False))
        values = resolve(self.resident.name, {name: name for name in buffers} | weights, changes)
        own = {name: values.pop(name) for name in buffers if name in values}
        for name, value in own.items():
            if not callable(value):
                check_value(self.resident.name, name, buffers[name], value)
        self.resident.update(values)
        for name, value in own.items():
            if callable(value):
                value = value(buffers[name].detach().to("cpu", copy=True))
                check_value(self.resident.name, name, buffers[name], value)
            with torch.no_grad():
                buffers[name].copy_(value)

    @property
    def replaced_bytes(self) -> int:
        """What weights take that updates made, or that were put in the place of others."""
        return sum(unit.replaced_bytes for unit in self.units)


def load_component(
    placement: Placement,
    facts: CheckpointFacts,
    module: nn.Module,
    host: Machine,
    device: Machine,
    stage: Stage,
    progress: Progress = ignore,
    *,
    passes: int = 1,
    allowance: Allowance | None = None,
) -> LoadedComponent:
    """Bind a module as its placement says.

    Args:
        placement: the plan's, for this component.
        facts: the checkpoint's headers.
        module: built without weights.
        host: where host copies are made.
        device: the compute device.
        stage: the pipeline's, on which one component at a time has its phase.
        progress: told the bytes of each unit when it is at home.
        passes: forwards in one request.
        allowance: what new values of mapped weights may take of the host; nothing is known of it if null.

    Raises:
        ExecutionError: the module does not fit the checkpoint, the placement asks for what this executor does not do,
            or a unit did not get the home that the plan says.
        DeviceMemoryError: a device has not enough memory left.
    """
    started = time.perf_counter()
    _check_honoured(placement, device)
    check_free(placement.component, module)
    found = match_names(module, facts.tensors, facts.aliases)
    parameters = {weight.stored: weight for weight in found.weights if not weight.is_buffer}
    keys = {name: key for name, key in keys_of(facts.tensors).items() if name in parameters}
    roots = layer_roots(parameters, keys)
    chunk_module(placement, module, roots.values())
    shared = [name for name, weight in parameters.items() if is_shared(weight, roots.get(keys[name]))]
    _check_shapes(placement.component, facts, found.weights)
    mappings = Mappings(facts)
    homes = Homes(mappings, facts.tensors, host, device)
    units = units_of(placement, facts, keys, shared, homes.settle, progress)
    _PLACED.update(module.modules())
    buffer_bytes = _own_buffers(module, found, mappings, device.device)
    names = {stored: weight.name for stored, weight in parameters.items()}
    fetcher = Fetcher(device, facts.tensors, mappings, _reader(placement.staging, facts, units), names)
    writer = Writer(placement.component, host, device, allowance or Allowance(None))
    resident = Resident(
        placement.component, device, units, parameters, placement.staging, fetcher, writer, stage, repeats=passes > 1
    )
    if stage.has_phases:
        _install_hooks(module, resident, {unit.prefix: unit for unit in units if unit.hold is Hold.layer}, roots)
    maps = snapshot_maps()
    _check_homes(placement.component, facts, units, device, maps)
    pinned = sum(unit.layout.nbytes for unit in units if unit.home is Home.pinned)
    return LoadedComponent(
        module=module,
        resident=resident,
        units=units,
        layers={layer_prefix(stack or "", number): root for (stack, number), root in roots.items()},
        load_s=time.perf_counter() - started,
        buffer_bytes=buffer_bytes,
        host_bytes=pinned + sum(unit.layout.nbytes for unit in units if unit.home is Home.pageable),
        page_locked_bytes=pinned + homes.locked_bytes,
        notes=tuple(homes.notes),
        unused=found.unused,
        as_built=found.as_built,
        homes_verified=maps is not None,
    )


def _check_honoured(placement: Placement, device: Machine) -> None:
    """Refuse what would have no effect: a plan is carried out whole or not at all."""
    staging = placement.staging
    alone = device.capabilities.unified and placement.compute_device != "cpu"
    if staging is not None and alone and (staging.slots, staging.prefetch_layers) != (1, 0):
        raise ExecutionError(
            f"component '{placement.component}': {staging.slots} slots with {staging.prefetch_layers} filled ahead,"
            f" and {placement.compute_device} shares the host's memory: nothing is copied there beside the compute",
            hint="plan it for a device with unified memory: with one slot, and nothing ahead",
        )
    for segment in placement.segments:
        always = segment.hold is Hold.always and placement.sharding is None  # what is sharded is gathered
        if always and segment.home is not Home.device and placement.compute_device != "cpu":
            raise ExecutionError(
                f"component '{placement.component}': home {segment.home} is not on {placement.compute_device},"
                " and hold always would leave its weights there",
                hint="plan with hold phase or layer, or with home device",
            )


def check_free(component: str, module: nn.Module) -> None:
    """Refuse a module that is placed already: two that fetch its weights would do so over one another."""
    for each in module.modules():
        by = "accelerate" if hasattr(each, "_hf_hook") else "another load" if each in _PLACED else None
        if by is not None:
            raise ExecutionError(
                f"component '{component}': this {type(module).__name__} is placed already, by {by}",
                hint="give a module that was built afresh",
            )


def chunk_module(placement: Placement, module: nn.Module, layers: Iterable[str]) -> None:
    """Let token-wise modules take as many tokens at once as the placement says; all at once where it says nothing."""
    if placement.chunk_tokens is None:
        return
    chunkable = token_wise(module, layers)
    if not chunkable:
        raise ExecutionError(
            f"component '{placement.component}': chunk_tokens {placement.chunk_tokens} would have no effect: "
            f"no module of {type(module).__name__} gains from running over parts of its tokens",
            hint="plan it without chunk_tokens",
        )
    for each in chunkable:
        run_in_chunks(each, placement.chunk_tokens)


def _check_shapes(component: str, facts: CheckpointFacts, weights: Iterable[Binding]) -> None:
    """Refuse transforms that give a weight another shape than the module has."""
    for weight in (each for each in weights if each.stored in facts.transforms):
        shape, given = weight.places[0].get().shape, facts.wanted(weight.stored).shape
        if shape != given:
            raise ExecutionError(
                f"component '{component}': '{weight.stored}' is transformed to {list(given)}, "
                f"and '{weight.name}' of the module is {list(shape)}",
                hint="plan it with the transforms that this module needs",
            )


def _reader(staging: Staging | None, facts: CheckpointFacts, units: Iterable[Unit]) -> FileReader | None:
    """What reads mapped units, if the plan's staging has them read."""
    stored = {
        name for unit in units if unit.home is Home.mapped and unit.hold is not Hold.always for name in unit.source
    }
    if staging is None or staging.reader is Reader.mapping or not stored or not can_read():
        return None
    return FileReader(
        sorted({facts.tensors[name][0].path for name in stored}),
        reader=staging.reader,
        chunk_bytes=staging.chunk_bytes or 0,
        depth=staging.depth or 1,
    )


def layer_roots(parameters: Mapping[str, Binding], keys: Mapping[str, UnitKey]) -> dict[UnitKey, str]:
    """The dotted name of each layer's module. The checkpoint may spell it with another prefix than the module."""
    roots: dict[UnitKey, str] = {}
    for stored, (stack, number) in keys.items():
        if stack is not None and (stack, number) not in roots:
            within = stored.removeprefix(layer_prefix(stack, number))
            roots[stack, number] = parameters[stored].name.removesuffix(within)
    return roots


def is_shared(weight: Binding, root: str | None) -> bool:
    """Whether a layer's weight is used outside that layer too."""
    return root is not None and any(not place.name.startswith(f"{root}.") for place in weight.places)


def _own_buffers(module: nn.Module, found: Bindings, mappings: Mappings, device: torch.device) -> int:
    """Give the module its buffers, on the compute device and its own to write. Returns their bytes."""
    for weight in found.weights:
        if weight.is_buffer:
            value = mappings.value(weight.stored)
            for place in weight.places:
                place.put(value)
    _check_buffers(module)
    moved: dict[int, torch.Tensor] = {}
    for owner in module.modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                owner._buffers[name] = moved.setdefault(id(buffer), buffer.to(device))
    return sum(buffer.nbytes for buffer in moved.values())


def _check_buffers(module: nn.Module) -> None:
    empty = [name for name, buffer in module.named_buffers() if buffer.is_meta]
    if empty:
        shown = ", ".join(empty[:5]) + (f" and {len(empty) - 5} more" if len(empty) > 5 else "")
        raise ExecutionError(
            f"{type(module).__name__}: {len(empty)} buffers are on meta and not in the checkpoint: {shown}",
            hint="build it on the CPU, or under placewise.models.build.parameters_on_meta, "
            "so that its buffers are computed",
        )


def _install_hooks(
    module: nn.Module, resident: Resident, streamed: Mapping[str | None, Unit], roots: Mapping[UnitKey, str]
) -> None:
    """Fetch and release around forwards. The hooks hold no reference to the module, so deleting it frees it at once.

    A child that a method other than `forward` calls begins the phase before anything in it is looked at: some modules
    choose their kernels by whether a weight is a placeholder.
    """

    @partial(_untraced, refusal=_compile_refusal(resident) if streamed else None)
    def enter(_: nn.Module, __: object) -> None:
        resident.enter()

    @_untraced
    def begin(_: nn.Module, __: object) -> None:
        resident.begin()

    layers: set[nn.Module] = set()
    for (stack, number), root in roots.items():
        unit = streamed.get(layer_prefix(stack or "", number))
        if unit is not None:
            layers.update(entries_of(module.get_submodule(root)))
            for entry in entries_of(module.get_submodule(root)):
                _hook_layer(entry, resident, unit)
    module.register_forward_pre_hook(enter)
    for child in module.children():
        for entry in entries_of(child):
            if entry not in layers:
                entry.register_forward_pre_hook(begin)


def _hook_layer(entry: nn.Module, resident: Resident, unit: Unit) -> None:
    @_untraced
    def acquire(_: nn.Module, __: object) -> None:
        resident.acquire(unit)

    @_untraced
    def release(_: nn.Module, __: object, ___: object) -> None:
        resident.release(unit)

    entry.register_forward_pre_hook(acquire)
    entry.register_forward_hook(release, always_call=True)


def _compile_refusal(resident: Resident) -> str | None:
    """What is said to torch.compile of streamed layers on accelerators whose memory is the host's."""
    device = resident.machine.device
    if device.type == "cpu" or not resident.machine.capabilities.unified:
        return None
    return f"component '{resident.name}': torch.compile does not go with layers that are streamed to {device}"


def _untraced(hook: Callable[..., None], refusal: str | None = None) -> Callable[..., None]:
    """Leave a hook, and all that it calls, to the interpreter where the module is compiled; or refuse that.

    As torch.compiler.disable does, which would import the compiler.
    """

    def run(*args: object) -> None:
        before = eval_frame.set_eval_frame(None)
        try:
            if before and refusal is not None:
                raise ExecutionError(refusal, hint="call it uncompiled, or plan its layers with home device")
            hook(*args)
        finally:
            eval_frame.set_eval_frame(before)

    eval_frame.set_code_exec_strategy(run.__code__, _INTERPRETED)
    run._torchdynamo_disable = True  # type: ignore[attr-defined]
    run._torchdynamo_disable_msg = "weights are fetched here"  # type: ignore[attr-defined]
    return run


def _check_homes(
    component: str, facts: CheckpointFacts, units: tuple[Unit, ...], device: Machine, maps: MapsSnapshot | None
) -> None:
    files = frozenset(str(file.path.resolve()) for file in facts.files)
    for unit in units:
        if (why := misplaced(unit, device, files, maps)) is not None:
            raise ExecutionError(f"component '{component}': {unit.label} is not where the plan says: {why}")
