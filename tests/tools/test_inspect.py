"""`suzuri inspect`: parts, formats and sizes; damaged folders are shown, with every fault."""

import dataclasses
import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from suzuri.config import parse
from suzuri.model.checkpoint_files import encode_header, scan
from suzuri.model.config import PRESETS, ModelConfig, Quantization
from suzuri.model.tensor_names import Layout
from suzuri.model.tensor_table import Entry, Storage, released_nvfp4_layers, table
from suzuri.tools.doctor.nvidia import Nvidia
from suzuri.tools.doctor.run import model_lines, this_machine
from suzuri.tools.inspect.config import InspectConfig
from suzuri.tools.inspect.parts import TEXT_GROUPS, UNKNOWN, experts, group_of, groups, ranges
from suzuri.tools.inspect.report import Findings, as_document, chosen, size
from suzuri.tools.inspect.run import find, of_shape, run_inspect

BASE = Path(__file__).parent.parent / "golden" / "base" / "original"
MAIN = "model-00001-of-00001.safetensors"
INDEX = "model.safetensors.index.json"
CONFIG = ModelConfig.from_file(BASE)


def copied(tmp_path: Path) -> Path:
    """A copy of a complete checkpoint of two files with an index."""
    folder = tmp_path / "model"
    shutil.copytree(BASE, folder)
    return folder


