"""Make or check golden cases, with the Inkling implementation of `transformers` as the oracle.

The expected values must not come from this package, so nothing of it is imported here. Run by hand,
in an environment of its own (torch 2.13.0, transformers 5.23.0, safetensors, scipy):

    python tests/golden/generate.py check tests/golden/odd tests/golden/wide
    python tests/golden/generate.py write tests/golden/odd --seed 2101 --tokens 29

`check` recomputes a case from its checkpoint and inputs and compares. `write` reads
CASE/original/config.json (released spelling) and makes everything else in CASE. It takes the first
seed, counting up, that meets the margins below, so that neither the experts nor the greedy tokens
hang on rounding, and that generates no placeholder of an image or a sound. README.md describes the
layout, the keys and the tolerances.
"""

import argparse
import json
import tempfile
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import transformers
from draw import Tensors, draw_inputs, draw_weights, has_tower, media_ids, vision_scales
from safetensors.torch import load_file, save_file
from transformers import (
    DynamicCache,
    InklingConfig,
    InklingForCausalLM,
    InklingForConditionalGeneration,
)
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

GREEDY_TOKENS, MEDIA_GREEDY_TOKENS = 32, 8
REQUIRED_MARGINS = {
    "min_router_margin": 5e-4,
    "min_greedy_top2_gap": 0.015,
    "min_draft_top2_gap": 0.08,
}
# What stands in for an absent tower, which the oracle cannot leave out. It is never run.
STAND_IN = {
    "audio": {"n_mel_bins": 1, "mel_vocab_size": 2},
    "vision": {"patch_size": 2, "temporal_patch_size": 2, "n_layers": 2},
}
TOWER_PREFIX = {"audio": "model.audio_tower.", "vision": "model.vision_tower."}
SHARD = "model-00001-of-00001.safetensors"


def stand_in_prefixes(config: dict) -> tuple[str, ...]:
    """Where the oracle keeps the towers that the case does not have."""
    return tuple(TOWER_PREFIX[kind] for kind in STAND_IN if not has_tower(config, kind))


# ----------------------------------------------------------------------------------------- oracle


def oracle_config(config: dict) -> tuple[InklingConfig, list[str]]:
    """The released config as the oracle takes it, and what had to be written differently."""
    config, notes = deepcopy(config), []
    if not config["text_config"]["logits_mup_width_multiplier"]:
        config["text_config"]["logits_mup_width_multiplier"] = 1.0
        notes.append("oracle: logits_mup_width_multiplier null was run as 1.0, the same function")
    for kind, block in STAND_IN.items():
        if not has_tower(config, kind):
            config[f"{kind}_config"] = block
            notes.append(f"oracle: no {kind} tower here; a small unused one stood in for it")
    return InklingConfig.from_dict(config), notes


