"""Bytes as people write them: binary units, both ways."""

import re
from fractions import Fraction

from .errors import InputError

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

_FACTOR = {
    "": 1,
    "b": 1,
    "kib": KIB,
    "mib": MIB,
    "gib": GIB,
    "tib": 1 << 40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_PER_SECOND = re.compile(r"\s*/\s*s\s*$")
_SIZE = re.compile(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([a-zA-Z]*)\s*")


def parse_bytes(text: str) -> int:
    """Read `12GiB`, `512 MiB`, `1.5GB` or a bare number of bytes. A fraction of a byte is dropped.

    Raises:
        InputError: for anything else, negative sizes among it.
    """
    match = _SIZE.fullmatch(text)
    factor = _FACTOR.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise InputError(f"'{text}' is not a size", hint="write a number with a unit, such as 12GiB, 512MiB or 2GB")
    # A float would read 1.001kB as 1000 bytes.
    return int(Fraction(match[1]) * factor)


def parse_rate(text: str) -> int:
    """Read `2.5GB/s`, `3 GiB/s` or, without the seconds, `512MiB` as bytes per second.

    Raises:
        InputError: for anything else; bits among it.
    """
    size = _PER_SECOND.sub("", text)
    try:
        return parse_bytes(size)
    except InputError:
        hint = "write a number with a unit, such as 2.5GB/s or 900MiB/s"
        raise InputError(f"'{text}' is not a rate", hint=hint) from None


def format_bytes(count: int) -> str:
    """Three significant figures in the largest binary unit that keeps the number at 1 or more: `1.50 GiB`.

    From 1000 up all figures before the point are shown: `1010 MiB`.
    """
    size = float(abs(count))
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if round(size) < 1024 or unit == "TiB":
            break
        size /= 1024
    sign = "-" if count < 0 else ""
    if unit == "B":
        return f"{sign}{int(size)} B"
    digits = 2 if round(size, 2) < 10 else 1 if round(size, 1) < 100 else 0
    return f"{sign}{size:.{digits}f} {unit}"
