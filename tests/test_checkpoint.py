import os
from pathlib import Path

import pytest
from placewise.models.checkpoint import read_checkpoint
from placewise.plans.errors import CheckpointError

from .checkpoints import (
    Tensors,
    refusal,
    shard_name,
    stored_bytes,
    write_json,
    write_raw,
    write_safetensors,
    write_sharded,
    write_transformers,
)

CONVERT = "convert it with safetensors.torch.save_file; pickled checkpoints cannot be mapped"
REST = "download the rest of the checkpoint"
NAME_IT = "give the file that you mean"
A: Tensors = {"a": ("F32", (2, 3)), "a.bias": ("F32", ())}
B: Tensors = {"b": ("BF16", (4,))}
FIRST, SECOND = shard_name("model", 1, 2), shard_name("model", 2, 2)


def files_of(path: Path) -> list[str]:
    facts = read_checkpoint(path)
    return [file.path.relative_to(facts.root).as_posix() for file in facts.files]


def refused(path: Path) -> tuple[str, str | None]:
    return refusal(lambda: read_checkpoint(path), CheckpointError)


class TestFound:
    def test_a_file(self, tmp_path: Path) -> None:
        facts = read_checkpoint(write_safetensors(tmp_path / "any.safetensors", A))
        assert facts.root == tmp_path
        assert {name: entry.nbytes for name, (_, entry) in facts.tensors.items()} == {"a": 24, "a.bias": 4}

    @pytest.mark.parametrize("name", ["model", "diffusion_pytorch_model", "pytorch_model", "any.fp16"])
    def test_the_only_file_of_a_folder(self, tmp_path: Path, name: str) -> None:
        write_safetensors(tmp_path / f"{name}.safetensors", A)
        assert files_of(tmp_path) == [f"{name}.safetensors"]

    def test_a_file_of_the_usual_name_among_others(self, tmp_path: Path) -> None:
        for name in ("adapter", "diffusion_pytorch_model", "diffusion_pytorch_model.fp16"):
            write_safetensors(tmp_path / f"{name}.safetensors", A)
        assert files_of(tmp_path) == ["diffusion_pytorch_model.safetensors"]

    def test_files_that_are_named_by_their_suffix_alone_are_weights(self, tmp_path: Path) -> None:
        write_safetensors(tmp_path / "any.safetensors", A)
        (tmp_path / "any.safetensors.part").touch()
        (tmp_path / "pytorch_model.bin").touch()
        (tmp_path / "folder.safetensors").mkdir()
        assert files_of(tmp_path) == ["any.safetensors"]

    @pytest.mark.parametrize("given", [".", FIRST, SECOND, "model.safetensors.index.json"])
    def test_shards_with_an_index(self, tmp_path: Path, given: str) -> None:
        write_sharded(tmp_path, [A, B])
        assert files_of(tmp_path / given) == [FIRST, SECOND]

    @pytest.mark.parametrize("given", [".", FIRST, SECOND])
    def test_shards_without_an_index(self, tmp_path: Path, given: str) -> None:
        write_sharded(tmp_path, [A, B], index={})
        assert files_of(tmp_path / given) == [FIRST, SECOND]

    def test_ten_shards_stand_in_the_order_of_their_numbers(self, tmp_path: Path) -> None:
        shards: list[Tensors] = [{f"t{number}": ("U8", (number,))} for number in range(12)]
        write_sharded(tmp_path, shards, stem="any", index={})
        assert files_of(tmp_path) == [shard_name("any", number, 12) for number in range(1, 13)]

    def test_shards_of_one_digit(self, tmp_path: Path) -> None:
        write_safetensors(tmp_path / "any-1-of-2.safetensors", A)
        write_safetensors(tmp_path / "any-2-of-2.safetensors", B)
        assert files_of(tmp_path) == ["any-1-of-2.safetensors", "any-2-of-2.safetensors"]

    def test_an_index_that_names_a_folder_below(self, tmp_path: Path) -> None:
        write_safetensors(tmp_path / "below" / "x.safetensors", B)
        write_json(tmp_path / "model.safetensors.index.json", {"weight_map": {"b": "below/x.safetensors"}})
        assert files_of(tmp_path) == ["below/x.safetensors"]

    def test_what_an_index_leaves_out_of_its_shards_still_counts(self, tmp_path: Path) -> None:
        write_sharded(tmp_path, [A, B], index={"a": FIRST, "b": SECOND})
        assert sorted(read_checkpoint(tmp_path).tensors) == ["a", "a.bias", "b"]

    def test_order_of_an_index_is_no_matter(self, tmp_path: Path) -> None:
        write_sharded(tmp_path, [A, B], index={"b": SECOND, "a.bias": FIRST, "a": FIRST})
        before = read_checkpoint(tmp_path)
        write_sharded(tmp_path, [A, B], index={"a": FIRST, "a.bias": FIRST, "b": SECOND})
        assert list(read_checkpoint(tmp_path).tensors) == list(before.tensors)

    def test_aliases_of_all_files(self, tmp_path: Path) -> None:
        write_sharded(tmp_path, [A, B], index={})
        write_safetensors(tmp_path / FIRST, A, metadata={"tied": "a", "b": "a"})
        assert read_checkpoint(tmp_path).aliases == {"tied": "a"}

    def test_a_hub_cache_of_links_to_blobs(self, tmp_path: Path) -> None:
        snapshot, blobs = tmp_path / "snapshots" / "abc", tmp_path / "blobs"
        write_sharded(snapshot, [A, B])
        blobs.mkdir()
        for number, file in enumerate(sorted(snapshot.iterdir())):
            file.rename(blobs / f"{number:064}")
            file.symlink_to(Path("../../blobs") / f"{number:064}")
        facts = read_checkpoint(snapshot)
        assert facts.root == snapshot
        assert files_of(snapshot) == [FIRST, SECOND]
        assert [file.size_bytes for file in facts.files] == [os.stat(file.path).st_size for file in facts.files]


