"""The base of everything that goes to JSON: frozen, strict, and closed to unknown fields."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, Self, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, NonNegativeInt, PlainSerializer


class Record(BaseModel):
    """A frozen record. Sequences are tuples, choices are enums, units stand in the names."""

    # Most plans have few of all kinds of records: what validates them is made with the first of each.
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        """Nothing in a record changes, so it serves as its own copy."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """A record travels between processes as its JSON; read-only mappings have no other way."""
        return type(self).model_validate_json, (self.model_dump_json(),)


_V = TypeVar("_V")


def _frozen(numbers: Mapping[str, _V]) -> Mapping[str, _V]:
    return MappingProxyType(dict(sorted(numbers.items())))


def _plain(numbers: Mapping[str, _V]) -> dict[str, _V]:
    return dict(numbers)


Numbers = Annotated[Mapping[str, NonNegativeInt], AfterValidator(_frozen), PlainSerializer(_plain)]
"""Named counts, such as bytes per axis: sorted by name, and read-only."""

KnownNumbers = Annotated[Mapping[str, int | None], AfterValidator(_frozen), PlainSerializer(_plain)]
"""Named counts of which some are not known. `None` is unknown, and never zero."""
