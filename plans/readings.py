"""A measured figure as text."""

from .machine import Malformed, Measured, Reading, Unlimited, Unmeasurable
from .units import format_bytes


def reading_text(reading: Reading) -> str:
    """A figure, or why there is none."""
    match reading:
        case Measured():
            return format_bytes(reading.value)
        case Unlimited():
            return "unlimited"
        case Unmeasurable():
            return f"unmeasurable: {reading.why}"
        case Malformed():
            return f"malformed: {reading.source}: {reading.why}"
