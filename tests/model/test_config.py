import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from suzuri.model.config import (
    PRESETS,
    AttentionConfig,
    AudioConfig,
    ModelConfig,
    MtpConfig,
    VisionConfig,
    preset,
)
from suzuri.model.tensor_table import table
from tests.model.documents import document, refused, with_value

GOLDEN = Path(__file__).parent.parent / "golden"
CASES = sorted(path.parent for path in GOLDEN.glob("*/original/config.json"))


# The released models.


def test_inkling_is_exactly_the_release() -> None:
    config = preset("inkling")
    text = config.text
    assert (text.hidden_size, text.num_hidden_layers, text.vocab_size) == (6144, 66, 201024)
    assert [i for i in range(66) if not text.is_local(i)] == list(range(5, 66, 6))
    assert [i for i in range(66) if text.is_dense(i)] == [0, 1]
    assert text.attention(0) == AttentionConfig(
        num_heads=64,
        num_kv_heads=16,
        head_dim=128,
        d_rel=16,
        rel_extent=512,
        window=512,
        log_scaling_n_floor=None,
        log_scaling_alpha=0.1,
    )
    assert text.attention(65) == AttentionConfig(
        num_heads=64,
        num_kv_heads=8,
        head_dim=128,
        d_rel=16,
        rel_extent=1024,
        window=None,
        log_scaling_n_floor=128000.0,
        log_scaling_alpha=0.1,
    )
    assert [d for d in range(8) if config.depth_attention(d).window is None] == [1, 3]
    assert config.depth_attention(1) == text.attention(5)
    assert config.depth_attention(0) == text.attention(0)
    assert config.eos_token_id == 200006
    assert (config.image_token_id, config.audio_token_id) == (200054, 200053)


def test_small_differs_in_width_and_depth_only() -> None:
    small, large = preset("inkling-small").to_dict(), preset("inkling").to_dict()
    changed = {
        key for key, value in small["text_config"].items() if large["text_config"][key] != value
    }
    assert changed == {
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "swa_num_attention_heads",
        "swa_num_key_value_heads",
        "dense_intermediate_size",
        "intermediate_size",
        "local_layer_ids",
        "logits_mup_width_multiplier",
    }
    assert small["text_config"]["logits_mup_width_multiplier"] == 4096 / 256
    assert small["mtp_config"] == large["mtp_config"]


def test_released_vision_plan() -> None:
    vision = preset("inkling-small").vision
    assert vision is not None
    assert vision.scales() == ((1, 1, 3), (1, 5, 128), (1, 10, 320), (1, 40, 4800), (2, 40, 9600))
    assert vision.linear_shapes() == ((128, 75), (320, 512), (4800, 5120), (4096, 9600))


def test_tiny_has_every_layer_kind_of_the_large_models() -> None:
    def kinds(config: ModelConfig) -> set[tuple[bool, bool]]:
        text = config.text
        return {(text.is_local(i), text.is_dense(i)) for i in range(text.num_hidden_layers)}

    def depth_kinds(config: ModelConfig) -> set[bool]:
        return {config.depth_attention(d).is_local for d in range(config.mtp_depths)}

    tiny = preset("tiny")
    for name in ("inkling", "inkling-small"):
        assert kinds(tiny) == kinds(preset(name))
        assert depth_kinds(tiny) == depth_kinds(preset(name))
    assert tiny.text.attention(0).num_kv_heads != tiny.text.attention(5).num_kv_heads
    assert tiny.audio and tiny.vision and tiny.text.logits_mup_width_multiplier == 4.0
    assert sum(entry.num_values for entry in table(tiny)) < 1_500_000


def test_tiny_keeps_its_special_tokens() -> None:
    tiny = preset("tiny")
    kept = tiny.kept_vocabulary
    assert kept is not None
    assert len(kept) == 1000 and kept[939:942] == (939, 199998, 199999)
    assert {tiny.eos_token_id, tiny.image_token_id, tiny.audio_bos_token_id} <= set(kept)


