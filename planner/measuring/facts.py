"""Everything that is measured of a machine, in one record; and the same record read from a file."""

from pathlib import Path

from pydantic import ValidationError

from ...plans.codec import explain_validation, read_file
from ...plans.errors import FactsError
from ...plans.machine import Machine
from .accelerators import measure_accelerators
from .disk import disk_of
from .host import measure_host


def measure_machine(model: Path | None = None, *, root: Path = Path("/"), accelerators: bool = True) -> Machine:
    """Measure the host, the accelerators, and the file system that holds `model`.

    Args:
        model: a checkpoint; its disk is told when it is given.
        root: where the kernel's files are looked for.
        accelerators: false leaves them out, and then torch is not imported.
    """
    return Machine(
        host=measure_host(root),
        accelerators=measure_accelerators(root) if accelerators else (),
        disk=None if model is None else disk_of(model, root),
    )


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
