"""The draft depths' loss: depth d predicts the token d + 2 places on (docs/architecture.md 3)."""

# torch leaves these without types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import torch
from torch import Tensor

from suzuri.kernels.token_logprobs import token_logprobs
from suzuri.model.inkling import Inkling
from suzuri.training.packing import MicroBatch


def draft_loss(model: Inkling, micro: MicroBatch, hidden_ND: Tensor, *, detached: bool) -> Tensor:
    """-sum over depths of w log p, divided by the number of depths: a scalar.

    Row j of depth d reads token j + d + 1 of its sample and is held against the target at that
    token, with its weight. `hidden_ND`: the trunk's final-norm rows. `detached`: no gradient
    reaches the trunk, embeddings and head included. Targets [N, K] are not for drafts.
    """
    targets_N, weights_N = micro.fields["target_tokens"], micro.fields["weights"]
    decoder, draft = model.decoder, model.draft
    assert draft is not None
    embedded_ND = decoder.embedded(micro.batch)
    head_VD = decoder.unembed.weight
    if detached:
        embedded_ND, head_VD, hidden_ND = (x.detach() for x in (embedded_ND, head_VD, hidden_ND))
    total = hidden_ND.new_zeros((), dtype=torch.float32)
    for depth_MD, read_M in draft.over_known_tokens(hidden_ND, embedded_ND, micro.lengths):
        logprobs_M = token_logprobs(
            depth_MD,
            head_VD,
            targets_N.index_select(0, read_M),
            scale=decoder.logit_scale,
            num_rows=decoder.text.unpadded_vocab_size,
        )
        total = total - (logprobs_M * weights_N.index_select(0, read_M)).sum() / len(draft.depths)
    return total