@pytest.mark.parametrize("name", PRESETS)
def test_preset_survives_its_own_document(name: str) -> None:
    config = preset(name)
    again = ModelConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert again.unknown_keys == ()


@pytest.mark.parametrize("wrong", ["inkling_small", "Inkling-Small", "inklingsmall"])
def test_unknown_preset_suggests_the_nearest(wrong: str) -> None:
    with pytest.raises(ValueError, match=f"{wrong}.*did you mean 'inkling-small'"):
        preset(wrong)


def test_no_torch_is_loaded() -> None:
    code = (
        "import sys\n"
        "import suzuri.model.quantization_config, suzuri.model.tensor_table\n"
        "import suzuri.model.reconcile\n"
        "sys.exit('torch' in sys.modules)"
    )
    root = Path(__file__).parents[2]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0


def test_records_built_in_code_are_checked_too() -> None:
    with pytest.raises(ValueError, match=r"audio_config\.mel_vocab_size = 1"):
        AudioConfig(
            decoder_dmodel=8, n_mel_bins=4, mel_vocab_size=1, dmel_min_value=0, dmel_max_value=1
        )


# Towers, draft depths, ids.


@pytest.mark.parametrize("absent", [None, {}, {"decoder_dmodel": None}, "missing"])
def test_tower_without_width_is_absent(absent: Any) -> None:
    values = document()
    for block in ("audio_config", "vision_config"):
        values[block] = absent
        if absent == "missing":
            del values[block]
    config = ModelConfig.from_dict(values)
    assert config.audio is None and config.vision is None
    assert ModelConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("absent", [None, {}, {"num_nextn_predict_layers": None}, "missing", 0])
def test_no_draft_depths(absent: Any) -> None:
    values = document()
    values["mtp_config"] = absent
    if absent == "missing":
        del values["mtp_config"]
    if absent == 0:
        values["mtp_config"] = {"num_nextn_predict_layers": 0, "local_layer_ids": [0, 2]}
    config = ModelConfig.from_dict(values)
    assert config.mtp == MtpConfig() and config.mtp_depths == 0


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("audio_config", "decoder_dmodel"), 64, ["audio_config.decoder_dmodel = 64", "= 48"]),
        (("vision_config", "decoder_dmodel"), 64, ["vision_config.decoder_dmodel = 64", "= 48"]),
        (("audio_config", "n_mel_bins"), None, ["audio_config.n_mel_bins is null"]),
        (("audio_config", "dmel_min_value"), 2.0, ["dmel_min_value = 2.0", "below"]),
        (("vision_config", "patch_size"), "40", ["vision_config.patch_size", "without quotes"]),
        (("vision_config", "n_layers"), 0, ["vision_config.n_layers = 0"]),
        (("vision_config",), [], ["vision_config = []", "an object"]),
        (("text_config",), None, ["text_config is null"]),
        (("model_type",), None, ["model_type is null"]),
        (("mtp_config", "local_layer_ids"), [0, 3], ["mtp_config.local_layer_ids", "3"]),
        (("mtp_config", "num_nextn_predict_layers"), -1, ["num_nextn_predict_layers = -1"]),
        (("mtp_config", "num_nextn_predict_layers"), False, ["False"]),
        (("mtp_config", "chain_hidden_post_norm"), 1, ["chain_hidden_post_norm = 1", "true"]),
        (("mtp_config", "local_extent"), 0, ["mtp_config.local_extent = 0"]),
        (("eos_token_id",), 1000, ["eos_token_id = 1000", "kept_vocabulary"]),
        (("eos_token_id",), -1, ["eos_token_id = -1"]),
        (("image_token_id",), 200053, ["image_token_id = 200053", "differ"]),
        (("image_token_id",), 200058, ["image_token_id = 200058", "kept_vocabulary"]),
        (("audio_bos_token_id",), "200020", ["audio_bos_token_id", "without quotes"]),
        (("kept_vocabulary",), [1, 2], ["kept_vocabulary has 2 ids", "1000"]),
        (("kept_vocabulary",), [0, *range(999)], ["0 is listed twice"]),
        (("kept_vocabulary",), [*range(1, 1000), 0], ["ascending"]),
        (
            ("kept_vocabulary",),
            [*range(5), *range(6, 941), *range(199998, 200058)],
            ["lacks [5]", "single-byte token"],
        ),
        (("kept_vocabulary",), [*range(1000)], ["lacks [199998, 199999", "special token"]),
        (
            ("kept_vocabulary",),
            [*range(939), *range(199998, 200058), 200058],
            ["200058 is not a token id"],
        ),
    ],
)
def test_impossible_values_elsewhere(path: tuple[str, ...], value: Any, words: list[str]) -> None:
    refused(with_value(document(), value, *path), *words)


