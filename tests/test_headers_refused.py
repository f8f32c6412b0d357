import json
import os
from pathlib import Path

import pytest
from placewise.models.headers import read_header
from placewise.plans.errors import CheckpointError

from .checkpoints import Tensors, entries, header_json, refusal, write_raw

NOT_SOUND = "this is not a complete safetensors file: download or save it again"
TWO: Tensors = {"a": ("F32", (2, 3)), "b": ("BF16", (4,))}
TWO_BYTES = 2 * 3 * 4 + 4 * 2


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def told(message: str, hint: str = NOT_SOUND) -> tuple[str, str]:
    return message, hint


class TestTruncated:
    @pytest.mark.parametrize("size", [0, 1, 7])
    def test_before_the_header(self, file: Path, size: int) -> None:
        file.write_bytes(b"\x40\0\0\0\0\0\0\0"[:size])
        expected = told(f"{file}: {size} bytes, too short for a header")
        assert refusal(lambda: read_header(file), CheckpointError) == expected

    @pytest.mark.parametrize("left", [0, 1, 50])
    def test_in_the_header(self, file: Path, left: int) -> None:
        raw = header_json(entries(TWO))
        write_raw(file, raw[:left], length=len(raw))
        expected = told(f"{file}: the header's length is {len(raw)} bytes, but only {left} follow")
        assert refusal(lambda: read_header(file), CheckpointError) == expected

    def test_in_the_data(self, file: Path) -> None:
        write_raw(file, header_json(entries(TWO)), TWO_BYTES - 1)
        expected = told(f"{file}: tensor 'b': offsets [24, 32) are out of the file's 31 bytes of data")
        assert refusal(lambda: read_header(file), CheckpointError) == expected

    def test_between_two_tensors(self, file: Path) -> None:
        write_raw(file, header_json(entries(TWO)), 24)
        expected = told(f"{file}: tensor 'b': offsets [24, 32) are out of the file's 24 bytes of data")
        assert refusal(lambda: read_header(file), CheckpointError) == expected


class TestHeaderLength:
    @pytest.mark.parametrize("length", [100_000_001, 2**63, 2**64 - 1])
    def test_beyond_the_file(self, file: Path, length: int) -> None:
        write_raw(file, b"{}", length=length)
        expected = told(f"{file}: the header's length is {length} bytes, but only 2 follow")
        assert refusal(lambda: read_header(file), CheckpointError) == expected

    def test_beyond_the_format(self, file: Path) -> None:
        write_raw(file, b"{}", 1 << 40, length=100_000_001)
        expected = told(f"{file}: the header's length is 100000001 bytes; the format allows 100000000")
        assert refusal(lambda: read_header(file), CheckpointError) == expected

    def test_the_file_shrinks_while_it_is_read(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        write_raw(file, b"{", length=2)
        facts = file.stat()

        def a_byte_longer(_: int) -> os.stat_result:
            return os.stat_result([*facts[:6], facts.st_size + 1, *facts[7:]])

        monkeypatch.setattr("os.fstat", a_byte_longer)
        assert refusal(lambda: read_header(file), CheckpointError) == told(f"{file}: ends in its header, after 9 bytes")


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b"", "Input data was truncated"),
        (b"{", "Input data was truncated"),
        (b"[]", "Expected `object`, got `array`"),
        (b"null", "Expected `object`, got `null`"),
        (b"{}x", "JSON is malformed: trailing characters (byte 3)"),
        (b"{}\0", "JSON is malformed: trailing characters (byte 3)"),
        (b'{"\xff": {}}', "Invalid UTF-8 encoded string"),
        (b'{"a": ' + b"[" * 100_000, "maximum recursion depth exceeded while deserializing an object"),
    ],
    ids=["empty", "cut", "array", "null", "trailing", "nul", "not-utf-8", "deep"],
)
def test_not_an_object(file: Path, header: bytes, reason: str) -> None:
    write_raw(file, header)
    expected = told(f"{file}: the header is not a JSON object: {reason}")
    assert refusal(lambda: read_header(file), CheckpointError) == expected


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (1, "Expected `object`, got `int`"),
        ({}, "Object missing required field `dtype`"),
        ({"dtype": "U8", "shape": [1]}, "Object missing required field `data_offsets`"),
        ({"dtype": "U8", "data_offsets": [0, 1]}, "Object missing required field `shape`"),
        ({**entry("U8", [1], 0, 1), "strides": [1]}, "Object contains unknown field `strides`"),
        ({**entry("U8", [1], 0, 1), "dtype": 8}, "Expected `str`, got `int` - at `$.dtype`"),
        ({**entry("U8", [1], 0, 1), "shape": [1.0]}, "Expected `int`, got `float` - at `$.shape[0]`"),
        ({**entry("U8", [1], 0, 1), "shape": [True]}, "Expected `int`, got `bool` - at `$.shape[0]`"),
        ({**entry("U8", [1], 0, 1), "shape": 1}, "Expected `array`, got `int` - at `$.shape`"),
        (
            {**entry("U8", [1], 0, 1), "data_offsets": [0, 1, 2]},
            "Expected `array` of length 2 - at `$.data_offsets`",
        ),
    ],
)
def test_an_entry_of_another_form(file: Path, value: object, reason: str) -> None:
    write_raw(file, header_json({"a.b": value}), 1)
    assert refusal(lambda: read_header(file), CheckpointError) == told(f"{file}: tensor 'a.b': {reason}")


