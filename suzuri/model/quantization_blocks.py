"""What a checkpoint says about its quantisation: the layers whose routed experts are NVFP4.

Three forms mean the same: ModelOpt's side file, its block in config.json, and the block of
compressed-tensors. module_patterns.py decides which experts their lists name. Routed experts of
decoder layers are all that is ever NVFP4: a draft depth that no list excludes is bf16 all the same.
"""

# pyright: strict

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, cast

from suzuri.model.json_fields import Block
from suzuri.model.module_patterns import ModulePatterns

GROUP_SIZE = 16
"""Columns that share one scale."""
MODELOPT, COMPRESSED = "modelopt", "compressed-tensors"
_MODELOPT_METHODS = (MODELOPT, "modelopt_fp4")
PACKED_FORMAT = "nvfp4-pack-quantized"
SUPPORTED = f"supported: NVFP4 with group_size {GROUP_SIZE} of the routed experts"

# Lists of what is not quantised, by any of these names.
EXCLUSIONS = ("exclude_modules", "ignore", "ignored_layers", "modules_to_not_convert")

# About activations, or about how the file came to be: of no account for the weights.
_UNUSED = ("producer", "version", "global_compression_ratio")
_UNUSED_GROUP = ("input_activations", "output_activations")
_UNUSED_WEIGHTS = ("observer", "observer_kwargs", "zp_dtype")

