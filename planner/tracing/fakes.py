"""Modules on fake tensors: shapes, dtypes and devices without data. Other people's code runs on them.

Torch is imported with this module.
"""

# Torch's own types are partial here, and its modules keep their tables underscored.
# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import logging
import re
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ...plans.errors import InputError
from ...plans.pipeline import Component

_DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64}
_LONGEST_WHY = 200

CPU: Final = torch.device("cpu")


@contextmanager
def faked(
    module: nn.Module, fake: FakeTensorMode, device_of: Callable[[str], torch.device] = lambda _: CPU
) -> Generator[None]:
    """Within it every parameter and buffer of a module is a fake one; what was shared stays shared.

    Args:
        module: gets back afterwards what it had.
        fake: the mode, active.
        device_of: where the parameter or buffer of a dotted name is then.
    """
    made: dict[int, torch.Tensor] = {}
    before: list[tuple[dict[str, Any], str, torch.Tensor]] = []
    try:
        for path, owner in module.named_modules():
            tables: list[dict[str, Any]] = [owner._parameters, owner._buffers]
            for table in tables:
                for leaf, tensor in table.items():
                    if tensor is not None:
                        if id(tensor) not in made:
                            made[id(tensor)] = _fake_of(tensor, fake, device_of(f"{path}.{leaf}" if path else leaf))
                        before.append((table, leaf, tensor))
                        table[leaf] = made[id(tensor)]
        yield
    finally:
        for table, leaf, tensor in before:
            table[leaf] = tensor


def _fake_of(tensor: torch.Tensor, fake: FakeTensorMode, device: torch.device) -> torch.Tensor:
    if tensor.device.type == "meta":
        empty = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)
    else:
        empty = fake.from_tensor(tensor).to(device)
    return nn.Parameter(empty, requires_grad=False) if isinstance(tensor, nn.Parameter) else empty


@contextmanager
def quiet() -> Generator[None]:
    """Within it torch prints nothing of what fails: that is told otherwise."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.disabled = before


def dtype_of(component: Component) -> torch.dtype:
    """The stored dtype of most bytes.

    Raises:
        InputError: it is none that is computed in.
    """
    largest = max(component.dtype_bytes.items(), key=lambda item: item[1], default=("F32", 0))[0]
    if largest not in _DTYPES:
        raise InputError(f"stored as {largest}: the dtype that it computes in is not known")
    return _DTYPES[largest]


def why(error: Exception) -> str:
    """Type and first line, without addresses, so that equal failures read equal."""
    lines = str(error).strip().splitlines() or [""]
    text = f"{type(error).__name__}: {lines[0]}".removesuffix(": ").encode(errors="replace").decode()
    return re.sub(r"0x[0-9a-f]+", "0x…", text)[:_LONGEST_WHY]
