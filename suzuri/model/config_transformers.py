"""The transformers spelling of config.json, turned into the released spelling and back.

The two swap the meaning of `intermediate_size`: beside `dense_intermediate_size` (released) it is
the width of one expert, beside `moe_intermediate_size` (transformers) that of the dense MLPs. A
file may mix both spellings as long as it does not contradict itself. See config_file.py.
"""

# pyright: strict

import copy
import dataclasses
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, cast

from suzuri.model.json_fields import Block

MODEL_TYPE = "inkling_mm_model"
TEXT_ONLY_TYPES = ("inkling_model", "inkling_text")
BLOCK_TYPES = {
    "text_config": (*TEXT_ONLY_TYPES, MODEL_TYPE),
    "audio_config": ("inkling_audio",),
    "vision_config": ("inkling_vision",),
}

# Released name: the other names of the same field. Files of transformers have the first three.
RENAMED = {
    "model_max_length": ("max_position_embeddings",),
    "sconv_kernel_size": ("conv_kernel_size",),
    "torch_dtype": ("dtype",),
}
TEXT_SYNONYMS = {
    **RENAMED,
    "sliding_window_size": ("sliding_window",),
    "n_routed_experts": ("num_local_experts",),
    "logits_mup_width_multiplier": ("embedding_multiplier",),
}
TOWER_SYNONYMS = {
    "audio_config": {
        "decoder_dmodel": ("text_hidden_size",),
        "n_mel_bins": ("num_codebooks",),
        "mel_vocab_size": ("codebook_size",),
    },
    "vision_config": {
        "decoder_dmodel": ("text_hidden_size",),
        "n_channels": ("num_channels",),
        "n_layers": ("num_hidden_layers",),
    },
}
MTP_IN_TEXT = {
    "num_nextn_predict_layers": "num_mtp_layers",
    "local_layer_ids": "mtp_local_layer_ids",
    "chain_hidden_post_norm": "chain_hidden_post_norm",
}
LAYER_KINDS = {
    "hybrid_sliding": True,
    "sliding_attention": True,
    "hybrid": False,
    "full_attention": False,
}
"""The entries of `layer_types`, and whether such a layer is local."""
NO_COMMON_DEFAULT = (
    "head_dim",
    "swa_num_attention_heads",
    "swa_num_key_value_heads",
    "swa_head_dim",
    "logits_mup_width_multiplier",
)
"""Absent, transformers takes the values of the largest model and others derive them."""
ONLY_THERE = ("layer_types", "mlp_layer_types", "conv_kernel_size", "max_position_embeddings")
ONLY_RELEASED = ("dense_mlp_idx", "sconv_kernel_size", "model_max_length")
MLP_KINDS = {"dense": True, "sparse": False}

# Written by transformers; none of them changes what the model computes.
UNUSED_TEXT = (
    "attention_dropout",
    "initializer_range",
    "bos_token_id",
    "pad_token_id",
    "number_of_conv_states",
    "rms_norm_eps_moe_gate",
    "use_cache",
)
UNUSED_TOWER = ("dtype", "torch_dtype", "initializer_range", "hidden_size", "num_attention_heads")
TOWER_EPS = 1e-6
"""The epsilon of the towers' norms; the released spelling cannot say another."""

_NAME = re.compile(r"(?<![\w.'\"])[a-z][a-z_0-9]*(?:\.[a-z][a-z_0-9]*)?")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spelled:
    """A document in the released spelling, and what its file calls the fields."""

    document: dict[str, Any]
    names: Mapping[str, str]
    text_at_top: bool

    @contextmanager
    def faults(self) -> Generator[None]:
        """Faults found inside name the fields as the file spells them."""
        try:
            yield
        except ValueError as error:
            raise ValueError(_NAME.sub(self._name, str(error))) from error

    def _name(self, found: re.Match[str]) -> str:
        name = self.names.get(found[0], found[0])
        return name.removeprefix("text_config.") if self.text_at_top else name


def text_at_top(document: Mapping[str, Any]) -> bool:
    """Whether the decoder's fields are at the top, as text-only models may have them."""
    return document.get("model_type") in TEXT_ONLY_TYPES and "text_config" not in document