def test_metadata_that_is_not_text(file: Path) -> None:
    write_raw(file, header_json({"__metadata__": {"epoch": 3}}))
    expected = told(f"{file}: tensor '__metadata__': Expected `str`, got `int` - at `$[...]`")
    assert refusal(lambda: read_header(file), CheckpointError) == expected


def test_an_extent_of_too_many_digits(file: Path) -> None:
    raw = json.dumps({"a": entry("U8", [7], 0, 1)}).replace("[7]", f"[{'9' * 5000}]").encode()
    write_raw(file, raw, 1)
    expected = told(f"{file}: tensor 'a': Integer value out of range - at `$.shape[0]`")
    assert refusal(lambda: read_header(file), CheckpointError) == expected


OUT = "are out of the file's 8 bytes of data"


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"a": entry("U8", [9], 0, 9)}, f"tensor 'a': offsets [0, 9) {OUT}"),
        ({"a": entry("U8", [1], -1, 0)}, f"tensor 'a': offsets [-1, 0) {OUT}"),
        ({"a": entry("U8", [1], 8, 9)}, f"tensor 'a': offsets [8, 9) {OUT}"),
        ({"a": entry("U8", [4], 4, 0)}, f"tensor 'a': offsets [4, 0) {OUT}"),
        ({"a": entry("U8", [2**64], 0, 2**64)}, f"tensor 'a': offsets [0, {2**64}) {OUT}"),
        ({"a": entry("U8", [-8], 0, 8)}, "tensor 'a': shape [-8] of U8 does not take 8 bytes"),
        ({"a": entry("U8", [-2, -4], 0, 8)}, "tensor 'a': shape [-2, -4] of U8 does not take 8 bytes"),
        ({"a": entry("U8", [-1, 0], 0, 0)}, "tensor 'a': shape [-1, 0] of U8 does not take 0 bytes"),
        ({"a": entry("F32", [8], 0, 8)}, "tensor 'a': shape [8] of F32 does not take 8 bytes"),
        ({"a": entry("F32", [], 0, 8)}, "tensor 'a': shape [] of F32 does not take 8 bytes"),
        ({"a": entry("BOOL", [64], 0, 8)}, "tensor 'a': shape [64] of BOOL does not take 8 bytes"),
        ({"a": entry("F4", [15], 0, 8)}, "tensor 'a': shape [15] of F4 does not take 8 bytes"),
        ({"a": entry("U8", [0, 2**64], 0, 0)}, f"tensor 'a': shape [0, {2**64}] of U8 does not take 0 bytes"),
        ({"a": entry("U8", [2**63, 4, 0], 0, 0)}, f"tensor 'a': shape [{2**63}, 4, 0] of U8 does not take 0 bytes"),
        (
            {"a": entry("U8", [5], 0, 5), "b": entry("U8", [4], 4, 8)},
            "tensor 'b': its data at [4, 8) overlaps that of 'a'",
        ),
        (
            {"b": entry("U8", [8], 0, 8), "a": entry("U8", [8], 0, 8)},
            "tensor 'a': its data at [0, 8) overlaps that of 'b'",
        ),
        (
            {"a": entry("U8", [8], 0, 8), "b": entry("U8", [0], 4, 4)},
            "tensor 'b': its data at [4, 4) overlaps that of 'a'",
        ),
        (
            {"a": entry("U8", [3], 0, 3), "b": entry("U8", [4], 4, 8)},
            "tensor 'b': its data at [4, 8) leaves a hole of 1 bytes after that of 'a'",
        ),
        (
            {"a": entry("U8", [7], 1, 8)},
            "tensor 'a': its data at [1, 8) leaves a hole of 1 bytes after that of 'the header'",
        ),
        ({"a": entry("U8", [7], 0, 7)}, "the tensors end at byte 7 of 8 bytes of data"),
        ({}, "the tensors end at byte 0 of 8 bytes of data"),
    ],
)
def test_offsets_and_shapes(file: Path, parts: dict[str, object], message: str) -> None:
    write_raw(file, header_json(parts), 8)
    assert refusal(lambda: read_header(file), CheckpointError) == told(f"{file}: {message}")


