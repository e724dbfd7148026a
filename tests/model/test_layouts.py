"""The transformers layout and the spellings of tensor names: the same model, or refused by name."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from suzuri.model.checkpoint_files import CheckpointError, scan
from suzuri.model.config import ModelConfig
from suzuri.model.inkling import Inkling
from suzuri.model.tensor_names import canonical, in_transformers, marks
from suzuri.model.weights import export_weights, load_weights
from tests.model.checkpoints import (
    ALL,
    CASES,
    GOLDEN,
    Tensors,
    assert_same_bits,
    changed,
    load,
    read_tensors,
)

OTHER = GOLDEN / "base" / "transformers"
BASE_NAMES = ("model.llm.layers.0.attn.wq_du.weight", "model.visual.final_norm.weight")
Change = Callable[[Tensors], None]


def renamed(*pairs: tuple[str, str]) -> Change:
    """Replaces the first prefix that fits each name."""

    def change(tensors: Tensors) -> None:
        for name in list(tensors):
            for old, new in pairs:
                if name.startswith(old):
                    tensors[new + name.removeprefix(old)] = tensors.pop(name)
                    break

    return change


def refused(folder: Path, *words: str) -> None:
    model = Inkling(ModelConfig.from_file(folder))
    with pytest.raises(CheckpointError) as caught:
        load_weights(model, folder, want=ALL)
    for word in words:
        assert word in str(caught.value), f"{word!r} is not in: {caught.value}"


@pytest.mark.parametrize("case", [path.parent.name for path in CASES])
def test_both_layouts_hold_the_same_model(case: str) -> None:
    ours, _ = load(GOLDEN / case / "original", frozenset({"vision", "audio"}))
    theirs, report = load(GOLDEN / case / "transformers")
    assert_same_bits(ours.state_dict(), theirs.state_dict())
    assert report.absent == ("mtp",) and theirs.draft is None
    assert any(note.startswith("mtp: off") for note in report.notes)


@pytest.mark.parametrize("case", [path.parent.name for path in CASES])
def test_export_writes_what_transformers_writes(tmp_path: Path, case: str) -> None:
    model, _ = load(GOLDEN / case / "original", frozenset({"vision", "audio"}))
    export_weights(model, tmp_path / "out", layout="transformers")
    assert_same_bits(read_tensors(GOLDEN / case / "transformers"), read_tensors(tmp_path / "out"))
    again, _ = load(tmp_path / "out")
    assert_same_bits(model.state_dict(), again.state_dict())


def test_draft_depths_keep_their_names_beside_the_other_layout(tmp_path: Path) -> None:
    model, _ = load(GOLDEN / "chain" / "original")
    export_weights(model, tmp_path / "out", layout="transformers")
    drafts = {k for k in read_tensors(tmp_path / "out") if k.startswith("model.mtp.")}
    released = read_tensors(GOLDEN / "chain" / "original")
    assert drafts == {k for k in released if k.startswith("model.mtp.")}
    again, report = load(tmp_path / "out")
    assert report.notes == () and report.mtp_depths == 4
    assert_same_bits(model.state_dict(), again.state_dict())


@pytest.mark.parametrize("max_shard_bytes", [1, 20_000, 300_000])
def test_shards_of_any_size_in_the_other_layout(tmp_path: Path, max_shard_bytes: int) -> None:
    model, _ = load(GOLDEN / "base" / "original")
    export_weights(model, tmp_path / "out", layout="transformers", max_shard_bytes=max_shard_bytes)
    again, _ = load(tmp_path / "out")
    assert_same_bits(model.state_dict(), again.state_dict())


# W06: prefixes that writers leave away or add, in both layouts.

SPELLINGS: dict[str, Change] = {
    "bare": renamed(("model.", "")),
    "old": renamed(
        ("model.language_model.", "language_model.model."), ("lm_head.", "language_model.lm_head.")
    ),
    "head inside": renamed(("lm_head.", "model.lm_head.")),
    "text as in a text-only model": renamed(("model.language_model.", "model.")),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_w06_spellings_of_the_transformers_layout(tmp_path: Path, spelling: str) -> None:
    expected, _ = load(OTHER)
    model, _ = load(changed(tmp_path, SPELLINGS[spelling], OTHER))
    assert_same_bits(expected.state_dict(), model.state_dict())


def test_w06_spellings_of_the_released_layout(tmp_path: Path) -> None:
    """The dialect of adapters: language_model.layers.N.attn..., language_model.lm_head."""
    expected, _ = load(GOLDEN / "base" / "original")
    change = renamed(
        ("model.llm.unembed.", "language_model.lm_head."), ("model.llm.", "language_model.")
    )
    model, _ = load(changed(tmp_path, change, GOLDEN / "base" / "original"))
    assert_same_bits(expected.state_dict(), model.state_dict())


@pytest.mark.parametrize("want", [frozenset[str](), frozenset({"audio"})])
def test_w06_text_alone_skips_towers_of_the_other_layout(want: frozenset[str]) -> None:
    model, report = load(OTHER, want)
    assert model.vision is None and (model.audio is None) == ("audio" not in want)
    assert {"vision", "audio"} - want == set(report.skipped)
    assert any("vision" in note and "not wanted" in note for note in report.notes)


def test_two_layouts_in_one_folder_are_refused(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors["model.llm.layers.0.attn.wq_du.weight"] = torch.zeros(2)

    refused(changed(tmp_path, change, OTHER), "mixes two layouts", "wq_du", "transformers one")


Q = "model.language_model.layers.1.self_attn.q_proj.weight"
EXPERTS = "model.language_model.layers.4.mlp.experts.gate_up_proj"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(Q), [f"{Q} [64, 64] is missing"]),
        (lambda t: t.update({Q: t[Q].half()}), [Q, "dtype F16; must be BF16"]),
        (lambda t: t.update({Q: t[Q][:32].clone()}), [Q, "shape [32, 64]; must be [64, 64]"]),
        (
            lambda t: t.update({EXPERTS: t[EXPERTS].transpose(1, 2)[:, :48].contiguous()}),
            [EXPERTS, "[8, 48, 64]; must be [8, 64, 64]"],
        ),
        (
            lambda t: t.update({"model.vision_tower.extra.weight": torch.zeros(2)}),
            ["model.vision_tower.extra.weight is surplus"],
        ),
        (
            lambda t: t.update({"model.sound_tower.norm.weight": torch.zeros(2)}),
            ["model.sound_tower.norm.weight is surplus"],
        ),
        (
            lambda t: t.update({f"{EXPERTS}.scale2": torch.ones(8)}),
            [EXPERTS, f"{EXPERTS}.scale [8, 64, 4] is missing"],
        ),
    ],
)
def test_w05_faults_of_the_other_layout_are_named(
    tmp_path: Path, change: Change, words: list[str]
) -> None:
    refused(changed(tmp_path, change, OTHER), *words)


def test_w05_one_weight_in_another_dtype_is_refused_all_of_them_are_noted(tmp_path: Path) -> None:
    def widen(tensors: Tensors) -> None:
        tensors.update({name: value.float() for name, value in tensors.items()})

    model, report = load(changed(tmp_path / "all", widen, OTHER))
    assert "the config says bfloat16, the files hold float32 throughout" in report.notes
    expected, _ = load(OTHER)
    assert_same_bits(expected.state_dict(), model.state_dict())
    one = changed(tmp_path / "one", lambda t: t.update({Q: t[Q].float()}), OTHER)
    refused(one, Q, "dtype F32; must be BF16", ": 1 problem(s)")


def test_w05_a_router_in_bf16_is_widened_and_noted(tmp_path: Path) -> None:
    """What transformers saves of a model that ran in bf16; its weight must not be wider."""
    ends = ("e_score_correction_bias", "mlp.gate.global_scale")

    def narrow(tensors: Tensors) -> None:
        tensors.update({k: v.bfloat16() for k, v in tensors.items() if k.endswith(ends)})

    def rounded(tensors: Tensors) -> None:
        tensors.update({k: v.bfloat16().float() for k, v in tensors.items() if k.endswith(ends)})

    model, report = load(changed(tmp_path / "narrow", narrow, OTHER))
    (note,) = [note for note in report.notes if "routers are bf16" in note]
    assert note.startswith("12 tensors of routers are bf16 instead of fp32, first model.language_")
    expected, report = load(changed(tmp_path / "rounded", rounded, OTHER))
    assert_same_bits(model.state_dict(), expected.state_dict())
    assert not any("routers" in note for note in report.notes)
    bias = model.state_dict()["decoder.layers.2.mlp.router.bias"]
    assert bias.dtype == torch.float32 and bias.abs().sum() > 0

    gate = "model.language_model.layers.3.mlp.gate.weight"
    wide = changed(tmp_path / "wide", lambda t: t.update({gate: t[gate].float()}), OTHER)
    refused(wide, gate, "dtype F32; must be BF16", ": 1 problem(s)")


def test_w07_a_depth_more_than_the_config_has(tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        tensors.update(
            {k: v for k, v in read_tensors(GOLDEN / "base" / "original").items() if ".mtp." in k}
        )
        tensors["model.mtp.layers.3.hidden_norm.weight"] = torch.zeros(64).bfloat16()

    refused(changed(tmp_path, change, OTHER), "model.mtp.layers.3 is surplus")


@pytest.mark.parametrize("tenth", range(10))
def test_w01_shard_of_the_other_layout_cut_at_any_tenth(tmp_path: Path, tenth: int) -> None:
    folder = changed(tmp_path, lambda tensors: None, OTHER)
    file = folder / "model.safetensors"
    with file.open("r+b") as handle:
        handle.truncate(file.stat().st_size * tenth // 10)
    refused(folder, "model.safetensors is cut off")


@pytest.mark.parametrize("folder", CASES, ids=lambda path: path.parent.name)
def test_every_name_is_its_own_canonical_name(folder: Path) -> None:
    for name in scan(folder).tensors:
        assert canonical(name, "released") == name
        for other in in_transformers(name):
            assert canonical(other, "transformers") == other
            assert set(marks([other])) <= {"transformers"}
        assert set(marks([name])) <= {"released"}
    assert set(marks(scan(folder).tensors)) == {"released"}


def test_a_folder_of_neither_layout_lists_what_is_wrong(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((OTHER / "config.json").read_text())
    refused(tmp_path, "model.llm.embed.weight [320, 64] is missing", "problem(s)", "and ")
