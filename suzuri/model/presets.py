"""The known models as config.json documents in the released spelling, which config.py reads; and
which of them come with weights, which locate.py finds."""

# pyright: strict

from pathlib import Path
from typing import Any

from suzuri.model.nano_vocabulary import NANO_VOCABULARY

CUT_VOCABULARY = [*range(940), *range(199998, 200058)]
"""A small text vocabulary and all the special tokens: 1000 ids."""

_TOKENIZER = {
    "architectures": ["InklingForConditionalGeneration"],
    "model_type": "inkling_mm_model",
    "eos_token_id": 200006,
}

_RELEASED_TEXT = {
    "model_max_length": 1048576,
    "torch_dtype": "bfloat16",
    "vocab_size": 201024,
    "unpadded_vocab_size": 200058,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "swa_head_dim": 128,
    "sliding_window_size": 512,
    "d_rel": 16,
    "rel_extent": 1024,
    "log_scaling_n_floor": 128000,
    "log_scaling_alpha": 0.1,
    "rms_norm_eps": 1e-6,
    "sconv_kernel_size": 4,
    "dense_mlp_idx": 2,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "n_shared_experts": 2,
    "route_scale": 8.0,
}

_RELEASED_MTP = {
    "num_nextn_predict_layers": 8,
    "chain_hidden_post_norm": False,
    "local_layer_ids": [0, 2, 4, 5, 6, 7],
}


def _audio(width: int) -> dict[str, Any]:
    return {
        "decoder_dmodel": width,
        "n_mel_bins": 80,
        "mel_vocab_size": 16,
        "dmel_min_value": -7.0,
        "dmel_max_value": 2.0,
    }


def _vision(width: int, num_layers: int) -> dict[str, Any]:
    return {
        "decoder_dmodel": width,
        "patch_size": 40,
        "temporal_patch_size": 2,
        "n_channels": 3,
        "n_layers": num_layers,
    }


_INKLING = {
    **_TOKENIZER,
    "text_config": {
        **_RELEASED_TEXT,
        "hidden_size": 6144,
        "num_hidden_layers": 66,
        "num_attention_heads": 64,
        "swa_num_attention_heads": 64,
        "swa_num_key_value_heads": 16,
        "dense_intermediate_size": 24576,
        "intermediate_size": 3072,
        "logits_mup_width_multiplier": 24.0,
    },
    "audio_config": _audio(6144),
    "vision_config": _vision(6144, 4),
    "mtp_config": _RELEASED_MTP,
}

_INKLING_SMALL = {
    **_TOKENIZER,
    "text_config": {
        **_RELEASED_TEXT,
        "hidden_size": 4096,
        "num_hidden_layers": 42,
        "num_attention_heads": 32,
        "swa_num_attention_heads": 32,
        "swa_num_key_value_heads": 8,
        "dense_intermediate_size": 16384,
        "intermediate_size": 2048,
        "logits_mup_width_multiplier": 16.0,
    },
    "audio_config": _audio(4096),
    "vision_config": _vision(4096, 4),
    "mtp_config": _RELEASED_MTP,
}

# Every kind of layer of the large models, in under 1.5 million parameters, with the window and the
# floor of the log scaling short enough that a test of two dozen tokens passes both. Two vision
# layers: with three, one linear alone would hold 2.5 million parameters.
_TINY = {
    **_TOKENIZER,
    "text_config": {
        "model_max_length": 4096,
        "torch_dtype": "bfloat16",
        "hidden_size": 48,
        "num_hidden_layers": 6,
        "vocab_size": 1024,
        "unpadded_vocab_size": len(CUT_VOCABULARY),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 16,
        "sliding_window_size": 16,
        "d_rel": 4,
        "rel_extent": 24,
        "log_scaling_n_floor": 16,
        "log_scaling_alpha": 0.1,
        "rms_norm_eps": 1e-6,
        "sconv_kernel_size": 4,
        "dense_mlp_idx": 2,
        "dense_intermediate_size": 96,
        "intermediate_size": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 2,
        "route_scale": 8.0,
        "logits_mup_width_multiplier": 4.0,
    },
    "audio_config": _audio(48),
    "vision_config": _vision(48, 2),
    "mtp_config": {"num_nextn_predict_layers": 3, "local_layer_ids": [0, 2]},
    "kept_vocabulary": CUT_VOCABULARY,
}

# The small model that comes with the package (docs/nano.md): 12.9 million parameters, of which the
# vision tower has 2.7 million and the draft depths 2.2. Few wide layers, since a step on a CPU
# costs per layer; a global layer after every two local ones, so that two of six see everything. A
# chat with a few tools is longer than the floor of the log scaling.
_NANO = {
    **_TOKENIZER,
    "text_config": {
        "model_max_length": 4096,
        "torch_dtype": "bfloat16",
        "hidden_size": 256,
        "num_hidden_layers": 6,
        "vocab_size": len(NANO_VOCABULARY),
        "unpadded_vocab_size": len(NANO_VOCABULARY),
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "swa_num_attention_heads": 8,
        "swa_num_key_value_heads": 4,
        "swa_head_dim": 32,
        "sliding_window_size": 128,
        "local_layer_ids": [0, 1, 3, 4],
        "d_rel": 8,
        "rel_extent": 256,
        "log_scaling_n_floor": 256,
        "log_scaling_alpha": 0.1,
        "rms_norm_eps": 1e-6,
        "sconv_kernel_size": 4,
        "dense_mlp_idx": 1,
        "dense_intermediate_size": 512,
        "intermediate_size": 64,
        "n_routed_experts": 16,
        "num_experts_per_tok": 2,
        "n_shared_experts": 2,
        "route_scale": 8.0,
        "logits_mup_width_multiplier": 4.0,
    },
    "audio_config": _audio(256),
    "vision_config": _vision(256, 2),
    "mtp_config": {"num_nextn_predict_layers": 3, "local_layer_ids": [0, 2]},
    "kept_vocabulary": NANO_VOCABULARY,
}

DOCUMENTS: dict[str, dict[str, Any]] = {
    "inkling": _INKLING,
    "inkling-small": _INKLING_SMALL,
    "inkling-nano": _NANO,
    "tiny": _TINY,
}

DEFAULT_MODEL = "inkling-nano"
"""What every command that runs a model takes without MODEL."""
TOY_MODEL = "tiny"
"""Has no weights anywhere: the engine draws them unasked."""
SHORT_NAMES = {"nano": "inkling-nano"}
SHIPPED = {"inkling-nano": Path(__file__).parents[1] / "weights" / "inkling-nano"}
"""Presets whose weights are part of this package, and their folders."""
