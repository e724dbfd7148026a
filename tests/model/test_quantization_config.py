import copy
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from suzuri.model.config import ModelConfig, Quantization, preset
from suzuri.model.quantization_config import side_file
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

BF16_LAYER_2 = ["model.llm.layers.2.mlp.experts"]
WEIGHTS = {"num_bits": 4, "type": "float", "group_size": 16}
NVFP4 = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": 16}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": BF16_LAYER_2}
COMPRESSED = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}},
    "ignore": BF16_LAYER_2,
}


def side(**fields: Any) -> dict[str, Any]:
    """A side file as ModelOpt writes it, for tiny with its layer 2 in bf16."""
    return {
        "producer": {"name": "modelopt", "version": "0.41.0"},
        "quantization": {**NVFP4, "exclude_modules": BF16_LAYER_2, **fields},
    }


def with_block(block: Any) -> dict[str, Any]:
    return {**document(), "quantization_config": copy.deepcopy(block)}


def layers(block: Any) -> tuple[int, ...] | None:
    quantization = ModelConfig.from_dict(with_block(block)).quantization
    return None if quantization is None else quantization.layers


def folder(path: Path, block: Any = None, beside: Any = None) -> Path:
    """A folder with a config.json and, if asked for, a side file."""
    values = document() if block is None else with_block(block)
    (path / "config.json").write_text(json.dumps(values))
    if beside is not None:
        (path / "hf_quant_config.json").write_text(json.dumps(beside))
    return path


# Q04: every place and form in which the same is said.

SIDE_FORMS = {
    "released": side(),
    "no producer": without(side(), "producer"),
    "flat": side()["quantization"],
    "flat with producer": {"producer": {"name": "modelopt"}, **side()["quantization"]},
    "no group size": without(side(), "quantization", "group_size"),
    "kv none": side(kv_cache_quant_algo="none"),
    "input activations": side(input_activations={"num_bits": 8}, activation_scheme="static"),
    "pattern": side(exclude_modules=["*.layers.2.mlp.experts*", "lm_head"]),
}
BLOCK_FORMS = {
    "ignore": MODELOPT,
    "fp4 method": {**MODELOPT, "quant_method": "modelopt_fp4"},
    "exclude_modules": {**without(dict(MODELOPT), "ignore"), "exclude_modules": BF16_LAYER_2},
    "no method": side()["quantization"],
    "nested": side(),
    "nested with method": {"quant_method": "modelopt", **side()},
    "groups": {
        **without(dict(MODELOPT), "quant_algo"),
        "config_groups": {
            "group_0": {
                "weights": {**WEIGHTS, "dynamic": False},
                "input_activations": {**WEIGHTS, "dynamic": True},
                "targets": ["Linear"],
            }
        },
    },
}


@pytest.mark.parametrize("form", SIDE_FORMS)
def test_q04_side_file_in_every_form(tmp_path: Path, form: str) -> None:
    config = ModelConfig.from_file(folder(tmp_path, beside=SIDE_FORMS[form]))
    assert config == quantised()
    assert ModelConfig.from_file(tmp_path / "config.json") == config


@pytest.mark.parametrize("form", BLOCK_FORMS)
def test_q04_block_in_config_json_in_every_form(tmp_path: Path, form: str) -> None:
    config = ModelConfig.from_file(folder(tmp_path, BLOCK_FORMS[form]))
    assert config == quantised()
    assert config.unknown_keys == ()
    assert ModelConfig.from_file(folder(tmp_path, BLOCK_FORMS[form], side())) == config


def test_q04_nested_in_the_text_block() -> None:
    values = document(quantization_config=copy.deepcopy(MODELOPT))
    assert ModelConfig.from_dict(values) == quantised()
    values["quantization_config"] = {**MODELOPT, "ignore": []}
    refused(
        values, "text_config.quantization_config", "quantization_config and", "contradict", "[2, 3"
    )


def test_q04_neither_is_bf16(tmp_path: Path) -> None:
    assert ModelConfig.from_file(folder(tmp_path)).quantization is None
    assert layers(None) is None
    nothing = {"quant_algo": None, "kv_cache_quant_algo": None}
    assert ModelConfig.from_file(folder(tmp_path, beside=nothing)).quantization is None
    assert layers({**MODELOPT, "ignore": ["*"]}) is None