@pytest.mark.parametrize("dtype", ["", "f32", "F128", "U4", "torch.float32"])
def test_unknown_dtype(file: Path, dtype: str) -> None:
    write_raw(file, header_json({"a": entry(dtype, [2], 0, 8)}), 8)
    known = (
        "BF16, BOOL, C64, F16, F32, F4, F64, F6_E2M3, F6_E3M2, F8_E4M3, F8_E4M3FNUZ, F8_E5M2, F8_E5M2FNUZ, F8_E8M0, "
        "I16, I32, I64, I8, U16, U32, U64, U8"
    )
    expected = told(f"{file}: tensor 'a': unknown dtype '{dtype}'", f"known are {known}")
    assert refusal(lambda: read_header(file), CheckpointError) == expected


class TestCannotOpen:
    def test_missing(self, file: Path) -> None:
        expected = told(f"{file}: No such file or directory", "give a safetensors file that can be read")
        assert refusal(lambda: read_header(file), CheckpointError) == expected

    def test_a_folder(self, tmp_path: Path) -> None:
        expected = told(f"{tmp_path}: Is a directory", "give a safetensors file that can be read")
        assert refusal(lambda: read_header(tmp_path), CheckpointError) == expected

    def test_a_pipe_is_refused_and_not_waited_for(self, file: Path) -> None:
        os.mkfifo(file)
        expected = told(f"{file}: not a regular file", "give a safetensors file")
        assert refusal(lambda: read_header(file), CheckpointError) == expected


def test_a_shape_of_very_many_extents_is_soon_refused(file: Path) -> None:
    raw = header_json({"a": entry("U8", [2**63 - 1] * 200_000, 0, 1)})
    write_raw(file, raw, 1)
    message, hint = refusal(lambda: read_header(file), CheckpointError)
    assert message.startswith(f"{file}: tensor 'a': shape [{2**63 - 1}, {2**63 - 1}, ")
    assert message.endswith(" of U8 does not take 1 bytes")
    assert hint == NOT_SOUND
