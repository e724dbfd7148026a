"""Multi-token prediction: draft depths chained behind the decoder, each a dense block."""

import torch
from torch import Tensor, nn

from suzuri.model.batch import Batch
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
            dense=True,
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
