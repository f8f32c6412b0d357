"""Laws of the header's reader: what was written is read, and a damaged file is read or refused, never more."""

import json
import tempfile
from pathlib import Path
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st
from placewise.models.headers import DTYPE_BITS, read_header
from placewise.plans.errors import CheckpointError

from ..checkpoints import Tensors, header_json, stored_bytes, write_raw, write_safetensors
from ..safetensors_says import ours, safetensors_reads, theirs

# Those that torch has a dtype for and that safetensors therefore hands out as tensors.
LOADABLE = ["BOOL", "U8", "I8", "I16", "I32", "I64", "F16", "BF16", "F32", "F64", "F8_E4M3", "F8_E5M2", "C64"]

names = st.text(max_size=6).filter(lambda name: name != "__metadata__" and name.isprintable())
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
huge_shapes = st.lists(st.integers(0, 2**10), max_size=3).map(lambda shape: (*shape, 8))
metadata = st.none() | st.dictionaries(names, names, max_size=3)


def specs(dtypes: list[str], shape: st.SearchStrategy[tuple[int, ...]]) -> st.SearchStrategy[Tensors]:
    return st.dictionaries(names, st.tuples(st.sampled_from(dtypes), shape), max_size=6)


@st.composite
def scattered(draw: st.DrawFn) -> tuple[dict[str, object], int]:
    """Entries whose order in the header is not that of their data, and the bytes of that."""
    tensors = draw(specs(["U8", "BF16", "F64"], shapes))
    parts: dict[str, object] = {}
    begin = 0
    for name in draw(st.permutations(sorted(tensors))):
        dtype, shape = tensors[name]
        end = begin + stored_bytes(dtype, shape)
        parts[name] = {"data_offsets": [begin, end], "shape": list(shape), "dtype": dtype}
        begin = end
    return {name: parts[name] for name in draw(st.permutations(sorted(parts)))}, begin


@given(specs(sorted(DTYPE_BITS), huge_shapes), metadata)
@settings(deadline=None)
def test_what_was_written_is_read(tensors: Tensors, extra: dict[str, str] | None) -> None:
    with tempfile.TemporaryDirectory() as folder:
        header = read_header(write_safetensors(Path(folder) / "model.safetensors", tensors, metadata=extra))
    assert {name: (entry.dtype, entry.shape) for name, entry in header.tensors.items()} == dict(tensors)
    assert [entry.nbytes for entry in header.tensors.values()] == [stored_bytes(*spec) for spec in tensors.values()]
    assert header.data_start + sum(entry.nbytes for entry in header.tensors.values()) == header.size_bytes
    for name, kept in header.aliases.items():
        assert name not in header.tensors
        assert kept in header.tensors


@given(specs(LOADABLE, shapes), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=60)
def test_safetensors_reads_the_same(tensors: Tensors, chance: Random) -> None:
    data = chance.randbytes(sum(stored_bytes(*spec) for spec in tensors.values()))
    with tempfile.TemporaryDirectory() as folder:
        file = write_safetensors(Path(folder) / "model.safetensors", tensors, data=data)
        assert ours(file) == theirs(file)


@given(scattered())
@settings(deadline=None, max_examples=60)
def test_data_may_lie_in_any_order(written: tuple[dict[str, object], int]) -> None:
    parts, size = written
    with tempfile.TemporaryDirectory() as folder:
        file = write_raw(Path(folder) / "model.safetensors", header_json(parts), size)
        assert len(read_header(file).tensors) == len(parts)
        assert ours(file) == theirs(file)


def refused(file: Path) -> CheckpointError | None:
    """The refusal with which the reader ends; null where it takes the file."""
    try:
        read_header(file)
    except CheckpointError as error:
        return error
    return None


def check_like_safetensors(content: bytes) -> None:
    """Read or refused, and read only if safetensors reads it too."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.safetensors"
        file.write_bytes(content)
        error = refused(file)
        if error is None:
            # JSON's -0 is a whole number to our parser and none to theirs.
            assert safetensors_reads(file) or b"-0" in content
        else:
            assert error.message.startswith(f"{file}: ")
            assert error.hint


SOUND: Tensors = {"a.0.w": ("F32", (2, 3)), "a.1.w": ("BF16", (4,)), "flag": ("BOOL", ()), "none": ("I64", (0, 2))}


def sound_content() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        file = write_safetensors(Path(folder) / "model.safetensors", SOUND, metadata={"format": "pt", "tied": "flag"})
        return file.read_bytes()


CONTENT = sound_content()
HEADER_END = 8 + int.from_bytes(CONTENT[:8], "little")


def test_every_truncation_is_refused() -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.safetensors"
        for length in range(len(CONTENT)):
            file.write_bytes(CONTENT[:length])
            assert refused(file) is not None, f"{length} of {len(CONTENT)} bytes were taken for a whole file"


@given(st.integers(0, HEADER_END - 1), st.integers(0, 255))
@settings(deadline=None, max_examples=300)
def test_a_changed_byte_of_the_header_is_read_or_refused(position: int, byte: int) -> None:
    check_like_safetensors(CONTENT[:position] + bytes([byte]) + CONTENT[position + 1 :])


@given(st.integers(0, HEADER_END), st.binary(max_size=4), st.integers(0, 8))
@settings(deadline=None, max_examples=150)
def test_a_changed_piece_of_the_header_is_read_or_refused(position: int, piece: bytes, removed: int) -> None:
    raw = CONTENT[8:HEADER_END]
    changed = raw[:position] + piece + raw[position + removed :]
    check_like_safetensors(len(changed).to_bytes(8, "little") + changed + CONTENT[HEADER_END:])


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)
near_entries = st.fixed_dictionaries(
    {"dtype": st.sampled_from(["U8", "F4", "F32"]) | json_values},
    optional={
        "shape": st.lists(st.integers(-1, 8), max_size=3) | json_values,
        "data_offsets": st.lists(st.integers(-1, 40), min_size=2, max_size=2) | json_values,
    },
)


@given(st.dictionaries(names, near_entries | json_values, max_size=3), st.integers(0, 40))
@settings(deadline=None, max_examples=200)
def test_any_json_is_read_or_refused(parts: dict[str, object], size: int) -> None:
    raw = json.dumps(parts).encode()
    check_like_safetensors(len(raw).to_bytes(8, "little") + raw + bytes(size))
