import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from suzuri.model import transfer, weights
from suzuri.model.checkpoint_files import CheckpointError, scan
from suzuri.model.config import PRESETS, ModelConfig, MtpConfig
from suzuri.model.inkling import Inkling
from suzuri.model.random_weights import initialize
from suzuri.model.tensor_table import table
from suzuri.model.weights import export_weights, load_weights
from tests.memory import peak_growths
from tests.model.checkpoints import (
    ALL,
    BASE,
    CASES,
    GOLDEN,
    INDEX,
    MAIN,
    Change,
    Tensors,
    assert_same_bits,
    build,
    changed,
    keep_depths,
    load,
    read_tensors,
)


def refused(folder: Path, *words: str, want: frozenset[str] = ALL) -> str:
    """The message of a refused load; the model must be as it was."""
    model = build(folder)
    parts = {name for name, _ in model.named_children()}
    with pytest.raises(CheckpointError) as caught:
        load_weights(model, folder, want=want)
    message = str(caught.value)
    for word in words:
        assert word in message, f"{word!r} is not in: {message}"
    assert all(parameter.isnan().all() for parameter in model.parameters())
    assert parts == {name for name, _ in model.named_children() if getattr(model, name) is not None}
    return message


@pytest.mark.parametrize("folder", CASES, ids=lambda path: path.parent.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_load_puts_every_value_in_its_place(folder: Path, dtype: torch.dtype) -> None:
    model = build(folder, dtype)
    report = load_weights(model, folder, want=ALL)
    source, parameters = read_tensors(folder), model.state_dict()
    for entry in table(model.config):
        ours = parameters[entry.parameter][entry.start : entry.stop].reshape(entry.shape)
        assert torch.equal(ours, source[entry.name].to(ours.dtype)), entry.name
    assert not any(value.isnan().any() for value in parameters.values())
    assert report.num_tensors == len(source)
    assert report.num_bytes == sum(value.nbytes for value in source.values())
    assert report.skipped == report.absent == report.notes == ()


def test_fused_parameters_hold_their_rows_in_order() -> None:
    """The layout that the layers rely on, written out once without the table."""
    model, _ = load(BASE)
    source, ours = read_tensors(BASE), model.state_dict()

    def released(layer: int, *names: str) -> Tensor:
        return torch.cat([source[f"model.llm.layers.{layer}.{name}"] for name in names])

    for layer in (0, 3):  # local and global: other KV head counts
        attn = f"decoder.layers.{layer}.attn"
        projections = [f"attn.w{name}.weight" for name in ("q_du", "k_dv", "v_dv", "r_du")]
        assert torch.equal(ours[f"{attn}.qkvr.weight"], released(layer, *projections))
        convs = released(layer, "attn.k_sconv.weight", "attn.v_sconv.weight")
        assert torch.equal(ours[f"{attn}.kv_conv.weight"], convs.squeeze(1))
    experts = released(3, "mlp.experts.w13_weight", "mlp.shared_experts.shared_w13_weight")
    assert torch.equal(ours["decoder.layers.3.mlp.gate_up"], experts)
    downs = released(3, "mlp.experts.w2_weight", "mlp.shared_experts.shared_w2_weight")
    assert torch.equal(ours["decoder.layers.3.mlp.down"], downs)
    assert ours["decoder.layers.3.mlp.router.bias"].dtype == torch.float32
    dense = source["model.mtp.layers.1.transformer_block.mlp.w13_dn.weight"]
    assert torch.equal(ours["draft.depths.1.block.mlp.gate_up.weight"], dense)


@pytest.mark.parametrize("chunk", [515, 4099, 65536])
def test_pieces_of_any_size_give_the_same_model(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, _ = load(BASE)
    monkeypatch.setattr(transfer, "CHUNK_BYTES", chunk)
    pieces, _ = load(BASE)
    assert_same_bits(whole.state_dict(), pieces.state_dict())


def test_progress_counts_every_byte_once() -> None:
    seen: list[tuple[int, int]] = []
    model = build()
    report = load_weights(model, BASE, want=ALL, progress=lambda *both: seen.append(both))
    done = [count for count, _ in seen]
    assert done == sorted(set(done)) and done[-1] == report.num_bytes
    assert {total for _, total in seen} == {report.num_bytes}


def test_want_of_an_unknown_part_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'draft'.*vision, audio, mtp"):
        load_weights(build(), BASE, want=frozenset({"draft"}))


@pytest.mark.parametrize("part", sorted(ALL))
def test_unwanted_part_is_skipped_and_named(part: str) -> None:
    model, report = load(BASE, ALL - {part})
    assert report.skipped == (part,) and part not in report.parts
    assert f"{part}: " in report.notes[0] and "not wanted" in report.notes[0]
    assert getattr(model, weights.PART_MODULES[part]) is None
    assert not any(value.isnan().any() for value in model.state_dict().values())


def test_model_built_without_a_wanted_part() -> None:
    config = ModelConfig.from_file(BASE)
    model = Inkling(config, parts=frozenset({"mtp"}))
    with pytest.raises(ValueError, match=r"'audio'.*built without it"):
        load_weights(model, BASE, want=ALL)
    report = load_weights(model, BASE, want=frozenset({"mtp"}))
    assert report.parts == {"text", "mtp"} and report.skipped == ("vision", "audio")


def test_file_that_shrinks_while_it_is_read() -> None:
    def cut_now(done: int, total: int) -> None:
        raise AssertionError("not reached")

    model = build()
    checkpoint = scan(BASE)
    longer = {
        name: dataclasses.replace(entry, start=entry.start + (BASE / entry.file).stat().st_size)
        for name, entry in checkpoint.tensors.items()
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            weights, "scan", lambda folder: dataclasses.replace(checkpoint, tensors=longer)
        )
        with pytest.raises(CheckpointError, match=r"safetensors: model\..*became shorter"):
            load_weights(model, BASE, want=ALL, progress=cut_now)


# W01, W02: what the scan refuses, the loader refuses before it touches the model.


def test_w01_cut_shard_leaves_the_model_alone(tmp_path: Path) -> None:
    folder = changed(tmp_path, lambda tensors: None)
    file = folder / "model.safetensors"
    with file.open("r+b") as handle:
        handle.truncate(file.stat().st_size - 100)
    refused(folder, str(file), "100 bytes are missing")


def test_w02_missing_shard_leaves_the_model_alone(tmp_path: Path) -> None:
    shutil.copytree(BASE, tmp_path / "model")
    (tmp_path / "model" / MAIN).unlink()
    refused(tmp_path / "model", INDEX, MAIN)


def test_w04_folder_without_index_loads_alike(tmp_path: Path) -> None:
    shutil.copytree(BASE, tmp_path / "model")
    (tmp_path / "model" / INDEX).unlink()
    assert_same_bits(load(tmp_path / "model")[0].state_dict(), load(BASE)[0].state_dict())


# W05: odd tensors.

NORM = "model.llm.norm.weight"
DOWN = "model.llm.layers.0.mlp.w2_md.weight"
W13 = "model.llm.layers.3.mlp.experts.w13_weight"
BIAS = "model.llm.layers.3.mlp.gate.bias"


@pytest.mark.parametrize(
    ("name", "replace", "words"),
    [
        (NORM, lambda t: t.new_empty(0), ["shape [0]", "must be [64]"]),
        (NORM, lambda t: t[None].clone(), ["shape [1, 64]", "must be [64]"]),
        (DOWN, lambda t: t.T.contiguous(), ["shape [96, 64] (it is transposed)", "[64, 96]"]),
        (W13, lambda t: t[:7].clone(), ["shape [7, 64, 64]", "must be [8, 64, 64]"]),
        (NORM, lambda t: t.to(torch.int8), ["dtype I8", "must be BF16"]),
        (NORM, lambda t: t.half(), ["dtype F16", "must be BF16"]),
        (NORM, lambda t: t.float(), ["dtype F32", "must be BF16"]),
        (NORM, lambda t: t.double(), ["dtype F64", "must be BF16"]),
        (BIAS, lambda t: t.bfloat16(), ["dtype BF16", "must be F32"]),
        (W13, lambda t: t.to(torch.uint8), ["dtype U8", "must be BF16"]),
    ],
)
def test_w05_wrong_shape_or_dtype(
    tmp_path: Path, name: str, replace: Callable[[Tensor], Tensor], words: list[str]
) -> None:
    def change(tensors: Tensors) -> None:
        tensors[name] = replace(tensors[name])

    refused(changed(tmp_path, change), f"model.safetensors: {name}", *words)


def test_w05_missing_and_surplus_tensors_are_all_listed(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        del tensors[NORM], tensors["model.visual.final_norm.weight"]
        tensors["model.llm.layers.8.attn_norm.weight"] = torch.zeros(64)
        tensors["other"] = torch.zeros(1)

    refused(
        changed(tmp_path, change),
        f"{NORM} [64] is missing",
        "model.visual.final_norm.weight [64] is missing",
        "model.safetensors: model.llm.layers.8.attn_norm.weight is surplus",
        "model.safetensors: other is surplus",
        ": 4 problem(s)",
    )


def test_w05_long_lists_end_in_a_count(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        for i in range(33):
            tensors[f"extra.{i}"] = torch.zeros(1)

    message = refused(changed(tmp_path, change), ": 33 problem(s)", "and 13 more")
    assert message.count("is surplus") == 20


def test_w05_duplicate_in_two_shards(tmp_path: Path) -> None:
    folder = changed(tmp_path, lambda tensors: None)
    norm = read_tensors(BASE)[NORM]
    save_file({NORM: norm}, folder / "again.safetensors")
    _, report = load(folder)
    assert any(NORM in note and "equal" in note for note in report.notes)
    save_file({NORM: norm + 1}, folder / "again.safetensors")
    refused(folder, NORM, "again.safetensors", "model.safetensors", "different contents")


# W06: tower tensors with and without `model.`, with and without the towers.


def bare_towers(tensors: Tensors) -> None:
    for name in list(tensors):
        if not name.startswith("model.llm."):
            tensors[name.removeprefix("model.")] = tensors.pop(name)


@pytest.mark.parametrize("want", [ALL, frozenset[str]()], ids=["full", "text only"])
def test_w06_both_spellings_load(tmp_path: Path, want: frozenset[str]) -> None:
    expected, _ = load(BASE, want)
    model, report = load(changed(tmp_path, bare_towers), want)
    assert_same_bits(model.state_dict(), expected.state_dict())
    assert set(report.skipped) == ALL - want


@pytest.mark.parametrize("change", [bare_towers, lambda tensors: None], ids=["bare", "full"])
def test_w06_text_config_skips_towers_knowingly(tmp_path: Path, change: Change) -> None:
    """Where the caller wants no tower; else their tensors are surplus, and named."""
    folder = changed(tmp_path, change)
    document = json.loads((folder / "config.json").read_text())
    document |= {"model_type": "inkling_text", "vision_config": None, "audio_config": None}
    (folder / "config.json").write_text(json.dumps(document))
    model, report = load(folder, frozenset({"mtp"}))
    assert model.vision is None and model.audio is None and model.draft is not None
    assert report.skipped == ("vision", "audio")
    assert report.notes[0] == "vision: 6 tensors skipped, not wanted"
    message = refused(
        folder,
        "model.safetensors: model.visual.* is surplus: 6 tensors",
        "model.safetensors: model.audio.* is surplus: 2 tensors",
        "(vision_config)",
        "--text-only",
    )
    assert ": 2 problem(s)" in message


@pytest.mark.parametrize("part", ["vision", "audio"])
def test_w06_one_tower_that_the_config_lacks(tmp_path: Path, part: str) -> None:
    folder = changed(tmp_path, lambda tensors: None)
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(document | {f"{part}_config": None}))
    message = refused(folder, "is surplus", f"({part}_config)")
    assert ": 1 problem(s)" in message
    _, report = load(folder, ALL - {part})
    assert report.skipped == (part,) and report.parts == ALL - {part} | {"text"}


# W07: draft depths that are absent, too few, too many or with holes; absent towers.


def test_w07_no_draft_is_off_with_a_note(tmp_path: Path) -> None:
    model, report = load(changed(tmp_path, keep_depths()))
    assert model.draft is None and report.mtp_depths == 0
    assert report.absent == ("mtp",) and "mtp: off" in report.notes[0]


@pytest.mark.parametrize("count", [1, 2])
def test_w07_leading_depths_are_loaded(tmp_path: Path, count: int) -> None:
    folder = changed(tmp_path, keep_depths(*range(count)))
    model, report = load(folder)
    assert report.mtp_depths == count and f"{count} of 3 draft depths" in report.notes[0]
    assert model.draft is not None and len(model.draft.depths) == count
    assert not any(value.isnan().any() for value in model.state_dict().values())
    with pytest.raises(ValueError, match="build the model anew"):
        load_weights(model, BASE, want=ALL)


@pytest.mark.parametrize(
    ("kept", "words"),
    [
        ((0, 2), ["model.mtp.layers.2 cannot be used without depth 1"]),
        ((1, 2), ["layers.1 cannot be used without depth 0", "layers.2 cannot be used without"]),
    ],
)
def test_w07_hole_is_refused(tmp_path: Path, kept: tuple[int, ...], words: list[str]) -> None:
    folder = changed(tmp_path, keep_depths(*kept))
    message = refused(folder, "model.safetensors: model.mtp.layers", *words)
    assert message.count("\n") == len(words)


@pytest.mark.parametrize("extra", [3, 5])
def test_w07_surplus_depth_is_refused(tmp_path: Path, extra: int) -> None:
    def change(tensors: Tensors) -> None:
        for name in list(tensors):
            if name.startswith("model.mtp.layers.2."):
                other = name.replace("layers.2.", f"layers.{extra}.")
                tensors[other] = tensors[name].clone()

    folder = changed(tmp_path, change)
    message = refused(folder, f"model.mtp.layers.{extra} is surplus", "has 3 draft depths")
    assert ": 1 problem(s)" in message
    _, report = load(folder, ALL - {"mtp"})
    assert report.skipped == ("mtp",)


def test_w07_half_a_depth_is_refused(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        del tensors["model.mtp.layers.2.input_proj.weight"]

    refused(changed(tmp_path, change), "model.mtp.layers.2.input_proj.weight [64, 128] is missing")


def test_w07_chain_norm_comes_with_the_depths(tmp_path: Path) -> None:
    source = GOLDEN / "chain" / "original"

    def change(tensors: Tensors) -> None:
        del tensors["model.mtp.chain_norm.weight"]

    refused(changed(tmp_path / "a", change, source), "model.mtp.chain_norm.weight [64] is missing")
    refused(changed(tmp_path / "b", keep_depths(), source), "model.mtp.layers.0 is missing")
    model, _ = load(changed(tmp_path / "c", keep_depths(0), source))
    assert model.draft is not None and model.draft.chain_norm is not None


def test_w07_draft_in_the_files_but_not_in_the_config(tmp_path: Path) -> None:
    folder = changed(tmp_path, lambda tensors: None)
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(document | {"mtp_config": None}))
    model, report = load(folder)
    assert model.draft is None and report.skipped == ("mtp",)
    assert "the config does not have it" in report.notes[0]


@pytest.mark.parametrize(("part", "prefix"), [("vision", "visual"), ("audio", "audio")])
def test_tower_absent_from_the_files_is_off(tmp_path: Path, part: str, prefix: str) -> None:
    def change(tensors: Tensors) -> None:
        for name in list(tensors):
            if name.startswith(f"model.{prefix}."):
                del tensors[name]

    model, report = load(changed(tmp_path, change))
    assert getattr(model, part) is None
    assert report.absent == (part,) and f"{part}: off" in report.notes[0]


def test_w09_links_spaces_and_unicode(tmp_path: Path) -> None:
    store, folder = tmp_path / "blobs", tmp_path / "my 墨 model"
    shutil.copytree(BASE, store)
    folder.mkdir()
    for file in store.iterdir():
        (folder / file.name).symlink_to(Path("..") / "blobs" / file.name)
    model = build()
    load_weights(model, f"{folder}/", want=ALL)
    assert_same_bits(model.state_dict(), load(BASE)[0].state_dict())


# Memory.


def test_memory_stays_near_one_piece_while_loading(tmp_path: Path) -> None:
    tiny = PRESETS["tiny"]
    rows = 300_000
    text = dataclasses.replace(tiny.text, vocab_size=rows)
    config = dataclasses.replace(tiny, text=text, vision=None, audio=None, mtp=MtpConfig())
    model = Inkling(config)
    initialize(model)
    folder = tmp_path / "model"
    export_weights(model, folder)
    (shard,) = folder.glob("*.safetensors")
    assert shard.stat().st_size > 55 << 20
    setup = f"""
from pathlib import Path
from suzuri.model import transfer
from suzuri.model.config import ModelConfig
from suzuri.model.inkling import PARTS, Inkling
from suzuri.model.weights import load_weights
transfer.CHUNK_BYTES = 2 << 20
folder = {str(folder)!r}
model = Inkling(ModelConfig.from_file(folder))
load_weights(model, folder, want=PARTS)
"""
    load, whole = "load_weights(model, folder, want=PARTS)", f"Path({str(shard)!r}).read_bytes()"
    again, control = peak_growths(setup, load, whole)
    limit = 12 << 20
    assert again < limit
    assert control > 50 << 20  # the same measure sees a reader that holds a whole shard