def test_q04_both_must_agree(tmp_path: Path) -> None:
    for block, beside in (
        (MODELOPT, side(exclude_modules=[])),
        (COMPRESSED, side()),
        (MODELOPT, {"quant_algo": None}),
    ):
        with pytest.raises(ValueError) as caught:
            ModelConfig.from_file(folder(tmp_path, block, beside))
        for word in (f"quantization_config in {tmp_path / 'config.json'}", "hf_quant_config.json"):
            assert word in str(caught.value)
        assert "[3, 4, 5]" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", ["line 1 column 2"]),
        (b"", ["line 1 column 1"]),
        (b"[]", ["JSON object"]),
        (b"{}", ["quant_algo is missing", "NVFP4"]),
        (b'{"quantization": 3}', ["quantization = 3", "object"]),
        (b'{"quantization": {"quant_algo": "FP8"}}', ["quantization.quant_algo = 'FP8'", "NVFP4"]),
    ],
)
def test_q04_unreadable_side_file_is_named(
    tmp_path: Path, content: bytes, words: list[str]
) -> None:
    file = folder(tmp_path) / "hf_quant_config.json"
    file.write_bytes(content)
    with pytest.raises(ValueError) as caught:
        ModelConfig.from_file(tmp_path)
    assert str(caught.value).startswith(f"{file}: ")
    for word in words:
        assert word in str(caught.value)


def test_q04_side_file_that_cannot_be_opened(tmp_path: Path) -> None:
    file = folder(tmp_path) / "hf_quant_config.json"
    file.symlink_to("nowhere")
    with pytest.raises(ValueError, match=r"hf_quant_config\.json: cannot be read"):
        ModelConfig.from_file(tmp_path)
    file.unlink()
    file.mkdir()
    with pytest.raises(ValueError, match=r"hf_quant_config\.json: not a plain file"):
        ModelConfig.from_file(tmp_path)


def test_side_file_belongs_to_config_json_only(tmp_path: Path) -> None:
    folder(tmp_path, beside=side())
    other = tmp_path / "other.json"
    other.write_text(json.dumps(document()))
    assert ModelConfig.from_file(other).quantization is None


def test_unknown_keys_name_their_file(tmp_path: Path) -> None:
    config = ModelConfig.from_file(folder(tmp_path, {**MODELOPT, "odd": 1}, side(rotation=1)))
    assert config.unknown_keys == (
        "quantization_config.odd",
        "hf_quant_config.json: quantization.rotation",
    )


# compressed-tensors.


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"ignore": [*BF16_LAYER_2, "lm_head", "re:.*mlp.gate$", "re:.*self_attn.*"]},
        {"ignore": ["re:.*layers\\.2\\.mlp\\.experts.*"]},
        {"ignore": ["re:.*layers\\.2\\.mlp\\.experts\\.\\d+\\..*"]},
        {"ignore": ["re:.*layers\\.2\\.mlp\\.experts\\.(gate_up_proj|down_proj)"]},
        {"quantization_status": "compressed", "sparsity_config": {}, "kv_cache_scheme": None},
        {"quant_method": None},
    ],
)
def test_compressed_tensors_block(changes: dict[str, Any]) -> None:
    values = with_block({**COMPRESSED, **changes})
    assert ModelConfig.from_dict(values) == quantised("compressed-tensors")


def test_targets_choose_layers() -> None:
    def target(*targets: str) -> dict[str, Any]:
        group = {"targets": list(targets), "weights": WEIGHTS}
        return {**COMPRESSED, "config_groups": {"group_0": group}, "ignore": []}

    assert layers(target("Linear")) == (2, 3, 4, 5)
    assert layers(target("re:.*\\.[45]\\.mlp\\.experts.*")) == (4, 5)
    assert layers(target("model.layers.3.mlp.experts", "re:.*layers.5.mlp.*")) == (3, 5)
    two = target("re:.*\\.4\\.mlp\\.experts.*")
    two["config_groups"]["group_1"] = {"targets": ["*.5.mlp.experts"], "weights": WEIGHTS}
    assert layers(two) == (4, 5)
    refused(with_block(target("re:.*self_attn.*")), "config_groups.group_0.targets", "no routed")


