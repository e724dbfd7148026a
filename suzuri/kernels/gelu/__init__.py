"""Exact (erf) GELU."""

from torch import Tensor

from suzuri.kernels import dispatch
from suzuri.kernels.gelu import reference


def gelu(x: Tensor) -> Tensor:
    """x * (1 + erf(x / sqrt(2))) / 2 in fp32, one rounding; any shape; dtype of x.

    Gradient: x. Source: Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016 (erf form).
    """
    if dispatch.use_reference(x):
        return reference.gelu(x)
    raise dispatch.no_kernel("gelu", x)