def to_released(document: Mapping[str, Any]) -> Spelled:
    """Respell a document in either spelling, or a mixture. Unknown keys stay.

    Raises ValueError naming two fields that contradict each other, or one that has no meaning.
    """
    top = dict(document)
    names: dict[str, str] = {}
    if text_at_top(document):
        _respell_text(top, top, "", names)
    else:
        if isinstance(top.get("text_config"), Mapping):
            text = top["text_config"] = dict(cast(Mapping[str, Any], top["text_config"]))
            if text.get("eos_token_id") in (2, None, top.get("eos_token_id")):
                text.pop("eos_token_id", None)  # transformers writes 2, whatever the model
            _respell_text(text, top, "text_config.", names)
        for key in ("bos_token_id", "pad_token_id"):
            top.pop(key, None)
    for key, synonyms in TOWER_SYNONYMS.items():
        if isinstance(top.get(key), Mapping):
            tower = top[key] = dict(cast(Mapping[str, Any], top[key]))
            _respell_tower(tower, key, synonyms, names)
    return Spelled(document=top, names=names, text_at_top=text_at_top(document))


def _respell_text(
    text: dict[str, Any], top: dict[str, Any], prefix: str, names: dict[str, str]
) -> None:
    _check_type(text, prefix, "text_config")
    is_transformers = _is_transformers(text)
    _respell_widths(text, prefix, names, is_transformers)
    for ours, others in TEXT_SYNONYMS.items():
        _merge(text, ours, others, prefix, names)
        if is_transformers and ours in RENAMED and ours not in text:
            _rename(names, ours, f"{prefix}{others[0]}")
    for key in NO_COMMON_DEFAULT if is_transformers else ():
        if key not in text:
            raise ValueError(
                f"{prefix}{key} is missing; readers of this spelling differ about its default, so "
                "write it out"
            )
    if prefix and text.get("torch_dtype") is None:
        dtype = next((key for key in ("torch_dtype", "dtype") if top.get(key) is not None), None)
        if dtype is not None:
            names["text_config.torch_dtype"] = dtype
    _respell_layers(text, prefix)
    if is_transformers and "dense_mlp_idx" not in text:
        _rename(names, "dense_mlp_idx", f"{prefix}mlp_layer_types")
    _move_mtp(text, top, prefix, names)
    Block(text, prefix.rstrip(".")).expect("mtp_hidden_states_first", True)
    for key in ("mtp_hidden_states_first", *UNUSED_TEXT):
        text.pop(key, None)


def _is_transformers(text: Mapping[str, Any]) -> bool:
    if text.get("dense_intermediate_size") is not None:
        return False
    if text.get("moe_intermediate_size") is not None:
        return True
    return any(key in text for key in ONLY_THERE) and not any(key in text for key in ONLY_RELEASED)


def _respell_widths(
    text: dict[str, Any], prefix: str, names: dict[str, str], is_transformers: bool
) -> None:
    expert, dense = text.pop("moe_intermediate_size", None), text.get("dense_intermediate_size")
    width = text.get("intermediate_size")
    if is_transformers:
        text["dense_intermediate_size"] = Block(text, prefix.rstrip(".")).require(
            "intermediate_size"
        )
        del text["intermediate_size"]
        if expert is not None:
            text["intermediate_size"] = expert
        _rename(names, "dense_intermediate_size", f"{prefix}intermediate_size")
        _rename(names, "intermediate_size", f"{prefix}moe_intermediate_size")
    elif dense is not None and expert is not None:
        if width is not None and not _same(width, expert):
            raise ValueError(
                f"{prefix}intermediate_size = {width!r} contradicts {prefix}moe_intermediate_size "
                f"= {expert!r}: beside {prefix}dense_intermediate_size = {dense!r} both are the "
                "width of one expert; drop dense_intermediate_size if it is that of the dense MLPs"
            )
        text["intermediate_size"] = expert
        if width is None:
            _rename(names, "intermediate_size", f"{prefix}moe_intermediate_size")
    elif dense is None and width is not None and any(key in text for key in ONLY_THERE):
        raise ValueError(
            f"{prefix}intermediate_size = {width!r} has two meanings in a file of both spellings; "
            "give dense_intermediate_size (then it is the width of one expert) or "
            "moe_intermediate_size (then it is that of the dense MLPs)"
        )


