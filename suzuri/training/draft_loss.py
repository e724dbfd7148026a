"""The draft depths' loss: depth d predicts the token d + 2 places on (docs/architecture.md 3)."""

# torch leaves these without types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import torch
from torch import Tensor

from suzuri.kernels.token_logprobs import token_logprobs
from suzuri.model.batch import pack
from suzuri.model.inkling import Inkling
from suzuri.training.packing import MicroBatch


def draft_loss(model: Inkling, micro: MicroBatch, hidden_ND: Tensor, *, detached: bool) -> Tensor:
    """-sum over depths of w log p, divided by the number of depths: a scalar.

    Row j of depth d reads token j + d + 1 of its sample and is held against the target at that
    token, with its weight. `hidden_ND`: the trunk's final-norm rows. `detached`: no gradient
    reaches the trunk, embeddings and head included. Targets [N, K] are not for drafts: ValueError.
    """
    targets_N, weights_N = micro.fields["target_tokens"], micro.fields.get("weights")
    if targets_N.dim() != 1:
        raise ValueError("draft_loss_weight: draft depths need one target per token")
    decoder, draft = model.decoder, model.draft
    assert draft is not None
    embedded_ND = decoder.embedded(micro.batch)
    head_VD = decoder.unembed.weight
    previous_ND, device = hidden_ND, hidden_ND.device
    if detached:
        embedded_ND, head_VD, previous_ND = (
            x.detach() for x in (embedded_ND, head_VD, previous_ND)
        )
    starts = [0]
    for length in micro.lengths:
        starts.append(starts[-1] + length)
    total = hidden_ND.new_zeros((), dtype=torch.float32)
    left = list(micro.lengths)
    for depth in range(len(draft.depths)):
        # A sample's last row of the depth before has no further token to read.
        kept, place = [], 0
        for length in left:
            kept += range(place, place + max(length - 1, 0))
            place += length
        left = [max(length - 1, 0) for length in left]
        if not kept:
            break
        read = [
            start + depth + 1 + j
            for start, length in zip(starts, left, strict=False)
            for j in range(length)
        ]
        read_M = torch.tensor(read, device=device)
        batch = pack([[0] * length for length in left], device=device)
        previous_ND = draft(
            depth,
            previous_ND.index_select(0, torch.tensor(kept, device=device)),
            embedded_ND.index_select(0, read_M),
            batch,
        )
        logprobs_M = token_logprobs(
            previous_ND,
            head_VD,
            targets_N.index_select(0, read_M),
            scale=decoder.logit_scale,
            num_rows=decoder.text.unpadded_vocab_size,
        )
        if weights_N is not None:
            logprobs_M = logprobs_M * weights_N.index_select(0, read_M)
        total = total - logprobs_M.sum() / len(draft.depths)
    return total