def written(folder: Path, entries: list[Entry], num_files: int = 1) -> Path:
    """A checkpoint whose data are zero bytes, but for the few numbers that are read here."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(BASE / "config.json", folder)
    for i in range(num_files):
        part = entries[i::num_files]
        header = encode_header((entry.name, entry.dtype, entry.shape) for entry in part)
        path = folder / f"model-{i + 1:05d}-of-{num_files:05d}.safetensors"
        path.write_bytes(header)
        os.truncate(path, len(header) + sum(entry.num_bytes for entry in part))
        with path.open("r+b") as file:
            at = len(header)
            for entry in part:
                file.seek(at)
                file.write(numbers(entry))
                at += entry.num_bytes
    return folder


def numbers(entry: Entry) -> bytes:
    """What is in the small tensors of NVFP4: ones, and the shape of the codes."""
    if entry.field == "original_shape":
        shape = (entry.stop - entry.start, *entry.parameter_shape[1:])
        return struct.pack("<3q", *shape)
    if entry.field in ("global_scales", "global_divisors", "input_divisor"):
        return struct.pack("<f", 1.0) * entry.num_values
    return struct.pack("<H", 0x3F80) if entry.field == "input_amax" else b""


def shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any], str]:
    """(exit code, the JSON document, the text of the tables) of one folder."""
    code = run_inspect(InspectConfig(model=str(folder), json=True))
    document = json.loads(capsys.readouterr().out)
    assert run_inspect(InspectConfig(model=str(folder))) == code
    return code, document, capsys.readouterr().out


def test_a_complete_folder(capsys: pytest.CaptureFixture[str]) -> None:
    code, document, text = shown(BASE, capsys)
    assert code == 0 and document["complete"] and document["faults"] == []
    assert text.splitlines()[-1] == "OK: complete, 232 tensors, 1.59 MB"
    assert document["bytes"] == sum(entry.num_bytes for entry in table(CONFIG))
    assert document["layout"] == "released names"
    assert document["experts"]["plain"] == {"BF16": [2, 3, 4, 5, 6, 7]}
    parts = {(part["part"], part["name"]): part for part in document["parts"]}
    assert [name for part, name in parts if part == "text"] == list(TEXT_GROUPS)
    assert parts["text", "routed experts"]["num_values"] == 6 * 8 * (2 * 32 * 64 + 64 * 32)
    assert parts["text", "router"]["dtypes"] == {"BF16": 6 * 10 * 64 * 2, "F32": 6 * 9 * 4}
    assert parts["mtp", "depth 1"]["num_tensors"] == 20
    files = {file["name"]: file for file in document["files"]}
    assert files[MAIN]["num_bytes"] == (BASE / MAIN).stat().st_size
    assert (files["mtp.safetensors"]["num_tensors"], files[MAIN]["state"]) == (60, "read")
    assert "6 local (window 8), 2 global; 2 dense, 6 with experts" in text
    assert f"suzuri plan {BASE} --gpu" in text


def test_the_published_totals_of_inkling_small() -> None:
    config = PRESETS["inkling-small"]
    found = of_shape(config, "small")
    assert found.num_bytes == 531_912_898_740
    assert len(found.tensors) == 1048
    assert sum(group.num_values for group in groups(found.tensors)) == 265_956_439_090
    layers = released_nvfp4_layers(config)
    quantised = dataclasses.replace(
        config, quantization=Quantization(names="modelopt", layers=layers)
    )
    found = of_shape(quantised, "small nvfp4")
    sums: dict[str, int] = {}
    for group in groups(found.tensors):
        for dtype, count in group.dtypes.items():
            sums[dtype] = sums.get(dtype, 0) + count
    assert sums["U8"] == 125_627_793_408 and sums["F8_E4M3"] == 15_703_474_176
    # Counted as weights, not as bytes: packing changes nothing.
    assert sum(group.num_values for group in groups(found.tensors)) == 265_956_439_090
    assert dict(experts(found.tensors).nvfp4) == {"modelopt": layers}


@pytest.mark.parametrize("layout", ["released", "transformers"])
@pytest.mark.parametrize("names", ["", "modelopt", "compressed-tensors"])
def test_names_are_sorted_as_the_table_has_them(layout: Layout, names: str) -> None:
    """Grouping knows names only; the table knows what each tensor is."""
    storage = Storage(
        layout=layout, nvfp4_layers=(3, 4) if names else (), names=names or "modelopt"
    )
    ours = {
        ".embed.weight": "embed",
        ".unembed.weight": "unembed",
        ".attn.qkvr.weight": "attention",
        ".attn.rel_proj": "attention",
        ".attn.out.weight": "attention",
        ".mlp.gate_up.weight": "dense MLP",
        ".mlp.down.weight": "dense MLP",
        ".mlp.global_scale": "dense MLP",
        ".router.weight": "router",
        ".router.bias": "router",
        ".router.global_scale": "router",
    }
    seen: set[str] = set()
    for entry in table(CONFIG, storage):
        part, group = group_of(entry.name)
        assert part == entry.part and group != UNKNOWN, entry.name
        if entry.depth is not None:
            assert group == f"depth {entry.depth}"
        if part != "text":
            continue
        routed = CONFIG.text.n_routed_experts
        expected = next((g for end, g in ours.items() if entry.parameter.endswith(end)), None)
        if entry.parameter.endswith((".mlp.gate_up", ".mlp.down")):
            expected = "routed experts" if entry.start < routed else "shared experts"
        assert group == (expected or "norms and convs"), entry.name
        seen.add(group)
    assert seen == set(TEXT_GROUPS)


def test_names_of_other_models_are_unknown() -> None:
    for name in ("transformer.h.0.attn.weight", "model.llm.layers.x.attn.wq_du.weight", "lm", ""):
        assert group_of(name) == ("other", UNKNOWN)


@pytest.mark.parametrize("names", ["modelopt", "compressed-tensors"])
def test_nvfp4_with_and_without_activation_scales(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], names: str
) -> None:
    """q01: a weight-only checkpoint is called so. q04: neither config nor side file says it."""
    entries = list(table(CONFIG, Storage(nvfp4_layers=(3, 4, 6), names=names)))
    code, document, text = shown(written(tmp_path / "whole", entries), capsys)
    assert code == 0, document["faults"]
    assert document["experts"]["nvfp4"] == {names: [3, 4, 6]}
    text = " ".join(text.split())
    assert "in layers 3-4, 6; BF16 in layers 2, 5, 7; with activation scales" in text
    assert "which neither config.json nor hf_quant_config.json says" in text
    bare = [entry for entry in entries if entry.field not in ("input_amax", "input_divisor")]
    code, document, text = shown(written(tmp_path / "bare", bare), capsys)
    assert code == 0, document["faults"]
    assert "weight-only" in text and document["experts"]["num_quantised"] == 6
    scale = next(entry for entry in entries if entry.field == "block_scales")
    broken = [entry for entry in entries if entry is not scale]
    code, document, _ = shown(written(tmp_path / "broken", broken), capsys)
    assert code == 1
    assert any(scale.name in fault for fault in document["faults"])


def test_the_transformers_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entries = [e for e in table(CONFIG, Storage(layout="transformers")) if e.part != "mtp"]
    code, document, text = shown(written(tmp_path / "hf", entries, num_files=3), capsys)
    assert code == 0, document["faults"]
    assert document["layout"] == "transformers names"
    assert "note: mtp" in text
    parts = {(part["part"], part["name"]): part for part in document["parts"]}
    original = {(group.part, group.name): group for group in groups(scan(BASE).tensors)}
    assert {key for key in original if key[0] != "mtp"} == parts.keys()
    for key, part in parts.items():
        assert part["num_values"] == original[key].num_values, key


@pytest.mark.parametrize("cut", [1, 100, 4096])
def test_a_cut_file_is_shown_with_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cut: int
) -> None:
    """w01"""
    folder = copied(tmp_path)
    path = folder / MAIN
    os.truncate(path, path.stat().st_size - cut)
    code, document, text = shown(folder, capsys)
    assert code == 1
    (fault,) = document["faults"]
    assert f"{cut} bytes are missing" in fault and MAIN in fault
    assert {file["name"]: file["state"] for file in document["files"]}[MAIN] == "faulty"
    assert document["bytes"] == sum(entry.num_bytes for entry in table(CONFIG))
    assert text.splitlines()[-1].startswith("INCOMPLETE or faulty: 1 fault(s), first")


def test_a_file_cut_inside_its_header_leaves_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """w01"""
    folder = copied(tmp_path)
    os.truncate(folder / MAIN, 200)
    code, document, _ = shown(folder, capsys)
    assert code == 1
    assert "inside its header" in document["faults"][0]
    assert any("model.llm.embed.weight" in fault for fault in document["faults"])
    assert [part["part"] for part in document["parts"]] == ["mtp"] * 3
    # Of the 172 tensors those of the towers (8) may be absent; 20 are listed, the rest counted.
    assert "165 fault(s)" in document["verdict"]


@pytest.mark.parametrize("names", ["", "modelopt"])
def test_a_missing_shard_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], names: str
) -> None:
    """w02"""
    storage = Storage(nvfp4_layers=(3, 4) if names else ())
    folder = written(tmp_path / "m", list(table(CONFIG, storage)), num_files=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    code, document, _ = shown(folder, capsys)
    assert code == 1
    assert "lacks model-00002-of-00003.safetensors" in document["faults"][0]
    assert any("is missing from every file" in fault for fault in document["faults"])


def test_indexes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """w04: a stale index, none, two of them; a file that the index leaves out."""
    folder = copied(tmp_path)
    index = json.loads((folder / INDEX).read_text())
    (folder / INDEX).unlink()
    assert shown(folder, capsys)[0] == 0
    stale = {"weight_map": dict.fromkeys(index["weight_map"], "model-1-of-4.safetensors")}
    (folder / INDEX).write_text(json.dumps(stale))
    code, document, _ = shown(folder, capsys)
    assert code == 1 and "names files that are not there" in document["faults"][0]
    assert {file["state"] for file in document["files"] if file["num_tensors"]} == {
        "left out: not in the index"
    }
    (folder / "other.safetensors.index.json").write_text(json.dumps(index))
    code, document, _ = shown(folder, capsys)
    assert code == 1 and "2 indexes" in document["faults"][0] and document["bytes"] > 0
    (folder / "other.safetensors.index.json").unlink()
    (folder / INDEX).write_text("{broken")
    code, document, _ = shown(folder, capsys)
    assert code == 1 and "not valid JSON" in document["faults"][0] and document["bytes"] > 0


def test_odd_tensors_are_all_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """w05: a transposed one, another dtype, a surplus one and a missing one, at once."""
    entries = {entry.name: entry for entry in table(CONFIG)}
    turned = "model.llm.layers.0.mlp.w2_md.weight"
    retyped = "model.llm.layers.1.attn_norm.weight"
    entries[turned] = dataclasses.replace(
        entries[turned], shape=tuple(reversed(entries[turned].shape))
    )
    entries[retyped] = dataclasses.replace(entries[retyped], dtype="F32")
    entries["extra"] = dataclasses.replace(entries["model.llm.norm.weight"], name="model.extra")
    del entries["model.llm.unembed.weight"]
    code, document, text = shown(written(tmp_path / "m", list(entries.values())), capsys)
    assert code == 1
    faults = "\n".join(document["faults"])
    assert len(document["faults"]) == 4
    assert "it is transposed" in faults and f"{retyped} has dtype F32" in faults
    assert "model.extra is surplus" in faults
    assert "model.llm.unembed.weight [320, 64] is missing" in faults
    assert UNKNOWN in text


def test_doubled_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """w05: equal ones are a note, and counted once; different ones a fault."""
    folder = copied(tmp_path)
    (folder / INDEX).unlink()
    shutil.copy(folder / "mtp.safetensors", folder / "again.safetensors")
    code, document, _ = shown(folder, capsys)
    assert code == 0 and len(document["notes"]) == 60
    assert document["bytes"] == sum(entry.num_bytes for entry in table(CONFIG))
    data = bytearray((folder / "again.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "again.safetensors").write_bytes(data)
    code, document, _ = shown(folder, capsys)
    assert code == 1 and "with different contents" in document["faults"][0]


def test_names_without_the_first_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """w06"""
    entries = [
        dataclasses.replace(entry, name=entry.name.removeprefix("model."))
        for entry in table(CONFIG)
    ]
    code, document, _ = shown(written(tmp_path / "m", entries), capsys)
    assert code == 0, document["faults"]
    assert document["parts"][0]["name"] == "embed"


def test_draft_depths(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """w07: without any, the first of three, and a hole."""

    def kept(*depths: int) -> list[Entry]:
        return [entry for entry in table(CONFIG) if entry.depth in (None, *depths)]

    code, document, text = shown(written(tmp_path / "none", kept()), capsys)
    assert code == 0 and "note: mtp: off" in text
    code, document, text = shown(written(tmp_path / "first", kept(0)), capsys)
    assert code == 0 and "1 of 3 draft depths" in text
    code, document, _ = shown(written(tmp_path / "hole", kept(0, 2)), capsys)
    assert code == 1 and "cannot be used without depth 1" in document["faults"][0]


def test_folder_forms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """w09: links into a store, a loop, a broken link, spaces and letters in the path, a pipe."""
    store = copied(tmp_path)
    linked = tmp_path / "with spaces é"
    linked.mkdir()
    for file in store.iterdir():
        (linked / file.name).symlink_to(Path("..") / "model" / file.name)
    code, _, text = shown(Path(f"{linked}/"), capsys)
    assert code == 0 and f"suzuri plan '{linked}'" in text
    (linked / MAIN).unlink()
    (linked / MAIN).symlink_to("nowhere")
    code, document, _ = shown(linked, capsys)
    assert code == 1 and "whose target is missing" in document["faults"][0]
    (linked / MAIN).unlink()
    (linked / MAIN).symlink_to(MAIN)
    assert shown(linked, capsys)[0] == 1
    (linked / MAIN).unlink()
    os.mkfifo(linked / MAIN)
    code, document, _ = shown(linked, capsys)
    assert code == 1 and "not a plain file" in document["faults"][0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "no such file"),
        ("{", "not valid JSON"),
        ('{"model_type": "llama"}', "llama"),
        ('{"model_type": "inkling_mm_model", "text_config": {"hidden_size": "64"}}', "text_config"),
    ],
)
def test_a_config_that_is_missing_or_refused_leaves_the_tensors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, words: str
) -> None:
    """w11"""
    folder = copied(tmp_path)
    (folder / "config.json").unlink()
    if text is not None:
        (folder / "config.json").write_text(text)
    code, document, out = shown(folder, capsys)
    assert code == 1 and document["config"] is None
    (fault,) = document["faults"]
    assert words in fault
    assert len(document["parts"]) == 13 and "routed experts" in out


HEADERS = [
    b"",
    b"\x00" * 7,
    b"version https://git-lfs.github.com/spec/v1\n",
    struct.pack("<Q", 1 << 60) + b"{}",
    struct.pack("<Q", 2) + b"[]",
    struct.pack("<Q", 9) + b'{"a": 1 }',
    struct.pack("<Q", 4) + b"\xff\xfe{}",
    struct.pack("<Q", 60_000) + b"[" * 60_000,
    *(
        struct.pack("<Q", len(text)) + text + b"\0" * 8
        for text in (
            b'{"a":{"dtype":"F32","shape":[1e400],"data_offsets":[0,4]}}',
            b'{"a":{"dtype":["F32"],"shape":[2],"data_offsets":[0,8]}}',
            b'{"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}}',
            b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8,9]}}',
            b'{"\\ud800":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}',
            b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[8,0]},"b":7,"c":"F32"}',
            b'{"a":{"dtype":"F99","shape":[2],"data_offsets":[0,8]}}',
        )
    ),
]


@pytest.mark.parametrize("header", HEADERS)
def test_no_header_is_too_broken_to_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], header: bytes
) -> None:
    shutil.copy(BASE / "config.json", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(header)
    code, document, text = shown(tmp_path, capsys)
    assert code == 1
    assert "model.safetensors" in document["faults"][0]
    assert text.splitlines()[-1].startswith("INCOMPLETE or faulty")


def test_what_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "weights.gguf").write_bytes(b"GGUF")
    for model, words in {
        str(tmp_path): "this format is not read",
        str(tmp_path / "nothing"): "does not exist",
        str(BASE / MAIN): "give the folder that holds it",
        "no-such-preset": "no preset",
    }.items():
        with pytest.raises(ValueError, match=words):
            find(model)
    with pytest.raises(ValueError, match="MODEL is empty"):
        InspectConfig(model=" ").resolve()


def test_a_shape_without_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_inspect(InspectConfig(model="tiny")) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("OK: a shape without files")
    found = find(str(BASE / "config.json"))
    assert found.folder is None and found.num_bytes == find(str(BASE)).num_bytes
    assert as_document(found, {})["complete"] is False


def test_single_tensors_by_word_and_by_pattern(capsys: pytest.CaptureFixture[str]) -> None:
    tensors = find(str(BASE)).tensors
    assert chosen(tensors, ()) == tensors
    assert list(chosen(tensors, ("rel_logits",))) == [n for n in tensors if "rel_logits" in n]
    exact = "model.llm.layers.3.mlp.gate.bias"
    assert list(chosen(tensors, ("*.layers.3.mlp.gate.b*",))) == [exact]
    assert chosen(tensors, ("nothing",)) == {}
    assert run_inspect(InspectConfig(model=str(BASE), tensors=("gate.bias",))) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.endswith(exact)]
    assert line.split() == ["F32", "8", "32", "bytes", exact]


def test_the_command_line() -> None:
    def parsed(*words: str) -> InspectConfig:
        return parse(InspectConfig, prog="suzuri inspect", args=words).resolve()

    assert parsed("x").tensors is None
    assert parsed("x", "--tensors").tensors == ()
    assert parsed("x", "--tensors", "a", "b*", "--json").tensors == ("a", "b*")


def test_numbers_for_readers() -> None:
    assert ranges([]) == "" and ranges([5, 2, 6, 9, 7]) == "2, 5-7, 9"
    assert size(0) == "0 bytes" and size(1500) == "1.50 kB" and size(2**40) == "1.10 TB"
    many = Findings(
        name="x",
        folder=BASE,
        layout="",
        config=None,
        tensors={},
        faults=("a is missing", "and 31 more"),
    )
    assert many.num_faults == 32


def test_the_doctor_looks_at_a_folder_with_this(tmp_path: Path) -> None:
    files, weights = model_lines(this_machine(), BASE, Nvidia())
    assert (files.status, weights.status) == ("ok", "ok")
    assert "OK: complete, 232 tensors" in files.value and "weights 0.0 GB" in weights.value
    folder = copied(tmp_path)
    (folder / MAIN).unlink()
    files = model_lines(this_machine(), folder, Nvidia())[0]
    assert files.status == "problem" and "INCOMPLETE" in files.value
    (nothing,) = model_lines(this_machine(), tmp_path / "nothing", Nvidia())
    assert nothing.status == "problem" and "does not exist" in nothing.value


def test_the_parent_of_model_folders_points_to_them(capsys: pytest.CaptureFixture[str]) -> None:
    """A golden folder holds records of tensors, and its checkpoints one level down."""
    golden = BASE.parent
    assert run_inspect(InspectConfig(model=str(golden))) == 1
    words = f"{golden} has no config.json; did you mean one of {BASE}, {golden / 'transformers'}?"
    assert capsys.readouterr().out.splitlines()[-1].endswith(words)
    with pytest.raises(ValueError, match=r"no \*.safetensors file; did you mean .*9 more\?$"):
        run_inspect(InspectConfig(model=str(golden.parent)))


def test_doctor_says_in_plain_words_what_is_wrong_with_a_model(tmp_path: Path) -> None:
    for model, words in (
        ("nosuch", "no preset 'nosuch'; there are inkling,"),
        (str(tmp_path), f"{tmp_path} has no *.safetensors file, and no config.json"),
        (str(tmp_path / "none" / "x"), "this path does not exist"),
    ):
        (line,) = model_lines(this_machine(), Path(model), Nvidia())
        assert (line.name, line.status) == ("files", "problem")
        assert words in line.value and "Error" not in line.value and "ended with" not in line.value
        assert line.fix.startswith("give the folder of a model")
