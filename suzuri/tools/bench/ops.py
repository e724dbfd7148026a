"""Every op as a benchmark: how a case of its cases.py becomes a call, what that call must move and
compute, and a free version (no promise about bits) where a fair one exists.

Bytes count each input read once and each output written once; of tables only the rows that are
used. What a call allocates for itself counts nothing.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from suzuri.kernels.attention_prologue import Scaling, Sequences, State, attention_prologue
from suzuri.kernels.attention_prologue import cases as attention_prologue_cases
from suzuri.kernels.draw_tokens import cases as draw_tokens_cases
from suzuri.kernels.draw_tokens import draw_tokens
from suzuri.kernels.embedding import cases as embedding_cases
from suzuri.kernels.embedding import embedding
from suzuri.kernels.embedding_norm import cases as embedding_norm_cases
from suzuri.kernels.embedding_norm import embedding_norm
from suzuri.kernels.embedding_sum import cases as embedding_sum_cases
from suzuri.kernels.embedding_sum import embedding_sum
from suzuri.kernels.filter_logits import cases as filter_logits_cases
from suzuri.kernels.filter_logits import filter_logits
from suzuri.kernels.gelu import cases as gelu_cases
from suzuri.kernels.gelu import gelu
from suzuri.kernels.grouped_gemm import cases as grouped_gemm_cases
from suzuri.kernels.grouped_gemm import grouped_gemm
from suzuri.kernels.kv_write import cases as kv_write_cases
from suzuri.kernels.kv_write import kv_write
from suzuri.kernels.log_scaling import cases as log_scaling_cases
from suzuri.kernels.log_scaling import log_scaling
from suzuri.kernels.log_softmax import cases as log_softmax_cases
from suzuri.kernels.log_softmax import log_softmax
from suzuri.kernels.matmul import cases as matmul_cases
from suzuri.kernels.matmul import matmul
from suzuri.kernels.moe_combine import cases as moe_combine_cases
from suzuri.kernels.moe_combine import moe_combine
from suzuri.kernels.moe_experts import cases as moe_experts_cases
from suzuri.kernels.moe_experts import moe_experts
from suzuri.kernels.moe_permute import Permutation, moe_permute
from suzuri.kernels.moe_permute import cases as moe_permute_cases
from suzuri.kernels.nvfp4 import cases as nvfp4_cases
from suzuri.kernels.nvfp4 import dequantize, quantize
from suzuri.kernels.paged_attention import cases as paged_attention_cases
from suzuri.kernels.paged_attention import paged_attention
from suzuri.kernels.penalize_logits import cases as penalize_logits_cases
from suzuri.kernels.penalize_logits import penalize_logits
from suzuri.kernels.philox import cases as philox_cases
from suzuri.kernels.philox import philox
from suzuri.kernels.random_normal import cases as random_normal_cases
from suzuri.kernels.random_normal import random_normal
from suzuri.kernels.relative_attention import cases as relative_attention_cases
from suzuri.kernels.relative_attention import relative_attention
from suzuri.kernels.residual_norm import cases as residual_norm_cases
from suzuri.kernels.residual_norm import residual_norm
from suzuri.kernels.rms_norm import cases as rms_norm_cases
from suzuri.kernels.rms_norm import rms_norm
from suzuri.kernels.router import cases as router_cases
from suzuri.kernels.router import router
from suzuri.kernels.sample_tokens import cases as sample_tokens_cases
from suzuri.kernels.sample_tokens import sample_tokens
from suzuri.kernels.short_conv import cases as short_conv_cases
from suzuri.kernels.short_conv import short_conv
from suzuri.kernels.swiglu import cases as swiglu_cases
from suzuri.kernels.swiglu import swiglu
from suzuri.kernels.token_logprobs import cases as token_logprobs_cases
from suzuri.kernels.token_logprobs import token_logprobs
from suzuri.tools.bench.kernels_matmul import grouped_mm
from suzuri.tools.bench.timing import bytes_of

Given = dict[str, Any]
BF16, FP32 = torch.bfloat16, torch.float32
EPS = 1e-6
TRUE = ("inkling",)
"""How the true shapes of the models are named in every cases.py."""


def _moved(given: Given, out: Any) -> int:
    return bytes_of(given) + bytes_of(out)


def _no_flops(given: Given) -> int:
    return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Op:
    """`run(given)` is the call; `build(case, dtype, generator)` its arguments; `moved(given, out)`
    bytes and `flops(given)` operations; `free(given)` the free version."""

    name: str
    shapes: Mapping[str, Any]
    build: Callable[[str, torch.dtype, torch.Generator], Given]
    run: Callable[[Given], Any]
    moved: Callable[[Given, Any], int] = _moved
    flops: Callable[[Given], int] = _no_flops
    free: Callable[[Given], Any] | None = None
    dtype: torch.dtype = BF16
    more_true: tuple[str, ...] = ()
    """Cases of true shapes under other names."""

    @property
    def true_cases(self) -> list[str]:
        return [n for n in self.shapes if n.startswith(TRUE) or n in self.more_true]


def _plain(
    name: str,
    cases: Any,
    run: Callable[..., Any],
    *,
    constants: Given | None = None,
    moved: Callable[[Given, Any], int] = _moved,
    flops: Callable[[Given], int] = _no_flops,
    free: Callable[[Given], Any] | None = None,
    dtype: torch.dtype = BF16,
    more_true: tuple[str, ...] = (),
) -> Op:
    """An op that takes its case's arguments by name, and `constants`."""
    more = constants or {}
    return Op(
        name=name,
        shapes=cases.SHAPES,
        build=cases.build,
        run=lambda given: run(**given, **more),
        moved=moved,
        flops=flops,
        free=free,
        dtype=dtype,
        more_true=more_true,
    )