def _respell_layers(text: dict[str, Any], prefix: str) -> None:
    """The lists with an entry per layer become ids of local layers and a count of dense ones."""
    count = text.get("num_hidden_layers")
    is_local = _kinds(text, "layer_types", LAYER_KINDS, count, prefix)
    if is_local is not None:
        local = [layer for layer, one in enumerate(is_local) if one]
        given = text.get("local_layer_ids")
        if given is not None and not _same_ids(given, local):
            raise ValueError(
                f"{prefix}layer_types contradicts {prefix}local_layer_ids = {given!r}: the local "
                f"layers of the first are {local}; keep one"
            )
        if given is None:
            text["local_layer_ids"] = local
    is_dense = _kinds(text, "mlp_layer_types", MLP_KINDS, count, prefix)
    if is_dense is not None:
        leading = next((i for i, one in enumerate(is_dense) if not one), len(is_dense))
        late = next((i for i in range(leading, len(is_dense)) if is_dense[i]), None)
        if late is not None:
            raise ValueError(
                f"{prefix}mlp_layer_types[{late}] = 'dense' is not implemented: layer {leading} "
                "before it is sparse; supported: dense layers first"
            )
        given = text.get("dense_mlp_idx")
        if given is not None and not _same(given, leading):
            raise ValueError(
                f"{prefix}mlp_layer_types contradicts {prefix}dense_mlp_idx = {given!r}: the first "
                f"has {leading} leading dense layers; keep one"
            )
        text["dense_mlp_idx"] = leading
    for key in ("layer_types", "mlp_layer_types"):
        text.pop(key, None)


def _kinds(
    text: Mapping[str, Any], key: str, kinds: Mapping[str, bool], count: object, prefix: str
) -> list[bool] | None:
    """What each entry stands for; None when there is no list."""
    given = text.get(key)
    if given is None:
        return None
    if not isinstance(given, list):
        raise ValueError(f"{prefix}{key} = {given!r}: must be a list with one entry per layer")
    entries = cast(list[object], given)
    for layer, entry in enumerate(entries):
        if not isinstance(entry, str) or entry not in kinds:
            raise ValueError(
                f"{prefix}{key}[{layer}] = {entry!r} is not implemented; "
                f"supported: {', '.join(kinds)}"
            )
    if isinstance(count, int) and len(entries) != count:
        raise ValueError(
            f"{prefix}{key} has {len(entries)} entries: must have one per layer, "
            f"num_hidden_layers = {count}"
        )
    return [kinds[cast(str, entry)] for entry in entries]


def _move_mtp(
    text: dict[str, Any], top: dict[str, Any], prefix: str, names: dict[str, str]
) -> None:
    """Draft depths given among the decoder's fields go to `mtp_config`."""
    given = top.get("mtp_config")
    found = {ours: text.pop(theirs, None) for ours, theirs in MTP_IN_TEXT.items()}
    if given is not None and not isinstance(given, Mapping):
        return
    mtp = dict(cast(Mapping[str, Any], given or {}))
    for ours, value in found.items():
        if value is None:
            continue
        name, other = f"{prefix}{MTP_IN_TEXT[ours]}", mtp.get(ours)
        if other is None:
            mtp[ours] = value
            names[f"mtp_config.{ours}"] = name
        elif not (_same(value, other) or _same_ids(value, other)):
            raise ValueError(
                f"{name} = {value!r} contradicts mtp_config.{ours} = {other!r}; keep one"
            )
    if mtp:
        top["mtp_config"] = mtp


def _respell_tower(
    tower: dict[str, Any], key: str, synonyms: Mapping[str, tuple[str, ...]], names: dict[str, str]
) -> None:
    if tower.get("decoder_dmodel") is None and (
        "decoder_dmodel" in tower or tower.get("text_hidden_size") is None
    ):
        return  # no tower, whatever else the block says
    _check_type(tower, f"{key}.", key)
    for ours, others in synonyms.items():
        _merge(tower, ours, others, f"{key}.", names)
    Block(tower, key).expect("rms_norm_eps", TOWER_EPS)
    for unused in ("rms_norm_eps", *UNUSED_TOWER):
        tower.pop(unused, None)


def _check_type(block: Mapping[str, Any], prefix: str, key: str) -> None:
    given = block.get("model_type")
    if given is not None and given not in BLOCK_TYPES[key]:
        raise ValueError(
            f"{prefix}model_type = {given!r} is not implemented; "
            f"supported: {', '.join(BLOCK_TYPES[key])}"
        )


