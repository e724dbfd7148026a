"""Random checkpoints and prompts for a golden case, by the released names and shapes.

Every tensor is drawn, none left at a default: norm weights, conv taps, relative banks, router
biases and scales included. All are exact in bf16 except the router's bias and scale, which are fp32
in a released checkpoint too. The order of the draws is part of a case: to change it is to change
every case made with it.
"""

from itertools import pairwise

import torch
from transformers.models.inkling.modeling_inkling import plan_out_scales

IMAGE_TOKENS, AUDIO_TOKENS = 5, 7

Tensors = dict[str, torch.Tensor]


def has_tower(config: dict, kind: str) -> bool:
    block = config.get(f"{kind}_config")
    return bool(block) and block["decoder_dmodel"] is not None


class Draw:
    """Seeded random tensors under their released names; bf16 unless asked for fp32."""

    def __init__(self, seed: int):
        self.generator = torch.Generator().manual_seed(seed)
        self.tensors: Tensors = {}

    def normal(self, name: str, shape, std: float, mean: float = 0.0, dtype=torch.bfloat16):
        values = torch.randn(shape, generator=self.generator) * std + mean
        self.tensors[name] = values.to(dtype)

    def matrix(self, name: str, *shape: int, gain: float = 1.2):
        """A weight that keeps the scale of its input, times the gain."""
        self.normal(name, shape, std=gain / shape[-1] ** 0.5)

    def norm(self, name: str, width: int):
        self.normal(f"{name}.weight", (width,), std=0.35, mean=1.0)

    def scale(self, name: str, low: float, high: float, dtype=torch.bfloat16):
        value = torch.rand((1,), generator=self.generator) * (high - low) + low
        self.tensors[name] = value.to(dtype)


def draw_block(draw: Draw, name: str, text: dict, sliding: bool, dense: bool) -> None:
    """One decoder layer. Every MTP depth has one of these too, always dense."""
    hidden, taps, prefix = text["hidden_size"], text["sconv_kernel_size"], "swa_" * sliding
    heads, kv_heads = text[f"{prefix}num_attention_heads"], text[f"{prefix}num_key_value_heads"]
    width, d_rel = text[f"{prefix}head_dim"], text["d_rel"]
    extent = text["sliding_window_size"] if sliding else text["rel_extent"]

    draw.norm(f"{name}.attn_norm", hidden)
    draw.norm(f"{name}.mlp_norm", hidden)
    draw.matrix(f"{name}.attn.wq_du.weight", heads * width, hidden, gain=1.3)
    draw.matrix(f"{name}.attn.wk_dv.weight", kv_heads * width, hidden, gain=1.3)
    draw.matrix(f"{name}.attn.wv_dv.weight", kv_heads * width, hidden)
    draw.matrix(f"{name}.attn.wr_du.weight", heads * d_rel, hidden)
    draw.matrix(f"{name}.attn.wo_ud.weight", hidden, heads * width)
    draw.norm(f"{name}.attn.q_norm", width)
    draw.norm(f"{name}.attn.k_norm", width)
    draw.normal(f"{name}.attn.rel_logits_proj.proj", (d_rel, extent), std=1.2)
    for conv in ("k_sconv", "v_sconv"):
        draw.normal(f"{name}.attn.{conv}.weight", (kv_heads * width, 1, taps), std=0.45)
    for conv in ("attn_sconv", "mlp_sconv"):
        draw.normal(f"{name}.{conv}.weight", (hidden, 1, taps), std=0.45)

    if dense:
        inner = text["dense_intermediate_size"]
        draw.matrix(f"{name}.mlp.w13_dn.weight", 2 * inner, hidden)
        draw.matrix(f"{name}.mlp.w2_md.weight", hidden, inner)
        draw.scale(f"{name}.mlp.global_scale", 0.6, 1.3)
        return
    inner, routed, shared = (
        text[key] for key in ("intermediate_size", "n_routed_experts", "n_shared_experts")
    )
    draw.matrix(f"{name}.mlp.gate.weight", routed + shared, hidden, gain=1.5)
    draw.normal(f"{name}.mlp.gate.bias", (routed,), std=0.15, dtype=torch.float32)
    draw.scale(f"{name}.mlp.gate.global_scale", 0.6, 1.2, dtype=torch.float32)
    draw.matrix(f"{name}.mlp.experts.w13_weight", routed, 2 * inner, hidden)
    draw.matrix(f"{name}.mlp.experts.w2_weight", routed, hidden, inner)
    draw.matrix(f"{name}.mlp.shared_experts.shared_w13_weight", shared, 2 * inner, hidden)
    draw.matrix(f"{name}.mlp.shared_experts.shared_w2_weight", shared, hidden, inner)


