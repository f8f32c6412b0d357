"""Placewise: placement plans for PyTorch pipelines that do not fit. Import is lazy: nothing comes with it.

`placewise.plan`, `placewise.check` and `placewise.load` are in `placewise.api`; each comes with its first use.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .api import (
        apply,
        check,
        check_devices,
        inspect,
        load,
        measure,
        plan,
        plan_from_json,
        plan_to_json,
        plan_together,
        read_plan,
    )

__version__ = "0.1.0"

__all__ = [
    "apply",
    "check",
    "check_devices",
    "inspect",
    "load",
    "measure",
    "plan",
    "plan_from_json",
    "plan_to_json",
    "plan_together",
    "read_plan",
]


def __getattr__(name: str) -> object:
    if name in __all__:
        from . import api

        return getattr(api, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
