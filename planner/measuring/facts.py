"""Everything that is measured of a machine, in one record; and the same record read from a file."""

import sys
from pathlib import Path

from pydantic import ValidationError

from ...plans.codec import explain_validation, read_file
from ...plans.errors import FactsError
from ...plans.machine import Host, Machine, Measured
from ...plans.units import MIB, format_bytes
from .accelerators import measure_accelerators
from .disk import disk_of
from .host import measure_host

TORCH_BYTES = 130 * MIB
"""What importing torch 2.13 takes of a process' own memory: it is measured without, and loads with it."""


def measure_machine(model: Path | None = None, *, root: Path = Path("/"), accelerators: bool = True) -> Machine:
    """Measure the host, the accelerators, and the file system that holds `model`.

    What importing torch will take is not available, where this process has not imported it.

    Args:
        model: a checkpoint; its disk is told when it is given.
        root: where the kernel's files are looked for.
        accelerators: false leaves them out, and then torch is not imported.
    """
    found = measure_accelerators(root) if accelerators else ()  # May import torch, so before the host is measured.
    return Machine(
        host=_less_torch(measure_host(root)),
        accelerators=found,
        disk=None if model is None else disk_of(model, root),
    )


def _less_torch(host: Host) -> Host:
    if "torch" in sys.modules or not isinstance(host.available, Measured):
        return host
    left = host.available.model_copy(update={"value": max(0, host.available.value - TORCH_BYTES)})
    note = f"{format_bytes(TORCH_BYTES)} of the host are kept for importing torch"
    return host.model_copy(update={"available": left, "notes": (*host.notes, note)})


def read_machine(path: Path) -> Machine:
    """Facts of another machine, as `placewise facts --json` printed them there.

    Raises:
        InputError: there is no such file.
        FactsError: it holds no such facts.
    """
    try:
        return Machine.model_validate_json(read_file(path))
    except ValidationError as error:
        raise FactsError(
            f"{path}: {explain_validation(error)}", hint="write it with `placewise facts --json > facts.json`"
        ) from None
