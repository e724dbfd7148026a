import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from suzuri.model.config import PRESETS, ModelConfig, MtpConfig, preset
from tests.model.documents import (
    JSON,
    document,
    paths,
    quantised,
    refused,
    text_only,
    with_value,
    without,
)

GOLDEN = Path(__file__).parent.parent / "golden"
CASES = sorted(path.parent.parent.name for path in GOLDEN.glob("*/transformers/config.json"))

# In four cases the golden files were saved from a model in fp32, and a text-only file has neither
# placeholder ids nor an end token of its own (2 is what transformers puts there).
FP32_CASES = {"alldense", "odd", "wide"}
NOT_IN_TEXT_ONLY = {
    "eos_token_id": 2,
    "image_token_id": 200054,
    "audio_token_id": 200053,
    "image_bos_token_id": 200005,
    "audio_bos_token_id": 200020,
}


def theirs(**text: Any) -> dict[str, Any]:
    """The document of tiny in the transformers spelling, fields of its text block replaced."""
    return document("tiny", "transformers", **text)


def golden(case: str) -> dict[str, Any]:
    return json.loads((GOLDEN / case / "transformers" / "config.json").read_bytes())


# Files of transformers.


@pytest.mark.parametrize("case", CASES)
def test_both_spellings_of_a_golden_case_are_one_config(case: str) -> None:
    released = ModelConfig.from_file(GOLDEN / case / "original")
    config = ModelConfig.from_file(GOLDEN / case / "transformers")
    assert config.unknown_keys == ()
    expected = released
    if case in FP32_CASES:
        text = dataclasses.replace(released.text, torch_dtype="float32")
        expected = dataclasses.replace(released, text=text)
    if case == "alldense":
        expected = dataclasses.replace(expected, **NOT_IN_TEXT_ONLY)
    assert config == expected


def test_mup_of_one_is_no_mup() -> None:
    assert golden("alldense")["logits_mup_width_multiplier"] == 1.0
    for value in (1, 1.0, 0, None):
        config = ModelConfig.from_dict(document(logits_mup_width_multiplier=value))
        assert config.text.logits_mup_width_multiplier is None
        assert config.to_dict("transformers")["text_config"]["logits_mup_width_multiplier"] == 1.0
        assert config.to_dict()["text_config"]["logits_mup_width_multiplier"] is None


def test_alldense_is_text_only() -> None:
    config = ModelConfig.from_file(GOLDEN / "alldense" / "transformers")
    assert config.audio is None and config.vision is None
    assert (config.mtp_depths, config.text.dense_mlp_idx) == (1, 4)
    assert (config.text.intermediate_size, config.text.dense_intermediate_size) == (16, 90)


@pytest.mark.parametrize("case", CASES)
def test_written_documents_agree_with_what_transformers_writes(case: str) -> None:
    wanted = golden(case)
    written = ModelConfig.from_file(GOLDEN / case / "original").to_dict("transformers")
    differ = {
        path
        for path in {*paths(wanted), *paths(written)}
        if _at(wanted, path) != _at(written, path)
        and not (isinstance(_at(wanted, path), dict) and isinstance(_at(written, path), dict))
    }
    # Absent: what transformers fills in with these values, and no model here uses.
    block = () if case == "alldense" else ("text_config",)
    unused = {
        "attention_dropout": 0.0,
        "bos_token_id": 1,
        "initializer_range": 0.02,
        "number_of_conv_states": 4,
        "rms_norm_eps_moe_gate": 1e-6,
    }
    towers = {
        ("vision_config", "hidden_size"): 1024,
        ("vision_config", "num_attention_heads"): 16,
        ("vision_config", "initializer_range"): 0.02,
        ("audio_config", "initializer_range"): 0.02,
    }
    expected = {(*block, key): value for key, value in unused.items()}
    expected |= {} if case == "alldense" else towers
    for path, value in expected.items():
        assert _at(wanted, path) == value and _at(written, path) is None
    # Different: the dtype of the tensors instead of that of the run; the true end token, and one
    # recipe flag in full; how many rows are kept though none is dropped.
    expected_paths = {
        *expected,
        ("dtype",),
        (*block, "eos_token_id"),
        (*block, "tie_word_embeddings"),
        ("transformers_version",),
    }
    if case in FP32_CASES:
        expected_paths |= {("text_config", "dtype")} if block else set()
        expected_paths |= {(key, "dtype") for key in ("audio_config", "vision_config") if block}
    if case == "wide":
        expected_paths |= {("text_config", "unpadded_vocab_size")}
    if case == "alldense":  # said there by nothing
        expected_paths |= {(key,) for key in NOT_IN_TEXT_ONLY}
        expected_paths |= {path for path in paths(written) if path[0] == "mtp_config"}
    assert differ == expected_paths


