"""Patterns of dotted names, such as `blocks.*.attn.q.weight`: a `*` stands for whole segments, one or more."""

import difflib
import re
from collections.abc import Iterable


def matching(pattern: str, names: Iterable[str]) -> list[str]:
    """The names that a pattern matches; one without a `*` matches itself."""
    segments = (".+" if segment == "*" else re.escape(segment) for segment in pattern.split("."))
    matches = re.compile(r"\.".join(segments), re.DOTALL).fullmatch
    return [name for name in names if matches(name)]


def near(text: str, names: Iterable[str]) -> str:
    """A question that names what may have been meant by something that matches nothing."""
    known = sorted(set(names))
    return f"did you mean {', '.join(difflib.get_close_matches(text, known, n=3, cutoff=0.4) or known[:8])}?"
