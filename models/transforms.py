"""Transforms of stored tensors, tied to those that they are of, and what the module gets of each."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import prod

from ..plans.errors import InputError
from ..plans.patterns import matching, near
from ..plans.pipeline import Cast, Deinterleave, Transform, Transpose
from .checkpoint import CheckpointFacts, Transformed
from .headers import DTYPE_BITS, TensorEntry

_FLOATING = ("F16", "BF16", "F32", "F64")


def transformed(facts: CheckpointFacts, transforms: Sequence[Transform], component: str) -> CheckpointFacts:
    """The same checkpoint with the transforms of each tensor, in the order given. A cast to its own dtype is none.

    Args:
        facts: without transforms.
        transforms: by patterns of stored names.
        component: for errors.

    Raises:
        InputError: a pattern matches no tensor, or a tensor cannot be transformed so.
    """
    steps: dict[str, list[Transform]] = {}
    for transform in transforms:
        names = matching(transform.tensor, facts.tensors)
        if not names:
            raise InputError(
                f"component '{component}': no stored tensor matches '{transform.tensor}', for {transform.kind}",
                hint=near(transform.tensor, map(_numberless, facts.tensors)),
            )
        for name in names:
            steps.setdefault(name, []).append(transform)
    found = {
        name: _transformed(f"component '{component}': tensor '{name}'", facts.tensors[name][1], each)
        for name, each in steps.items()
    }
    return replace(facts, transforms={name: each for name, each in found.items() if each.steps})


def _transformed(tensor: str, entry: TensorEntry, steps: Sequence[Transform]) -> Transformed:
    def refused(why: str, hint: str = "leave it out of the pattern") -> InputError:
        return InputError(f"{tensor} of {entry.dtype} {list(entry.shape)} {why}", hint=hint)

    for kind, count in Counter(step.kind for step in steps).items():
        if count > 1:
            raise refused(f"is given {kind} {count} times", hint="say it once")
    if DTYPE_BITS[entry.dtype] < 8:
        raise refused("is not transformed: its elements share bytes")
    dtype, shape = entry.dtype, entry.shape
    for step in steps:
        match step:
            case Deinterleave(groups=groups, parts=parts):
                if not shape or shape[0] % (groups * parts):
                    raise refused(f"has no rows that divide into {groups} groups of {parts} parts")
            case Transpose():
                if len(shape) < 2:
                    raise refused("cannot be transposed: it has no two axes")
                shape = (*shape[:-2], shape[-1], shape[-2])
            case Cast():
                if dtype not in _FLOATING:
                    raise refused(f"cannot be cast: only {', '.join(_FLOATING)} are")
                dtype = step.dtype
    return Transformed(
        steps=tuple(step for step in steps if not (isinstance(step, Cast) and step.dtype == entry.dtype)),
        entry=TensorEntry(dtype=dtype, shape=shape, data_offsets=(0, prod(shape) * DTYPE_BITS[dtype] // 8)),
    )


def _numberless(name: str) -> str:
    return ".".join("*" if segment.isdecimal() else segment for segment in name.split("."))
