"""Pictures through matplotlib, which is optional."""

import importlib
from pathlib import Path
from typing import Any

from .errors import InputError


def new_figure(width: float, height: float) -> Any:
    """An empty figure of that size in inches, of matplotlib's own type.

    Raises:
        InputError: matplotlib is not installed.
    """
    try:
        drawing: Any = importlib.import_module("matplotlib.figure")
    except ImportError:
        raise InputError("a picture needs matplotlib", hint="pip install 'placewise[plot]'") from None
    return drawing.Figure(figsize=(width, height), layout="constrained")


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure to a file.

    Raises:
        InputError: the file cannot be written.
    """
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: {error}", hint="give a path that can be written, ending in .png or .svg") from None