class TestNotFound:
    @pytest.mark.parametrize("name", ["ghost", "ghost.safetensors", "ghost.safetensors.index.json", "model\0"])
    def test_no_such_path(self, tmp_path: Path, name: str) -> None:
        path = tmp_path / name
        assert refused(path) == (f"{path}: no such file or folder", "give a checkpoint's file or folder")

    def test_a_name_that_no_file_system_takes(self, tmp_path: Path) -> None:
        path = tmp_path / ("x" * 300)
        assert refused(path) == (f"{path}: File name too long", "give a checkpoint that can be read")

    def test_an_empty_folder(self, tmp_path: Path) -> None:
        assert refused(tmp_path) == (
            f"{tmp_path}: no safetensors file in it",
            "give the folder that holds the weights, or a pipeline folder with model_index.json",
        )

    @pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "v1-5.ckpt"])
    def test_only_pickled_files(self, tmp_path: Path, name: str) -> None:
        (tmp_path / name).touch()
        (tmp_path / "z.bin").touch()
        assert refused(tmp_path) == (f"{tmp_path}: no safetensors file in it, only {name}", CONVERT)
        assert refused(tmp_path / name) == (f"{tmp_path / name}: not a safetensors file", CONVERT)

    def test_a_link_to_a_blob_that_was_not_downloaded(self, tmp_path: Path) -> None:
        file = tmp_path / "model.safetensors"
        file.symlink_to("../blobs/0")
        expected = (f"{file}: No such file or directory", "give a safetensors file that can be read")
        assert refused(tmp_path) == expected