def _at(values: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        values = values.get(key) if isinstance(values, dict) else None
    return values


@pytest.mark.parametrize(
    "config",
    [
        *PRESETS.values(),
        text_only(),
        text_only("inkling"),
        quantised(),
        quantised("compressed-tensors", (2, 5)),
        quantised(config=text_only()),
        dataclasses.replace(preset("tiny"), mtp=MtpConfig()),
        dataclasses.replace(
            preset("tiny"),
            mtp=MtpConfig(
                num_nextn_predict_layers=2,
                local_layer_ids=(1,),
                local_extent=7,
                chain_hidden_post_norm=True,
            ),
        ),
        *(ModelConfig.from_file(GOLDEN / case / "original") for case in CASES),
    ],
)
def test_a_written_document_gives_the_config_back(config: ModelConfig) -> None:
    for spelling in ("released", "transformers"):
        again = ModelConfig.from_dict(json.loads(json.dumps(config.to_dict(spelling))))
        assert again == config
        assert again.unknown_keys == ()


def test_written_spellings_differ_where_they_must() -> None:
    values = theirs()
    assert values["text_config"]["intermediate_size"] == 96
    assert values["text_config"]["moe_intermediate_size"] == 32
    assert not {"dense_intermediate_size", "dense_mlp_idx", "sconv_kernel_size"} & set(
        values["text_config"]
    )
    assert values["text_config"]["layer_types"] == ["hybrid_sliding"] * 5 + ["hybrid"]
    assert values["text_config"]["mlp_layer_types"] == ["dense"] * 2 + ["sparse"] * 4
    flat = text_only().to_dict("transformers")
    assert flat["model_type"] == "inkling_text"
    assert flat["architectures"] == ["InklingForCausalLM"]
    assert "text_config" not in flat and "vision_config" not in flat


def test_what_the_transformers_spelling_cannot_say_is_refused() -> None:
    with pytest.raises(ValueError, match=r"audio_config\.decoder_dmodel is null.*both towers"):
        dataclasses.replace(preset("tiny"), audio=None).to_dict("transformers")
    fractional = ModelConfig.from_dict(document(log_scaling_n_floor=16.5))
    with pytest.raises(ValueError, match=r"log_scaling_n_floor = 16\.5.*whole numbers"):
        fractional.to_dict("transformers")


def test_no_window_is_left_out() -> None:
    values = document(local_layer_ids=[], sliding_window_size=None)
    values["mtp_config"]["local_layer_ids"] = []
    config = ModelConfig.from_dict(values)
    written = config.to_dict("transformers")
    assert "sliding_window_size" not in written["text_config"]
    assert ModelConfig.from_dict(written) == config


# Which spelling it is, and mixtures.


def test_intermediate_size_means_what_stands_beside_it() -> None:
    same = {"intermediate_size": 32, "dense_intermediate_size": 96}
    swapped = {"intermediate_size": 96, "moe_intermediate_size": 32}
    values = without(document(), "text_config", "dense_intermediate_size")
    for widths in (same, swapped, {**same, "moe_intermediate_size": 32}):
        text = {**values["text_config"], **widths}
        assert ModelConfig.from_dict({**values, "text_config": text}) == preset("tiny")
    both = {**swapped, "dense_intermediate_size": 96}
    refused(
        {**values, "text_config": {**values["text_config"], **both}},
        "text_config.intermediate_size = 96 contradicts text_config.moe_intermediate_size = 32",
        "text_config.dense_intermediate_size = 96",
    )
    del values["text_config"]["intermediate_size"]
    values["text_config"] |= {"dense_intermediate_size": 96, "moe_intermediate_size": 32}
    assert ModelConfig.from_dict(values) == preset("tiny")


def test_lone_intermediate_size_in_a_mixture_is_refused() -> None:
    values = without(document(conv_kernel_size=4), "text_config", "dense_intermediate_size")
    refused(values, "text_config.intermediate_size = 32", "two meanings", "moe_intermediate_size")


MIXED = [
    ("layer_types", ["hybrid_sliding"] * 5 + ["hybrid"], "local_layer_ids"),
    ("layer_types", ["sliding_attention"] * 5 + ["full_attention"], "local_layer_ids"),
    ("mlp_layer_types", ["dense"] * 2 + ["sparse"] * 4, "dense_mlp_idx"),
    ("max_position_embeddings", 4096, "model_max_length"),
    ("conv_kernel_size", 4, "sconv_kernel_size"),
    ("sliding_window", 16, "sliding_window_size"),
    ("num_local_experts", 8, "n_routed_experts"),
    ("embedding_multiplier", 4, "logits_mup_width_multiplier"),
    ("dtype", "bfloat16", "torch_dtype"),
]
OTHER_VALUES = {
    "layer_types": ["hybrid_sliding"] * 4 + ["hybrid"] * 2,
    "mlp_layer_types": ["dense"] + ["sparse"] * 5,
    "dtype": "float32",
}


@pytest.mark.parametrize(("key", "value", "released"), MIXED)
def test_both_names_of_a_field_must_agree(key: str, value: Any, released: str) -> None:
    assert ModelConfig.from_dict(document(**{key: value})) == preset("tiny")
    assert ModelConfig.from_dict(document(**{key: value})).unknown_keys == ()
    alone = without(document(**{key: value}), "text_config", released)
    assert ModelConfig.from_dict(alone) == preset("tiny")
    other = OTHER_VALUES.get(key, 5)
    refused(
        document(**{key: other}), f"text_config.{key}", f"text_config.{released}", "contradicts"
    )


def test_ids_of_local_layers_may_be_in_any_order() -> None:
    assert ModelConfig.from_dict(theirs(local_layer_ids=[4, 0, 1, 3, 2])) == preset("tiny")
    refused(theirs(local_layer_ids=[4, 0, 1, 3, 3]), "local_layer_ids", "3 is listed twice")
    refused(theirs(local_layer_ids=[0, 1, 2, 3]), "layer_types", "contradicts", "local_layer_ids")


# W11: what the transformers spelling leaves out or says wrongly.


def test_w11_missing_layer_types_means_every_sixth_global() -> None:
    values = without(theirs(layer_types=None), "text_config", "local_layer_ids")
    assert ModelConfig.from_dict(values) == preset("tiny")
    del values["text_config"]["layer_types"]
    assert ModelConfig.from_dict(values) == preset("tiny")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("layer_types", ["hybrid"], ["layer_types has 1 entries", "num_hidden_layers = 6"]),
        ("layer_types", "hybrid", ["layer_types = 'hybrid'", "a list"]),
        ("layer_types", ["hybrid"] * 5 + ["linear"], ["layer_types[5] = 'linear'", "hybrid_slidi"]),
        ("layer_types", [True] * 6, ["layer_types[0] = True"]),
        ("mlp_layer_types", ["sparse"] * 5 + ["dense"], ["mlp_layer_types[5] = 'dense'"]),
        (
            "mlp_layer_types",
            ["dense", "sparse", "dense", *["sparse"] * 3],
            ["mlp_layer_types[2] = 'dense'", "layer 1 before it is sparse"],
        ),
        ("mlp_layer_types", ["dense"] * 7, ["mlp_layer_types has 7 entries"]),
        ("mlp_layer_types", None, ["mlp_layer_types is missing"]),
        ("conv_kernel_size", "4", ["conv_kernel_size = '4'", "without quotes"]),
        ("conv_kernel_size", None, ["conv_kernel_size is null"]),
        ("max_position_embeddings", 0, ["max_position_embeddings = 0"]),
        ("moe_intermediate_size", "32", ["moe_intermediate_size = '32'"]),
        ("moe_intermediate_size", 0, ["moe_intermediate_size = 0", "at least 1"]),
        ("moe_intermediate_size", None, ["moe_intermediate_size is missing"]),
        ("intermediate_size", 96.0, ["text_config.intermediate_size = 96.0", "decimal point"]),
        ("intermediate_size", None, ["text_config.intermediate_size is null"]),
        ("num_mtp_layers", "3", ["num_mtp_layers = '3'"]),
        ("mtp_local_layer_ids", [3], ["mtp_local_layer_ids", "3"]),
        ("dtype", "float16", ["text_config.dtype = 'float16'"]),
        ("q_bias", True, ["text_config.q_bias = true"]),
        ("mtp_hidden_states_first", False, ["text_config.mtp_hidden_states_first = false"]),
        ("model_type", "inkling2_text", ["text_config.model_type = 'inkling2_text'", "inkling_t"]),
    ],
)
def test_w11_faults_are_named_as_the_file_spells_them(
    key: str, value: Any, words: list[str]
) -> None:
    values = theirs(**{key: value})
    if key == "layer_types":
        del values["text_config"]["local_layer_ids"]
    if "mtp" in key and "first" not in key:
        del values["mtp_config"]
    refused(values, *words)