def test_placeholder_ids_do_not_matter_without_towers() -> None:
    values = document(vocab_size=64, unpadded_vocab_size=None)
    values |= {"audio_config": None, "vision_config": None, "kept_vocabulary": None}
    refused(values, "eos_token_id = 200006", "unpadded_vocab_size = 64")
    values["eos_token_id"] = 63
    assert ModelConfig.from_dict(values).image_token_id == 200054


def test_local_extent_is_the_window_of_local_depths() -> None:
    values = with_value(document(), 8, "mtp_config", "local_extent")
    config = ModelConfig.from_dict(values)
    assert config.depth_attention(0).window == config.depth_attention(0).rel_extent == 8
    assert config.text.attention(0).window == 16
    assert ModelConfig.from_dict(config.to_dict()) == config


def test_local_depth_needs_a_window() -> None:
    values = document(local_layer_ids=[], sliding_window_size=None)
    refused(values, "mtp_config.local_extent", "depth 0 is local")
    values["mtp_config"]["local_extent"] = 5
    assert ModelConfig.from_dict(values).depth_attention(2).window == 5


@pytest.mark.parametrize("model_type", ["inkling_model", "inkling_text"])
def test_text_only_types_flat_or_nested(model_type: str) -> None:
    text = document()["text_config"]
    flat = ModelConfig.from_dict({"model_type": model_type, "eos_token_id": 5, **text, "odd": 1})
    nested = ModelConfig.from_dict(
        {"model_type": model_type, "eos_token_id": 5, "text_config": text}
    )
    assert flat == nested
    assert flat.text == preset("tiny").text
    assert flat.audio is None and flat.vision is None and flat.mtp_depths == 0
    assert flat.unknown_keys == ("odd",)


def test_multimodal_type_needs_its_text_block() -> None:
    refused({"model_type": "inkling_mm_model", **document()["text_config"]}, "text_config is miss")


@settings(max_examples=60, deadline=None)
@given(
    patch_size=st.integers(1, 64),
    frames=st.integers(1, 6),
    channels=st.integers(1, 4),
    num_layers=st.integers(1, 9),
)
def test_vision_plan_folds_the_whole_patch(
    patch_size: int, frames: int, channels: int, num_layers: int
) -> None:
    vision = VisionConfig(
        decoder_dmodel=32,
        patch_size=patch_size,
        temporal_patch_size=frames,
        n_channels=channels,
        n_layers=num_layers,
    )
    scales, shapes = vision.scales(), vision.linear_shapes()
    assert len(scales) == num_layers + 1 == len(shapes) + 1
    assert scales[0] == (1, 1, channels)
    assert scales[-1][:2] == (frames, patch_size)
    folded = 1
    for (t, side, _), (next_t, next_side, _) in itertools.pairwise(scales):
        assert next_t % t == 0 and next_side % side == 0
        folded *= next_t // t * (next_side // side) ** 2
    assert folded == frames * patch_size**2
    assert shapes[0][1] % channels == 0 and shapes[-1][0] == 32
    assert all(scale[2] == shape[0] for scale, shape in zip(scales[1:-1], shapes, strict=False))
