"""Computes with our model what a golden folder holds: a name in the file -> a tensor of ours.

Names are those of tests/golden/README.md. Read `compute` first.
"""

import dataclasses
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from suzuri.kernels import dispatch
from suzuri.model.batch import Batch, pack
from suzuri.model.cache import SequenceCache, decoder_attentions
from suzuri.model.config import ModelConfig
from suzuri.model.inkling import Inkling
from suzuri.model.moe import MoE

Values = dict[str, Tensor]


def compute(model: Inkling, expected: Values, report: Callable[[str], None]) -> Values:
    """Everything that `expected` has inputs for. `report(part)` is called before each part."""
    got: Values = {}
    with torch.no_grad():
        if "text.input_ids" in expected:
            report("text")
            got |= _text(model, expected)
        if model.vision is not None and "vision.pixel_values" in expected:
            report("vision")
            got["vision.features"] = model.vision(expected["vision.pixel_values"])
        if model.audio is not None and "audio.bins" in expected:
            report("audio")
            bins = expected["audio.bins"].reshape(-1, expected["audio.bins"].shape[-1])
            got["audio.features"] = model.audio(bins)
        if "mm.input_ids" in expected:
            report("multimodal")
            got |= _multimodal(model, expected, got)
        if model.draft is not None and "mtp.normed.hidden_in" in expected:
            report("MTP")
            got |= _drafts(model, expected)
    return got


def record_problem(model: Inkling, expected: Values) -> str:
    """Why the inputs in `expected` cannot be given to this model; empty when they can."""
    config = model.config
    text, vision, audio = config.text, config.vision, config.audio
    for name in ("text.input_ids", "mm.input_ids"):
        ids = expected.get(name)
        if ids is None:
            continue
        if ids.is_floating_point() or ids.numel() < 2:
            return f"{name} must hold at least 2 token ids"
        if int(ids.min()) < 0 or int(ids.max()) >= text.unpadded_vocab_size:
            return f"{name} has ids outside 0..{text.unpadded_vocab_size - 1}"
    greedy_ids = [n for n in expected if n.endswith(".greedy_ids") and not expected[n].numel()]
    if greedy_ids:
        return f"{greedy_ids[0]} is empty"
    wanted: dict[str, tuple[int, ...]] = {}
    if vision is not None:
        side = vision.patch_size
        wanted["vision.pixel_values"] = (vision.temporal_patch_size, side, side, vision.n_channels)
    if audio is not None:
        wanted["audio.bins"] = (audio.n_mel_bins,)
    if "text.input_ids" in expected:
        rows = expected["text.input_ids"].numel() - 1
        wanted["mtp.normed.hidden_in"] = (rows, text.hidden_size)
    elif "mtp.normed.hidden_in" in expected:
        return "mtp.normed.hidden_in needs text.input_ids"
    for name, tail in wanted.items():
        values = expected.get(name)
        if values is not None and tuple(values.shape[-len(tail) :]) != tail:
            return f"{name} has shape {list(values.shape)}, this model needs [..., {tail}]"
    bins = expected.get("audio.bins")
    if bins is not None and audio is not None and not _inside(bins, audio.mel_vocab_size):
        return f"audio.bins has levels outside 0..{audio.mel_vocab_size - 1}"
    return _media_problem(model, expected)


def _inside(values: Tensor, limit: int) -> bool:
    return bool(((values >= 0) & (values < limit)).all())


def _media_problem(model: Inkling, expected: Values) -> str:
    """Why the placeholders of mm.input_ids and the recorded pictures and clips do not fit."""
    ids = expected.get("mm.input_ids")
    if ids is None:
        return ""
    config = model.config
    for source, tower, token in (
        ("vision.pixel_values", model.vision, config.image_token_id),
        ("audio.bins", model.audio, config.audio_token_id),
    ):
        places = int((ids == _row(config, token)).sum())
        if not places:
            continue
        if tower is None:
            return f"mm.input_ids has {places} placeholders for {source}, but there is no tower"
        inner = 4 if source.startswith("vision") else 1
        given = expected[source].shape[:-inner].numel() if source in expected else 0
        if given != places:
            return f"mm.input_ids has {places} placeholders, {source} holds {given} tokens"
    return ""


def _text(model: Inkling, expected: Values) -> Values:
    ids = _ids(expected["text.input_ids"])
    decoder = model.decoder
    with recorded(model) as records:
        hidden_ND = decoder(_packed(model, ids))
    got: Values = {"text.embed": records[decoder.embed_norm]}
    for i, layer in enumerate(decoder.blocks):
        name = f"text.layer.{i}"
        got[f"{name}.attn"] = records[layer.attn]
        got[f"{name}.attn_sconv"] = records[layer.attn_conv]
        got[f"{name}.mlp"] = records[layer.mlp]
        got[f"{name}.out"] = records[layer]
        if isinstance(layer.mlp, MoE):
            got |= _router(f"{name}.router", model.config, records[layer.mlp.router])
    got["text.final_norm"] = hidden_ND
    got["text.logits"] = decoder.logits(hidden_ND)
    if "text.greedy_ids" in expected:
        num_new = expected["text.greedy_ids"].numel()
        got |= _named("text.greedy", greedy(model, _packed(model, ids), num_new))
    return got


