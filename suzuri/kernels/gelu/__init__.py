"""Exact (erf) GELU."""

from torch import Tensor

from suzuri.kernels import dispatch, exact
from suzuri.kernels.gelu import reference


def gelu(x: Tensor) -> Tensor:
    """x * (1 + erf(x / sqrt(2))) / 2 in fp32, one rounding; any shape; dtype of x.

    Gradient: x. Source: Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016 (erf form).
    """
    if exact.records_gradient(x) and not dispatch.is_forced():
        from suzuri.kernels.gelu import gradient

        return gradient.GELU.apply(x)
    if dispatch.use_reference(x):
        return reference.gelu(x)
    if x.device.type != "cuda":
        raise dispatch.no_kernel("gelu", x)
    from suzuri.kernels.gelu import kernel

    return kernel.gelu(x)
