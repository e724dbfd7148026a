import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from suzuri.model.config import ModelConfig, preset
from suzuri.model.tensor_table import table
from tests.model.documents import JSON, document, paths, refused, with_value, without

GOLDEN = Path(__file__).parent.parent / "golden"
BASE = GOLDEN / "base" / "original"
CASES = sorted(path.parent for path in GOLDEN.glob("*/original/config.json"))


REQUIRED_TEXT = [
    "model_max_length",
    "hidden_size",
    "num_hidden_layers",
    "vocab_size",
    "num_attention_heads",
    "num_key_value_heads",
    "d_rel",
    "rel_extent",
    "rms_norm_eps",
    "sconv_kernel_size",
    "dense_mlp_idx",
    "intermediate_size",
    "n_routed_experts",
    "num_experts_per_tok",
    "n_shared_experts",
    "route_scale",
    "log_scaling_alpha",
]


# Files.


@pytest.mark.parametrize("folder", CASES, ids=lambda path: path.parent.name)
def test_golden_configs(folder: Path) -> None:
    config = ModelConfig.from_file(folder)
    assert config == ModelConfig.from_file(folder / "config.json")
    assert config.unknown_keys == ()
    assert ModelConfig.from_dict(config.to_dict()) == config


def test_golden_base_values() -> None:
    config = ModelConfig.from_file(GOLDEN / "base" / "original")
    assert config.eos_token_id is None
    assert config.image_token_id == 299
    assert config.text.attention(3).log_scaling_n_floor == 10.0
    assert config.vision is not None
    assert config.vision.linear_shapes() == ((64, 27), (128, 256), (64, 256))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b'{\n "a": 1,\n}', ["line 3 column 1"]),
        (b"", ["line 1 column 1"]),
        (b'{"a": 1, "a": 2}', ["'a' appears twice"]),
        (b"[1]", ["JSON object", "list"]),
        (b'{"a": "\xff"}', ["not UTF-8", "byte 7"]),
        (b"[" * 100_000, ["nested too deeply"]),
        (b'{"a": ' + b"9" * 5000 + b"}", ["config.json"]),
    ],
)
def test_broken_file_names_file_and_position(
    tmp_path: Path, content: bytes, words: list[str]
) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(content)
    with pytest.raises(ValueError) as caught:
        ModelConfig.from_file(tmp_path)
    for word in [str(file), *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize("key", ["torch_dtype", "dtype"])
def test_both_names_of_the_weight_dtype(key: str) -> None:
    values = document()
    values.pop("torch_dtype", None)
    values["text_config"].pop("torch_dtype", None)
    assert ModelConfig.from_dict(values).text.torch_dtype == "bfloat16"
    values["text_config"][key] = "float32"
    config = ModelConfig.from_dict(values)
    assert config.text.torch_dtype == "float32"
    assert config.unknown_keys == ()


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    for name in ("config.json", "hf_quant_config.json"):
        side = {"quantization": {"quant_algo": None}}
        text = (BASE / name).read_text() if name == "config.json" else json.dumps(side)
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert ModelConfig.from_file(tmp_path) == ModelConfig.from_file(BASE)


@pytest.mark.parametrize(
    "given",
    [["LlamaForCausalLM"], "InklingForCausalLM ", ["Inkling2ForConditionalGeneration"], [3], 7],
)
def test_w11_another_architecture_is_refused_by_name(given: Any) -> None:
    document = json.loads((BASE / "config.json").read_text()) | {"architectures": given}
    with pytest.raises(ValueError, match=r"architectures = .* is not implemented; supported: Ink"):
        ModelConfig.from_dict(document)


@pytest.mark.parametrize("given", [None, [], ["InklingForCausalLM"], ["Mine", "InklingModel"]])
def test_architectures_of_the_family(given: Any) -> None:
    document = json.loads((BASE / "config.json").read_text()) | {"architectures": given}
    assert ModelConfig.from_dict(document) == ModelConfig.from_file(BASE)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"config\.json: no such file"):
        ModelConfig.from_file(tmp_path)
    (tmp_path / "config.json").symlink_to("nowhere")
    with pytest.raises(ValueError, match="broken link"):
        ModelConfig.from_file(tmp_path)


def test_fault_in_a_file_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(document(d_rel="4")))
    with pytest.raises(ValueError, match=r"config\.json: text_config\.d_rel = '4'"):
        ModelConfig.from_file(tmp_path)


# W11: what a config leaves out or spells differently.


def test_w11_missing_local_layer_ids_means_every_sixth_global() -> None:
    missing = ModelConfig.from_dict(without(document(), "text_config", "local_layer_ids"))
    null = ModelConfig.from_dict(document(local_layer_ids=None))
    assert missing.text.local_layer_ids == null.text.local_layer_ids == (0, 1, 2, 3, 4)