@pytest.mark.parametrize("key", ["head_dim", "swa_head_dim", "logits_mup_width_multiplier"])
def test_w11_what_transformers_would_fill_in_otherwise_is_refused(key: str) -> None:
    refused(without(theirs(), "text_config", key), f"text_config.{key} is missing", "write it out")
    assert ModelConfig.from_dict(without(document(), "text_config", key)).text.head_dim in (12, 16)


def test_faults_at_the_top_have_no_block_in_their_name() -> None:
    values = text_only().to_dict("transformers")
    for key in ("conv_kernel_size", "rel_extent", "num_mtp_layers"):
        changed = {**values, key: "4"}
        del changed["mtp_config"]
        with pytest.raises(ValueError, match=f"^{key} = '4'"):
            ModelConfig.from_dict(changed)


def test_dtype_at_the_top_is_named_there() -> None:
    values = without(theirs(), "text_config", "dtype")
    refused({**values, "dtype": "float16"}, "dtype = 'float16'")
    assert ModelConfig.from_dict({**values, "dtype": "float32"}).text.torch_dtype == "float32"


@pytest.mark.parametrize("model_type", ["inkling2", "qwen3_moe", "llama", None, 3])
def test_another_architecture_is_refused_by_name(model_type: Any) -> None:
    values = {**theirs(), "model_type": model_type}
    refused(
        values, "model_type", "inkling_mm_model" if model_type else "null", str(model_type or "")
    )


