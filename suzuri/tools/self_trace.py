"""A model without expected numbers (a checkpoint, or a shape with random weights) against itself.

What can be proven without expected numbers: everything is finite, and a token's hidden row has the
same bits alone, in a batch, in chunks and decoded one by one through the cache.
"""

import dataclasses

import torch
from rich.console import Console
from torch import Tensor

from suzuri.model.batch import pack
from suzuri.model.cache import SequenceCache, decoder_attentions
from suzuri.model.inkling import Inkling
from suzuri.model.locate import locate
from suzuri.model.random_weights import initialize
from suzuri.model.tensor_table import Storage, table
from suzuri.tools.golden import draft_chain
from suzuri.tools.loading import refuse_too_big, with_towers
from suzuri.tools.rows import Row
from suzuri.tools.trace_config import DEFAULT_TOKENS, TraceConfig

INTEGERS = {
    torch.float32: torch.int32,
    torch.float64: torch.int64,
    torch.bfloat16: torch.int16,
}


def trace_shape(config: TraceConfig, console: Console) -> list[Row]:
    """Self-checks of the shape that `config` names. Raises ValueError when it cannot fit."""
    name = config.model or config.config
    assert name is not None
    shape = with_towers(locate(name).config, config.want)
    refuse_too_big(shape, config.dtype, name)
    model = Inkling(shape, dtype=getattr(torch, config.dtype))
    with console.status("drawing weights"):
        initialize(model, config.seed or 0)
    num_parameters = sum(entry.num_values for entry in table(shape, Storage()))
    console.print(f"{num_parameters:,} random parameters as {config.dtype}")
    return self_checks(model, config, console)


def self_checks(model: Inkling, config: TraceConfig, console: Console) -> list[Row]:
    """What a model must hold against itself, whatever its weights."""
    text, num_tokens = model.config.text, config.num_tokens or DEFAULT_TOKENS
    if num_tokens > text.model_max_length:
        raise ValueError(
            f"--num-tokens {num_tokens}: the model's model_max_length is {text.model_max_length}"
        )
    generator = torch.Generator().manual_seed((config.seed or 0) + 1)
    ids = draw_ids(text.unpadded_vocab_size, num_tokens, generator)
    other = draw_ids(text.unpadded_vocab_size, num_tokens // 2 + 1, generator)
    with torch.no_grad(), console.status("running"):
        rows = [finite(f"weights: {name}", x) for name, x in model.named_parameters()]
        # One row for all weights, unless some are at fault: a large model has a thousand of them.
        bad = [row for row in rows if not row.ok]
        rows = bad or [dataclasses.replace(rows[0], name=f"{len(rows)} weights finite")]
        hidden_ND = model.decoder(pack([ids]))
        rows += _decoder_rows(model, hidden_ND, ids, other)
        rows += _tower_rows(model, generator)
        rows += _draft_rows(model, hidden_ND, ids)
    return rows


def draw_ids(vocabulary: int, count: int, generator: torch.Generator) -> list[int]:
    """Random model rows."""
    return [int(i) for i in torch.randint(vocabulary, (count,), generator=generator)]


def _decoder_rows(model: Inkling, full_ND: Tensor, ids: list[int], other: list[int]) -> list[Row]:
    decoder = model.decoder
    logits_NV = decoder.logits(full_ND)
    batched_ND = decoder(pack([other, ids, other]))[len(other) : len(other) + len(ids)]
    third = max(len(ids) // 3, 1)
    return [
        finite("decoder.hidden", full_ND),
        finite("decoder.logits", logits_NV),
        same("decoder: in a batch = alone", batched_ND, full_ND),
        same("decoder: in chunks = whole", _in_chunks(model, ids, third), full_ND),
        same("decoder: one by one = whole", _in_chunks(model, ids, 1), full_ND),
        same("decoder: other thread count", _other_threads(model, ids), full_ND),
    ]


def _in_chunks(model: Inkling, ids: list[int], chunk: int) -> Tensor:
    cache = SequenceCache(
        model.config,
        decoder_attentions(model.config),
        num_sequences=1,
        max_tokens=len(ids),
        dtype=model.decoder.norm.weight.dtype,
    )
    parts: list[Tensor] = []
    for first in range(0, len(ids), chunk):
        piece = ids[first : first + chunk]
        view = cache.view([0], [first], [len(piece)])
        parts.append(model.decoder(pack([piece], first_positions=[first], cache=view)))
    return torch.cat(parts)


def _other_threads(model: Inkling, ids: list[int]) -> Tensor:
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if threads > 1 else 2)
    try:
        return model.decoder(pack([ids]))
    finally:
        torch.set_num_threads(threads)


def _tower_rows(model: Inkling, generator: torch.Generator) -> list[Row]:
    rows: list[Row] = []
    vision, audio = model.config.vision, model.config.audio
    if model.vision is not None and vision is not None:
        side = vision.patch_size
        shape = (5, vision.temporal_patch_size, side, side, vision.n_channels)
        patches = torch.randn(shape, generator=generator)
        features_MD = model.vision(patches)
        rows.append(finite("vision.features", features_MD))
        rows.append(same("vision: a patch alone", model.vision(patches[2:3]), features_MD[2:3]))
    if model.audio is not None and audio is not None:
        levels = torch.randint(audio.mel_vocab_size, (7, audio.n_mel_bins), generator=generator)
        features_MD = model.audio(levels)
        rows.append(finite("audio.features", features_MD))
        rows.append(same("audio: a frame alone", model.audio(levels[3:4]), features_MD[3:4]))
    return rows


def _draft_rows(model: Inkling, full_ND: Tensor, ids: list[int]) -> list[Row]:
    if model.draft is None:
        return []
    chain = draft_chain(model, full_ND[:-1], ids[1:], len(model.draft.depths))
    return [finite(f"mtp.depth.{d}.logits", logits_1V) for d, (_, logits_1V) in enumerate(chain)]


def finite(name: str, x: Tensor) -> Row:
    """A row that fails when a value is not finite; its gap is the number of such values."""
    bad = int((~torch.isfinite(x)).sum())
    problem = f"{bad} of {x.numel()} values are not finite" if bad else ""
    return Row(name=f"{name} finite", difference=float(bad), limit="equal", problem=problem)


def same(name: str, ours: Tensor, expected: Tensor) -> Row:
    """A row that fails unless every row has the same bits; its gap is the number that do not."""
    unequal = (
        int(_bits(ours).ne(_bits(expected)).flatten(1).any(1).sum())
        if len(ours) == len(expected)
        else len(ours)
    )
    problem = f"{unequal} of {len(expected)} rows have other bits" if unequal else ""
    return Row(name=name, difference=float(unequal), limit="equal", problem=problem)


def _bits(x: Tensor) -> Tensor:
    """The values as integers, so that -0.0 and 0.0 differ and a NaN equals itself."""
    return x.contiguous().view(INTEGERS[x.dtype])