def _prologue_case(name: str, dtype: torch.dtype, generator: torch.Generator) -> Given:
    given = attention_prologue_cases.build(name, dtype, generator)
    memory = attention_prologue_cases.memory(given, 2, generator)
    return given | {
        "sequences": Sequences(*given["sequences"]),
        "scaling": Scaling(128_000, 0.1),
        "state": State(**memory),
    }


def _prologue_bytes(given: Given, out: Any) -> int:
    """Rows in, queries and bias rows out, keys and values into pages, the ring's rows."""
    rows, channels = given["qkvr_NX"].shape[0], given["conv_CK"].shape[0]
    taps = given["conv_CK"].shape[1] - 1
    item = given["qkvr_NX"].element_size()
    num_seqs = given["sequences"].seq_starts_S1.shape[0] - 1
    kept = rows * channels + 2 * min(rows, num_seqs * taps) * channels
    inputs = (given["qkvr_NX"], given["conv_CK"], given["q_norm_C"], given["k_norm_C"])
    return bytes_of(inputs) + bytes_of((out.q_NHC, out.r_NHB)) + kept * item


def _gathered(table: str, ids: str) -> Callable[[Given, Any], int]:
    def moved(given: Given, out: Any) -> int:
        row = given[table].shape[1] * given[table].element_size()
        read = min(given[ids].numel() * row, bytes_of(given[table]))
        return read + bytes_of(given[ids]) + bytes_of(out)

    return moved


def _matmul_flops(given: Given) -> int:
    return 2 * given["x_NK"].shape[0] * given["weight_MK"].numel()


def _grouped_flops(given: Given) -> int:
    return 2 * given["x_MK"].shape[0] * given["weight_EFK"][0].numel()


def _experts_bytes(given: Given, out: Any) -> int:
    """Weights of the experts that are used; hidden rows stay where they are."""
    used = given["experts_NK"].unique().numel()
    used += given["weights_NJ"].shape[1] - given["experts_NK"].shape[1]
    one = (given["gate_up_EFD"][0], given["down_EDF"][0])
    return used * bytes_of(one) + bytes_of((given["x_ND"], given["weights_NJ"], out))


def _experts_flops(given: Given) -> int:
    one = given["gate_up_EFD"][0].numel() + given["down_EDF"][0].numel()
    return 2 * given["weights_NJ"].numel() * one


def _combine_case(name: str, dtype: torch.dtype, generator: torch.Generator) -> Given:
    given = dict(moe_combine_cases.build(name, dtype, generator))
    order = given.pop("order_M")
    offsets = torch.zeros(1, dtype=torch.int64, device=order.device)
    return given | {"permutation": Permutation(order, order.argsort(), offsets)}