# Draft depths, given in two places.


def test_draft_depths_of_either_place() -> None:
    values = theirs()
    assert ModelConfig.from_dict(without(theirs(), "mtp_config")).mtp == preset("tiny").mtp
    for key in ("num_mtp_layers", "mtp_local_layer_ids", "chain_hidden_post_norm"):
        del values["text_config"][key]
    assert ModelConfig.from_dict(values).mtp == preset("tiny").mtp
    del values["mtp_config"]
    assert ModelConfig.from_dict(values).mtp == MtpConfig()
    values["text_config"] |= {"num_mtp_layers": None, "chain_hidden_post_norm": False}
    assert ModelConfig.from_dict(values).mtp == MtpConfig()
    values["text_config"] |= {"num_mtp_layers": 2, "chain_hidden_post_norm": True}
    assert ModelConfig.from_dict(values).mtp == MtpConfig(
        num_nextn_predict_layers=2, chain_hidden_post_norm=True
    )


@pytest.mark.parametrize(
    ("key", "value", "released"),
    [
        ("num_mtp_layers", 2, "num_nextn_predict_layers"),
        ("mtp_local_layer_ids", [0], "local_layer_ids"),
        ("chain_hidden_post_norm", True, "chain_hidden_post_norm"),
    ],
)
def test_draft_depths_that_contradict(key: str, value: Any, released: str) -> None:
    refused(theirs(**{key: value}), f"text_config.{key} = ", f"mtp_config.{released} = ", "contra")


