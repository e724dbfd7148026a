"""Length-dependent scale of queries on global attention layers."""

from torch import Tensor

from suzuri.kernels import dispatch, exact
from suzuri.kernels.log_scaling import reference


def log_scaling(x_NHC: Tensor, positions_N: Tensor, n_floor: float, alpha: float) -> Tensor:
    """x * tau(position), tau(p) = 1 + alpha * ln(max((p + 1) / n_floor, 1)), in fp32, one rounding.

    x_NHC [N, H, C] (queries, or the relative-bias branch), positions_N [N] int64: 0-based position
    among the real tokens of the row's sequence (padding never counts). Returns the dtype of x.
    tau is exactly 1 up to p + 1 = n_floor. Gradient: x. Source: docs/architecture.md 2.4.
    """
    if exact.records_gradient(x_NHC) and not dispatch.is_forced():
        from suzuri.kernels.log_scaling import gradient

        return gradient.LogScaling.apply(x_NHC, positions_N, n_floor, alpha)
    if dispatch.use_reference(x_NHC):
        return reference.log_scaling(x_NHC, positions_N, n_floor, alpha)
    if x_NHC.device.type != "cuda":
        raise dispatch.no_kernel("log_scaling", x_NHC)
    from suzuri.kernels.log_scaling import kernel

    return kernel.log_scaling(x_NHC, positions_N, n_floor, alpha)