def _combine_bytes(given: Given, out: Any) -> int:
    return bytes_of((given["y_MD"], given["permutation"].inverse_M, given["weights_NJ"], out))


def _paged_seen(given: Given) -> tuple[int, int]:
    """Keys that any row of a sequence sees, and (row, key) pairs, of all sequences."""
    firsts: list[int] = given["first_positions_S"].tolist()
    counts: list[int] = given["seq_starts_S1"].diff().tolist()
    window: int | None = given["window"]
    keys = pairs = 0
    for first, count in zip(firsts, counts, strict=True):
        seen = [min(first + i + 1, window or first + i + 1) for i in range(count)]
        pairs += sum(seen)
        keys += min(first + count, (window or first + count) + count - 1)
    return keys, pairs


def _paged_bytes(given: Given, out: Any) -> int:
    keys, _ = _paged_seen(given)
    key = 2 * given["k_pages_PTUC"][0, 0].numel() * given["k_pages_PTUC"].element_size()
    return keys * key + bytes_of((given["q_NHC"], given["r_NHB"], given["proj_BE"], out))


def _paged_flops(given: Given) -> int:
    return 4 * _paged_seen(given)[1] * given["q_NHC"][0].numel()


def _rows_flops(given: Given) -> int:
    window: int | None = given["window"]
    lengths: list[int] = given["seq_starts_S1"].diff().tolist()
    pairs = sum(min(p + 1, window or p + 1) for n in lengths for p in range(n))
    return 4 * pairs * given["q_NHC"][0].numel()


def _free_attention(given: Given) -> Any:
    """Our kernel without chunks and with row sums in the compiler's order."""
    from suzuri.kernels.relative_attention import kernel

    q, k, v, r, proj, starts, window = given.values()
    launch = kernel.launch_of(
        kernel.shape_of(q, k.shape[1], proj, window), tma=kernel.can_tma(k, v)
    )
    launch = dataclasses.replace(launch, exact=False)
    return kernel.relative_attention(q, k, v, r, proj, starts, window, launch)


def _penalty_bytes(given: Given, out: Any) -> int:
    """Of the tables one row of flags and one of counts for each row."""
    tables = (given["prompt_LV"][0], given["output_LV"][0])
    return bytes_of((given["logits_NV"], out)) + given["slots_N"].numel() * bytes_of(tables)


def _nvfp4_case(name: str, dtype: torch.dtype, generator: torch.Generator) -> Given:
    weight: Tensor = nvfp4_cases.build(name, dtype, generator)["weight_ENK"]
    return {"weight": quantize(weight)}


def _normal_case(name: str, dtype: torch.dtype, generator: torch.Generator) -> Given:
    return random_normal_cases.build(name) | {"device": generator.device}


def _free_grouped(given: Given) -> Any:
    ends = given["offsets_E1"][1:].to(torch.int32)
    return grouped_mm(given["x_MK"], given["weight_EFK"].transpose(1, 2), offs=ends)