def test_w11_empty_local_layer_ids_means_all_global() -> None:
    values = document(local_layer_ids=[], sliding_window_size=None)
    values["mtp_config"]["local_layer_ids"] = []
    config = ModelConfig.from_dict(values)
    assert not any(config.text.is_local(i) for i in range(6))
    assert ModelConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("given", "padded", "kept"),
    [
        ({"vocab_size": 1024, "unpadded_vocab_size": 1000}, 1024, 1000),
        ({"vocab_size": 1024, "unpadded_vocab_size": 1024}, 1024, 1024),
        ({"vocab_size": 1024, "unpadded_vocab_size": None}, 1024, 1024),
        ({"vocab_size": 1024}, 1024, 1024),
    ],
)
def test_w11_vocabulary_fields(given: dict[str, Any], padded: int, kept: int) -> None:
    values = document()
    values.update(audio_config=None, vision_config=None, eos_token_id=None, kept_vocabulary=None)
    del values["text_config"]["unpadded_vocab_size"]
    values["text_config"] |= given
    text = ModelConfig.from_dict(values).text
    assert (text.vocab_size, text.unpadded_vocab_size) == (padded, kept)


def test_w11_vocabulary_fields_that_contradict() -> None:
    refused(document(unpadded_vocab_size=1025), "unpadded_vocab_size = 1025", "1024")
    refused(document(vocab_size=None), "text_config.vocab_size is null")
    refused(without(document(), "text_config", "vocab_size"), "vocab_size is missing")


def test_w11_unknown_keys_are_listed_and_harmless() -> None:
    values = document(rope_theta=1.0, n_layers=3)
    values["surprise"] = {}
    values["audio_config"]["gain"] = 2
    values["mtp_config"]["n_layers"] = 9
    config = ModelConfig.from_dict(values)
    assert config.unknown_keys == (
        "surprise",
        "text_config.rope_theta",
        "text_config.n_layers",
        "audio_config.gain",
        "mtp_config.n_layers",
    )
    assert config == preset("tiny")


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("hidden_size", "48", ["'48'", "without quotes"]),
        ("hidden_size", True, ["True", "not true or false"]),
        ("hidden_size", 48.0, ["48.0", "without a decimal point"]),
        ("hidden_size", 48.5, ["48.5", "integer >= 1"]),
        ("hidden_size", 0, ["= 0", ">= 1"]),
        ("hidden_size", -48, ["-48", ">= 1"]),
        ("hidden_size", [48], ["[48]"]),
        ("hidden_size", float("nan"), ["nan"]),
        ("num_hidden_layers", 10**12, ["<= 4096"]),
        ("rms_norm_eps", "1e-6", ["'1e-6'", "without quotes"]),
        ("rms_norm_eps", float("nan"), ["nan", "finite"]),
        ("rms_norm_eps", float("inf"), ["inf", "finite"]),
        ("rms_norm_eps", 10**400, ["finite"]),
        ("rms_norm_eps", 0, ["greater than 0"]),
        ("rms_norm_eps", False, ["False"]),
        ("route_scale", -8, ["greater than 0"]),
        ("log_scaling_n_floor", 0, ["greater than 0"]),
        ("log_scaling_alpha", -0.1, [">= 0"]),
        ("logits_mup_width_multiplier", -4.0, ["greater than 0"]),
        ("logits_mup_width_multiplier", "4", ["without quotes"]),
        ("dense_mlp_idx", -1, [">= 0"]),
        ("sconv_kernel_size", 0, [">= 1"]),
        ("head_dim", 0, [">= 1"]),
        ("torch_dtype", "float16", ["float16", "bfloat16, float32"]),
        ("torch_dtype", 16, ["a string"]),
        ("local_layer_ids", "0,1", ["a list of integers"]),
        ("local_layer_ids", [0, 6], ["6 is not a layer", "num_hidden_layers = 6"]),
        ("local_layer_ids", [0, 1, 1], ["1 is listed twice"]),
        ("local_layer_ids", [-1], ["[0] = -1", ">= 0"]),
        ("local_layer_ids", [True], ["[0] = True"]),
        ("local_layer_ids", [0.0], ["[0] = 0.0"]),
        ("num_key_value_heads", 3, ["num_attention_heads = 4", "num_key_value_heads = 3"]),
        ("swa_num_key_value_heads", 3, ["swa_num_attention_heads = 4", "= 3"]),
        ("num_experts_per_tok", 9, ["num_experts_per_tok = 9", "n_routed_experts = 8"]),
        ("num_experts_per_tok", 0, ["at least 1", "dense_mlp_idx = 2"]),
        ("sliding_window_size", None, ["sliding_window_size is missing", "layer 0 is local"]),
        ("sliding_window_size", 0, [">= 1"]),
    ],
)
def test_w11_impossible_text_values(field: str, value: Any, words: list[str]) -> None:
    refused(document(**{field: value}), "text_config.", field.removeprefix("swa_"), *words)


