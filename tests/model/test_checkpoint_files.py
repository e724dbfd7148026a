import json
import os
import shutil
import stat
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from suzuri.model.checkpoint_files import (
    MAX_HEADER_BYTES,
    CheckpointError,
    encode_header,
    read_header,
    scan,
)

GOLDEN = Path(__file__).parent.parent / "golden"
BASE = GOLDEN / "base" / "original"
INDEX = "model.safetensors.index.json"

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]


def write_shard(path: Path, tensors: Tensors) -> None:
    header = encode_header((name, dtype, shape) for name, (dtype, shape, _) in tensors.items())
    path.write_bytes(header + b"".join(data for _, _, data in tensors.values()))


def write_raw(path: Path, header: Any, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def write_index(folder: Path, weight_map: dict[str, str], name: str = INDEX) -> None:
    (folder / name).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def values(count: int, first: int = 0) -> tuple[str, tuple[int, ...], bytes]:
    """A BF16 tensor of `count` values whose bytes differ with `first`."""
    return "BF16", (count,), bytes((first + i) % 251 for i in range(2 * count))


def three_shards(folder: Path, *, with_index: bool = True) -> list[str]:
    """Three shards of two tensors each, called model.llm.a .. f."""
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    weight_map: dict[str, str] = {}
    for i, file in enumerate(names):
        tensors = {
            f"model.llm.{letter}": values(3000 + i, first=ord(letter))
            for letter in "abcdef"[2 * i : 2 * i + 2]
        }
        write_shard(folder / file, tensors)
        weight_map |= dict.fromkeys(tensors, file)
    if with_index:
        write_index(folder, weight_map)
    return names


def refused(folder: Path | str, *words: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        scan(folder)
    message = str(caught.value)
    for word in words:
        assert word in message, f"{word!r} is not in: {message}"
    return message


def test_golden_folder() -> None:
    found = scan(BASE)
    assert len(found.tensors) == 232
    assert found.files == ("model-00001-of-00001.safetensors", "mtp.safetensors")
    assert found.notes == ()
    entry = found.tensors["model.llm.layers.2.mlp.experts.w13_weight"]
    assert (entry.dtype, entry.shape, entry.nbytes) == ("BF16", (8, 64, 64), 65536)


@pytest.mark.parametrize("with_index", [True, False])
def test_entries_point_at_the_bytes(tmp_path: Path, with_index: bool) -> None:
    three_shards(tmp_path, with_index=with_index)
    found = scan(tmp_path)
    assert sorted(found.tensors) == [f"model.llm.{letter}" for letter in "abcdef"]
    for name, entry in found.tensors.items():
        data = (tmp_path / entry.file).read_bytes()
        count = entry.shape[0]
        assert data[entry.start : entry.start + entry.nbytes] == values(count, ord(name[-1]))[2]


def test_header_is_what_the_format_library_reads(tmp_path: Path) -> None:
    tensors: Tensors = {
        "scale": ("F32", (2,), struct.pack("<2f", 1.5, -2)),
        "empty": ("F32", (0, 3), b""),
        "codes": ("U8", (2, 2), bytes([1, 2, 3, 4])),
    }
    write_shard(tmp_path / "x.safetensors", tensors)
    loaded = load_file(tmp_path / "x.safetensors")
    assert loaded["scale"].tolist() == [1.5, -2]
    assert loaded["empty"].shape == (0, 3)
    assert loaded["codes"].tolist() == [[1, 2], [3, 4]]
    ours = read_header(tmp_path / "x.safetensors")
    assert {name: entry.shape for name, entry in ours.items()} == {
        name: shape for name, (_, shape, _) in tensors.items()
    }


# W01: shards that are cut, padded or not what they should be.


@pytest.mark.parametrize("with_index", [True, False])
@pytest.mark.parametrize("missing", [1, 100, 4096])
def test_w01_cut_data(tmp_path: Path, missing: int, with_index: bool) -> None:
    shard = tmp_path / three_shards(tmp_path, with_index=with_index)[1]
    os.truncate(shard, shard.stat().st_size - missing)
    refused(tmp_path, str(shard), f"{missing} bytes are missing", "'model.llm.d'")


def test_w01_first_tensor_that_is_cut_is_named(tmp_path: Path) -> None:
    shard = tmp_path / three_shards(tmp_path)[0]
    os.truncate(shard, shard.stat().st_size - 7000)
    refused(tmp_path, "7000 bytes are missing", "'model.llm.a'")


@pytest.mark.parametrize("kept", [0, 3, 7])
def test_w01_cut_before_the_header(tmp_path: Path, kept: int) -> None:
    shard = tmp_path / three_shards(tmp_path)[1]
    os.truncate(shard, kept)
    refused(tmp_path, str(shard), "inside its header", f"it has {kept} bytes")


def test_w01_cut_inside_the_header(tmp_path: Path) -> None:
    shard = tmp_path / three_shards(tmp_path)[1]
    (length,) = struct.unpack("<Q", shard.read_bytes()[:8])
    os.truncate(shard, 60)
    refused(tmp_path, str(shard), "inside its header", f"{8 + length - 60} bytes of it")


def test_w01_surplus_bytes(tmp_path: Path) -> None:
    shard = tmp_path / three_shards(tmp_path)[2]
    with shard.open("ab") as file:
        file.write(bytes(5))
    refused(tmp_path, str(shard), "5 surplus bytes")


@pytest.mark.parametrize(
    ("offsets", "words"),
    [
        ([[0, 4], [2, 6]], ["'b'", "overlaps tensor 'a'", "2 bytes"]),
        ([[0, 4], [5, 9]], ["'b'", "hole after tensor 'a'", "1 bytes"]),
        ([[2, 6], [6, 10]], ["'a'", "hole after the header"]),
        ([[0, 4], [0, 4]], ["'b'", "overlaps tensor 'a'"]),
        ([[0, 4], [4, 9]], ["'b'", "given 5 bytes", "takes 4"]),
        ([[0, 4], [8, 4]], ["'b'", "no byte range"]),
        ([[0, 4], [4]], ["'b'", "no byte range"]),
        ([[0, 4], [-4, 0]], ["'b'", "no byte range"]),
        ([[0, 4], [True, 4]], ["'b'", "no byte range"]),
        ([[0, 4], "x"], ["'b'", "no byte range"]),
    ],
)
def test_w01_offsets_that_do_not_fit(tmp_path: Path, offsets: list[Any], words: list[str]) -> None:
    header = {
        name: {"dtype": "BF16", "shape": [2], "data_offsets": span}
        for name, span in zip("ab", offsets, strict=True)
    }
    write_raw(tmp_path / "model.safetensors", header, bytes(8))
    refused(tmp_path, "model.safetensors", *words)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (struct.pack("<Q", MAX_HEADER_BYTES + 1), ["not a safetensors file", "100000001"]),
        (b"\x89PNG\r\n\x1a\n" + bytes(100), ["not a safetensors file"]),
        (b"version https://git-lfs.github.com/spec/v1\n", ["Git LFS pointer", "git lfs pull"]),
        (struct.pack("<Q", 4) + b"nope", ["header", "not valid JSON"]),
        (struct.pack("<Q", 2) + b"[]", ["header", "JSON object"]),
        (struct.pack("<Q", 2) + b"\xff\xfe", ["header", "not UTF-8"]),
        (struct.pack("<Q", 0), ["header", "not valid JSON"]),
    ],
)
def test_w01_not_a_header(tmp_path: Path, content: bytes, words: list[str]) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    refused(tmp_path, str(tmp_path / "model.safetensors"), *words)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (3, ["no description"]),
        ({"dtype": "F99", "shape": [1], "data_offsets": [0, 1]}, ["'F99'", "not known"]),
        ({"shape": [1], "data_offsets": [0, 1]}, ["None", "not known"]),
        ({"dtype": "U8", "shape": [-1], "data_offsets": [0, 1]}, ["[-1]", "not a shape"]),
        ({"dtype": "U8", "shape": [1.0], "data_offsets": [0, 1]}, ["[1.0]", "not a shape"]),
        ({"dtype": "U8", "shape": None, "data_offsets": [0, 1]}, ["not a shape"]),
    ],
)
def test_w01_odd_descriptions(tmp_path: Path, spec: Any, words: list[str]) -> None:
    write_raw(tmp_path / "model.safetensors", {"model.llm.x": spec}, bytes(1))
    refused(tmp_path, "model.safetensors", "'model.llm.x'", *words)