OPS: dict[str, Op] = {
    op.name: op
    for op in (
        Op(
            name="attention_prologue",
            shapes=attention_prologue_cases.SHAPES,
            build=_prologue_case,
            run=lambda given: attention_prologue(**given),
            moved=_prologue_bytes,
        ),
        _plain(
            "draw_tokens",
            draw_tokens_cases,
            draw_tokens,
            flops=lambda given: 2 * given["h_ND"].shape[0] * given["unembed_VD"].numel(),
        ),
        _plain(
            "embedding",
            embedding_cases,
            embedding,
            moved=_gathered("weight_VD", "ids_N"),
            free=lambda given: functional.embedding(given["ids_N"], given["weight_VD"]),
        ),
        _plain(
            "embedding_norm",
            embedding_norm_cases,
            embedding_norm,
            moved=_gathered("weight_VD", "ids_N"),
        ),
        _plain(
            "embedding_sum",
            embedding_sum_cases,
            embedding_sum,
            moved=_gathered("weight_VD", "ids_NB"),
        ),
        _plain("filter_logits", filter_logits_cases, filter_logits, dtype=FP32),
        _plain("gelu", gelu_cases, gelu, free=lambda given: functional.gelu(given["x"])),
        _plain(
            "grouped_gemm",
            grouped_gemm_cases,
            grouped_gemm,
            constants={"out_dtype": BF16},
            flops=_grouped_flops,
            free=_free_grouped,
        ),
        _plain(
            "kv_write",
            kv_write_cases,
            kv_write,
            moved=lambda given, out: 2 * bytes_of((given["k_NUC"], given["v_NUC"])),
        ),
        _plain(
            "log_scaling",
            log_scaling_cases,
            log_scaling,
            constants={"n_floor": 128_000, "alpha": 0.1},
        ),
        _plain(
            "log_softmax",
            log_softmax_cases,
            log_softmax,
            dtype=FP32,
            free=lambda given: torch.log_softmax(given["logits_NV"], -1),
        ),
        _plain(
            "matmul",
            matmul_cases,
            matmul,
            flops=_matmul_flops,
            free=lambda given: torch.mm(given["x_NK"], given["weight_MK"].t()),
            more_true=("router",),
        ),
        Op(
            name="moe_combine",
            shapes=moe_combine_cases.SHAPES,
            build=_combine_case,
            run=lambda given: moe_combine(**given, out_dtype=given["y_MD"].dtype),
            moved=_combine_bytes,
        ),
        _plain(
            "moe_experts",
            moe_experts_cases,
            moe_experts,
            moved=_experts_bytes,
            flops=_experts_flops,
        ),
        _plain("moe_permute", moe_permute_cases, moe_permute),
        _plain("nvfp4", nvfp4_cases, quantize),
        Op(
            name="nvfp4 dequantize",
            shapes=nvfp4_cases.SHAPES,
            build=_nvfp4_case,
            run=lambda given: dequantize(given["weight"]),
        ),
        _plain(
            "paged_attention",
            paged_attention_cases,
            paged_attention,
            moved=_paged_bytes,
            flops=_paged_flops,
        ),
        _plain(
            "penalize_logits",
            penalize_logits_cases,
            penalize_logits,
            moved=_penalty_bytes,
            dtype=FP32,
        ),
        _plain("philox", philox_cases, philox),
        Op(
            name="random_normal",
            shapes=random_normal_cases.SHAPES,
            build=_normal_case,
            run=lambda given: random_normal(**given),
            more_true=("large",),
        ),
        _plain(
            "relative_attention",
            relative_attention_cases,
            relative_attention,
            flops=_rows_flops,
            free=_free_attention,
        ),
        _plain("residual_norm", residual_norm_cases, residual_norm),
        _plain(
            "rms_norm",
            rms_norm_cases,
            rms_norm,
            constants={"eps": EPS},
            free=lambda given: functional.rms_norm(
                given["x_ND"], given["weight_D"].shape, given["weight_D"], EPS
            ),
        ),
        _plain(
            "router",
            router_cases,
            router,
            flops=lambda given: 2 * given["x_ND"].shape[0] * given["weight_ED"].numel(),
        ),
        _plain(
            "sample_tokens",
            sample_tokens_cases,
            sample_tokens,
            dtype=FP32,
        ),
        _plain("short_conv", short_conv_cases, short_conv),
        _plain("swiglu", swiglu_cases, swiglu, constants={"out_dtype": BF16}, dtype=FP32),
        _plain(
            "token_logprobs",
            token_logprobs_cases,
            token_logprobs,
            flops=lambda given: 2 * given["h_ND"].shape[0] * given["unembed_VD"].numel(),
        ),
    )
}


def ops_named(names: tuple[str, ...]) -> list[Op]:
    """The ops of these folders of suzuri/kernels; all without names. Raises ValueError."""
    folders = list(dict.fromkeys(folder(op) for op in OPS.values()))
    wrong = [name for name in names if name not in folders]
    if wrong:
        raise ValueError(f"{wrong[0]!r} is no op; there are {', '.join(folders)}")
    return [op for op in OPS.values() if not names or folder(op) in names]


def folder(op: Op) -> str:
    """The op's folder in suzuri/kernels."""
    return op.name.split()[0]
