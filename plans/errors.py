"""Every error that Placewise raises on purpose.

PlacewiseError
├── InputError          the caller's: a path, a file, an option, a document
│   ├── CheckpointError     a checkpoint that cannot be read as one
│   ├── PlanFormatError     a plan document that this version does not read
│   └── FactsError          machine facts that are missing or contradict themselves
├── RefusedError        there is no placement that fits; carries every axis that ran out
├── DriftError          the plan's facts no longer hold; carries every changed fact
└── ExecutionError      the executor could not do what the plan says
    ├── DeviceMismatchError   one operation, two devices
    ├── DeviceMemoryError     an allocation beyond the device's capacity
    ├── ReleasedWeightError   a released weight was used as data
    └── ReadOnlyWeightError   a mapped weight was to be written
"""


class PlacewiseError(Exception):
    """The base of all. The message says what, where and the numbers; the hint is the remedy.

    Args:
        message: what is wrong, where, with the numbers and their units.
        hint: what the reader can do about it; printed after ``hint:``.
    """

    def __init__(self, message: str, /, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\nhint: {self.hint}"


class InputError(PlacewiseError):
    """What the caller gave cannot be used. The CLI exits with 2."""


class CheckpointError(InputError):
    """A checkpoint that cannot be read as one."""


class PlanFormatError(InputError):
    """A plan document that this version does not read."""


class FactsError(InputError):
    """Machine facts that are missing or contradict themselves."""


class RefusedError(PlacewiseError):
    """No placement fits. The CLI exits with 3; the plan's verdict carries every axis that ran out."""


class DriftError(PlacewiseError):
    """The plan's facts no longer hold. The CLI exits with 4; the message names every changed fact."""


class ExecutionError(PlacewiseError):
    """The executor could not do what the plan says."""


class DeviceMismatchError(ExecutionError, RuntimeError):
    """One operation was given tensors of two devices. A RuntimeError too, as torch's own is."""


class DeviceMemoryError(ExecutionError, MemoryError):
    """An allocation went beyond the device's capacity."""


class ReleasedWeightError(ExecutionError, RuntimeError):
    """A weight that is not on its compute device now was used as data."""


class ReadOnlyWeightError(ExecutionError, RuntimeError):
    """A weight that is a view of the checkpoint file was to be written."""