def _merge(
    block: dict[str, Any], ours: str, others: tuple[str, ...], prefix: str, names: dict[str, str]
) -> None:
    """Bring a field with several names to ours. Two different values are refused."""
    keys = [key for key in (ours, *others) if key in block]
    given = [key for key in keys if block[key] is not None]
    for key in given[1:]:
        if not _same(block[given[0]], block[key]):
            raise ValueError(
                f"{prefix}{given[0]} = {block[given[0]]!r} contradicts "
                f"{prefix}{key} = {block[key]!r}; keep one"
            )
    used = next(iter(given or keys), ours)
    if used != ours:
        value = block[used]
        _rename(names, ours, f"{prefix}{used}")
        block[ours] = value
    for key in others:
        block.pop(key, None)


def _rename(names: dict[str, str], ours: str, theirs: str) -> None:
    """Let messages about `ours`, with its block's name or bare, say `theirs`."""
    block = theirs.rpartition(".")[0] or "text_config"
    names[f"{block}.{ours}"] = theirs
    if block == "text_config":
        names[ours] = theirs.rpartition(".")[2]


def _same(one: object, other: object) -> bool:
    """Equal, and not by counting true as 1."""
    return isinstance(one, bool) == isinstance(other, bool) and one == other


def _same_ids(one: object, other: object) -> bool:
    """Whether two lists hold the same in any order; what is in them is checked later."""
    if not isinstance(one, list) or not isinstance(other, list):
        return False
    left, right = cast(list[object], one), cast(list[object], other)
    return len(left) == len(right) and all(item in right for item in left)


def from_released(document: Mapping[str, Any]) -> dict[str, Any]:
    """Respell a complete released document. Without towers it becomes that of a text-only model.

    Raises ValueError for what the transformers spelling cannot say: one tower without the other,
    a `log_scaling_n_floor` that is no whole number.
    """
    top = copy.deepcopy(dict(document))
    text = _transformers_text(top)
    towers: dict[str, dict[str, Any]] = {key: top.pop(key) for key in TOWER_SYNONYMS}
    absent = [key for key, tower in towers.items() if tower["decoder_dmodel"] is None]
    if len(absent) == 1:
        raise ValueError(
            f"{absent[0]}.decoder_dmodel is null: the transformers spelling has both towers or "
            "none; write the released spelling"
        )
    del top["text_config"]
    top["dtype"] = text["dtype"]
    if absent:
        top |= {"architectures": ["InklingForCausalLM"], **text}
        return top
    # Readers other than transformers take the end token from the top.
    top["text_config"] = {**text, "eos_token_id": top["eos_token_id"]}
    audio, vision = towers["audio_config"], towers["vision_config"]
    audio |= {"model_type": "inkling_audio"}
    vision |= {"model_type": "inkling_vision", "num_channels": vision["n_channels"]}
    for key, tower in towers.items():
        top[key] = {**tower, "rms_norm_eps": TOWER_EPS, "text_hidden_size": text["hidden_size"]}
    return top


def _transformers_text(top: Mapping[str, Any]) -> dict[str, Any]:
    text: dict[str, Any] = {"model_type": "inkling_text", **top["text_config"]}
    floor = text["log_scaling_n_floor"]
    if isinstance(floor, float):
        raise ValueError(
            f"text_config.log_scaling_n_floor = {floor}: the transformers spelling holds whole "
            "numbers only; write the released spelling"
        )
    for ours, (theirs,) in RENAMED.items():
        text[theirs] = text.pop(ours)
    text["moe_intermediate_size"] = text.pop("intermediate_size")
    text["intermediate_size"] = text.pop("dense_intermediate_size")
    if text["sliding_window_size"] is None:
        del text["sliding_window_size"]  # must be a number there; without local layers, unused
    if text["logits_mup_width_multiplier"] is None:
        text["logits_mup_width_multiplier"] = 1.0
    layers, dense = range(text["num_hidden_layers"]), text.pop("dense_mlp_idx")
    local = frozenset(text["local_layer_ids"])
    text["layer_types"] = ["hybrid_sliding" if i in local else "hybrid" for i in layers]
    text["mlp_layer_types"] = ["dense" if i < dense else "sparse" for i in layers]
    mtp = top["mtp_config"]
    text["num_mtp_layers"] = mtp["num_nextn_predict_layers"] or None
    text["mtp_local_layer_ids"] = mtp["local_layer_ids"]
    text["chain_hidden_post_norm"] = mtp["chain_hidden_post_norm"]
    text["mtp_hidden_states_first"] = True
    return text
