"""config.json read into plain fields, and the released spelling of them written. See config.py.

config_transformers.py respells a file in the transformers spelling first, quantization_blocks.py
reads what it says about quantisation.
"""

# pyright: strict

import codecs
import dataclasses
import stat
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, cast

from suzuri.model.config_transformers import MODEL_TYPE, TEXT_ONLY_TYPES, Spelled, to_released
from suzuri.model.json_fields import Block, parse_object

SIDE_FILE = "hf_quant_config.json"
QUANTIZATION_KEYS = ("quantization_config", "compression_config")
LOCAL_PERIOD = 6

# Fixed traits of the family. Every released model has these values and nothing else is built.
TEXT_RECIPE: dict[str, Any] = {
    "q_bias": False,
    "o_bias": False,
    "use_embed_norm": True,
    "use_sconv": True,
    "shared_expert_sink": True,
    "gate_activation": "sigmoid",
    "norm_after_topk": True,
    "use_gate_bias": True,
    "use_global_scale": True,
    "final_logit_softcapping": None,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
AUDIO_RECIPE: dict[str, Any] = {"bias": False, "use_audio_norm": True, "audio_mode": "dmel"}
VISION_RECIPE: dict[str, Any] = {"vision_encoder_type": "hmlp", "use_vision_norm": True}

ARCHITECTURES = (
    "InklingForConditionalGeneration",
    "InklingForCausalLM",
    "InklingModel",
    "InklingTextModel",
)
"""Classes under which checkpoints of the family are saved; some readers choose by them alone."""

TOP_IDS = (
    "eos_token_id",
    "image_token_id",
    "audio_token_id",
    "image_bos_token_id",
    "audio_bos_token_id",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fields:
    """Keyword arguments of the records in config.py, defaults filled in, types not yet checked."""

    text: dict[str, Any]
    audio: dict[str, Any] | None
    vision: dict[str, Any] | None
    mtp: dict[str, Any]
    top: dict[str, Any]
    quantization: Annotated[tuple[Block, ...], "where the file tells what is quantised"]
    unknown_keys: tuple[str, ...]
    spelled: Annotated[Spelled, "how the file calls the fields"]


def five_to_one(num_layers: int) -> tuple[int, ...]:
    """The local layers when a config lists none: all but every sixth."""
    return tuple(i for i in range(num_layers) if (i + 1) % LOCAL_PERIOD)


def locate(path: str | Path) -> Path:
    """The config file meant by a path to it or to its folder. ValueError when there is none."""
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    if not file.exists():
        link = " (a broken link)" if file.is_symlink() else ""
        raise ValueError(f"{file}: no such file{link}; give a config.json or its model folder")
    if not file.is_file():
        raise ValueError(f"{file}: not a file; give a config.json or its model folder")
    return file


def parse(file: Path) -> dict[str, Any]:
    """The JSON object in a file. ValueError names the file and the position of a fault.

    A byte order mark, which some editors put in front, is skipped.
    """
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise ValueError(f"{file}: not a plain file; opening a pipe would wait for ever")
        data = file.read_bytes()
    except OSError as error:
        raise ValueError(f"{file}: cannot be read: {error.strerror}") from error
    return parse_object(data.removeprefix(codecs.BOM_UTF8), str(file))


@contextmanager
def faults_in(file: Path | None) -> Generator[None]:
    """Faults found inside begin with the file's path, if there is one."""
    try:
        yield
    except ValueError as error:
        if file is None:
            raise
        raise ValueError(f"{file}: {error}") from error


def parse_side_file(config: Path) -> tuple[Path, dict[str, Any]] | None:
    """The side file about quantisation beside a config.json, parsed; None when there is none."""
    file = config.with_name(SIDE_FILE)
    if config.name != "config.json" or not (file.exists() or file.is_symlink()):
        return None
    return file, parse(file)


def read(document: Mapping[str, Any]) -> Fields:
    """Take a config in either spelling apart.

    ValueError names the field that is missing or not implemented as the file spells it.
    """
    spelled = to_released(document)
    with spelled.faults():
        return _read(spelled)


def _read(spelled: Spelled) -> Fields:
    top = Block(spelled.document)
    text = _text_block(top)
    _check_architectures(top)
    top.get("transformers_version")
    top.expect("tie_word_embeddings", False)
    quantization = tuple(
        child
        for block in ([top] if text is top else [top, text])
        for key in QUANTIZATION_KEYS
        if (child := block.child(key)) is not None
    )
    blocks = [top, *([] if text is top else [text])]
    audio = _tower(top, "audio_config", AUDIO_RECIPE, blocks)
    vision = _tower(top, "vision_config", VISION_RECIPE, blocks)
    fields: dict[str, Any] = {
        "text": _text_fields(text, top),
        "audio": audio,
        "vision": vision,
        "mtp": _mtp_fields(top, blocks),
        "top": {key: value for key in TOP_IDS if (value := top.get(key)) is not None},
    }
    fields["top"]["kept_vocabulary"] = top.get("kept_vocabulary")
    unknown = [name for block in blocks for name in block.unknown()]
    return Fields(**fields, quantization=quantization, unknown_keys=tuple(unknown), spelled=spelled)


def _check_architectures(top: Block) -> None:
    """Names of classes, one of them ours. Fields alone do not tell a model with another head."""
    given = top.get("architectures")
    if given is None or given == []:
        return
    names = cast(list[object], given) if isinstance(given, list) else [given]
    if not any(name in ARCHITECTURES for name in names):
        raise ValueError(
            f"{top.name('architectures')} = {given!r} is not implemented; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )


def _text_block(top: Block) -> Block:
    """The block with the decoder's fields; text-only models may have them at the top."""
    model_type = top.require("model_type")
    if model_type == MODEL_TYPE or (model_type in TEXT_ONLY_TYPES and top.has("text_config")):
        top.require("text_config")
        text = top.child("text_config")
        assert text is not None
        text.get("model_type")
        return text
    if model_type in TEXT_ONLY_TYPES:
        return top
    raise ValueError(
        f"model_type = {model_type!r} is not implemented; "
        f"supported: {', '.join((MODEL_TYPE, *TEXT_ONLY_TYPES))}"
    )


def _text_fields(text: Block, top: Block) -> dict[str, Any]:
    for key, supported in TEXT_RECIPE.items():
        text.expect(key, supported)
    fields = {
        key: text.require(key)
        for key in (
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
        )
    }
    # Newer writers call it dtype.
    given = [block.get(key) for block in (text, top) for key in ("torch_dtype", "dtype")]
    fields["torch_dtype"] = next((dtype for dtype in given if dtype is not None), "bfloat16")
    fields["unpadded_vocab_size"] = text.get("unpadded_vocab_size", fields["vocab_size"])
    fields["head_dim"] = _head_dim(text, fields)
    for key in ("num_attention_heads", "num_key_value_heads", "head_dim"):
        fields[f"swa_{key}"] = text.get(f"swa_{key}", fields[key])
    fields["sliding_window_size"] = text.get("sliding_window_size")
    fields["local_layer_ids"] = _local_ids(text, fields["num_hidden_layers"])
    fields["log_scaling_n_floor"] = text.get("log_scaling_n_floor")
    if fields["log_scaling_n_floor"] is None:
        fields["log_scaling_alpha"] = text.get("log_scaling_alpha", 0.0)
    else:
        fields["log_scaling_alpha"] = text.require("log_scaling_alpha")
    mup = text.get("logits_mup_width_multiplier")
    is_zero = isinstance(mup, int | float) and not isinstance(mup, bool) and mup == 0
    fields["logits_mup_width_multiplier"] = None if is_zero else mup
    fields.update(_mlp_fields(text, fields))
    return fields


def _head_dim(text: Block, fields: dict[str, Any]) -> Any:
    given = text.get("head_dim")
    if given is not None:
        return given
    width, heads = fields["hidden_size"], fields["num_attention_heads"]
    if not (isinstance(width, int) and isinstance(heads, int) and heads > 0):
        return 1  # never used: the record refuses one of the two
    if width % heads:
        raise ValueError(
            f"{text.name('head_dim')} is missing and hidden_size = {width} is not a multiple of "
            f"num_attention_heads = {heads}; give head_dim"
        )
    return width // heads


def _local_ids(text: Block, num_layers: Any) -> Any:
    given = text.get("local_layer_ids")
    if given is not None:
        return given
    # A wrong layer count is refused by the record; do not build a list from it.
    return five_to_one(num_layers) if isinstance(num_layers, int) and num_layers < 10_000 else ()


def _mlp_fields(text: Block, fields: dict[str, Any]) -> dict[str, Any]:
    """Widths and experts; a model without expert layers needs no expert fields."""
    dense, layers = fields["dense_mlp_idx"], fields["num_hidden_layers"]
    all_dense = isinstance(dense, int) and isinstance(layers, int) and dense >= layers
    mlp: dict[str, Any] = {}
    for key in ("intermediate_size", "n_routed_experts", "num_experts_per_tok", "n_shared_experts"):
        mlp[key] = text.get(key, 0) if all_dense else text.require(key)
    mlp["route_scale"] = text.get("route_scale", 1.0) if all_dense else text.require("route_scale")
    if text.get("intermediate_size") is None:
        mlp["dense_intermediate_size"] = text.require("dense_intermediate_size")
    else:
        mlp["dense_intermediate_size"] = text.get(
            "dense_intermediate_size", mlp["intermediate_size"]
        )
    return mlp


def _tower(
    top: Block, key: str, recipe: dict[str, Any], blocks: list[Block]
) -> dict[str, Any] | None:
    tower = top.child(key)
    if tower is None:
        return None
    tower.get("model_type")
    if tower.get("decoder_dmodel") is None:
        return None
    blocks.append(tower)
    for name, supported in recipe.items():
        tower.expect(name, supported)
    if key == "audio_config":
        names = ("n_mel_bins", "mel_vocab_size", "dmel_min_value", "dmel_max_value")
    else:
        names = ("patch_size", "temporal_patch_size", "n_channels", "n_layers")
    return {name: tower.require(name) for name in ("decoder_dmodel", *names)}


def _mtp_fields(top: Block, blocks: list[Block]) -> dict[str, Any]:
    mtp = top.child("mtp_config")
    if mtp is None:
        return {}
    depths = mtp.get("num_nextn_predict_layers")
    if depths is None or (isinstance(depths, int) and not isinstance(depths, bool) and depths == 0):
        return {}
    blocks.append(mtp)
    mtp.get("model_type")
    return {
        "num_nextn_predict_layers": depths,
        "chain_hidden_post_norm": mtp.get("chain_hidden_post_norm", False),
        "local_layer_ids": mtp.get("local_layer_ids", ()),
        "local_extent": mtp.get("local_extent"),
    }


def write(fields: dict[str, Any]) -> dict[str, Any]:
    """The released document of a config given as nested plain fields. An absent tower is written
    as a null `decoder_dmodel`, because readers take a missing block for their defaults."""
    document: dict[str, Any] = {
        "architectures": ["InklingForConditionalGeneration"],
        "model_type": MODEL_TYPE,
        **{key: fields[key] for key in TOP_IDS},
        "text_config": {**fields["text"], **TEXT_RECIPE},
        "audio_config": _written_tower(fields["audio"], AUDIO_RECIPE),
        "vision_config": _written_tower(fields["vision"], VISION_RECIPE),
        "mtp_config": dict(fields["mtp"]),
    }
    document["text_config"]["local_layer_ids"] = list(fields["text"]["local_layer_ids"])
    floor = fields["text"]["log_scaling_n_floor"]
    if floor is not None and floor.is_integer():  # other readers want an integer
        document["text_config"]["log_scaling_n_floor"] = int(floor)
    document["mtp_config"]["local_layer_ids"] = list(fields["mtp"]["local_layer_ids"])
    if document["mtp_config"]["local_extent"] is None:
        del document["mtp_config"]["local_extent"]
    if fields["kept_vocabulary"] is not None:
        document["kept_vocabulary"] = list(fields["kept_vocabulary"])
    return document


def _written_tower(tower: dict[str, Any] | None, recipe: dict[str, Any]) -> dict[str, Any]:
    return {"decoder_dmodel": None} if tower is None else {**tower, **recipe}
