"""The gradient of attention_prologue without state, where its loops run (cpu.py). Elsewhere its
parts have theirs.

Saved: the inputs. The convolution of the keys and the statistics of the norms are computed again.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from suzuri.kernels.attention_prologue import Scaling, Sequences, attention_prologue


class AttentionPrologue(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx,
        qkvr_NX: Tensor,
        conv_CK: Tensor,
        q_norm_C: Tensor,
        k_norm_C: Tensor,
        positions_N: Tensor,
        seq_ids_N: Tensor,
        seq_starts_S1: Tensor,
        heads: int,
        kv_heads: int,
        eps: float,
        scaling: Scaling | None,
    ) -> tuple[Tensor | None, ...]:
        given = (qkvr_NX, conv_CK, q_norm_C, k_norm_C)
        sequences = Sequences(positions_N, seq_ids_N, seq_starts_S1)
        ctx.save_for_backward(*given, *sequences)
        ctx.eps, ctx.scaling = eps, scaling
        return attention_prologue(
            *given, sequences, heads=heads, kv_heads=kv_heads, eps=eps, scaling=scaling
        )

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from suzuri.kernels.attention_prologue import cpu

        qkvr_NX, conv_CK, q_norm_C, k_norm_C, *sequences = ctx.saved_tensors
        found = cpu.attention_prologue_backward(
            qkvr_NX, conv_CK, q_norm_C, k_norm_C, sequences, ctx.eps, ctx.scaling, grads
        )
        needed = ctx.needs_input_grad[:4]
        wanted = (x if is_needed else None for x, is_needed in zip(found, needed, strict=True))
        return (*wanted, *(None,) * 7)