# Towers, and what is not used.


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("vision_config", "rms_norm_eps"), 1e-3, ["vision_config.rms_norm_eps = 0.001", "1e-06"]),
        (("audio_config", "rms_norm_eps"), 1e-5, ["audio_config.rms_norm_eps = 1e-05"]),
        (
            ("vision_config", "num_channels"),
            1,
            ["vision_config.n_channels = 3", "num_channels = 1"],
        ),
        (("vision_config", "num_hidden_layers"), 9, ["n_layers = 2", "num_hidden_layers = 9"]),
        (
            ("audio_config", "text_hidden_size"),
            64,
            ["decoder_dmodel = 48", "text_hidden_size = 64"],
        ),
        (("vision_config", "model_type"), "inkling2_vision", ["vision_config.model_type"]),
    ],
)
def test_tower_fields_that_cannot_be_right(
    path: tuple[str, ...], value: Any, words: list[str]
) -> None:
    refused(with_value(theirs(), value, *path), *words)


def test_towers_of_a_config_made_by_transformers() -> None:
    values = theirs()
    for key in ("audio_config", "vision_config"):
        del values[key]["decoder_dmodel"]
    del values["vision_config"]["n_channels"]
    assert ModelConfig.from_dict(values) == preset("tiny")
    values["vision_config"]["num_channels"] = "3"
    refused(values, "vision_config.num_channels = '3'")


def test_null_width_is_no_tower_whatever_transformers_adds() -> None:
    values = theirs()
    for key in ("audio_config", "vision_config"):
        values[key]["decoder_dmodel"] = None
    config = ModelConfig.from_dict(values)
    assert config.audio is None and config.vision is None


def test_unused_fields_are_recognised() -> None:
    unused = {
        "attention_dropout": 0.1,
        "initializer_range": 1.0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "number_of_conv_states": 4,
        "rms_norm_eps_moe_gate": 1e-3,
    }
    values = theirs(**unused)
    values |= {"bos_token_id": 1, "pad_token_id": None, "transformers_version": "5.23.0"}
    values["vision_config"] |= {"hidden_size": 1024, "num_attention_heads": 16}
    values["audio_config"] |= {"dtype": "float32"}
    config = ModelConfig.from_dict(values)
    assert config == preset("tiny")
    assert config.unknown_keys == ()
    values["text_config"] |= {"surprise": 1, "eos_token_id": 3}
    unknown = ModelConfig.from_dict(values).unknown_keys
    assert set(unknown) == {"text_config.surprise", "text_config.eos_token_id"}


# Properties.


@pytest.mark.parametrize("config", [preset("tiny"), text_only()])
def test_any_value_anywhere_is_read_or_refused_in_words(config: ModelConfig) -> None:
    values = config.to_dict("transformers")

    @settings(max_examples=300, deadline=None)
    @given(path=st.sampled_from(paths(values)), value=JSON)
    def check(path: tuple[str, ...], value: Any) -> None:
        changed = with_value(json.loads(json.dumps(values)), value, *path)
        try:
            read = ModelConfig.from_dict(changed)
        except ValueError as error:
            # Without its list of kept ids a model has ids too high for its rows.
            cut = path == ("kept_vocabulary",) and value is None
            named = "eos_token_id" if cut else path[-1].removeprefix("swa_")
            assert named in str(error)
        else:
            assert ModelConfig.from_dict(read.to_dict()) == read

    check()
