"""How a decision and a difference name the part of a pipeline that they are about."""

from collections.abc import Sequence

from .pipeline import Run


def subject_of(component: str, stack: str | None, layers: Sequence[Run]) -> str:
    """A segment by name: `transformer.blocks[0:12,30:60]`, or `transformer (fixed)`."""
    if stack is None:
        return f"{component} (fixed)"
    runs = ",".join(f"{start}:{stop}" for start, stop in layers)
    return f"{component}.{stack}[{runs}]" if stack else f"{component}[{runs}]"
