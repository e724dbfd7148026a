"""The text decoder: `Decoder.forward` goes from token rows to final hidden rows."""

import torch
from torch import Tensor, nn

from suzuri.kernels import dispatch
from suzuri.kernels.embedding import embedding
from suzuri.kernels.embedding_norm import embedding_norm
from suzuri.kernels.exact import at_least_fp32
from suzuri.kernels.matmul import matmul
from suzuri.model.attention import Attention
from suzuri.model.batch import Batch
from suzuri.model.config import AttentionConfig, TextConfig
from suzuri.model.linear import RMSNorm
from suzuri.model.moe import DenseMLP, MoE
from suzuri.model.short_conv import ShortConv


class Layer(nn.Module):
    """One block: attention, then an MLP, each with a norm before, a short conv after, and a
    residual.

    `layer` is its index in the cache, `moe_index` its place among the layers with experts; None:
    its MLP is dense, as in draft depths.
    """

    def __init__(
        self,
        text: TextConfig,
        attention: AttentionConfig,
        *,
        moe_index: int | None,
        nvfp4: bool = False,
        layer: int,
        position_offset: int = 0,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        hidden, taps, eps = text.hidden_size, text.sconv_kernel_size, text.rms_norm_eps
        self.attn_norm = RMSNorm(hidden, eps, dtype)
        self.attn = Attention(
            attention,
            hidden_size=hidden,
            taps=taps,
            eps=eps,
            layer=layer,
            position_offset=position_offset,
            dtype=dtype,
        )
        self.attn_conv = ShortConv(hidden, taps, layer=layer, stream="attn", dtype=dtype)
        self.mlp_norm = RMSNorm(hidden, eps, dtype)
        self.mlp = (
            DenseMLP(hidden, text.dense_intermediate_size, dtype)
            if moe_index is None
            else MoE(text, dtype, index=moe_index, nvfp4=nvfp4)
        )
        self.mlp_conv = ShortConv(hidden, taps, layer=layer, stream="mlp", dtype=dtype)

    def forward(self, h_ND: Tensor, batch: Batch) -> Tensor:
        # A short conv already contains its own residual; the block's is added on top.
        h_ND = h_ND + self.attn_conv(self.attn(self.attn_norm(h_ND), batch), batch)
        return h_ND + self.mlp_conv(self._mlp(self.mlp_norm(h_ND), batch), batch)

    def joined(
        self, h_ND: Tensor, x_ND: Tensor, batch: Batch, norm: RMSNorm
    ) -> tuple[Tensor, Tensor]:
        """(forward(h), `norm` of that), both [N, D], with the bits of the modules one by one; x_ND:
        the attention's norm of h. For inference with a cache; what it joins is not called as
        modules."""
        h_ND, x_ND = self.attn_conv.joined(self.attn(x_ND, batch), h_ND, self.mlp_norm, batch)
        if isinstance(self.mlp, MoE) and batch.single_rows:
            y = self.mlp.outputs(x_ND, batch=batch)
            return self.mlp_conv.joined_with_experts(y, h_ND, norm, batch)
        return self.mlp_conv.joined(self._mlp(x_ND, batch), h_ND, norm, batch)

    def _mlp(self, x_ND: Tensor, batch: Batch) -> Tensor:
        return self.mlp(x_ND) if isinstance(self.mlp, DenseMLP) else self.mlp(x_ND, batch=batch)


class Embedding(nn.Module):
    """A table with one row per model row, padding included: embedding or unembedding."""

    def __init__(self, text: TextConfig, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(text.vocab_size, text.hidden_size, dtype=dtype))


class Decoder(nn.Module):
    """Packed tokens to hidden rows after the final norm; `logits` maps those to the vocabulary."""

    def __init__(
        self, text: TextConfig, dtype: torch.dtype, *, nvfp4_layers: tuple[int, ...] = ()
    ) -> None:
        super().__init__()
        self.text = text
        self.embed = Embedding(text, dtype)
        self.embed_norm = RMSNorm(text.hidden_size, text.rms_norm_eps, dtype)
        self.layers = nn.ModuleList(
            Layer(
                text,
                text.attention(i),
                moe_index=None if text.is_dense(i) else i - text.dense_mlp_idx,
                nvfp4=i in nvfp4_layers,
                layer=i,
                dtype=dtype,
            )
            for i in range(text.num_hidden_layers)
        )
        self.norm = RMSNorm(text.hidden_size, text.rms_norm_eps, dtype)
        self.unembed = Embedding(text, dtype)

    @property
    def blocks(self) -> list[Layer]:
        """The layers with their type, which nn.ModuleList forgets."""
        return [layer for layer in self.layers if isinstance(layer, Layer)]

    def embedded(self, batch: Batch) -> Tensor:
        """What enters the first layer, [N, D]; draft depths read it too.

        Media features replace rows after the norm and are not normed themselves.
        """
        # Padding rows are no tokens: an id that points at one is refused like any beyond the table.
        real = self.text.unpadded_vocab_size
        h_ND = self.embed_norm(embedding(batch.token_ids_N, self.embed.weight, num_rows=real))
        if batch.media_rows_M is not None and batch.media_features_MD is not None:
            features_MD = batch.media_features_MD.to(h_ND.dtype)
            if features_MD.shape[1] != h_ND.shape[1]:
                width = features_MD.shape[1]
                raise ValueError(f"media features are {width} wide, rows are {h_ND.shape[1]}")
            h_ND = h_ND.index_copy(0, batch.media_rows_M, features_MD)
        return h_ND

    def forward(self, batch: Batch) -> Tensor:
        """Hidden rows after the final norm [N, D]; not divided by the muP multiplier."""
        with batch.threads(self.text.hidden_size):
            # Without a cache it may be training, where layers are sharded or run again: each is
            # called as a module then.
            if batch.cache is not None and dispatch.use_joined(self.norm.weight):
                return self._joined(batch)
            h_ND = self.embedded(batch)
            for layer in self.blocks:
                h_ND = layer(h_ND, batch)
            return self.norm(h_ND)

    def _joined(self, batch: Batch) -> Tensor:
        """As `forward`: every norm is taken together with the sum before it."""
        blocks = self.blocks
        norms = [*(layer.attn_norm for layer in blocks), self.norm]
        if batch.media_rows_M is None:
            h_ND, x_ND = embedding_norm(
                batch.token_ids_N,
                self.embed.weight,
                self.embed_norm.weight,
                norms[0].weight,
                eps=self.embed_norm.eps,
                num_rows=self.text.unpadded_vocab_size,
            )
        else:
            h_ND = self.embedded(batch)
            x_ND = norms[0](h_ND)
        for layer, norm in zip(blocks, norms[1:], strict=True):
            h_ND, x_ND = layer.joined(h_ND, x_ND, batch, norm)
        return x_ND

    @property
    def logit_scale(self) -> float:
        """1 / muP multiplier: multiplies the fp32 accumulator of the head, once."""
        return 1.0 / (self.text.logits_mup_width_multiplier or 1.0)

    def logits(self, h_ND: Tensor) -> Tensor:
        """Logits [N, real vocabulary] in fp32 (at least) of final-norm (or draft) hidden rows.

        Padding rows of the unembedding are left out here, once, for everybody.
        """
        real_VD = self.unembed.weight[: self.text.unpadded_vocab_size]
        wide = at_least_fp32(h_ND.dtype)
        with dispatch.threads_for(h_ND.numel() + real_VD.numel(), h_ND.device):
            return matmul(h_ND, real_VD, scale=self.logit_scale, out_dtype=wide)