def load_oracle(directory: Path):
    """The oracle in fp32 from a released-layout directory, by its own loading code."""
    released = json.loads((directory / "config.json").read_text())
    config, notes = oracle_config(released)
    model, report = InklingForConditionalGeneration.from_pretrained(
        directory,
        config=config,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    stand_ins = stand_in_prefixes(released)
    missing = [name for name in report["missing_keys"] if not name.startswith(stand_ins)]
    if missing or report["unexpected_keys"] or report["mismatched_keys"]:
        raise RuntimeError(f"{directory} does not load cleanly: {missing or report}")
    mtp = MtpModel.from_pretrained(model).eval()
    # MtpModel gives sliding depths a plain causal mask; ours has the window.
    mtp.create_masks_for_mtp_layer = partial(mtp_masks, mtp.config)
    return model.eval(), mtp, released, notes


def mtp_masks(config, layer_idx, inputs_embeds, mtp_cache, position_ids) -> dict:
    """Additive mask of one depth over a whole prompt (the depth's cache is empty)."""
    rows = torch.arange(inputs_embeds.shape[1])
    distance = rows[:, None] - rows[None, :]
    hidden = distance < 0
    if config.layer_types[layer_idx] == "hybrid_sliding":
        hidden |= distance >= config.sliding_window_size
    mask = torch.zeros(distance.shape).masked_fill(hidden, torch.finfo(torch.float32).min)
    return {"attention_mask": mask[None, None], "conv_mask": None}


@dataclass
class Recorder:
    """Hooks that keep the values inside one forward, and the router margins of all of them."""

    values: Tensors = field(default_factory=dict)
    margins: list[float] = field(default_factory=list)
    keep: bool = False

    def attach(self, model) -> None:
        text = model.model.language_model
        self._hook(text.embed_tokens, "text.embed")
        self._hook(text.norm, "text.final_norm")
        for i, layer in enumerate(text.layers):
            self._hook(layer, f"text.layer.{i}.out")
            self._hook(layer.self_attn, f"text.layer.{i}.attn")
            self._hook(layer.attn_sconv, f"text.layer.{i}.attn_sconv")
            self._hook(layer.mlp, f"text.layer.{i}.mlp")
            if hasattr(layer.mlp, "gate"):
                layer.mlp.gate.register_forward_hook(partial(self._router, f"text.layer.{i}"))

    def _hook(self, module, key: str) -> None:
        def record(module, args, output):
            if self.keep:
                self.values[key] = output[0] if isinstance(output, tuple) else output

        module.register_forward_hook(record)

    def _router(self, layer: str, gate, args, output) -> None:
        logits, weights, ids, shared = output
        scores = logits.sigmoid() + gate.e_score_correction_bias
        self.margins.append(smallest_gap(scores, gate.top_k))
        if self.keep:
            ids, order = ids.sort(dim=-1)
            self.values |= {
                f"{layer}.router.routed_logits": logits,
                f"{layer}.router.topk_ids": ids,
                f"{layer}.router.topk_weights": weights.gather(-1, order),
                f"{layer}.router.shared_weights": shared,
            }


def smallest_gap(scores: torch.Tensor, rank: int) -> float:
    """Smallest difference, over the rows, between the rank-th best score and the next."""
    best = scores.topk(rank + 1).values
    return (best[..., -2] - best[..., -1]).min().item()


def greedy(model, logits, cache, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Cached greedy decoding: the ids and the row of logits that chose each."""
    rows = [logits[0, -1]]
    while len(rows) < length:
        token = rows[-1].argmax()[None, None]
        step = model(input_ids=token, past_key_values=cache, use_cache=True)
        rows.append(step.logits[0, -1])
    return torch.stack(rows).argmax(dim=-1), torch.stack(rows)


def run_mtp(model, mtp, input_ids, hidden, normed: bool) -> Tensors:
    """Draft one token per depth. `normed` applies the main embed_norm, which the oracle omits."""
    embed = model.get_input_embeddings() if normed else mtp.embed_tokens
    cache, ids = MtpCache(config=mtp.config), input_ids[:, 1:]
    values, drafts = {"hidden_in": hidden}, []
    for depth in range(mtp.num_mtp_layers):
        position_ids = torch.arange(ids.shape[1])[None] + depth + 1
        hidden = mtp.forward_layer(depth, hidden, position_ids, cache, inputs_embeds=embed(ids))
        logits = mtp._project_to_logits(hidden[:, -1])
        values |= {f"depth.{depth}.hidden": hidden, f"depth.{depth}.logits": logits}
        drafts.append(logits[0].argmax())
        ids = torch.cat([ids[:, 1:], drafts[-1][None, None]], dim=-1)
    return values | {"drafts": torch.stack(drafts)}


# ----------------------------------------------------------------------------------------- a case


@torch.no_grad()
def evaluate(directory: Path, inputs: Tensors) -> tuple[Tensors, dict, object]:
    """Every expected value of a case, its margins, and the oracle that gave them."""
    model, mtp, released, notes = load_oracle(directory)
    recorder = Recorder()
    recorder.attach(model)
    cache = partial(DynamicCache, config=model.config.get_text_config())

    ids, length = inputs["text.input_ids"], inputs["text.input_ids"].shape[1]
    recorder.keep, past = True, cache()
    logits = model(input_ids=ids, past_key_values=past, use_cache=True).logits
    recorder.keep = False
    values = dict(inputs) | recorder.values | {"text.logits": logits}
    tokens, rows = greedy(model, logits, past, GREEDY_TOKENS)
    values |= {"text.greedy_ids": tokens, "text.greedy_logits": rows}
    whole = model(input_ids=torch.cat([ids, tokens[None, :-1]], dim=-1)).logits[0, length - 1 :]
    gaps = [smallest_gap(rows, 1)]

    media = {}
    if has_tower(released, "vision"):
        media["pixel_values"] = pixels = inputs["vision.pixel_values"]
        values["vision.features"] = model.get_image_features(pixels).pooler_output.squeeze(1)
    if has_tower(released, "audio"):
        media["audio_input_ids"] = bins = inputs["audio.bins"]
        values["audio.features"] = model.model.get_audio_features(bins).last_hidden_state
    if media:
        mixed, past = inputs["mm.input_ids"], cache()
        out = model(input_ids=mixed, past_key_values=past, use_cache=True, **media).logits
        tokens, mixed_rows = greedy(model, out, past, MEDIA_GREEDY_TOKENS)
        values |= {"mm.logits": out, "mm.greedy_ids": tokens, "mm.greedy_logits": mixed_rows}
        gaps.append(smallest_gap(mixed_rows, 1))

    draft_gaps = []
    for style in ("normed", "raw"):
        hidden = values["text.final_norm"][:, :-1]
        drafts = run_mtp(model, mtp, ids, hidden, normed=style == "normed")
        values |= {f"mtp.{style}.{key}": value for key, value in drafts.items()}
        draft_gaps += [smallest_gap(v, 1) for key, v in drafts.items() if key.endswith("logits")]

    margin = min(recorder.margins, default=None)
    padded = torch.cat([torch.zeros((1, 3), dtype=ids.dtype), ids], dim=-1)
    real = (torch.arange(length + 3) > 2)[None]
    shifted = model(input_ids=padded, attention_mask=real).logits[:, 3:]
    info = {
        "dtype": "float32 compute, bf16-exact weights",
        "parameters": sum(
            value.numel()
            for name, value in model.named_parameters()
            if not name.startswith(stand_in_prefixes(released))
        ),
        "min_router_margin": margin,
        "min_greedy_top2_gap": min(gaps),
        "min_draft_top2_gap": min(draft_gaps),
        "cached_vs_full_max_abs": (whole - rows).abs().max().item(),
        "left_pad_max_abs_change": (shifted - logits).abs().max().item(),
        "logit_std": logits.std().item(),
        "logit_absmax": logits.abs().max().item(),
        "scales": vision_scales(released["vision_config"]) if "pixel_values" in media else None,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if notes:
        info["notes"] = notes
    return {key: value.contiguous().clone() for key, value in values.items()}, info, model


def margins(info: dict) -> dict:
    return {key: info[key] for key in REQUIRED_MARGINS}


def is_stable(info: dict) -> bool:
    """Whether experts (if any), greedy tokens and drafts all stand clear of rounding."""
    found = margins(info)
    return all(found[key] is None or found[key] >= REQUIRED_MARGINS[key] for key in found)


def generated_ids(values: Tensors) -> set[int]:
    """Every id that the model chose: greedy tokens and drafts."""
    chosen = [values[key] for key in values if key.endswith((".greedy_ids", ".drafts"))]
    return set(torch.cat(chosen).tolist())


def save_original(directory: Path, weights: Tensors) -> None:
    """The released layout: one shard, mtp.safetensors, and an index over both."""
    directory.mkdir(parents=True, exist_ok=True)
    files = {
        name: "mtp.safetensors" if name.startswith("model.mtp.") else SHARD
        for name in sorted(weights, key=lambda name: (name.startswith("model.mtp."), name))
    }
    for file in sorted(set(files.values())):
        tensors = {name: weights[name] for name in files if files[name] == file}
        save_file(tensors, directory / file, metadata={"format": "pt"})
    index = json.dumps({"metadata": {}, "weight_map": files}, indent=0)
    (directory / "model.safetensors.index.json").write_text(index)


def save_transformers(directory: Path, model, released: dict) -> None:
    """The same weights in the oracle's own layout; text only where the case has no tower."""
    if not any(has_tower(released, kind) for kind in STAND_IN):
        text = InklingForCausalLM(model.config.get_text_config())
        text.model.load_state_dict(model.model.language_model.state_dict())
        text.lm_head.load_state_dict(model.lm_head.state_dict())
        model = text
    fp32 = ("gate.e_score_correction_bias", "gate.global_scale")
    state = {
        name: value if name.endswith(fp32) else value.bfloat16()
        for name, value in model.state_dict().items()
    }
    model.save_pretrained(directory, state_dict=state, save_original_format=False)
    (directory / "generation_config.json").unlink(missing_ok=True)


def write(case: Path, first_seed: int, tokens: int, tries: int) -> None:
    config_text = (case / "original" / "config.json").read_text()
    config = json.loads(config_text)
    for seed in range(first_seed, first_seed + tries):
        with tempfile.TemporaryDirectory() as scratch:
            original, weights = Path(scratch), draw_weights(config, seed)
            save_original(original, weights)
            (original / "config.json").write_text(config_text)
            values, info, model = evaluate(original, draw_inputs(config, seed, tokens))
        print(seed, margins(info), flush=True)
        if is_stable(info) and generated_ids(values).isdisjoint(media_ids(config)):
            break
    else:
        raise SystemExit(f"no stable seed for {case} in {tries} tries")
    save_original(case / "original", weights)
    save_transformers(case / "transformers", model, config)
    save_file(dict(sorted(values.items())), case / "expected.safetensors", {"format": "pt"})
    info = {"case": case.name, "seed": seed, **info}
    (case / "info.json").write_text(json.dumps(info, indent=1) + "\n")


# ------------------------------------------------------------------------------------------ check


def tolerance(key: str) -> tuple[float, float]:
    """Absolute and relative tolerance of a floating-point key."""
    if key.startswith("text.layer."):
        return 1e-3, 1e-5
    if key.startswith(("vision.", "audio.")):
        return 1e-5, 0.0
    return 1e-4, 0.0


def check(case: Path) -> bool:
    """Recompute a case from its checkpoint and inputs; print the worst difference by kind."""
    stored = load_file(case / "expected.safetensors")
    names = ("text.input_ids", "mm.input_ids", "vision.pixel_values", "audio.bins")
    inputs = {name: stored[name] for name in names if name in stored}
    values, info, _ = evaluate(case / "original", inputs)
    bad = sorted(values.keys() ^ stored.keys())
    worst: dict[str, float] = {}
    for key in sorted(values.keys() & stored.keys()):
        got, want = values[key], stored[key]
        if got.shape != want.shape or got.dtype != want.dtype:
            bad.append(key)
            continue
        if not got.is_floating_point():
            difference, good = float((got != want).sum()), torch.equal(got, want)
        else:
            atol, rtol = tolerance(key)
            difference = (got - want).abs().max().item()
            good = torch.allclose(got, want, atol=atol, rtol=rtol)
        kind = ".".join(part for part in key.split(".") if not part.isdigit())
        worst[kind] = max(worst.get(kind, 0.0), difference)
        if not good:
            bad.append(key)
    print(f"{case.name}: {len(stored)} keys, {'ok' if not bad else f'BAD {bad}'}")
    for kind, difference in worst.items():
        print(f"  {kind:36} {difference:.3g}")
    print(f"  {margins(info)}")
    return not bad


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    checker = commands.add_parser("check", help="recompute cases and compare")
    checker.add_argument("cases", type=Path, nargs="+")
    writer = commands.add_parser("write", help="make a case from its original/config.json")
    writer.add_argument("case", type=Path)
    writer.add_argument("--seed", type=int, required=True)
    writer.add_argument("--tokens", type=int, default=32, help="length of the text prompt")
    writer.add_argument("--tries", type=int, default=200, help="seeds to try, counting up")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if options.command == "write":
        write(options.case, options.seed, options.tokens, options.tries)
    elif not all([check(case) for case in options.cases]):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