# Which experts a list names.


@pytest.mark.parametrize(
    ("entries", "left"),
    [
        ([], (2, 3, 4, 5)),
        (["model.llm.layers.2.mlp.experts"], (3, 4, 5)),
        (["model.language_model.layers.2.mlp.experts"], (3, 4, 5)),
        (["model.layers.2.mlp.experts", "layers.3.mlp.experts"], (4, 5)),
        (["language_model.model.layers.5.mlp.experts"], (2, 3, 4)),
        (["model.llm.layers.2.mlp.experts*"], (3, 4, 5)),
        (["model.llm.layers.2.mlp.experts.*"], (3, 4, 5)),
        (["model.llm.layers.[23].mlp.experts"], (4, 5)),
        (["*layers.?.mlp.experts"], ()),
        (["model.llm.layers.2"], (3, 4, 5)),
        (["model.llm.layers.2.mlp"], (3, 4, 5)),
        (["model.llm.layers.2*"], (3, 4, 5)),
        (
            [
                "model.llm.layers.2.mlp.experts.w13_weight",
                "model.llm.layers.2.mlp.experts.w2_weight",
            ],
            (3, 4, 5),
        ),
        (["model.llm.layers.2.attn", "model.llm.layers.2.mlp.gate"], (2, 3, 4, 5)),
        (["*shared_experts*", "*mlp.gate*", "*gate*", "lm_head", "*attn*"], (2, 3, 4, 5)),
        (["model.llm.layers.22.mlp.experts"], (2, 3, 4, 5)),
        (["model.mtp*", "model.mtp.layers.2.mlp.experts"], (2, 3, 4, 5)),
        (["model.llm.layers.0.mlp", "model.llm.layers.1.mlp"], (2, 3, 4, 5)),
    ],
)
def test_exclusions(entries: list[str], left: tuple[int, ...]) -> None:
    assert layers({**MODELOPT, "ignore": entries}) == (left or None)


def test_draft_depths_are_never_quantised() -> None:
    config = ModelConfig.from_dict(with_block({**MODELOPT, "ignore": []}))
    assert config.mtp_depths == 3
    assert config.quantization == Quantization(names="modelopt", layers=(2, 3, 4, 5))


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (["model.llm.layers.3.mlp.experts.w2_weight"], ["ignore", "part", "layer 3"]),
        (["*.mlp.experts.gate*"], ["ignore", "part", "layer 2"]),
        (["model.llm.layers.3.mlp.experts.7.w1"], ["ignore[0]", "picks one expert"]),
        (["re:.*experts\\.7\\..*"], ["ignore[0]", "picks one expert"]),
        (["lm_head", "re:(.*"], ["ignore[1] = 're:(.*'", "not a regular expression"]),
        ("lm_head", ["ignore = 'lm_head'", "a list"]),
        ([3], ["ignore[0] = 3"]),
    ],
)
def test_exclusions_that_cannot_be_right(entries: Any, words: list[str]) -> None:
    refused(with_block({**MODELOPT, "ignore": entries}), "quantization_config.", *words)


# What is refused by name.


@pytest.mark.parametrize(
    "algorithm", ["FP8", "MXFP4", "MXFP8", "W4A8_AWQ", "NVFP4_AWQ", "W4A16", 4]
)
def test_other_algorithms_are_refused(algorithm: Any) -> None:
    refused(
        with_block({**MODELOPT, "quant_algo": algorithm}),
        f"quantization_config.quant_algo = {algorithm!r}",
        "supported: NVFP4",
    )


@pytest.mark.parametrize("method", ["fp8", "awq", "gptq", "bitsandbytes", "mxfp4", "nvfp4", 1])
def test_other_methods_are_refused(method: Any) -> None:
    block = {"quant_method": method, "bits": 4}
    refused(with_block(block), f"quant_method = {method!r}", "modelopt or compressed-tensors")