_WEIGHTS: dict[str, tuple[Any, ...]] = {
    "num_bits": (4,),
    "type": ("float",),
    "group_size": (GROUP_SIZE,),
    "strategy": ("tensor_group", None),
    "symmetric": (True, None),
    "dynamic": (False, None),
    "actorder": (None, False),
    "block_structure": (None,),
    "scale_dtype": ("torch.float8_e4m3fn", "float8_e4m3fn", None),
}
"""What a group may say about its weights."""
_MUST_BE: dict[str, Any] = {
    "quantized_layers": {},
    "sparsity_config": {},
    "transform_config": {},
    "has_zero_point": False,
    "pre_quant_scale": False,
}
"""Other fields that would change what the codes mean; absent and null are right too."""
_RELEASED_MODULES = ("attn_norm", "attn", "attn_sconv", "mlp_norm", "mlp_sconv")
_TRANSFORMERS_MODULES = (
    "input_layernorm",
    "self_attn",
    "attn_sconv",
    "post_attention_layernorm",
    "mlp_sconv",
)
_EXPERT_CLASSES = ("Linear", "FusedMoE", "InklingExperts")
"""Targets that name modules by their class, routed experts among them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stored:
    """The answer: whose tensor names, and the layers (none: nothing is quantised)."""

    names: str
    layers: tuple[int, ...]
    unknown_keys: tuple[str, ...]


def read_block(block: Block, sparse: range) -> Stored:
    """Read a block or a whole side file for a model whose layers `sparse` have experts.

    Raises ValueError naming the field, its value and what is supported.
    """
    blocks = [block]
    inner = block.child("quantization")  # side files, and older blocks in config.json
    if inner is not None:
        blocks.append(inner)
    where, method = _one(blocks, "quant_method") or ("", None)
    if method is None and _one(blocks, "format") is not None:
        method = COMPRESSED
    if method not in (None, *_MODELOPT_METHODS, COMPRESSED):
        raise ValueError(
            f"{where} = {method!r} is not implemented; {SUPPORTED}, by {MODELOPT} or {COMPRESSED}"
        )
    _refuse_other_uses(blocks)
    groups = _groups(blocks)
    for group in groups:
        _check_weights(group)
    if method == COMPRESSED:
        is_used = _check_compressed(blocks, groups)
    else:
        is_used = _check_modelopt(blocks, groups)
    layers = _layers(blocks, groups, sparse) if is_used else ()
    for key in _UNUSED:
        _one(blocks, key)
    names = COMPRESSED if method == COMPRESSED else MODELOPT
    unknown = tuple(name for one in (*blocks, *groups) for name in one.unknown())
    return Stored(names=names, layers=layers, unknown_keys=unknown)


def _one(blocks: list[Block], key: str) -> tuple[str, Any] | None:
    """A field that either of the nested blocks may hold: its full name and value."""
    given = [(block.name(key), value) for block in blocks if (value := block.get(key)) is not None]
    if len(given) == 2 and given[0][1] != given[1][1] and key not in _UNUSED:
        raise ValueError(
            f"{given[0][0]} = {given[0][1]!r} contradicts {given[1][0]} = {given[1][1]!r}"
        )
    return given[-1] if given else None


def _check_modelopt(blocks: list[Block], groups: list[Block]) -> bool:
    """Whether anything is quantised; refuses all but NVFP4."""
    algorithm, size = _one(blocks, "quant_algo"), _one(blocks, "group_size")
    if algorithm is None and not groups:
        if any(block.has("quant_algo") for block in blocks):
            return False  # null
        raise ValueError(f"{blocks[-1].name('quant_algo')} is missing; {SUPPORTED}")
    if algorithm is not None:
        where, value = algorithm
        if not (isinstance(value, str) and value.upper() == "NVFP4"):
            raise ValueError(f"{where} = {value!r} is not implemented; {SUPPORTED}")
    if size is not None:
        where, value = size
        if type(value) is not int or value != GROUP_SIZE:
            raise ValueError(f"{where} = {value!r} is not implemented; {SUPPORTED}")
    return True


def _check_compressed(blocks: list[Block], groups: list[Block]) -> bool:
    if not groups:
        raise ValueError(f"{blocks[-1].name('config_groups')} is missing; {SUPPORTED}")
    formats = [one for block in (*blocks, *groups) if (one := _one([block], "format"))]
    if not formats:
        raise ValueError(f"{blocks[-1].name('format')} is missing; supported: {PACKED_FORMAT}")
    status = _one(blocks, "quantization_status")
    for (where, value), supported in (
        *((one, PACKED_FORMAT) for one in formats),
        *([(status, "compressed")] if status is not None else []),
    ):
        if value != supported:
            raise ValueError(f"{where} = {value!r} is not implemented; supported: {supported}")
    return True


def _refuse_other_uses(blocks: list[Block]) -> None:
    """What else a block may ask for, and is not built."""
    for key in ("kv_cache_quant_algo", "kv_cache_scheme"):
        where, value = _one(blocks, key) or ("", {})
        if value != {} and not (isinstance(value, str) and value.lower() == "none"):
            raise ValueError(
                f"{where} = {value!r} is not implemented; supported: null, a KV cache that is not "
                "quantised"
            )
    for key, supported in _MUST_BE.items():
        where, value = _one(blocks, key) or ("", supported)
        if type(value) is not type(supported) or value != supported:
            raise ValueError(
                f"{where} = {value!r} is not implemented; supported: {json.dumps(supported)}"
            )


def _groups(blocks: list[Block]) -> list[Block]:
    where, given = _one(blocks, "config_groups") or ("", {})
    if not isinstance(given, Mapping):
        raise ValueError(f"{where} = {given!r}: must be an object")
    groups: list[Block] = []
    for key, value in cast(Mapping[str, Any], given).items():
        if not isinstance(value, Mapping):
            raise ValueError(f"{where}.{key} = {value!r}: must be an object")
        groups.append(Block(cast(Mapping[str, Any], value), f"{where}.{key}"))
    return groups


def _check_weights(group: Block) -> None:
    for key in _UNUSED_GROUP:
        group.get(key)
    weights = group.child("weights")
    if weights is None:
        raise ValueError(f"{group.name('weights')} is missing; {SUPPORTED}")
    for key, allowed in _WEIGHTS.items():
        value = weights.get(key)
        if not any(type(value) is type(one) and value == one for one in allowed):
            raise ValueError(
                f"{weights.name(key)} = {value!r} is not implemented; "
                f"supported: {json.dumps(allowed[0])}; {SUPPORTED}"
            )
    for key in _UNUSED_WEIGHTS:
        weights.get(key)
    unknown = weights.unknown()
    if unknown:
        raise ValueError(f"{unknown[0]} is not known, and may change what the codes mean")


def _layers(blocks: list[Block], groups: list[Block], sparse: range) -> tuple[int, ...]:
    """The layers that a group targets (without groups: all) and no list excludes."""
    excluded = _patterns(blocks, EXCLUSIONS)
    targets = [_patterns([group], ("targets",)) for group in groups]
    if any(not group.has("targets") for group in groups):
        targets = []
    layers = [
        layer for layer in sparse if not targets or any(one.name_experts(layer) for one in targets)
    ]
    if sparse and not layers:
        raise ValueError(
            f"{groups[0].name('targets')} = {groups[0].get('targets')!r} names no routed experts, "
            "and nothing else can be NVFP4"
        )
    return tuple(layer for layer in layers if not excluded.name_experts(layer))


def _patterns(blocks: list[Block], keys: tuple[str, ...]) -> ModulePatterns:
    entries: list[tuple[str, str]] = []
    used: list[str] = []
    for block in blocks:
        for key in keys:
            given = block.get(key)
            if given is None:
                continue
            name = block.name(key)
            used.append(name)
            if not isinstance(given, list):
                raise ValueError(f"{name} = {given!r}: must be a list of module names")
            for i, entry in enumerate(cast(list[object], given)):
                if not isinstance(entry, str):
                    raise ValueError(f"{name}[{i}] = {entry!r}: must be a module's name")
                is_class = key == "targets" and entry in _EXPERT_CLASSES
                entries.append((f"{name}[{i}]", "*" if is_class else entry))
    return ModulePatterns(" and ".join(used), entries)


def write_block(fields: Mapping[str, Any], spelling: str) -> dict[str, Any] | None:
    """`quantization_config` of config.json for a config given as nested plain fields; None when
    nothing is quantised. The excluded modules have the names of that spelling."""
    quantization = fields["quantization"]
    if quantization is None:
        return None
    weights = {"num_bits": 4, "type": "float", "group_size": GROUP_SIZE, "dynamic": False}
    excluded = excluded_modules(fields, spelling)
    if quantization["names"] == MODELOPT:
        return {
            "quant_method": MODELOPT,
            "quant_algo": "NVFP4",
            "group_size": GROUP_SIZE,
            "kv_cache_quant_algo": None,
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            "ignore": excluded,
            "producer": {"name": MODELOPT},
        }
    weights |= {"strategy": "tensor_group", "symmetric": True}
    return {
        "quant_method": COMPRESSED,
        "format": PACKED_FORMAT,
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        # Its readers take every other linear layer for quantised, draft depths too.
        "ignore": [*excluded, r"re:(model\.)?mtp\..*"],
    }


def write_side_file(fields: Mapping[str, Any], spelling: str) -> dict[str, Any] | None:
    """hf_quant_config.json in the same way; None when ModelOpt's names are not used."""
    quantization = fields["quantization"]
    if quantization is None or quantization["names"] != MODELOPT:
        return None
    return {
        # Other readers know the format by this name, whoever wrote it.
        "producer": {"name": MODELOPT},
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": GROUP_SIZE,
            "exclude_modules": excluded_modules(fields, spelling),
        },
    }


