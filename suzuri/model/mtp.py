"""Multi-token prediction: draft depths chained behind the decoder, each a dense block."""

from collections.abc import Iterator, Sequence

import numpy as np  # exact: integers on the host only
import torch
from torch import Tensor, nn

from suzuri.model.batch import Batch, pack
from suzuri.model.config import ModelConfig
from suzuri.model.decoder import Layer
from suzuri.model.linear import Linear, RMSNorm


class DraftDepth(nn.Module):
    """Depth d: row j consumes token j + d + 1 and hidden row j of depth d - 1.

    docs/architecture.md 3. Positions of the batch are row indices; the length-dependent scale uses
    the position of the consumed token.
    """

    def __init__(self, config: ModelConfig, depth: int, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, eps = config.text.hidden_size, config.text.rms_norm_eps
        self.hidden_norm = RMSNorm(hidden, eps, dtype)
        self.embed_norm = RMSNorm(hidden, eps, dtype)
        self.input_proj = Linear(2 * hidden, hidden, dtype)
        self.block = Layer(
            config.text,
            config.depth_attention(depth),
            moe_index=None,
            layer=depth,
            position_offset=depth + 1,
            dtype=dtype,
        )

    def forward(self, previous_ND: Tensor, embedded_ND: Tensor, batch: Batch) -> Tensor:
        joined = torch.cat([self.hidden_norm(previous_ND), self.embed_norm(embedded_ND)], -1)
        return self.block(self.input_proj(joined), batch)


class DraftHead(nn.Module):
    """All depths, and the norm that some checkpoints apply between them."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.depths = nn.ModuleList(
            DraftDepth(config, depth, dtype) for depth in range(config.mtp.num_nextn_predict_layers)
        )
        self.chain_norm = (
            RMSNorm(config.text.hidden_size, config.text.rms_norm_eps, dtype)
            if config.mtp.chain_hidden_post_norm
            else None
        )

    def forward(self, depth: int, previous_ND: Tensor, embedded_ND: Tensor, batch: Batch) -> Tensor:
        """Hidden rows [N, D] of one depth: the next depth's `previous_ND`, and what the decoder's
        head turns into the logits of token j + depth + 2.

        previous_ND [N, D]: final-norm hidden rows of the decoder for depth 0, else the depth
        before; embedded_ND [N, D]: the decoder's `embedded` of the consumed tokens; batch: rows,
        positions and this head's own cache (state starts empty at row 0 of every depth).
        """
        h_ND = self.depths[depth](previous_ND, embedded_ND, batch)
        return h_ND if self.chain_norm is None else self.chain_norm(h_ND)

    def over_known_tokens(
        self, hidden_ND: Tensor, embedded_ND: Tensor, lengths: Sequence[int]
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Every depth over packed sequences of so many tokens each, all of which are known, without
        a cache: (hidden rows [M, D], packed row [M] of the token that each consumed).

        hidden_ND [N, D]: the decoder's final-norm rows; embedded_ND [N, D]: its `embedded`. Row j
        of depth d consumes token j + d + 1, so a sequence has a row less at every depth; it ends
        where no sequence has any.
        """
        device = hidden_ND.device
        given_S = np.asarray(lengths, np.int64)
        starts_S = np.cumsum(given_S) - given_S
        for depth in range(len(self.depths)):
            # A sequence's last row of the depth before has no further token to consume.
            left_S = np.maximum(given_S - depth - 1, 0)
            if not left_S.any():
                return
            before_S = np.maximum(given_S - depth, 0)
            ends_S = np.cumsum(left_S)
            row_M = np.arange(ends_S[-1]) - np.repeat(ends_S - left_S, left_S)
            kept = row_M + np.repeat(np.cumsum(before_S) - before_S, left_S)
            consumed = row_M + np.repeat(starts_S + depth + 1, left_S)
            kept_M, consumed_M = (torch.from_numpy(x).to(device) for x in (kept, consumed))
            hidden_ND = self(
                depth,
                hidden_ND.index_select(0, kept_M),  # exact: every row once at most
                embedded_ND.index_select(0, consumed_M),  # exact: every row once at most
                pack([np.zeros(length, np.int64) for length in left_S], device=device),
            )
            yield hidden_ND, consumed_M
