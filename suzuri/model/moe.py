"""The two kinds of MLP: dense, and a mixture of routed and shared experts."""

from typing import Any

import torch
from torch import Tensor, nn

from suzuri.kernels.exact import at_least_fp32
from suzuri.kernels.moe_experts import ExpertOutputs, expert_outputs, moe_experts
from suzuri.kernels.moe_permute import Permutation
from suzuri.kernels.router import route
from suzuri.kernels.swiglu import swiglu
from suzuri.model.batch import Batch
from suzuri.model.config import TextConfig
from suzuri.model.linear import Linear
from suzuri.model.quantization import Nvfp4Experts


class DenseMLP(nn.Module):
    """SwiGLU MLP [N, D] -> [N, D]; gate and up rows interleaved, one learned output scale."""

    def __init__(self, hidden_size: int, intermediate_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate_up = Linear(hidden_size, 2 * intermediate_size, dtype)
        self.down = Linear(intermediate_size, hidden_size, dtype)
        self.global_scale = nn.Parameter(torch.empty(1, dtype=dtype))

    def forward(self, x_ND: Tensor) -> Tensor:
        wide = at_least_fp32(x_ND.dtype)
        hidden_NF = swiglu(self.gate_up(x_ND, out_dtype=wide), out_dtype=x_ND.dtype)
        # The scale multiplies the unrounded accumulator (docs/exactness.md, rounding points).
        y_ND = self.down(hidden_NF, out_dtype=wide) * self.global_scale.to(wide)
        return y_ND.to(x_ND.dtype)


class Router(nn.Module):
    """Chooses and weighs experts; weight rows R..R+S-1 belong to the shared experts."""

    def __init__(self, config: TextConfig, dtype: torch.dtype) -> None:
        super().__init__()
        routed, wide = config.n_routed_experts, at_least_fp32(dtype)
        self.num_experts_per_token = config.num_experts_per_tok
        self.route_scale = config.route_scale
        rows = routed + config.n_shared_experts
        self.weight = nn.Parameter(torch.empty(rows, config.hidden_size, dtype=dtype))
        # The bias only chooses: no gradient reaches it, a balancing rule moves it.
        self.bias = nn.Parameter(torch.empty(routed, dtype=wide), requires_grad=False)
        self.global_scale = nn.Parameter(torch.empty(1, dtype=wide))

    def forward(
        self,
        x_ND: Tensor,
        *,
        given_NK: Tensor | None = None,
        num_rows_1: Tensor | None = None,
        orders: list[Permutation] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(chosen ids [N, K] ascending, weights [N, K+S], raw logits [N, R+S]); `given_NK` in place
        of the choice (kernels/router). Where the order of all slots is found on the way it is
        added to `orders`."""
        experts_NK, weights_NJ, logits_NE, order = route(
            x_ND,
            self.weight,
            self.bias,
            self.global_scale,
            num_experts_per_token=self.num_experts_per_token,
            route_scale=self.route_scale,
            given_NK=given_NK,
            num_rows_1=num_rows_1,
        )
        if order is not None and orders is not None:
            orders.append(order)
        return experts_NK, weights_NJ, logits_NE


class MoE(nn.Module):
    """Mixture of experts [N, D] -> [N, D]; shared experts are stacked behind the routed ones.

    With `nvfp4` the routed experts are held quantised, and the parameters hold the shared ones
    alone. The sums are those of a model that holds the dequantised values, bit for bit. `index` is
    its place among the layers with experts.
    """

    def __init__(
        self, config: TextConfig, dtype: torch.dtype, *, index: int, nvfp4: bool = False
    ) -> None:
        super().__init__()
        self.index = index
        self.num_routed = config.n_routed_experts
        self.num_experts = config.n_routed_experts + config.n_shared_experts
        hidden, width = config.hidden_size, config.intermediate_size
        self.router = Router(config, dtype)
        held = config.n_shared_experts if nvfp4 else self.num_experts
        self.gate_up = nn.Parameter(torch.empty(held, 2 * width, hidden, dtype=dtype))
        self.down = nn.Parameter(torch.empty(held, hidden, width, dtype=dtype))
        self.routed_gate_up = Nvfp4Experts(self.num_routed, 2 * width, hidden) if nvfp4 else None
        self.routed_down = Nvfp4Experts(self.num_routed, hidden, width) if nvfp4 else None

    def forward(self, x_ND: Tensor, *, batch: Batch | None = None) -> Tensor:
        """`batch` says which experts to take, and who wants to know."""
        given, known = self._given(x_ND, batch)
        return moe_experts(*given, **known)

    def outputs(self, x_ND: Tensor, *, batch: Batch | None = None) -> ExpertOutputs:
        """As `forward`, without its weighted sum: for a caller that combines in an op of its
        own."""
        given, known = self._given(x_ND, batch)
        return expert_outputs(*given, **known)

    def _given(
        self, x_ND: Tensor, batch: Batch | None
    ) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor, Tensor], dict[str, Any]]:
        """Arguments of both."""
        given_LNK = None if batch is None else batch.given_experts_LNK
        given_NK = None if given_LNK is None else given_LNK[self.index]
        num_rows_1 = None if batch is None else batch.num_rows_1
        orders: list[Permutation] = []
        experts_NK, weights_NJ, _ = self.router(
            x_ND, given_NK=given_NK, num_rows_1=num_rows_1, orders=orders
        )
        if batch is not None and batch.routes is not None:
            batch.routes.put(self.index, experts_NK, weights_NJ)
        gate_up_EFD = _all_experts(self.routed_gate_up, self.gate_up)
        down_EDF = _all_experts(self.routed_down, self.down)
        given = (x_ND, experts_NK, weights_NJ, gate_up_EFD, down_EDF)
        return given, {"num_rows_1": num_rows_1, "order": orders[0] if orders else None}


def _all_experts(routed: Nvfp4Experts | None, held: Tensor) -> Tensor:
    """The matrices of routed and shared experts, in order."""
    return held if routed is None else torch.cat([routed.values(held.dtype), held])