def excluded_modules(fields: Mapping[str, Any], spelling: str) -> list[str]:
    """All modules of the model that hold no NVFP4, layer by layer. The releases leave the draft
    depths out of this list though they are not quantised, and so does this."""
    text, quantised = fields["text"], frozenset(fields["quantization"]["layers"])
    towers = [name for name in ("vision", "audio") if fields[name] is not None]
    if spelling == "released":
        decoder, inside = "model.llm", _RELEASED_MODULES
        modules = ["model.llm.embed", "model.llm.embed_norm", "model.llm.norm", "model.llm.unembed"]
        modules += [{"vision": "model.visual", "audio": "model.audio"}[name] for name in towers]
    else:
        decoder, inside = "model.language_model" if towers else "model", _TRANSFORMERS_MODULES
        modules = [f"{decoder}.embed_tokens", f"{decoder}.norm", "lm_head"]
        modules += [f"model.{name}_tower" for name in towers]
    for layer in range(text["num_hidden_layers"]):
        held = ["mlp"]
        if layer >= text["dense_mlp_idx"]:
            held = ["mlp.gate"]
            held += ["mlp.shared_experts"] if text["n_shared_experts"] else []
            held += [] if layer in quantised else ["mlp.experts"]
        modules += [f"{decoder}.layers.{layer}.{name}" for name in (*inside, *held)]
    return modules
