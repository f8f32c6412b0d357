"""The data flow between components, as a directed acyclic graph."""

from collections.abc import Iterable
from graphlib import CycleError, TopologicalSorter
from heapq import heappop, heappush
from itertools import pairwise

from ..plans.errors import InputError

_CONDITIONERS = ("text_encoder", "image_encoder", "condition_encoder", "audio_encoder")
_DENOISERS = ("prior", "transformer", "unet", "dit", "denoiser")


def is_denoiser(name: str) -> bool:
    """Whether a component of this name runs once per sampling step, by the names that diffusers gives."""
    return name.removesuffix("_2") in _DENOISERS


def is_generator(class_name: str | None) -> bool:
    """Whether a class generates token by token, by the names that transformers gives."""
    return (class_name or "").endswith(("ForCausalLM", "ForConditionalGeneration", "LMHeadModel"))


def usual_edges(names: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """The flow that diffusion pipelines share: conditioners, then denoisers one after another, then the rest.

    It is read off the components' names: a file format that states the flow does not exist.
    """
    ordered = sorted(names)
    conditioners = [name for name in ordered if name.startswith(_CONDITIONERS)]
    denoisers = [name for name in ordered if is_denoiser(name)]
    decoders = [name for name in ordered if name not in conditioners and name not in denoisers]
    edges = [*pairwise(denoisers)]
    middle = denoisers or decoders
    edges += [(conditioner, middle[0]) for conditioner in conditioners if middle]
    edges += [(denoisers[-1], decoder) for decoder in decoders if denoisers]
    return tuple(sorted(edges))


def phase_order(names: Iterable[str], edges: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """The components in an order in which each follows what it needs; ties by name.

    Raises:
        InputError: an edge names a component that is not there, or the flow has a cycle.
    """
    known = set(names)
    sorter: TopologicalSorter[str] = TopologicalSorter(dict.fromkeys(sorted(known), ()))
    for source, target in sorted(edges):
        for name in (source, target):
            if name not in known:
                raise InputError(
                    f"the data flow names '{name}', which is no component",
                    hint=f"components are {sorted(known)}",
                )
        sorter.add(target, source)
    try:
        sorter.prepare()
    except CycleError as error:
        cycle = " -> ".join(error.args[1])
        raise InputError(f"the data flow has a cycle: {cycle}", hint="give edges that lead one way") from None
    ready: list[str] = []
    order: list[str] = []
    while sorter.is_active():
        for name in sorter.get_ready():
            heappush(ready, name)
        order.append(heappop(ready))
        sorter.done(order[-1])
    return tuple(order)