@pytest.mark.parametrize(
    ("block", "path", "value", "shown"),
    [
        (MODELOPT, ("group_size",), 32, "quantization_config.group_size = 32"),
        (MODELOPT, ("group_size",), "16", "group_size = '16'"),
        (MODELOPT, ("group_size",), True, "group_size = True"),
        (MODELOPT, ("quantized_layers",), {"model": {}}, "quantized_layers"),
        (MODELOPT, ("pre_quant_scale",), True, "pre_quant_scale = True"),
        (MODELOPT, ("quantization",), {"quant_algo": "FP8"}, "contradicts"),
        (COMPRESSED, ("format",), "mxfp4-pack-quantized", "format = 'mxfp4-pack-quantized'"),
        (COMPRESSED, ("format",), None, "quantization_config.format is missing"),
        (COMPRESSED, ("config_groups",), {}, "config_groups is missing"),
        (COMPRESSED, ("config_groups",), [], "config_groups = []"),
        (COMPRESSED, ("config_groups", "group_0"), 3, "config_groups.group_0 = 3"),
        (COMPRESSED, ("config_groups", "group_1"), {"weights": {"num_bits": 8}}, "num_bits = 8"),
        (COMPRESSED, ("config_groups", "group_0", "weights"), None, "group_0.weights is missing"),
        (COMPRESSED, ("config_groups", "group_0", "format"), "dense", "group_0.format = 'dense'"),
        (COMPRESSED, ("config_groups", "group_0", "targets"), [], "group_0.targets = []"),
        (COMPRESSED, ("quantization_status",), "frozen", "quantization_status = 'frozen'"),
        (COMPRESSED, ("sparsity_config",), {"format": "sparse-24"}, "sparsity_config"),
        (COMPRESSED, ("transform_config",), {"config_groups": {}}, "transform_config"),
    ],
)
def test_other_forms_are_refused(
    block: dict[str, Any], path: tuple[str, ...], value: Any, shown: str
) -> None:
    values = with_block(block)
    refused(with_value(values, value, "quantization_config", *path), shown)


@pytest.mark.parametrize("block", [MODELOPT, COMPRESSED, side()])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("kv_cache_quant_algo", "FP8"),
        ("kv_cache_quant_algo", "NVFP4"),
        ("kv_cache_scheme", {"num_bits": 8, "type": "float"}),
        ("kv_cache_scheme", 3),
    ],
)
def test_q07_quantised_kv_cache_is_refused(block: dict[str, Any], key: str, value: Any) -> None:
    refused(with_block({**block, key: value}), f"quantization_config.{key} = {value!r}", "KV cache")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_bits", 8),
        ("num_bits", 4.0),
        ("type", "int"),
        ("group_size", 32),
        ("group_size", None),
        ("strategy", "group"),
        ("symmetric", False),
        ("dynamic", True),
        ("actorder", "group"),
        ("scale_dtype", "torch.uint8"),
        ("rotation", 1),
    ],
)
def test_other_weights_are_refused(key: str, value: Any) -> None:
    values = with_block(COMPRESSED)
    where = ("quantization_config", "config_groups", "group_0", "weights", key)
    refused(with_value(values, value, *where), ".".join(where))


def test_widths_must_fill_the_blocks() -> None:
    values = with_block(MODELOPT)
    values["text_config"]["intermediate_size"] = 40
    refused(values, "text_config.intermediate_size = 40", "multiple of 16")
    theirs = ModelConfig.from_dict(document(intermediate_size=40)).to_dict("transformers")
    theirs["quantization_config"] = MODELOPT
    refused(theirs, "text_config.moe_intermediate_size = 40")
    values = with_block(MODELOPT)
    values["text_config"]["hidden_size"] = 40
    for tower in ("audio_config", "vision_config"):
        values[tower]["decoder_dmodel"] = 40
    refused(values, "text_config.hidden_size = 40", "multiple of 16")