def test_w01_name_twice_in_one_header(tmp_path: Path) -> None:
    one = b'"x":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'
    write_raw(tmp_path / "model.safetensors", b"{" + one + b"," + one + b"}", bytes(1))
    refused(tmp_path, "model.safetensors", "'x' appears twice")


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_w01_no_damage_passes_unseen_or_crashes(tmp_path: Path, data: st.DataObject) -> None:
    """Any cut is refused; any changed header byte is refused or leaves every tensor in the file."""
    path = tmp_path / "model.safetensors"
    write_shard(path, {"model.llm.a": values(5), "model.llm.b": ("F32", (2, 1), bytes(8))})
    whole = path.read_bytes()
    if data.draw(st.booleans(), label="cut"):
        kept = data.draw(st.integers(0, len(whole) - 1), label="kept")
        path.write_bytes(whole[:kept])
        refused(tmp_path, str(path))
        return
    position = data.draw(st.integers(0, len(whole) - 19), label="position")
    changed = bytearray(whole)
    changed[position] = data.draw(st.integers(0, 255), label="byte")
    path.write_bytes(changed)
    try:
        found = scan(tmp_path)
    except CheckpointError as error:
        assert str(path) in str(error)
    else:
        assert sum(entry.nbytes for entry in found.tensors.values()) == 18


