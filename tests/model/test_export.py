import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from suzuri.model import checkpoint_writer
from suzuri.model.checkpoint_files import scan
from suzuri.model.config import PRESETS, ModelConfig, MtpConfig
from suzuri.model.inkling import Inkling
from suzuri.model.random_weights import initialize
from suzuri.model.tensor_table import table
from suzuri.model.weights import export_weights, load_weights
from tests.model.checkpoints import (
    ALL,
    BASE,
    CASES,
    GOLDEN,
    INDEX,
    MAIN,
    assert_same_bits,
    build,
    changed,
    keep_depths,
    load,
    read_tensors,
)


@pytest.mark.parametrize("folder", CASES, ids=lambda path: path.parent.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_round_trip_is_equal_to_the_byte(tmp_path: Path, folder: Path, dtype: torch.dtype) -> None:
    model = build(folder, dtype)
    load_weights(model, folder, want=ALL)
    written = export_weights(model, tmp_path / "out")
    assert_same_bits(read_tensors(tmp_path / "out"), read_tensors(folder))
    assert ModelConfig.from_file(tmp_path / "out") == model.config
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(e.num_bytes for e in table(model.config))
    assert index["weight_map"] == {name: place.file for name, place in written.tensors.items()}
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(
        [*written.files, INDEX, "config.json"]
    )


@settings(
    max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@example(max_shard_bytes=40_000)
@given(max_shard_bytes=st.integers(60_000, 3_000_000))
def test_shards_of_any_size(tmp_path: Path, max_shard_bytes: int) -> None:
    model, _ = load(BASE)
    folder = tmp_path / "out"
    shutil.rmtree(folder, ignore_errors=True)
    written = export_weights(model, folder, max_shard_bytes=max_shard_bytes)
    assert_same_bits(read_tensors(folder), read_tensors(BASE))
    for file in written.files:
        held = [place.nbytes for place in written.tensors.values() if place.file == file]
        assert sum(held) <= max_shard_bytes or len(held) == 1
        prefix = "model.mtp." if file.startswith("mtp") else ""
        names = [name for name, place in written.tensors.items() if place.file == file]
        assert all(name.startswith("model.mtp.") == bool(prefix) for name in names)
    (folder / INDEX).unlink()
    assert len(scan(folder).tensors) == 232  # the names alone tell the number of shards
    with pytest.raises(ValueError, match="max_shard_bytes = 0"):
        export_weights(model, tmp_path / "none", max_shard_bytes=0)


def test_released_file_names(tmp_path: Path) -> None:
    model, _ = load(BASE)
    written = export_weights(model, tmp_path / "out", max_shard_bytes=400_000)
    mains = [name for name in written.files if name != "mtp.safetensors"]
    assert mains == [
        f"model-{i:05d}-of-{len(mains):05d}.safetensors" for i in range(1, len(mains) + 1)
    ]
    assert len(mains) > 2 and "mtp.safetensors" in written.files


def test_tensors_lie_aligned(tmp_path: Path) -> None:
    # One dense layer: its single bf16 scale would leave every fp32 value after it at an odd place.
    model, _ = load(GOLDEN / "narrow" / "original")
    widths = {"BF16": 2, "F32": 4}
    for place in export_weights(model, tmp_path / "out").tensors.values():
        assert place.start % widths[place.dtype] == 0


def test_values_that_bf16_cannot_hold_need_a_choice(tmp_path: Path) -> None:
    model = build(dtype=torch.float32)
    load_weights(model, BASE, want=ALL)
    name = "decoder.layers.1.attn.qkvr.weight"
    # Halfway between two bf16 values, twice: nearest even goes down, then up.
    odd = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1.1])
    with torch.no_grad():
        model.get_parameter(name)[0, :3] = odd
    with pytest.raises(ValueError, match=rf"{name} holds 1\.0039.*wq_du.*dtype='bfloat16'"):
        export_weights(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    export_weights(model, tmp_path / "rounded", dtype="bfloat16")
    stored = read_tensors(tmp_path / "rounded")["model.llm.layers.1.attn.wq_du.weight"]
    assert stored[0, :3].tolist() == [1.0, 1 + 2**-6, -1.1015625]
    export_weights(model, tmp_path / "wide", dtype="float32")
    wide = read_tensors(tmp_path / "wide")
    assert torch.equal(wide["model.llm.layers.1.attn.wq_du.weight"][0, :3], odd)
    assert {value.dtype for value in wide.values()} == {torch.float32}
    again, _ = load(tmp_path / "wide")
    assert again.config.text.torch_dtype == "float32"
    with pytest.raises(ValueError, match="'float16': must be one of bfloat16, float32"):
        export_weights(model, tmp_path / "half", dtype="float16")


def test_export_of_what_was_loaded_describes_itself(tmp_path: Path) -> None:
    folder = changed(tmp_path / "in", keep_depths(0, 1))
    model, _ = load(folder, frozenset({"mtp"}))
    export_weights(model, tmp_path / "out")
    config = ModelConfig.from_file(tmp_path / "out")
    assert config.vision is None and config.audio is None
    assert config.mtp_depths == 2 and config.mtp.local_layer_ids == (0,)
    again, report = load(tmp_path / "out")
    assert report.notes == ()
    assert_same_bits(again.state_dict(), model.state_dict())


def test_export_of_the_text_alone(tmp_path: Path) -> None:
    model, _ = load(BASE, frozenset())
    written = export_weights(model, tmp_path / "out")
    assert all(name.startswith("model.llm.") for name in written.tensors)
    assert ModelConfig.from_file(tmp_path / "out").mtp == MtpConfig()


def test_export_never_touches_what_is_there(tmp_path: Path) -> None:
    model, _ = load(BASE)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "note.txt").write_text("keep")
    with pytest.raises(ValueError, match=r"used exists and is not an empty folder"):
        export_weights(model, tmp_path / "used")
    with pytest.raises(ValueError, match=r"note\.txt exists"):
        export_weights(model, tmp_path / "used" / "note.txt")
    assert [file.name for file in (tmp_path / "used").iterdir()] == ["note.txt"]
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    export_weights(model, tmp_path / "link")
    assert len(scan(tmp_path / "empty").tensors) == 232


def test_export_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _ = load(BASE)
    seen: list[list[str]] = []

    def fail(path: Path, document: object) -> None:
        seen.append(sorted(file.name for file in path.parent.iterdir()))
        raise OSError("disk full")

    monkeypatch.setattr(checkpoint_writer, "write_json", fail)
    with pytest.raises(OSError, match="disk full"):
        export_weights(model, tmp_path / "deep" / "out")
    assert seen == [[MAIN, "mtp.safetensors"]]  # the index comes after all the weights
    assert list((tmp_path / "deep").iterdir()) == []


def test_tiny_round_trip(tmp_path: Path) -> None:
    model = Inkling(PRESETS["tiny"])
    initialize(model, seed=3)
    export_weights(model, tmp_path / "out", max_shard_bytes=1 << 20)
    again, report = load(tmp_path / "out")
    assert again.config == PRESETS["tiny"]
    assert report.parts == {"text"} | ALL and report.mtp_depths == 3
    assert_same_bits(again.state_dict(), model.state_dict())