class TestAmbiguous:
    def test_a_file_and_an_index_of_the_same_name(self, tmp_path: Path) -> None:
        write_safetensors(tmp_path / "model.safetensors", A)
        write_sharded(tmp_path, [A, B])
        assert refused(tmp_path) == (
            f"{tmp_path}: more than one checkpoint: model.safetensors.index.json, model.safetensors",
            NAME_IT,
        )

    def test_two_files(self, tmp_path: Path) -> None:
        write_safetensors(tmp_path / "y.safetensors", A)
        write_safetensors(tmp_path / "x.safetensors", A)
        assert refused(tmp_path) == (f"{tmp_path}: more than one checkpoint: x.safetensors, y.safetensors", NAME_IT)

    def test_two_indexes(self, tmp_path: Path) -> None:
        write_sharded(tmp_path, [A, B], stem="y")
        write_sharded(tmp_path, [A, B], stem="x")
        names = "x.safetensors.index.json, y.safetensors.index.json"
        assert refused(tmp_path) == (f"{tmp_path}: more than one checkpoint: {names}", NAME_IT)

    def test_two_sets_of_shards(self, tmp_path: Path) -> None:
        write_sharded(tmp_path, [A, B], stem="model", index={})
        write_sharded(tmp_path, [A, B, {}], stem="model", index={})
        names = f"{shard_name('model', 1, 2)}, {shard_name('model', 1, 3)}"
        assert refused(tmp_path) == (f"{tmp_path}: more than one checkpoint: {names}", NAME_IT)

    def test_a_file_and_shards(self, tmp_path: Path) -> None:
        write_sharded(tmp_path, [A, B], stem="x", index={})
        write_safetensors(tmp_path / "y.safetensors", A)
        names = f"y.safetensors, {shard_name('x', 1, 2)}"
        assert refused(tmp_path) == (f"{tmp_path}: more than one checkpoint: {names}", NAME_IT)

    def test_one_tensor_in_two_shards(self, tmp_path: Path) -> None:
        write_sharded(tmp_path, [A, {**B, "a": ("F32", (2, 3))}])
        assert refused(tmp_path) == (
            f"{tmp_path}: tensor 'a' stands in both {FIRST} and {SECOND}",
            "leave one checkpoint in the folder, or name the file that you mean",
        )


class TestShards:
    @pytest.mark.parametrize("missing", [1, 2, 3])
    def test_one_of_three_is_missing(self, tmp_path: Path, missing: int) -> None:
        write_sharded(tmp_path, [A, B, {}], stem="any", index={})
        name = shard_name("any", missing, 3)
        (tmp_path / name).unlink()
        assert refused(tmp_path) == (f"{tmp_path}: shard {name} of 3 is missing", REST)
        assert refused(tmp_path / shard_name("any", 1 if missing > 1 else 2, 3)) == refused(tmp_path)

    def test_a_count_beyond_all_reason(self, tmp_path: Path) -> None:
        write_safetensors(tmp_path / f"any-1-of-{10**15}.safetensors", A)
        name = f"any-2-of-{10**15}.safetensors"
        assert refused(tmp_path) == (f"{tmp_path}: shard {name} of {10**15} is missing", REST)

    @pytest.mark.parametrize(("number", "count"), [(0, 2), (3, 2), (1, 0), (0, 0)])
    def test_a_number_that_is_not_of_the_count(self, tmp_path: Path, number: int, count: int) -> None:
        write_sharded(tmp_path, [A, B], stem="other", index={})
        file = write_safetensors(tmp_path / shard_name("any", number, count), A)
        assert refused(file) == (
            f"{file}: no shard has this number: {count} shards are numbered from 1 to {count}",
            "give the file another name if it is a whole checkpoint",
        )

    def test_a_truncated_shard(self, tmp_path: Path) -> None:
        write_sharded(tmp_path, [A, B])
        (tmp_path / SECOND).write_bytes(b"")
        assert refused(tmp_path) == (
            f"{tmp_path / SECOND}: 0 bytes, too short for a header",
            "this is not a complete safetensors file: download or save it again",
        )


