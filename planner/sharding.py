"""Components that are divided over the ranks of a host: which, what of them a rank holds, and what a pass gathers."""

from ..plans.document import Sharding
from ..plans.errors import InputError
from ..plans.pipeline import Component, known_peak_bytes
from ..plans.policy import Home, Shard
from ..policies.selectors import Wish
from .budgets import whole_bytes

_GATHERED_LAYERS = 3
"""A layer in use, and what two gathers have in flight: the next one's buffer, and the last one's copy out of it."""


def sharding_of(component: Component, wish: Wish, usable_bytes: int, ranks: int) -> Sharding | None:
    """How a component is divided where it is to be, or where only its parts fit; null where it is not.

    Args:
        component: with its parts by ranks.
        wish: for the whole component.
        usable_bytes: of its compute device, for one rank.
        ranks: those of the workload.

    Raises:
        InputError: it is to be divided in any case, and there is one rank; its weights are transformed; or nobody has
            counted its parts.
    """
    if wish.shard is Shard.always and ranks == 1:
        raise InputError(
            f"the override of '{component.name}' shards over ranks, and there is one", hint="give more with --ranks"
        )
    if wish.shard is None or ranks == 1:
        return None
    if component.transforms:
        raise InputError(
            f"the override of '{component.name}' shards it, and its weights are transformed on their way",
            hint="plan it without shard, or save the weights as the module has them",
        )
    if component.fixed_part_bytes is None:
        raise InputError(f"'{component.name}' was read for one rank", hint="read the pipeline for the same workload")
    layer = max((size.packed_bytes for stack in component.stacks for size in stack.sizes), default=0)
    fixed = component.fixed_packed_bytes
    gathered = fixed + max(fixed, _GATHERED_LAYERS * layer)
    resting = 0 if wish.home is Home.pageable else whole_bytes(part_of(component))
    room = usable_bytes - (known_peak_bytes(component.activations) or 0)
    if wish.shard is Shard.when_too_large and not resting + gathered <= room < whole_bytes(component):
        return None
    return Sharding(mesh=(ranks,), dimension=0, gathered_bytes=gathered)


def part_of(component: Component) -> Component:
    """The component as one rank holds it."""
    stacks = [
        stack.model_copy(
            update={
                "sizes": tuple(
                    size.model_copy(update={"layer_bytes": size.part_bytes, "packed_bytes": size.part_bytes})
                    for size in stack.sizes
                )
            }
        )
        for stack in component.stacks
    ]
    fixed = component.fixed_part_bytes
    return component.model_copy(update={"stacks": tuple(stacks), "fixed_bytes": fixed, "fixed_packed_bytes": fixed})