# W02: a shard is missing.


def test_w02_missing_shard_of_the_index(tmp_path: Path) -> None:
    (tmp_path / three_shards(tmp_path)[1]).unlink()
    refused(tmp_path, INDEX, "not there: model-00002-of-00003.safetensors")


def test_w02_missing_shard_without_index(tmp_path: Path) -> None:
    (tmp_path / three_shards(tmp_path, with_index=False)[1]).unlink()
    refused(tmp_path, "lacks model-00002-of-00003.safetensors", "no index")


def test_w02_many_missing_shards_are_counted(tmp_path: Path) -> None:
    write_shard(tmp_path / "model-00009-of-00032.safetensors", {"model.llm.a": values(1)})
    refused(tmp_path, "model-00001-of-00032.safetensors", "and 28 more")


# W04: the index and the files disagree.


def test_w04_index_of_other_files(tmp_path: Path) -> None:
    names = three_shards(tmp_path)
    for i, name in enumerate(names):
        (tmp_path / name).rename(tmp_path / f"model-{i + 1}-of-3.safetensors")
    refused(tmp_path, INDEX, names[0], "model-1-of-3.safetensors", "delete the index")
    (tmp_path / INDEX).unlink()
    assert len(scan(tmp_path).tensors) == 6


def test_w04_two_indexes(tmp_path: Path) -> None:
    three_shards(tmp_path)
    write_index(tmp_path, {}, "model.fp32.safetensors.index.json")
    refused(tmp_path, INDEX, "model.fp32.safetensors.index.json", "2 indexes")


def test_w04_tensor_is_in_another_file_than_listed(tmp_path: Path) -> None:
    names = three_shards(tmp_path)
    weight_map = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    weight_map["model.llm.a"] = names[2]
    write_index(tmp_path, weight_map)
    refused(tmp_path, INDEX, f"'model.llm.a' should be in {names[2]} and is in {names[0]}")


def test_w04_listed_tensor_is_nowhere(tmp_path: Path) -> None:
    names = three_shards(tmp_path)
    weight_map = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    write_index(tmp_path, {**weight_map, "model.llm.g": names[2]})
    refused(tmp_path, f"'model.llm.g' should be in {names[2]} and is nowhere")


def test_w04_tensor_of_a_listed_file_is_not_listed(tmp_path: Path) -> None:
    names = three_shards(tmp_path)
    weight_map = json.loads((tmp_path / INDEX).read_text())["weight_map"]
    del weight_map["model.llm.c"]
    write_index(tmp_path, weight_map)
    refused(tmp_path, f"'model.llm.c' is in {names[1]} and is not listed")


def test_w04_file_with_tensors_is_not_listed(tmp_path: Path) -> None:
    three_shards(tmp_path)
    write_shard(tmp_path / "mtp.safetensors", {"model.mtp.x": values(2)})
    refused(tmp_path, INDEX, "omits mtp.safetensors", "'model.mtp.x'")


