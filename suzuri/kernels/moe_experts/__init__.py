"""All experts of a layer: sort, two products with SwiGLU between, and the weighted sum."""

from typing import NamedTuple

from torch import Tensor

from suzuri.kernels import dispatch, exact
from suzuri.kernels.moe_experts import reference
from suzuri.kernels.moe_permute import Permutation


class ExpertOutputs(NamedTuple):
    """What `moe_combine` adds up: y_MD [N * J, D] the rounded, unweighted outputs of the slots,
    sorted by expert; their order; weights_NJ [N, J] as given to `expert_outputs`."""

    y_MD: Tensor
    permutation: Permutation
    weights_NJ: Tensor

    @property
    def inverse_M(self) -> Tensor:
        """[N * J] int64: the row of y_MD of slot (n, j) at n * J + j."""
        return self.permutation.inverse_M


def moe_experts(
    x_ND: Tensor,
    experts_NK: Tensor,
    weights_NJ: Tensor,
    gate_up_EFD: Tensor,
    down_EDF: Tensor,
    *,
    num_rows_1: Tensor | None = None,
    order: Permutation | None = None,
) -> Tensor:
    """out[n] = sum_j weights[n, j] * expert(id[n, j])(x[n]), j ascending; [N, D].

    x_ND [N, D]; experts_NK [N, K] int64, chosen ids ascending; weights_NJ [N, K+S] fp32, in that
    order and then of the S shared experts, which are the last S of E; gate_up_EFD [E, 2F, D] with
    interleaved rows, down_EDF [E, D, F], dtype of x. By definition the composition of
    `moe_permute`, `grouped_gemm` (fp32 out), `swiglu`, `grouped_gemm` and `moe_combine`, with the
    roundings of each. Gradients: all floating inputs.

    Rows from num_rows_1 [1] int64 on, which stays on the device, are padding: no expert's weights
    are read for them and their outputs are zeros. With a gradient: ValueError. `order`: of all
    slots, where it is known (router.route), for the same num_rows_1.
    """
    _check(x_ND, experts_NK, weights_NJ, gate_up_EFD, down_EDF)
    given = (x_ND, experts_NK, weights_NJ, gate_up_EFD, down_EDF)
    numbers = (x_ND, weights_NJ, gate_up_EFD, down_EDF)
    records = exact.records_gradient(*numbers)
    if records and num_rows_1 is not None:
        raise ValueError("moe_experts: rows of padding have no gradient")
    if not records and (num_rows_1 is not None or order is not None):
        return reference.moe_experts(*given, num_rows_1, order)
    if records and not dispatch.is_forced():
        from suzuri.kernels.moe_experts import gradient

        return gradient.MoeExperts.apply(*given)
    if dispatch.use_cpu(*numbers):
        from suzuri.kernels.moe_experts import cpu

        if cpu.is_small(weights_NJ, gate_up_EFD):
            return cpu.moe_experts(*given)
    # On a GPU too: every part has its kernel. Large work on a CPU: its parts use all threads.
    return reference.moe_experts(*given)


def expert_outputs(
    x_ND: Tensor,
    experts_NK: Tensor,
    weights_NJ: Tensor,
    gate_up_EFD: Tensor,
    down_EDF: Tensor,
    *,
    num_rows_1: Tensor | None = None,
    order: Permutation | None = None,
) -> ExpertOutputs:
    """`moe_experts` without its sum: moe_combine(y_MD, permutation, weights_NJ, out_dtype=dtype of
    x) of what comes back has its bits. For callers that combine in an op of their own.

    Arguments and errors as `moe_experts`; slots of padding have zeros in y_MD. Gradients: those of
    the parts.
    """
    _check(x_ND, experts_NK, weights_NJ, gate_up_EFD, down_EDF)
    given = (x_ND, experts_NK, weights_NJ, gate_up_EFD, down_EDF, num_rows_1)
    y_MD, order = reference.slot_outputs(*given, order)
    return ExpertOutputs(y_MD, order, weights_NJ)


def _check(
    x_ND: Tensor,
    experts_NK: Tensor,
    weights_NJ: Tensor,
    gate_up_EFD: Tensor,
    down_EDF: Tensor,
) -> None:
    experts, doubled, width = gate_up_EFD.shape
    if down_EDF.shape != (experts, width, doubled // 2) or x_ND.shape[1] != width:
        raise ValueError(
            f"moe_experts: x {list(x_ND.shape)}, gate and up {list(gate_up_EFD.shape)}, down "
            f"{list(down_EDF.shape)}"
        )
    if any(w.dtype != x_ND.dtype for w in (gate_up_EFD, down_EDF)):
        raise ValueError("moe_experts: x and the weights must have one dtype")
    if experts_NK.shape[1] > weights_NJ.shape[1] or experts_NK.shape[0] != weights_NJ.shape[0]:
        raise ValueError(
            f"moe_experts: ids {list(experts_NK.shape)} for weights {list(weights_NJ.shape)}"
        )
