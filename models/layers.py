"""Layers, found from parameter names alone.

A stack is a dotted name whose next segments are exactly the numbers 0 to n - 1, with n at least two: `model.layers`,
`blocks`, `double_blocks`. The outermost one counts: a list inside a layer belongs to that layer. Numbers with gaps
are a sequence with parameterless steps, not a stack of layers, and one element is no repetition; their names are
looked at once more, one number deeper.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

_NUMBER = re.compile(r"(?:^|(?<=[^.]\.))(?:0|[1-9][0-9]{0,8})(?=\.)")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundStack:
    """A stack and, by layer, the full names of its tensors in the order in which they were given."""

    name: str
    layers: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A component's names, divided: each is in one layer of one stack, or in the fixed part."""

    stacks: tuple[FoundStack, ...]
    fixed: tuple[str, ...]


@dataclass(slots=True)
class _Candidate:
    """Names under one prefix, by the number that follows it."""

    by_number: dict[int, list[tuple[str, int]]] = field(default_factory=dict[int, list[tuple[str, int]]])

    def is_stack(self) -> bool:
        count = len(self.by_number)
        # Distinct, not negative, and none as large as their count: they are exactly 0 to count - 1.
        return count >= 2 and max(self.by_number) == count - 1


def find_layers(names: Iterable[str]) -> Layout:
    """Divide names into stacks and the fixed part; both sorted by name, so that order of registration is no matter."""
    stacks: list[FoundStack] = []
    fixed: list[str] = []
    pending: list[tuple[str, int]] = [(name, 0) for name in sorted(names)]
    while pending:
        candidates: dict[str, _Candidate] = {}
        for name, start in pending:
            number = _NUMBER.search(name, start)
            if number is None:
                fixed.append(name)
                continue
            candidate = candidates.setdefault(name[: number.start()].removesuffix("."), _Candidate())
            candidate.by_number.setdefault(int(number[0]), []).append((name, number.end()))
        pending = []
        for prefix, candidate in candidates.items():
            if candidate.is_stack():
                layers = (candidate.by_number[number] for number in range(len(candidate.by_number)))
                stacks.append(
                    FoundStack(name=prefix, layers=tuple(tuple(name for name, _ in layer) for layer in layers))
                )
            else:
                pending += (member for layer in candidate.by_number.values() for member in layer)
    return Layout(stacks=tuple(sorted(stacks, key=lambda stack: stack.name)), fixed=tuple(sorted(fixed)))


def layer_prefix(stack: str, number: int) -> str:
    """The dotted name of one layer's module: `blocks.3`, or `3` in a stack that is the component itself."""
    return f"{stack}.{number}" if stack else str(number)
