"""Components that are divided over ranks: FSDP2 gathers each layer before its forward, and frees it after.

A rank reads its own part alone: rows of a tensor are a range of the file's bytes, so to a rank its part is a checkpoint
of smaller tensors, which get their homes as any others do.
"""

# Torch's own types are partial here, and a sharded tensor's spec has no other name.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportPrivateUsage=false

from collections.abc import Iterable, Mapping
from typing import Any, cast

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ...models.checkpoint import CheckpointFacts
from ...models.headers import part_of_rank
from ...plans.document import Placement
from ...plans.errors import ExecutionError
from ...plans.policy import Hold, Home
from ..component import LoadedComponent, check_free, chunk_module, is_shared, layer_roots, load_component
from ..machine import Machine
from ..names import Binding, match_names
from ..resident import Stage, entries_of
from ..units import Progress, UnitKey, ignore, keys_of
from ..updates import Allowance
from .agreement import agree, rank_and_size


def load_sharded(
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
    """Bind this rank's part of a module as `load_component` binds a whole one. All ranks load it, and all call it.

    Weights that do not divide are whole on each rank. What is loaded, and its `weights`, are this rank's parts.

    Raises:
        ExecutionError: as `load_component`; or the ranks are not those of the plan, or a weight cannot be sharded.
        DeviceMemoryError: a device has not enough memory left.
    """
    sharding = placement.sharding
    assert sharding is not None
    rank, size = rank_and_size()
    if sharding.mesh != (size,):
        planned = " x ".join(map(str, sharding.mesh))
        raise ExecutionError(
            f"component '{placement.component}' is sharded over {planned} ranks, and there are {size}",
            hint="start as many as were planned, or plan with --ranks",
        )
    if facts.transforms:
        raise ExecutionError(
            f"component '{placement.component}' is sharded, and '{min(facts.transforms)}' is transformed on its way",
            hint="plan it without shard, or save the weights as the module has them",
        )
    check_free(placement.component, module)
    found = match_names(module, facts.tensors, facts.aliases).weights
    parameters = {weight.stored: weight for weight in found if not weight.is_buffer}
    entries = {stored: facts.tensors[stored][1] for stored in parameters}
    parts = {stored: part_of_rank(entry, rank, size) for stored, entry in entries.items()}
    divided = {stored for stored, part in parts.items() if part.shape != entries[stored].shape}
    keys = {name: key for name, key in keys_of(facts.tensors).items() if name in parameters}
    roots = layer_roots(parameters, keys)
    offloaded = any(segment.home is Home.pageable for segment in placement.segments)
    _check_parameters(placement.component, parameters, keys, roots, must_divide=offloaded, divided=divided)

    chunk_module(placement, module, roots.values())
    layers = [entry for root in roots.values() for entry in entries_of(module.get_submodule(root))]
    mesh = init_device_mesh(device.device.type, sharding.mesh)
    whole = {cast(nn.Parameter, weight.places[0].get()) for weight in _of(parameters, parts.keys() - divided)}
    for each in (*layers, module):
        fully_shard(
            each,
            mesh=mesh,
            reshard_after_forward=True,
            offload_policy=CPUOffloadPolicy(pin_memory=False) if offloaded else OffloadPolicy(),
            ignored_params=whole,
        )
    specs = [(weight, cast(Any, weight.places[0].get())._spec) for weight in _of(parameters, divided)]
    mine = {name: (header, parts.get(name, entry)) for name, (header, entry) in facts.tensors.items()}
    own = CheckpointFacts(root=facts.root, files=facts.files, tensors=mine)
    loaded: list[LoadedComponent] = []

    def load() -> None:
        resting = _at_rest(placement)
        loaded.append(
            load_component(resting, own, module, host, device, stage, progress, passes=passes, allowance=allowance)
        )

    agree(load)  # else the others would wait in their first pass for a rank that failed
    for weight, spec in specs:
        part = weight.places[0].get()
        # Its own `from_local` would move a part that rests on the host.
        parameter = nn.Parameter(cast(Any, DTensor)(part.detach(), spec, requires_grad=False), part.requires_grad)
        for place in weight.places:
            place.put(parameter)
    loaded[0].resident.is_sharded = True
    return loaded[0]


def _of(parameters: Mapping[str, Binding], stored: Iterable[str]) -> list[Binding]:
    return [parameters[name] for name in sorted(stored)]


def _at_rest(placement: Placement) -> Placement:
    """The placement of parts that stay where they are: what is gathered of them is FSDP2's."""
    segments = tuple(segment.model_copy(update={"hold": Hold.always}) for segment in placement.segments)
    return placement.model_copy(update={"staging": None, "chunk_tokens": None, "segments": segments})


def _check_parameters(
    component: str,
    parameters: Mapping[str, Binding],
    keys: Mapping[str, UnitKey],
    roots: Mapping[UnitKey, str],
    *,
    must_divide: bool,
    divided: set[str],
) -> None:
    for stored, weight in parameters.items():
        if is_shared(weight, roots.get(keys[stored])):
            raise ExecutionError(
                f"component '{component}': '{weight.name}' is used outside its layer too, and cannot be sharded",
                hint="plan it without shard",
            )
        if must_divide and stored not in divided:
            raise ExecutionError(
                f"component '{component}': '{weight.name}' does not divide by the ranks, and would stay on the host",
                hint="plan it with home device",
            )