class TestIndex:
    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            (b"", "Input data was truncated"),
            (b"[]", "Expected `object`, got `array`"),
            (b"{}", "Object missing required field `weight_map`"),
            (b'{"weight_map": ["a"]}', "Expected `object`, got `array` - at `$.weight_map`"),
            (b'{"weight_map": {"a": 1}}', "Expected `str`, got `int` - at `$.weight_map[...]`"),
            (b'{"x": ' + b"[" * 100_000, "maximum recursion depth exceeded while deserializing an object"),
        ],
        ids=["empty", "array", "no-map", "list", "number", "deep"],
    )
    def test_of_another_form(self, tmp_path: Path, content: bytes, reason: str) -> None:
        index = tmp_path / "model.safetensors.index.json"
        index.write_bytes(content)
        assert refused(tmp_path) == (f"{index}: not an index: {reason}", "download it again")

    def test_of_nothing(self, tmp_path: Path) -> None:
        index = write_json(tmp_path / "model.safetensors.index.json", {"weight_map": {}})
        assert refused(tmp_path) == (f"{index}: names no tensor", "download it again")

    def test_a_missing_shard(self, tmp_path: Path) -> None:
        write_sharded(tmp_path, [A, B])
        (tmp_path / SECOND).unlink()
        index = tmp_path / "model.safetensors.index.json"
        assert refused(tmp_path) == (f"{index}: names {SECOND}, which does not exist", REST)

    def test_a_shard_of_too_long_a_name(self, tmp_path: Path) -> None:
        write_json(tmp_path / "model.safetensors.index.json", {"weight_map": {"a": "x" * 300}})
        expected = (f"{tmp_path / ('x' * 300)}: File name too long", "give a checkpoint that can be read")
        assert refused(tmp_path) == expected

    @pytest.mark.parametrize(
        "file", ["../x.safetensors", "below/../../x.safetensors", "/x.safetensors", "a\\x", "", "."]
    )
    def test_a_path_that_leads_outside(self, tmp_path: Path, file: str) -> None:
        folder = tmp_path / "model"
        write_safetensors(tmp_path / "x.safetensors", A)
        index = write_json(folder / "model.safetensors.index.json", {"weight_map": {"a": file}})
        assert refused(folder) == (
            f"{index}: tensor 'a' is said to be in '{file}', outside the checkpoint's folder",
            "do not use this checkpoint; an index names files beside itself",
        )

    def test_a_tensor_that_its_shard_does_not_hold(self, tmp_path: Path) -> None:
        write_sharded(tmp_path, [A, B], index={"a": FIRST, "b": FIRST})
        index = tmp_path / "model.safetensors.index.json"
        assert refused(tmp_path) == (
            f"{index}: tensor 'b' is said to be in {FIRST}, which does not hold it",
            "index and shards are of different checkpoints: download both again",
        )

    def test_a_shard_that_is_no_safetensors_file(self, tmp_path: Path) -> None:
        write_raw(tmp_path / "pytorch_model.bin", b"PK", 100)
        write_json(tmp_path / "model.safetensors.index.json", {"weight_map": {"a": "pytorch_model.bin"}})
        assert refused(tmp_path) == (
            f"{tmp_path / 'pytorch_model.bin'}: the header is not a JSON object: "
            "JSON is malformed: invalid character (byte 0)",
            "this is not a complete safetensors file: download or save it again",
        )


def test_a_folder_that_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def locked(path: Path) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "iterdir", locked)
    assert refused(tmp_path) == (f"{tmp_path}: Permission denied", "give a checkpoint that can be read")


def test_the_builder_of_a_transformers_folder_is_read_whole(tmp_path: Path) -> None:
    facts = read_checkpoint(write_transformers(tmp_path, {**A, **B}))
    assert {name: entry.nbytes for name, (_, entry) in facts.tensors.items()} == {
        name: stored_bytes(*spec) for name, spec in {**A, **B}.items()
    }