@pytest.mark.parametrize("field", REQUIRED_TEXT)
def test_w11_missing_text_field_is_named(field: str) -> None:
    refused(without(document(), "text_config", field), f"text_config.{field} is missing")
    refused(with_value(document(), None, "text_config", field), f"text_config.{field} is null")


def test_w11_defaults_of_the_specification() -> None:
    values = document(num_key_value_heads=2, unpadded_vocab_size=1000)
    for key in ("head_dim", "swa_num_attention_heads", "swa_num_key_value_heads", "swa_head_dim"):
        del values["text_config"][key]
    for key in ("dense_intermediate_size", "log_scaling_n_floor", "torch_dtype"):
        del values["text_config"][key]
    values["text_config"]["logits_mup_width_multiplier"] = 0
    text = ModelConfig.from_dict(values).text
    assert text.head_dim == 48 // 4
    assert (text.swa_num_attention_heads, text.swa_num_key_value_heads) == (4, 2)
    assert text.swa_head_dim == text.head_dim
    assert text.dense_intermediate_size == text.intermediate_size == 32
    assert text.log_scaling_n_floor is None
    assert text.logits_mup_width_multiplier is None
    assert text.torch_dtype == "bfloat16"


def test_w11_dtype_at_the_top_counts_when_the_text_block_has_none() -> None:
    values = without(document(), "text_config", "torch_dtype")
    values["torch_dtype"] = "float32"
    assert ModelConfig.from_dict(values).text.torch_dtype == "float32"
    values["text_config"]["torch_dtype"] = "bfloat16"
    assert ModelConfig.from_dict(values).text.torch_dtype == "bfloat16"


def test_w11_head_dim_that_does_not_divide() -> None:
    refused(document(head_dim=None, num_attention_heads=10), "head_dim is missing", "48", "10")


def test_w11_no_expert_fields_when_all_layers_are_dense() -> None:
    values = document(dense_mlp_idx=6)
    for key in ("n_routed_experts", "num_experts_per_tok", "n_shared_experts", "route_scale"):
        del values["text_config"][key]
    del values["text_config"]["intermediate_size"]
    config = ModelConfig.from_dict(values)
    assert all(config.text.is_dense(i) for i in range(6))
    assert ModelConfig.from_dict(config.to_dict()) == config
    refused(
        without(values, "text_config", "dense_intermediate_size"),
        "dense_intermediate_size is missing",
    )


def test_no_shared_experts_is_allowed() -> None:
    config = ModelConfig.from_dict(document(n_shared_experts=0))
    assert config.text.n_shared_experts == 0
    names = {entry.name for entry in table(config)}
    assert not any("shared_experts" in name for name in names)


# Recipe flags: traits that every released model has.


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("text_config", "q_bias"), True),
        (("text_config", "o_bias"), True),
        (("text_config", "use_embed_norm"), False),
        (("text_config", "use_sconv"), False),
        (("text_config", "shared_expert_sink"), False),
        (("text_config", "gate_activation"), "softmax"),
        (("text_config", "norm_after_topk"), False),
        (("text_config", "use_gate_bias"), False),
        (("text_config", "use_global_scale"), False),
        (("text_config", "use_global_scale"), 1),
        (("text_config", "final_logit_softcapping"), 30.0),
        (("text_config", "hidden_act"), "gelu"),
        (("text_config", "tie_word_embeddings"), True),
        (("tie_word_embeddings",), True),
        (("audio_config", "bias"), True),
        (("audio_config", "audio_mode"), "mel"),
        (("audio_config", "use_audio_norm"), False),
        (("vision_config", "vision_encoder_type"), "vit"),
        (("vision_config", "use_vision_norm"), None),
        (("model_type",), "inkling2"),
        (("model_type",), "llama"),
    ],
)
def test_other_recipe_is_refused(path: tuple[str, ...], value: Any) -> None:
    words = (".".join(path), "is not implemented", "supported: ")
    shown = repr(value) if path == ("model_type",) else json.dumps(value)
    refused(with_value(document(), value, *path), *words, shown)


def test_absent_recipe_flags_are_the_supported_ones() -> None:
    values = document()
    for key in ("q_bias", "gate_activation", "final_logit_softcapping", "hidden_act"):
        del values["text_config"][key]
    del values["audio_config"]["audio_mode"]
    assert ModelConfig.from_dict(values) == preset("tiny")


# Properties.

PATHS = paths(document())


@settings(max_examples=300, deadline=None)
@given(path=st.sampled_from(PATHS), value=JSON)
def test_any_value_anywhere_is_read_or_refused_in_words(path: tuple[str, ...], value: Any) -> None:
    try:
        config = ModelConfig.from_dict(with_value(document(), value, *path))
    except ValueError as error:
        # Without its list of kept ids a model has ids too high for its rows.
        named = "eos_token_id" if path == ("kept_vocabulary",) else path[-1].removeprefix("swa_")
        assert named in str(error) or path[0] in str(error)
    else:
        assert ModelConfig.from_dict(config.to_dict()) == config
