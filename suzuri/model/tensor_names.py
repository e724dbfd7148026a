"""What tensors are called: the released and the transformers spelling, and their variants.

`canonical` brings the spellings that writers use to one per layout; `in_transformers` gives the
other layout's names for a released one. tensor_table.py says what the tensors hold.
"""

# pyright: strict

import re
from collections.abc import Iterable
from typing import Literal

Layout = Literal["released", "transformers"]
LAYOUTS: tuple[Layout, ...] = ("released", "transformers")

OPTIONAL_PARTS = ("vision", "audio", "mtp")
PART_PREFIXES = {
    "vision": ("model.visual.", "model.vision_tower."),
    "audio": ("model.audio.", "model.audio_tower."),
    "mtp": ("model.mtp.",),
}
"""How the canonical names of an optional part begin; all others belong to "text"."""

# Whole names. Draft depths have no place in the transformers layout and keep their names there.
_WHOLE = {
    "model.llm.embed.weight": "model.language_model.embed_tokens.weight",
    "model.llm.embed_norm.weight": "model.language_model.embed_tokens.embed_norm.weight",
    "model.llm.norm.weight": "model.language_model.norm.weight",
    "model.llm.unembed.weight": "lm_head.weight",
    "model.audio.encoder.weight": (
        "model.audio_tower.embed_audio_tokens.embed_audio_tokens.weight"
    ),
    "model.audio.final_norm.weight": "model.audio_tower.norm.weight",
    "model.visual.final_norm.weight": "model.vision_tower.final_norm.weight",
}
_IN_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "mlp_norm.weight": "post_attention_layernorm.weight",
    "attn.wq_du.weight": "self_attn.q_proj.weight",
    "attn.wk_dv.weight": "self_attn.k_proj.weight",
    "attn.wv_dv.weight": "self_attn.v_proj.weight",
    "attn.wr_du.weight": "self_attn.r_proj.weight",
    "attn.wo_ud.weight": "self_attn.o_proj.weight",
    "attn.q_norm.weight": "self_attn.q_norm.weight",
    "attn.k_norm.weight": "self_attn.k_norm.weight",
    "attn.rel_logits_proj.proj": "self_attn.rel_logits_proj.proj",
    "attn.k_sconv.weight": "self_attn.k_sconv.conv1d.weight",
    "attn.v_sconv.weight": "self_attn.v_sconv.conv1d.weight",
    "attn_sconv.weight": "attn_sconv.conv1d.weight",
    "mlp_sconv.weight": "mlp_sconv.conv1d.weight",
    "mlp.w2_md.weight": "mlp.down_proj.weight",
    "mlp.global_scale": "mlp.global_scale",
    "mlp.gate.weight": "mlp.gate.weight",
    "mlp.gate.bias": "mlp.gate.e_score_correction_bias",
    "mlp.gate.global_scale": "mlp.gate.global_scale",
    "mlp.experts.w13_weight": "mlp.experts.gate_up_proj",
    "mlp.experts.w2_weight": "mlp.experts.down_proj",
    "mlp.shared_experts.shared_w2_weight": "mlp.shared_experts.down_proj",
}
GATE_AND_UP = {
    "mlp.w13_dn.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight"),
    "mlp.shared_experts.shared_w13_weight": (
        "mlp.shared_experts.gate_proj",
        "mlp.shared_experts.up_proj",
    ),
}
"""Tensors that the transformers layout keeps as two: the even rows, and the odd ones."""

_LAYER = re.compile(r"model\.llm\.layers\.(\d+)\.(.*)")
_VISION = re.compile(r"model\.visual\.layers\.(linear|norm)_(\d+)\.weight")

# Some writers leave the first part of a name away or put one more in front.
_TO_RELEASED = (
    (re.compile(r"(?:model\.)?language_model\.lm_head\."), "model.llm.unembed."),
    (re.compile(r"(?:model\.)?(?:llm|language_model)\."), "model.llm."),
    (re.compile(r"(visual|audio|mtp)\."), r"model.\1."),
)
_TO_TRANSFORMERS = (
    (re.compile(r"(?:model\.)?(?:language_model\.)?lm_head\."), "lm_head."),
    (re.compile(r"(?:model\.)?language_model\.(?:model\.)?"), "model.language_model."),
    (re.compile(r"(?:model\.)?(layers|embed_tokens|norm)\."), r"model.language_model.\1."),
    (re.compile(r"(vision_tower|audio_tower|mtp)\."), r"model.\1."),
)
_MARKS = {
    "transformers": re.compile(
        r"\.self_attn\.|(^|\.)embed_tokens\.|\.conv1d\.|_layernorm\.|(^|\.)(vision|audio)_tower\.|"
        r"\.experts\.(gate_up|down)_proj"
    ),
    "released": re.compile(
        r"(^|\.)(llm|visual)\.|\.attn\.w[qkvro]_|\.attn_norm\.|\.mlp_norm\.|\.w13_|\.w2_|"
        r"(^|\.)audio\.encoder\."
    ),
}
_DRAFT = re.compile(r"(model\.)?mtp\.")


def in_transformers(name: str) -> tuple[str, ...]:
    """The transformers name of a released tensor; two of them (gate, up) where it keeps two."""
    if name in _WHOLE:
        return (_WHOLE[name],)
    if match := _VISION.fullmatch(name):
        kind = "projection" if match[1] == "linear" else "layer_norm"
        return (f"model.vision_tower.encoder_layers.{match[2]}.{kind}.weight",)
    match = _LAYER.fullmatch(name)
    if match is None:
        assert name.startswith(PART_PREFIXES["mtp"]), f"{name} has no name in the other layout"
        return (name,)
    inside = GATE_AND_UP.get(match[2]) or (_IN_LAYER[match[2]],)
    return tuple(f"model.language_model.layers.{match[1]}.{one}" for one in inside)


def marks(names: Iterable[str]) -> dict[Layout, str]:
    """The layouts that the names tell of, each with the first name that does (drafts do not)."""
    found: dict[Layout, str] = {}
    for name in names:
        if _DRAFT.match(name):
            continue
        for layout in LAYOUTS:
            if layout not in found and _MARKS[layout].search(name):
                found[layout] = name
    return found


def canonical(name: str, layout: Layout) -> str:
    """The one spelling of a tensor's name within a layout."""
    for pattern, start in _TO_RELEASED if layout == "released" else _TO_TRANSFORMERS:
        if match := pattern.match(name):
            return match.expand(start) + name[match.end() :]
    return name


def part_of(name: str) -> str:
    """The part that a canonical tensor name belongs to: text, vision, audio or mtp."""
    for part, prefixes in PART_PREFIXES.items():
        if name.startswith(prefixes):
            return part
    return "text"


def depth_of(name: str) -> int | None:
    """The draft depth in a canonical tensor name; None for a tensor of no depth."""
    head, _, rest = name.partition("model.mtp.layers.")
    number = rest.split(".", 1)[0]
    return int(number) if not head and number.isascii() and number.isdigit() else None
