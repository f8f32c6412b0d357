"""Stacks whose layers all do the same to live bytes: a pass over their first layers has the peak of one over all.

Torch is imported with this module.
"""

# Torch's own types are partial here, and its modules keep their tables underscored.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false

from collections.abc import Callable, Iterable
from contextlib import ExitStack

from torch import nn

from .live_bytes import LiveBytes

_FEW = 3
"""The first layer, which may find inputs alive that no later one finds, and two to compare."""


class Stacks:
    """Stacks of equal layers in a module, which may run shortened where each layer does the same to live bytes.

    Args:
        module: on fake tensors.
        names: of stacks; those that are no lists of modules, or whose layers after the first differ, never run shortened.
        live: active in every pass.
    """

    def __init__(self, module: nn.Module, names: Iterable[str], live: LiveBytes) -> None:
        modules = dict(module.named_modules())
        found = [modules.get(name) for name in names]
        lists = [each for each in found if isinstance(each, nn.ModuleList | nn.Sequential) and len(each) > _FEW]
        self._live = live
        self._lists = [each for each in lists if _equal(map(_structure, list(each)[1:]))]

    def run_all(self, run: Callable[[], None]) -> None:
        """Make a pass over all layers. Those stacks alone run shortened later whose layers repeat each other in it."""
        self._lists = self._repeating(run)

    def run_few(self, run: Callable[[], None]) -> bool:
        """Make a pass over the first layers; whether these repeat each other too, so that its peak is that of all."""
        if not self._lists:
            return False
        layers = [dict(each._modules) for each in self._lists]
        try:
            for each in self._lists:
                for name in list(each._modules)[_FEW:]:
                    del each._modules[name]
            return self._repeating(run) == self._lists
        except Exception:  # Other people's code runs here, and may count on all of its layers.
            return False
        finally:
            for each, whole in zip(self._lists, layers, strict=True):
                each._modules.update(whole)

    def _repeating(self, run: Callable[[], None]) -> list[nn.ModuleList | nn.Sequential]:
        """Those whose layers ran once each in a pass, and all after the first with the same history."""
        with ExitStack() as hooks:
            seen = [[self._watch(layer, hooks) for layer in each] for each in self._lists]
            run()
        return [
            each
            for each, calls in zip(self._lists, seen, strict=True)
            if all(len(layer) == 1 for layer in calls) and _equal(layer[0] for layer in calls[1:])
        ]

    def _watch(self, layer: nn.Module, hooks: ExitStack) -> list[list[int]]:
        """What live bytes were after each operation of each call."""
        history, begun, calls = self._live.history, list[int](), list[list[int]]()

        def enter(_: nn.Module, __: object) -> None:
            begun.append(len(history))

        def leave(_: nn.Module, __: object, ___: object) -> None:
            calls.append(history[begun.pop() :])

        hooks.callback(layer.register_forward_pre_hook(enter).remove)
        hooks.callback(layer.register_forward_hook(leave).remove)
        return calls


def _structure(layer: nn.Module) -> object:
    weights = [(name, weight.shape, weight.dtype) for name, weight in layer.state_dict().items()]
    return [(name, type(module)) for name, module in layer.named_modules()], weights


def _equal(items: Iterable[object]) -> bool:
    first, *others = items
    return all(other == first for other in others)