def _router(name: str, config: ModelConfig, record: tuple[Tensor, Tensor, Tensor]) -> Values:
    experts_NK, weights_NJ, logits_NE = record
    k = config.text.num_experts_per_tok
    return {
        f"{name}.routed_logits": logits_NE[:, : config.text.n_routed_experts],
        f"{name}.topk_ids": experts_NK,
        f"{name}.topk_weights": weights_NJ[:, :k],
        f"{name}.shared_weights": weights_NJ[:, k:],
    }


def _multimodal(model: Inkling, expected: Values, got: Values) -> Values:
    ids_N = expected["mm.input_ids"].flatten()
    features: list[Tensor] = []
    rows: list[Tensor] = []
    for kind, token in (
        ("vision", model.config.image_token_id),
        ("audio", model.config.audio_token_id),
    ):
        place_M = (ids_N == _row(model.config, token)).nonzero()[:, 0]
        if place_M.numel():
            rows.append(place_M)
            features.append(got[f"{kind}.features"])
    batch = _packed(model, _ids(ids_N))
    if rows:
        batch = dataclasses.replace(
            batch, media_rows_M=torch.cat(rows), media_features_MD=torch.cat(features)
        )
    out = {"mm.logits": model.decoder.logits(model.decoder(batch))}
    if "mm.greedy_ids" in expected:
        num_new = expected["mm.greedy_ids"].numel()
        out |= _named("mm.greedy", greedy(model, batch, num_new))
    return out


def _ids(ids: Tensor) -> list[int]:
    return [int(i) for i in ids.flatten()]


def _packed(model: Inkling, ids: list[int]) -> Batch:
    """One sequence, on the model's device."""
    return pack([ids], device=model.decoder.norm.weight.device)


def _row(config: ModelConfig, token_id: int) -> int:
    """The model row of a tokenizer id."""
    kept = config.kept_vocabulary
    return token_id if kept is None else kept.index(token_id)


def _named(prefix: str, result: tuple[Tensor, Tensor]) -> Values:
    return {f"{prefix}_ids": result[0], f"{prefix}_logits": result[1]}


def greedy(model: Inkling, batch: Batch, num_new: int) -> tuple[Tensor, Tensor]:
    """Greedy decoding of one sequence through the cache: (ids [num_new], logits [num_new, V])."""
    decoder, length = model.decoder, batch.token_ids_N.shape[0]
    cache = SequenceCache(
        model.config,
        decoder_attentions(model.config),
        num_sequences=1,
        max_tokens=length + num_new,
        dtype=decoder.norm.weight.dtype,
        device=batch.token_ids_N.device,
    )
    batch = dataclasses.replace(batch, cache=cache.view([0], [0], [length]))
    ids: list[int] = []
    rows: list[Tensor] = []
    for position in range(length, length + num_new):
        logits_1V = decoder.logits(decoder(batch)[-1:])
        rows.append(logits_1V)
        ids.append(int(logits_1V.argmax()))
        view = cache.view([0], [position], [1])
        batch = pack([ids[-1:]], first_positions=[position], cache=view, device=logits_1V.device)
    return torch.tensor(ids, device=rows[0].device), torch.cat(rows)


def draft_chain(
    model: Inkling, hidden_ND: Tensor, consumed: list[int], num_depths: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Runs depths 0, 1, ... over the same rows; yields each depth's (hidden rows, last logits).

    hidden_ND [N, D]: final-norm rows of the decoder for tokens 0..N-1; consumed: tokens 1..N. Each
    depth's greedy draft joins the tokens that the next one consumes.
    """
    assert model.draft is not None
    tokens = list(consumed)
    for depth in range(num_depths):
        batch = pack([tokens[depth:]], device=hidden_ND.device)
        embedded_ND = model.decoder.embedded(batch)
        hidden_ND = model.draft(depth, hidden_ND, embedded_ND, batch)
        logits_1V = model.decoder.logits(hidden_ND[-1:])
        yield hidden_ND, logits_1V
        tokens.append(int(logits_1V.argmax()))


def _drafts(model: Inkling, expected: Values) -> Values:
    assert model.draft is not None
    hidden_ND = expected["mtp.normed.hidden_in"].flatten(0, -2)
    hidden_ND = hidden_ND.to(model.decoder.norm.weight.dtype)
    consumed = _ids(expected["text.input_ids"])[1:]
    got: Values = {}
    drafts: list[int] = []
    chain = draft_chain(model, hidden_ND, consumed, len(model.draft.depths))
    for depth, (depth_ND, logits_1V) in enumerate(chain):
        got[f"mtp.normed.depth.{depth}.hidden"] = depth_ND
        got[f"mtp.normed.depth.{depth}.logits"] = logits_1V
        drafts.append(int(logits_1V.argmax()))
    got["mtp.normed.drafts"] = torch.tensor(drafts, device=hidden_ND.device)
    return got


@contextmanager
def recorded(model: Inkling) -> Generator[dict[nn.Module, Any]]:
    """Collects the output of every module of the decoder during the block, keyed by module."""
    records: dict[nn.Module, Any] = {}

    def keep(module: nn.Module, _: object, output: Any) -> None:
        records[module] = output

    handles = [module.register_forward_hook(keep) for module in model.decoder.modules()]
    try:
        with dispatch.apart():
            yield records
    finally:
        for handle in handles:
            handle.remove()