def test_w04_unlisted_copy_is_left_alone_with_a_note(tmp_path: Path) -> None:
    names = three_shards(tmp_path)
    shutil.copy(tmp_path / names[0], tmp_path / "consolidated.safetensors")
    found = scan(tmp_path)
    assert len(found.tensors) == 6 and found.files == tuple(names)
    assert "consolidated.safetensors is not in" in found.notes[0]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"weight_map": ', ["line 1 column 16"]),
        ("{}", ["no weight_map"]),
        ('{"weight_map": {}}', ["no weight_map"]),
        ('{"weight_map": {"a": 3}}', ["'a' is in 3"]),
        ('{"weight_map": {"a": "x.bin"}}', ["'a' is in 'x.bin'"]),
        ('{"weight_map": {"a": "../x.safetensors"}}', ["outside the model folder"]),
        ('{"weight_map": {"a": "/x.safetensors"}}', ["outside the model folder"]),
        (
            '{"weight_map": {"llm.a": "x.safetensors", "model.llm.a": "y.safetensors"}}',
            ["'model.llm.a' in two files"],
        ),
    ],
)
def test_w04_broken_index(tmp_path: Path, content: str, words: list[str]) -> None:
    three_shards(tmp_path, with_index=False)
    (tmp_path / INDEX).write_text(content)
    refused(tmp_path, str(tmp_path / INDEX), *words)


# W05: names that occur twice.


@pytest.mark.parametrize("with_index", [True, False])
def test_w05_duplicate_name_with_other_bytes(tmp_path: Path, with_index: bool) -> None:
    write_shard(tmp_path / "a.safetensors", {"model.llm.x": values(9), "model.llm.y": values(1)})
    write_shard(tmp_path / "b.safetensors", {"model.llm.x": values(9, 1), "model.llm.z": values(1)})
    if with_index:
        places = {"x": "a", "y": "a", "z": "b"}
        write_index(tmp_path, {f"model.llm.{k}": f"{v}.safetensors" for k, v in places.items()})
    refused(tmp_path, "'model.llm.x'", "a.safetensors", "b.safetensors", "different contents")