def vision_scales(vision: dict) -> list[list[int]]:
    """The oracle's plan: (frames, rows, columns, channels) before and after each layer."""
    keys = ("temporal_patch_size", "patch_size", "n_layers", "n_channels")
    return plan_out_scales(*(vision[key] for key in keys)).tolist()


def draw_towers(draw: Draw, config: dict) -> None:
    hidden = config["text_config"]["hidden_size"]
    if has_tower(config, "audio"):
        audio = config["audio_config"]
        rows = audio["n_mel_bins"] * audio["mel_vocab_size"]
        std = 1.8 / audio["n_mel_bins"] ** 0.5
        draw.normal("model.audio.encoder.weight", (rows, hidden), std=std)
        draw.norm("model.audio.final_norm", hidden)
    if has_tower(config, "vision"):
        scales = vision_scales(config["vision_config"])
        for i, (before, after) in enumerate(pairwise(scales)):
            last = i == len(scales) - 2
            fold = (after[0] // before[0]) * (after[1] // before[1]) ** 2
            out = hidden if last else after[3]
            draw.matrix(f"model.visual.layers.linear_{i}.weight", out, before[3] * fold)
            if not last:
                draw.norm(f"model.visual.layers.norm_{i}", out)
        draw.norm("model.visual.final_norm", hidden)


def draw_mtp(draw: Draw, config: dict) -> None:
    text, mtp = config["text_config"], config["mtp_config"]
    hidden = text["hidden_size"]
    for depth in range(mtp["num_nextn_predict_layers"]):
        name = f"model.mtp.layers.{depth}"
        draw.norm(f"{name}.hidden_norm", hidden)
        draw.norm(f"{name}.embed_norm", hidden)
        draw.matrix(f"{name}.input_proj.weight", hidden, 2 * hidden)
        sliding = depth in mtp["local_layer_ids"]
        draw_block(draw, f"{name}.transformer_block", text, sliding, dense=True)
    if mtp["chain_hidden_post_norm"]:
        draw.norm("model.mtp.chain_norm", hidden)


def draw_weights(config: dict, seed: int) -> Tensors:
    """A whole checkpoint by the released names, nothing at a default."""
    draw, text = Draw(seed), config["text_config"]
    hidden = text["hidden_size"]
    draw.normal("model.llm.embed.weight", (text["vocab_size"], hidden), std=0.8)
    unembed_gain = 1.5 * (text["logits_mup_width_multiplier"] or 1.0)
    draw.matrix("model.llm.unembed.weight", text["vocab_size"], hidden, gain=unembed_gain)
    draw.norm("model.llm.embed_norm", hidden)
    draw.norm("model.llm.norm", hidden)
    for i in range(text["num_hidden_layers"]):
        sliding, dense = i in text["local_layer_ids"], i < text["dense_mlp_idx"]
        draw_block(draw, f"model.llm.layers.{i}", text, sliding, dense)
    draw_towers(draw, config)
    draw_mtp(draw, config)
    return draw.tensors


def media_ids(config: dict) -> list[int]:
    """The placeholders of an image and a sound, and the marks that stand before them."""
    names = ("image_token_id", "audio_token_id", "image_bos_token_id", "audio_bos_token_id")
    return [config[name] for name in names]


def draw_inputs(config: dict, seed: int, tokens: int) -> Tensors:
    """A text prompt, and a shorter one with an image and a sound where there are towers."""
    generator = torch.Generator().manual_seed(seed + 1_000_000)
    image, audio, image_mark, audio_mark = media_ids(config)
    prompt = torch.randint(min(media_ids(config)), (tokens,), generator=generator).tolist()
    inputs = {"text.input_ids": torch.tensor([prompt])}
    mixed = prompt[:6]
    if has_tower(config, "vision"):
        block = config["vision_config"]
        size, frames = block["patch_size"], block["temporal_patch_size"]
        pixels = torch.randn((IMAGE_TOKENS, frames, size, size, 3), generator=generator)
        # Exact in bf16, because servers cast pixels to it.
        inputs["vision.pixel_values"] = pixels.bfloat16().float()
        mixed += [image_mark] + [image] * IMAGE_TOKENS
    mixed += prompt[6:9]
    if has_tower(config, "audio"):
        block = config["audio_config"]
        shape = (1, AUDIO_TOKENS, block["n_mel_bins"])
        bins = torch.randint(block["mel_vocab_size"], shape, generator=generator)
        inputs["audio.bins"] = bins.int()
        mixed += [audio_mark] + [audio] * AUDIO_TOKENS
    if len(inputs) > 1:
        inputs["mm.input_ids"] = torch.tensor([mixed + prompt[9:20]])
    return inputs
