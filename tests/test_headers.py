import hashlib
import sys
from pathlib import Path

import pytest
import torch
from placewise.models.headers import DTYPE_BITS, TensorEntry, packed_bytes, read_header
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]

from .checkpoints import Tensors, entries, header_json, stored_bytes, write_raw, write_safetensors
from .safetensors_says import ours, tensor_bytes, their_dtypes, theirs

TWO: Tensors = {"a": ("F32", (2, 3)), "b": ("BF16", (4,))}
TWO_BYTES = 2 * 3 * 4 + 4 * 2


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


class TestSound:
    def test_names_dtypes_shapes_and_offsets(self, file: Path) -> None:
        header = read_header(write_safetensors(file, TWO))
        assert header.tensors == {
            "a": TensorEntry(dtype="F32", shape=(2, 3), data_offsets=(0, 24)),
            "b": TensorEntry(dtype="BF16", shape=(4,), data_offsets=(24, 32)),
        }

    def test_identity_of_the_file(self, file: Path) -> None:
        raw = header_json(entries(TWO))
        facts = write_raw(file, raw, TWO_BYTES).stat()
        header = read_header(file)
        assert (header.path, header.size_bytes, header.mtime_ns) == (file, facts.st_size, facts.st_mtime_ns)
        assert header.header_sha256 == hashlib.sha256(raw).hexdigest()
        assert header.data_start == 8 + len(raw)

    def test_the_digest_sees_what_the_size_does_not(self, file: Path) -> None:
        before = read_header(write_safetensors(file, {"a": ("F32", (2, 3))}))
        after = read_header(write_safetensors(file, {"a": ("F32", (3, 2))}))
        assert before.size_bytes == after.size_bytes
        assert before.header_sha256 != after.header_sha256

    @pytest.mark.parametrize("dtype", sorted(DTYPE_BITS))
    def test_every_dtype_takes_what_its_name_says(self, file: Path, dtype: str) -> None:
        header = read_header(write_safetensors(file, {"t": (dtype, (3, 8))}))
        assert header.tensors["t"].nbytes == stored_bytes(dtype, (3, 8)) == 3 * DTYPE_BITS[dtype]

    def test_a_bool_is_a_byte_and_four_bits_are_half_of_one(self, file: Path) -> None:
        tensors: Tensors = {"bool": ("BOOL", (1000,)), "half": ("F4", (1000,)), "six": ("F6_E2M3", (1000,))}
        header = read_header(write_safetensors(file, tensors))
        assert [tensor.nbytes for tensor in header.tensors.values()] == [1000, 500, 750]

    @pytest.mark.parametrize("dtype", sorted(DTYPE_BITS))
    def test_safetensors_itself_agrees_on_every_dtype(self, file: Path, dtype: str) -> None:
        write_safetensors(file, {"t": (dtype, (3, 8))})
        assert their_dtypes(file) == {"t": dtype}

    def test_scalars_and_empty_tensors(self, file: Path) -> None:
        tensors: Tensors = {"none": ("F32", (0, 7)), "one": ("I64", ()), "last": ("U8", (0,))}
        header = read_header(write_safetensors(file, tensors))
        assert [tensor.nbytes for tensor in header.tensors.values()] == [0, 8, 0]
        assert header.tensors["one"].shape == ()

    def test_no_tensors(self, file: Path) -> None:
        assert read_header(write_safetensors(file, {})).tensors == {}

    def test_data_in_another_order_than_the_names(self, file: Path) -> None:
        parts = {"a": entry("U8", [2], 3, 5), "b": entry("U8", [3], 0, 3), "empty": entry("U8", [0], 3, 3)}
        header = read_header(write_raw(file, header_json(parts), 5))
        assert {name: tensor.data_offsets[0] for name, tensor in header.tensors.items()} == {"a": 3, "b": 0, "empty": 3}

    def test_a_count_that_passes_64_bits_only_after_a_zero(self, file: Path) -> None:
        assert read_header(write_safetensors(file, {"a": ("F32", (0, 2**62, 2**62))})).tensors["a"].nbytes == 0

    def test_aliases_are_metadata_that_names_a_stored_tensor(self, file: Path) -> None:
        metadata = {"format": "pt", "head.weight": "a", "a": "b", "b": "b", "ghost": "head.weight"}
        assert read_header(write_safetensors(file, TWO, metadata=metadata)).aliases == {"head.weight": "a"}

    @pytest.mark.parametrize(
        ("header_alignment", "first", "expected"),
        [(64, 8, 8), (64, 64, 64), (64, 4, 4), (64, 3, 1), (4096, 8192, 4096), (8192, 8192, 4096)],
    )
    def test_alignment_is_what_all_tensors_share(
        self, file: Path, header_alignment: int, first: int, expected: int
    ) -> None:
        tensors: Tensors = {"first": ("U8", (first,)), "second": ("U8", (5,))}
        header = read_header(write_safetensors(file, tensors, alignment=header_alignment))
        assert header.alignment == expected
        for tensor in header.tensors.values():
            assert (header.data_start + tensor.data_offsets[0]) % header.alignment == 0

    @pytest.mark.parametrize(
        ("stored", "packed"), [(0, 0), (1, 64), (63, 64), (64, 64), (65, 128), (2**60 + 1, 2**60 + 64)]
    )
    def test_packed(self, stored: int, packed: int) -> None:
        assert packed_bytes(stored) == packed


class TestAgainstSafetensors:
    def test_a_file_of_save_file(self, file: Path) -> None:
        saved = {
            "bf16": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
            "bool": torch.tensor([True, False, True]),
            "c64": torch.full((2,), 1 + 2j, dtype=torch.complex64),
            "empty": torch.empty(0, 4),
            "f8": torch.ones(5).to(torch.float8_e4m3fn),
            "i64": torch.tensor(-7),
            "u16": torch.tensor([1, 2, 3], dtype=torch.uint16),
        }
        save_file(saved, file, metadata={"format": "pt", "tied": "bf16"})
        assert ours(file) == theirs(file)
        assert {name: stored.data for name, stored in ours(file).items()} == {
            name: tensor_bytes(tensor) for name, tensor in saved.items()
        }
        assert read_header(file).aliases == {"tied": "bf16"}


class TestCost:
    def test_one_open_and_no_map(self, file: Path) -> None:
        write_safetensors(file, TWO)
        events: list[tuple[str, object]] = []
        listening = True

        def listen(event: str, arguments: tuple[object, ...]) -> None:
            # A hook stays until the process ends, so it is deaf afterwards.
            if listening and (event == "mmap.__new__" or (event == "open" and arguments[0] == str(file))):
                events.append((event, arguments[0]))

        sys.addaudithook(listen)
        read_header(file)
        listening = False
        assert events == [("open", str(file))]

    @pytest.mark.skipif(sys.platform != "linux", reason="counts bytes in Linux' /proc")
    def test_of_8_tib_only_the_header_is_read(self, file: Path) -> None:
        write_safetensors(file, {"a": ("F32", (1 << 41,))})

        def bytes_read() -> int:
            lines = Path("/proc/thread-self/io").read_text().splitlines()
            return int(dict(line.split(": ") for line in lines)["rchar"])

        # Reading the counter counts itself: the first difference is that alone.
        before, again = bytes_read(), bytes_read()
        header = read_header(file)
        after = bytes_read()
        assert header.tensors["a"].nbytes == 1 << 43
        assert after - again == pytest.approx((again - before) + header.data_start, abs=8)