@pytest.mark.parametrize(
    ("names", "given", "words"),
    [
        ("modelopt", (6,), "quantization.layers: 6 is not a layer"),
        ("modelopt", (1, 3), "layer 1 is dense"),
        ("modelopt", (), "quantization.layers is empty"),
        ("modelopt", (3, 3), "3 is listed twice"),
        ("awq", (3,), "quantization.names = 'awq'"),
    ],
)
def test_records_built_in_code_are_checked(names: str, given: tuple[int, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        quantised(names, given)


def test_equality_counts_quantization() -> None:
    assert quantised() != preset("tiny")
    assert quantised(layers=(5, 3, 4)) == quantised()
    assert quantised() != quantised("compressed-tensors")


# Written files.


@pytest.mark.parametrize("spelling", ["released", "transformers"])
@pytest.mark.parametrize(
    "config",
    [
        quantised(),
        quantised(layers=(2,)),
        quantised(config=text_only()),
        quantised(layers=tuple(range(3, 66)), config=preset("inkling")),
    ],
)
def test_side_file_and_block_say_the_same(
    tmp_path: Path, config: ModelConfig, spelling: Any
) -> None:
    values, beside = config.to_dict(spelling), side_file(config, spelling)
    assert beside is not None
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    for block in (values.pop("quantization_config"), None):
        written = {**values, "quantization_config": block}
        (tmp_path / "config.json").write_text(json.dumps(written))
        assert ModelConfig.from_file(tmp_path) == config


def test_side_file_lists_what_the_release_lists() -> None:
    small = quantised(layers=tuple(range(3, 42)), config=preset("inkling-small"))
    beside = side_file(small)
    assert beside is not None
    excluded = beside["quantization"].pop("exclude_modules")
    assert beside["quantization"] == NVFP4
    assert len(excluded) == len(set(excluded))
    assert [name for name in excluded if name.endswith("mlp.experts")] == BF16_LAYER_2
    assert {name for name in excluded if name.endswith(".mlp")} == {
        f"model.llm.layers.{i}.mlp" for i in (0, 1)
    }
    for module in ("attn", "attn_norm", "mlp_norm", "attn_sconv", "mlp_sconv"):
        assert {f"model.llm.layers.{i}.{module}" for i in range(42)} <= set(excluded)
    for module in ("mlp.gate", "mlp.shared_experts"):
        assert {f"model.llm.layers.{i}.{module}" for i in range(2, 42)} <= set(excluded)
    for name in ("embed", "embed_norm", "norm", "unembed"):
        assert f"model.llm.{name}" in excluded
    assert {"model.visual", "model.audio"} <= set(excluded)
    assert not any("mtp" in name for name in excluded)


def test_no_side_file_to_write() -> None:
    assert side_file(preset("tiny")) is None
    assert side_file(quantised("compressed-tensors")) is None
    assert "quantization_config" not in preset("tiny").to_dict()


def test_compressed_tensors_block_is_written_with_its_names() -> None:
    values = quantised("compressed-tensors").to_dict("transformers")
    block = values["quantization_config"]
    assert block["format"] == "nvfp4-pack-quantized"
    assert "model.language_model.layers.2.mlp.experts" in block["ignore"]
    assert not any("layers.3.mlp.experts" in name for name in block["ignore"])


# Properties.

BLOCKS = [block for name in ("modelopt", "compressed-tensors") for block in [quantised(name)]]


@pytest.mark.parametrize("config", BLOCKS)
def test_any_value_anywhere_is_read_or_refused_in_words(config: ModelConfig) -> None:
    values = config.to_dict()
    inside = paths({"quantization_config": values["quantization_config"]})

    @settings(max_examples=300, deadline=None)
    @given(path=st.sampled_from(inside), value=JSON)
    def check(path: tuple[str, ...], value: Any) -> None:
        changed = with_value(json.loads(json.dumps(values)), value, *path)
        try:
            read = ModelConfig.from_dict(changed)
        except ValueError as error:
            assert path[-1] in str(error) or "quant_algo is missing" in str(error)
        else:
            assert ModelConfig.from_dict(read.to_dict()) == read

    check()


@settings(max_examples=200, deadline=None)
@given(
    chosen=st.sets(st.integers(2, 5), min_size=1),
    names=st.sampled_from(["modelopt", "compressed-tensors"]),
    spelling=st.sampled_from(["released", "transformers"]),
)
def test_any_choice_of_layers_survives_writing(chosen: set[int], names: str, spelling: Any) -> None:
    config = quantised(names, tuple(chosen))
    assert ModelConfig.from_dict(config.to_dict(spelling)) == config
