"""Samples into micro-batches, and micro-batches into tensors."""

# torch leaves these without types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import dataclasses
from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from suzuri.model.batch import Batch, pack
from suzuri.processing.vocabulary import Vocabulary
from suzuri.training.losses import LossConfig, check_fields
from suzuri.types import Array, MediaInput, Sample

MEDIA = ("image", "audio")


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
    are model rows too."""

    rows: Array
    fields: dict[str, Array]
    media: tuple[MediaInput, ...]


def prepare(
    samples: Sequence[Sample],
    loss: str,
    config: LossConfig,
    vocabulary: Vocabulary,
    max_tokens: int,
    towers: Collection[str],
) -> list[Prepared]:
    """Raises SampleError for the first sample that is not sound, before anything is computed.
    `towers`: the kinds of media that the model has one for."""
    found: list[Prepared] = []
    for index, sample in enumerate(samples):
        try:
            found.append(_prepared(sample, loss, config, vocabulary, max_tokens, towers))
        except ValueError as error:
            raise SampleError(index, str(error)) from error
    return found


def _prepared(
    sample: Sample,
    loss: str,
    config: LossConfig,
    vocabulary: Vocabulary,
    max_tokens: int,
    towers: Collection[str],
) -> Prepared:
    count = sample.num_tokens
    if not 0 < count <= max_tokens:
        raise ValueError(f"{count} tokens; need 1 to {max_tokens}")
    fields = {name: np.asarray(values) for name, values in sample.inputs.items()}
    check_fields(loss, {name: values.shape for name, values in fields.items()}, config)
    for name, values in fields.items():
        if values.shape[0] != count:
            raise ValueError(f"{name} has {values.shape[0]} places for {count} tokens")
        if name == "target_tokens":
            if values.dtype.kind not in "iu":
                raise ValueError(f"target_tokens are {values.dtype}; need integers")
        elif values.dtype.kind not in "fiub" or not np.isfinite(values).all():
            raise ValueError(f"{name}: must be finite numbers")
    rows = vocabulary.to_row_array(np.asarray(sample.tokens, np.int64))
    fields["target_tokens"] = vocabulary.to_row_array(fields["target_tokens"])
    end = 0
    for item in sorted(sample.media, key=lambda item: item.index):
        if item.kind not in MEDIA:
            raise ValueError(f"media of kind {item.kind!r}; there are image and audio")
        if item.kind not in towers:
            raise ValueError(f"a part of kind {item.kind}, the model has no tower for it")
        if item.index < end or item.index + len(item.inputs) > count:
            raise ValueError(
                f"{item.kind} of {len(item.inputs)} tokens at {item.index}: outside of the "
                f"{count} tokens, or over another one"
            )
        end = item.index + len(item.inputs)
    return Prepared(rows=rows, fields=fields, media=sample.media)


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
    return MicroBatch(samples=list(indices), batch=batch, fields=fields, lengths=lengths)
