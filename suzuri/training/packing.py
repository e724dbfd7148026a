"""Samples into micro-batches, and micro-batches into tensors."""

# torch leaves these without types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from suzuri.model.batch import Batch, pack
from suzuri.model.config import ModelConfig
from suzuri.processing.vocabulary import Vocabulary
from suzuri.training.losses import LossConfig, check_fields
from suzuri.training.media_check import MEDIA, check_media
from suzuri.training.replay import checked_routing, packed_routing
from suzuri.types import Array, MediaInput, Sample

UNUSED = ("logprobs", "advantages", "reference_logprobs")
"""Fields that may hold anything where the weight is 0."""


class SampleError(ValueError):
    """A sample that cannot be trained on; `index` says which."""

    def __init__(self, index: int, text: str) -> None:
        super().__init__(f"sample {index}: {text}")
        self.index = index


@dataclasses.dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Some samples as tensors. `fields` by name, [N] or [N, K]: targets int64 model rows, the rest
    in the dtype of log-probs. `lengths` of the samples in order."""

    samples: list[int]
    batch: Batch
    fields: dict[str, Tensor]
    lengths: list[int]


def micro_batches(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Indices of samples, in order, such that no group has more tokens than the budget unless it
    is a single sample. First fit, longest first; within a group the order given."""
    groups: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = next((g for g, left in enumerate(room) if left >= lengths[index]), None)
        if place is None:
            groups.append([index])
            room.append(token_budget - lengths[index])
        else:
            groups[place].append(index)
            room[place] -= lengths[index]
    return sorted(sorted(group) for group in groups)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prepared:
    """A sound sample in model rows: those of its tokens [T], and its fields, whose target_tokens
    are model rows too; `routing` as replay.py checks it."""

    rows: Array
    fields: dict[str, Array]
    media: tuple[MediaInput, ...]
    routing: Array | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """What samples must keep to. `towers`: the kinds of media that the model has one for."""

    loss: str
    config: LossConfig
    model: ModelConfig
    vocabulary: Vocabulary
    max_tokens: int
    towers: Collection[str]


def prepare(samples: Sequence[Sample], rules: Rules) -> list[Prepared]:
    """Raises SampleError for the first sample that is not sound, before anything is computed.

    All that come back have the same fields: weights are 1 where none are given, and what the loss
    does not look at is left out.
    """
    found: list[Prepared] = []
    for index, sample in enumerate(samples):
        try:
            found.append(_prepared(sample, rules))
        except ValueError as error:
            raise SampleError(index, str(error)) from error
    return found


def groups_of(prepared: Sequence[Prepared], token_budget: int) -> list[list[int]]:
    """`micro_batches` of the samples; those with K targets per token are together."""
    found: list[list[int]] = []
    shapes = [one.fields["target_tokens"].shape[1:] for one in prepared]
    for shape in sorted(set(shapes)):
        chosen = [index for index, other in enumerate(shapes) if other == shape]
        lengths = [len(prepared[index].rows) for index in chosen]
        found += [[chosen[i] for i in group] for group in micro_batches(lengths, token_budget)]
    return found


def _prepared(sample: Sample, rules: Rules) -> Prepared:
    tokens_T = _integers("tokens", _array("tokens", sample.tokens))
    if tokens_T.ndim != 1:
        raise ValueError(f"tokens are {list(tokens_T.shape)}; need [T]")
    count = len(tokens_T)
    if not 0 < count <= rules.max_tokens:
        raise ValueError(f"{count} tokens; need 1 to {rules.max_tokens}")
    fields = {name: _array(name, values) for name, values in sample.inputs.items()}
    shapes = {name: values.shape for name, values in fields.items()}
    check_fields(rules.loss, shapes, rules.config)
    for name, values in fields.items():
        if values.shape[0] != count:
            raise ValueError(f"{name} has {values.shape[0]} places for {count} tokens")
        if name != "target_tokens" and values.dtype.kind not in "fiub":
            raise ValueError(f"{name} are {values.dtype}; need numbers")
    targets = _integers("target_tokens", fields.pop("target_tokens"))
    check_media(sample.media, tokens_T, rules.model, rules.towers)
    return Prepared(
        rows=_rows("tokens", tokens_T, rules),
        fields={
            "target_tokens": _rows("target_tokens", targets, rules),
            **_numbers(fields, targets.shape, rules),
        },
        media=sample.media,
        routing=checked_routing(sample, rules.model.text),
    )


def _array(name: str, values: object) -> Array:
    try:
        return np.asarray(values)
    except (ValueError, TypeError, RuntimeError) as error:  # ragged lists; torch's bf16 or GPU
        raise ValueError(f"{name}: no array of numbers ({error}); give one of numpy") from error


def _integers(name: str, values: Array) -> Array:
    if values.dtype.kind not in "iu" and values.size:
        raise ValueError(f"{name} are {values.dtype}; need integers")
    return values.astype(np.int64)


def _rows(name: str, ids: Array, rules: Rules) -> Array:
    """Model rows of ids."""
    try:
        rows = rules.vocabulary.to_row_array(ids)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    most = rules.model.text.unpadded_vocab_size
    if rows.max() >= most:
        raise ValueError(f"{name}: {rows.max()}, and the model has {most} rows")
    return rows


def _numbers(fields: Mapping[str, Array], shape: tuple[int, ...], rules: Rules) -> dict[str, Array]:
    """What the loss takes besides targets."""
    found = dict(fields)
    weights = found.setdefault("weights", np.ones(shape, np.float32))
    if not rules.config.kl_coefficient:
        found.pop("reference_logprobs", None)
    is_used = weights != 0
    if rules.loss == "gspo":
        is_used = is_used | (found.setdefault("sequence_ratio_mask", is_used) != 0)
    for name, values in found.items():
        is_sound = np.isfinite(values)
        if name in UNUSED and len(shape) == 1:
            found[name] = np.where(is_sound | is_used, values, 0)
            is_sound |= ~is_used
        if not is_sound.all():
            where = " where the weight is not 0" if name in UNUSED else ""
            raise ValueError(f"{name}: must be finite numbers{where}")
    return found


def build(
    prepared: Sequence[Prepared],
    indices: Sequence[int],
    features: Callable[[str, Array], Tensor],
    dtype: torch.dtype,
    device: torch.device,
) -> MicroBatch:
    """The samples at `indices` packed. `features(kind, inputs [M, ...])` [M, D]: what the tower of
    a kind makes of all its pictures or clips, one after the other."""
    chosen = [prepared[i] for i in indices]
    media: list[tuple[int, int, Tensor]] = []
    for kind in MEDIA:
        items = [
            (place, item)
            for place, sample in enumerate(chosen)
            for item in sample.media
            if item.kind == kind
        ]
        if items:
            made = features(kind, np.concatenate([item.inputs for _, item in items]))
            parts = made.split([len(item.inputs) for _, item in items])
            media += [(p, item.index, one) for (p, item), one in zip(items, parts, strict=True)]
    batch = pack([sample.rows for sample in chosen], media=media, device=device)
    fields: dict[str, Tensor] = {}
    for name in chosen[0].fields:
        values = torch.as_tensor(np.concatenate([sample.fields[name] for sample in chosen]))
        fields[name] = values.to(device, None if name == "target_tokens" else dtype)
    lengths = [len(sample.rows) for sample in chosen]
    given_LNK = packed_routing([sample.routing for sample in chosen], lengths, device)
    if given_LNK is not None:
        batch = dataclasses.replace(batch, given_experts_LNK=given_LNK)
    return MicroBatch(samples=list(indices), batch=batch, fields=fields, lengths=lengths)