def test_w05_duplicate_name_with_other_shape(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.safetensors", {"model.llm.x": ("BF16", (2, 3), bytes(12))})
    write_shard(tmp_path / "b.safetensors", {"model.llm.x": ("BF16", (3, 2), bytes(12))})
    refused(tmp_path, "'model.llm.x'", "different contents")


@pytest.mark.parametrize("listed_in", ["a", "b", None])
def test_w05_equal_duplicate_is_noted(tmp_path: Path, listed_in: str | None) -> None:
    write_shard(tmp_path / "a.safetensors", {"model.llm.x": values(9), "model.llm.y": values(1)})
    write_shard(tmp_path / "b.safetensors", {"model.llm.z": values(1), "llm.x": values(9)})
    if listed_in:
        places = {"x": listed_in, "y": "a", "z": "b"}
        write_index(tmp_path, {f"model.llm.{k}": f"{v}.safetensors" for k, v in places.items()})
    found = scan(tmp_path)
    assert found.tensors["model.llm.x"].file == f"{listed_in or 'a'}.safetensors"
    assert "model.llm.x is in a.safetensors and again, equal, in b.safetensors" in found.notes


def test_w05_difference_in_the_last_byte_of_a_long_duplicate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("suzuri.model.checkpoint_files.COMPARE_BYTES", 64)
    data = values(100)[2]
    write_shard(tmp_path / "a.safetensors", {"model.llm.x": ("BF16", (100,), data)})
    write_shard(tmp_path / "b.safetensors", {"model.llm.x": ("BF16", (100,), data)})
    assert len(scan(tmp_path).tensors) == 1
    other = data[:-1] + bytes([data[-1] ^ 1])
    write_shard(tmp_path / "b.safetensors", {"model.llm.x": ("BF16", (100,), other)})
    refused(tmp_path, "different contents")


def test_w05_empty_tensor_is_scanned(tmp_path: Path) -> None:
    write_shard(
        tmp_path / "model.safetensors",
        {"model.llm.x": values(1), "e": ("F32", (0, 4), b""), "model.llm.y": values(1)},
    )
    assert scan(tmp_path).tensors["e"].nbytes == 0


# W06: names with and without the leading `model.`.


def test_w06_both_spellings_of_a_name(tmp_path: Path) -> None:
    names = ["model.llm.a", "llm.b", "visual.c", "model.visual.d", "audio.e", "mtp.f", "other.g"]
    write_shard(tmp_path / "model.safetensors", dict.fromkeys(names, values(1)))
    write_index(tmp_path, dict.fromkeys(names, "model.safetensors"))
    found = scan(tmp_path).tensors
    assert list(found) == [
        "model.llm.a",
        "model.llm.b",
        "model.visual.c",
        "model.visual.d",
        "model.audio.e",
        "model.mtp.f",
        "other.g",
    ]
    assert found["model.llm.b"].stored_name == "llm.b"


def test_w06_index_in_the_other_spelling(tmp_path: Path) -> None:
    write_shard(tmp_path / "model.safetensors", {"llm.a": values(1), "model.mtp.b": values(1)})
    write_index(tmp_path, dict.fromkeys(["model.llm.a", "mtp.b"], "model.safetensors"))
    assert list(scan(tmp_path).tensors) == ["model.llm.a", "model.mtp.b"]


# W09: forms of a folder.


def test_w09_relative_links_into_a_store(tmp_path: Path) -> None:
    store, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    three_shards(store)
    for i, file in enumerate(sorted(store.iterdir())):
        file.rename(store / str(i))
        (snapshot / file.name).symlink_to(Path("..") / ".." / "blobs" / str(i))
    link = tmp_path / "latest"
    link.symlink_to("snapshots/1")
    assert scan(link).tensors == scan(snapshot).tensors
    assert len(scan(snapshot).tensors) == 6


def test_w09_broken_link_is_named_with_its_target(tmp_path: Path) -> None:
    shard = tmp_path / three_shards(tmp_path)[1]
    shard.unlink()
    shard.symlink_to("../blobs/gone")
    refused(tmp_path, str(shard), "../blobs/gone", "target is missing")


def test_w09_link_loop_is_named(tmp_path: Path) -> None:
    shard = tmp_path / three_shards(tmp_path)[1]
    shard.unlink()
    shard.symlink_to("again")
    (tmp_path / "again").symlink_to(shard.name)
    refused(tmp_path, str(shard), "cannot be opened", "symbolic links")


def test_w09_folder_that_is_a_loop_or_a_broken_link(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    refused(tmp_path / "loop", "loop", "symbolic links")
    (tmp_path / "broken").symlink_to("gone")
    refused(tmp_path / "broken", "no such folder", "broken link to gone")


def test_w09_read_only_folder(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    three_shards(folder)
    for file in folder.iterdir():
        file.chmod(stat.S_IRUSR)
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    try:
        assert len(scan(folder).tensors) == 6
    finally:
        folder.chmod(stat.S_IRWXU)


@pytest.mark.parametrize("name", ["with space", "墨 すずり", "percent%20", "quote'\"", "-dash"])
def test_w09_odd_folder_names_and_trailing_slash(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    three_shards(folder)
    assert len(scan(f"{folder}/").tensors) == 6
    assert len(scan(folder).tensors) == 6


def test_w09_relative_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    three_shards(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    assert len(scan("model").tensors) == 6
    monkeypatch.chdir(tmp_path / "model")
    assert len(scan(".").tensors) == 6


def test_w09_missing_folder_and_file_instead_of_folder(tmp_path: Path) -> None:
    refused(tmp_path / "gone", str(tmp_path / "gone"), "no such folder")
    name = three_shards(tmp_path)[0]
    refused(tmp_path / name, name, "is a file", "model folder")


def test_w09_folder_without_weights(tmp_path: Path) -> None:
    refused(tmp_path, str(tmp_path), "no *.safetensors file")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    refused(tmp_path, "pytorch_model.bin", "this format is not read")


def test_w09_parent_of_the_model_folder(tmp_path: Path) -> None:
    three_shards(tmp_path / "original")
    refused(tmp_path, "no *.safetensors file", f"did you mean {tmp_path / 'original'}?")


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo], ids=["folder", "pipe"])
def test_w09_shard_that_is_no_plain_file(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "model.safetensors")
    refused(tmp_path, "model.safetensors", "not a plain file")
