"""Stacks whose layers all do the same to live bytes: a pass over their first layers has the peak of one over all.

Torch is imported with this module.
"""

# Torch's own types are partial here, and its modules keep their tables underscored.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from itertools import pairwise

from torch import nn

from .live_bytes import LiveBytes

_FEW = 4
"""The first layer, which may find inputs alive that no later one finds, two to compare, and the last."""


class Stacks:
    """Stacks of equal layers in a module, which may run shortened where each layer does the same to live bytes.

    Args:
        module: on fake tensors.
        names: of stacks; those that are no lists of modules, or whose layers after the first differ, always run whole.
        live: active in every pass.
    """

    def __init__(self, module: nn.Module, names: Iterable[str], live: LiveBytes) -> None:
        modules = dict(module.named_modules())
        found = [modules.get(name) for name in names]
        lists = [each for each in found if isinstance(each, nn.ModuleList | nn.Sequential) and len(each) > _FEW]
        self._live = live
        self._others: list[int] = []
        self._lists = [each for each in lists if _equal(map(_structure, list(each)[1:]))]

    def run_all(self, run: Callable[[], None]) -> None:
        """Make a pass over all layers. Those stacks alone run shortened later whose layers repeat each other in it."""
        self._lists, self._others = self._repeating(run)

    def check(self, run: Callable[[], None]) -> None:
        """Make the same pass shortened. Nothing runs so later if all else than the left-out layers does not repeat."""
        others = self._others
        if not (self.run_few(run) and self._others == others):
            self._lists = []

    def run_few(self, run: Callable[[], None]) -> bool:
        """Make a pass over the first layers; whether these repeat each other too, so that its peak is that of all."""
        if not self._lists:
            return False
        layers = [dict(each._modules) for each in self._lists]
        try:
            for each in self._lists:
                for name in list(each._modules)[_FEW:]:
                    del each._modules[name]
            repeating, self._others = self._repeating(run)
            return repeating == self._lists
        except Exception:  # Other people's code runs here, and may count on all of its layers.
            return False
        finally:
            for each, whole in zip(self._lists, layers, strict=True):
                each._modules.update(whole)

    def _repeating(self, run: Callable[[], None]) -> tuple[list[nn.ModuleList | nn.Sequential], list[int]]:
        """Stacks whose layers ran once each in a pass, and alike from one's begin to the next one's, but for the ends.

        And what live bytes were from the first layer on, without the repetitions of the second layer.
        """
        history = self._live.history
        with ExitStack() as hooks:
            begun = [[self._begun(layer, hooks) for layer in each] for each in self._lists]
            run()
        found: list[nn.ModuleList | nn.Sequential] = []
        repeated: set[int] = set()
        for each, calls in zip(self._lists, begun, strict=True):
            begins = [at for layer in calls for at in layer]
            steps = [history[begin:end] for begin, end in pairwise(begins[1:])]
            if all(len(layer) == 1 for layer in calls) and begins == sorted(begins) and _equal(steps):
                found.append(each)
                repeated.update(range(begins[2], begins[-1]))
        first = min((at for calls in begun for layer in calls for at in layer), default=len(history))
        return found, [history[at] for at in range(first, len(history)) if at not in repeated]

    def _begun(self, layer: nn.Module, hooks: ExitStack) -> list[int]:
        """How many operations there were before each call."""
        begins: list[int] = []

        def begin(_: nn.Module, __: object) -> None:
            begins.append(len(self._live.history))

        hooks.callback(layer.register_forward_pre_hook(begin).remove)
        return begins


def _structure(layer: nn.Module) -> object:
    weights = [(name, weight.shape, weight.dtype) for name, weight in layer.state_dict().items()]
    return [(name, type(module)) for name, module in layer.named_modules()], weights


def _equal(items: Iterable[object]) -> bool:
    first, *others = items
    return all(other == first for other in others)
