"""What each way of computing is worth: two ways of the same work, timed one after the other.

    python scripts/reproduce/ablations.py benchmarks/shapes/L6E64 --out FILE
    python scripts/reproduce/ablations.py --render FILE --page docs/ablations.md

Whole steps of the engine (recorded or launched one by one; modules joined or apart) and single
parts at the model's own shapes: shared experts within the grouped products or as products of their
own, the relative bias made inside attention or written out first, exact products and attention or
free ones. What --seconds leaves no time for, or what this device cannot run, is left out and named.
"""

import argparse
import contextlib
import dataclasses
import gc
import json
import sys
import time
from collections.abc import Callable, Generator, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from suzuri.engine.devices import device_named
from suzuri.kernels import dispatch
from suzuri.kernels.grouped_gemm import grouped_gemm
from suzuri.kernels.matmul import matmul
from suzuri.kernels.moe_experts import moe_experts
from suzuri.kernels.moe_experts import reference as experts_parts
from suzuri.kernels.moe_permute import Permutation, moe_permute
from suzuri.kernels.moe_permute.reference import all_slots
from suzuri.kernels.relative_attention import relative_attention
from suzuri.kernels.swiglu import swiglu
from suzuri.model.inkling import Inkling
from suzuri.model.locate import locate
from suzuri.model.moe import MoE
from suzuri.tools.bench.cells import Cell, cell_named
from suzuri.tools.bench.measure import WARM_STEPS, params
from suzuri.tools.bench.record import header, write
from suzuri.tools.bench.shapes import decoder_only
from suzuri.tools.bench.state import Load, build_engine, fill_caches
from suzuri.tools.bench.timing import time_calls
from suzuri.tools.bench.watch import synchronise
from suzuri.tools.bench.weights import draw_model

MOST_CALLS = 4
Call = Callable[[], object]
# torch 2.11 has no public name for it.
grouped_mm: Callable[..., Tensor] = attrgetter("_grouped_mm")(torch)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """`measure` gives the milliseconds of both ways: (a, b)."""

    what: str
    cell: str
    a: str
    b: str
    measure: Callable[[], tuple[float, float]]


class Ablations:
    """The cases of one model on one device; `options` as on the command line."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.device = device_named(options.device, f"--device {options.device}")
        self.dtype: torch.dtype = getattr(torch, options.dtype)
        shape = decoder_only(locate(options.model).config)
        self.model: Inkling = draw_model(shape, dtype=self.dtype, device=self.device, seed=0)
        self.text = shape.text
        self._generator = torch.Generator(self.device).manual_seed(1)

    def cases(self) -> Iterator[Case]:
        for name in self.options.steps:
            yield self._recorded(cell_named(name))
        for name in self.options.steps:
            yield self._joined(cell_named(name))
        for tokens in self.options.tokens:
            yield self._experts(tokens)
            yield self._shared_experts(tokens)
        for tokens in self.options.attention:
            yield self._bias(tokens)
        for tokens in self.options.tokens:
            yield self._product(tokens)
            yield self._grouped(tokens)
        for tokens in self.options.attention:
            yield self._attention(tokens)

    def normal(self, *shape: int, scale: float = 1.0) -> Tensor:
        values = torch.empty(*shape, dtype=self.dtype, device=self.device)
        return values.normal_(0.0, scale, generator=self._generator)

    def _both(self, a: Call, b: Call) -> tuple[float, float]:
        with torch.no_grad():
            times = [
                time_calls([call] * MOST_CALLS, self.device, self.options.repeats).us / 1e3
                for call in (a, b)
            ]
        return times[0], times[1]

    # Steps of the engine

    def _recorded(self, cell: Cell) -> Case:
        def measure() -> tuple[float, float]:
            with self._steps(cell) as (run, runner):
                found: list[float] = []
                for replays in (True, False):
                    runner.replays = replays
                    found.append(run())
            return found[0], found[1]

        return Case(
            what="recorded steps",
            cell=cell.name,
            a="replayed where there is a recorded step",
            b="launched one by one",
            measure=measure,
        )

    def _joined(self, cell: Cell) -> Case:
        def measure() -> tuple[float, float]:
            found: list[float] = []
            for block in (contextlib.nullcontext(), unjoined()):
                with block, self._steps(cell) as (run, _):
                    found.append(run())
            return found[0], found[1]

        return Case(
            what="joined modules",
            cell=cell.name,
            a="ops that join several modules",
            b="each module's own op",
            measure=measure,
        )

    @contextlib.contextmanager
    def _steps(self, cell: Cell) -> Generator[tuple[Callable[[], float], Any]]:
        """(what gives the milliseconds of a step or of a prefill, warmed up; the runner)."""
        is_decode, repeats = cell.kind == "decode", self.options.repeats
        tokens = 2 * (WARM_STEPS + repeats * self.options.decode_steps) + 4 if is_decode else 1
        load = Load(
            sequences=cell.batch,
            context=cell.length + tokens + 1,
            token_budget=cell.batch * (cell.length + 1) if is_decode else 8192,
            at_once=is_decode,
        )
        engine, watch = build_engine(
            self.model, load, self.options.dtype, skip_prompts=is_decode, rows=max(cell.batch, 8192)
        )
        rows = self.text.unpadded_vocab_size
        turn = 0

        def add() -> None:
            nonlocal turn
            turn += 1
            for i in range(cell.batch):
                generator = torch.Generator().manual_seed(turn * 4096 + i)
                ids = torch.randint(rows, (cell.length,), generator=generator)
                engine.add(f"{turn} {i}", ids.tolist(), params(tokens))

        if is_decode:
            fill_caches(watch, 0)
            add()
            while engine.scheduler.num_waiting or any(
                sequence.is_prefilling for sequence in engine.scheduler.running
            ):
                engine.step()

        def once(steps: int) -> float:
            if not is_decode:
                add()
            synchronise(self.device)
            start = time.perf_counter()
            if is_decode:
                for _ in range(steps):
                    engine.step()
            else:
                engine.run()
            synchronise(self.device)
            return 1e3 * (time.perf_counter() - start) / (steps if is_decode else 1)

        def run() -> float:
            for _ in range(1 if is_decode else 3):
                once(WARM_STEPS)
            return sorted(once(self.options.decode_steps) for _ in range(repeats))[repeats // 2]

        try:
            yield run, watch.runner
        finally:
            for sequence in list(engine.scheduler.running):
                engine.abort(sequence.request.id)
            engine.run()

    # Experts

    def _moe(self) -> MoE:
        return next(b.mlp for b in self.model.decoder.blocks if isinstance(b.mlp, MoE))

    def _routed(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        """x [N, D], chosen ids [N, K] and weights [N, K + S] of the first layer with experts."""
        x_ND = self.normal(tokens, self.text.hidden_size)
        with torch.no_grad():
            experts_NK, weights_NJ, _ = self._moe().router(x_ND)
        return x_ND, experts_NK, weights_NJ

    def _experts(self, tokens: int) -> Case:
        def measure() -> tuple[float, float]:
            moe = self._moe()
            given = (*self._routed(tokens), moe.gate_up, moe.down)

            def parts() -> Tensor:
                with experts_in_parts():
                    return moe_experts(*given)

            return self._both(lambda: moe_experts(*given), parts)

        return Case(
            what="SwiGLU",
            cell=f"{tokens} tokens",
            a="within the experts' product",
            b="after it, through memory",
            measure=measure,
        )

    def _shared_experts(self, tokens: int) -> Case:
        def measure() -> tuple[float, float]:
            moe = self._moe()
            given = (*self._routed(tokens), moe.gate_up, moe.down)
            return self._both(
                lambda: moe_experts(*given),
                lambda: shared_apart(*given, num_routed=moe.num_routed),
            )

        return Case(
            what="shared experts",
            cell=f"{tokens} tokens",
            a="in the grouped products",
            b="products of their own",
            measure=measure,
        )

    def _grouped(self, tokens: int) -> Case:
        def measure() -> tuple[float, float]:
            moe = self._moe()
            _, experts_NK, weights_NJ = self._routed(tokens)
            experts = moe.gate_up.shape[0]
            slots_NJ = all_slots(experts_NK, weights_NJ.shape[1], experts)
            counts = torch.bincount(slots_NJ.flatten(), minlength=experts)
            offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
            ends = offsets[1:].to(torch.int32)
            x_MD = self.normal(slots_NJ.numel(), self.text.hidden_size)
            turned = moe.gate_up.transpose(1, 2)
            return self._both(
                lambda: grouped_gemm(x_MD, moe.gate_up, offsets, out_dtype=self.dtype),
                lambda: grouped_mm(x_MD, turned, offs=ends),
            )

        return Case(
            what="exact grouped product",
            cell=f"gate and up, {tokens} tokens",
            a="exact",
            b="the vendor's",
            measure=measure,
        )

    # Products

    def _product(self, tokens: int) -> Case:
        def measure() -> tuple[float, float]:
            weight = self.model.decoder.blocks[0].attn.qkvr.weight
            x_ND = self.normal(tokens, self.text.hidden_size)
            return self._both(
                lambda: matmul(x_ND, weight, out_dtype=self.dtype),
                lambda: torch.mm(x_ND, weight.t()),
            )

        return Case(
            what="exact product",
            cell=f"qkvr, {tokens} tokens",
            a="exact",
            b="the vendor's",
            measure=measure,
        )

    # Attention

    def _inputs(self, tokens: int) -> tuple[tuple[Tensor, ...], int | None]:
        """(q, k, v, r, proj, starts) of one prompt, and the window, of a global layer."""
        attentions = [block.attn for block in self.model.decoder.blocks]
        attention = next(one for one in attentions if one.config.window is None)
        config = attention.config
        heads, kv_heads, channels = config.num_heads, config.num_kv_heads, config.head_dim
        starts = torch.tensor([0, tokens], device=self.device)
        given = (
            self.normal(tokens, heads, channels, scale=channels**0.5),
            self.normal(tokens, kv_heads, channels),
            self.normal(tokens, kv_heads, channels),
            self.normal(tokens, heads, config.d_rel),
            attention.rel_proj,
            starts,
        )
        return given, config.window

    def _bias(self, tokens: int) -> Case:
        def measure() -> tuple[float, float]:
            given, window = self._inputs(tokens)
            return self._both(
                lambda: relative_attention(*given, window=window),
                lambda: biased_before(*given, window=window),
            )

        return Case(
            what="relative bias",
            cell=f"prefill 1 x {tokens}, a global layer",
            a="made inside attention",
            b="written out, then the vendor's attention",
            measure=measure,
        )

    def _attention(self, tokens: int) -> Case:
        def measure() -> tuple[float, float]:
            if self.device.type != "cuda":
                raise NotImplementedError("the free kernel runs on a GPU only")
            from suzuri.kernels.relative_attention import kernel

            (q, k, v, r, proj, starts), window = self._inputs(tokens)
            shape = kernel.shape_of(q, k.shape[1], proj, window)
            launch = kernel.launch_of(shape, tma=kernel.can_tma(k, v))
            free = dataclasses.replace(launch, exact=False)
            return self._both(
                lambda: kernel.relative_attention(q, k, v, r, proj, starts, window, launch),
                lambda: kernel.relative_attention(q, k, v, r, proj, starts, window, free),
            )

        return Case(
            what="exact attention",
            cell=f"prefill 1 x {tokens}, a global layer",
            a="chunks at absolute places",
            b="no chunks, the compiler's sums",
            measure=measure,
        )


@contextlib.contextmanager
def unjoined() -> Generator[None]:
    """Inside, every module and every part of the experts runs as an op of its own."""
    with dispatch.apart(), experts_in_parts():
        yield


@contextlib.contextmanager
def experts_in_parts() -> Generator[None]:
    """Inside, gate and up of the experts are written out in fp32 before SwiGLU reads them."""
    before = experts_parts.slot_outputs
    experts_parts.slot_outputs = _slots_in_parts
    try:
        yield
    finally:
        experts_parts.slot_outputs = before


def _slots_in_parts(
    x_ND: Tensor,
    experts_NK: Tensor,
    weights_NJ: Tensor,
    gate_up_EFD: Tensor,
    down_EDF: Tensor,
    num_rows_1: Tensor | None = None,
    order: Permutation | None = None,
) -> tuple[Tensor, Permutation]:
    dtype = x_ND.dtype
    rows_MD, order = moe_permute(
        x_ND,
        experts_NK,
        num_experts=gate_up_EFD.shape[0],
        num_slots=weights_NJ.shape[1],
        num_rows_1=num_rows_1,
    )
    offsets_E1 = order.offsets_E1
    gate_up_MF = grouped_gemm(rows_MD, gate_up_EFD, offsets_E1, out_dtype=torch.float32)
    hidden_MF = swiglu(gate_up_MF, out_dtype=dtype)
    return grouped_gemm(hidden_MF, down_EDF, offsets_E1, out_dtype=dtype), order


def shared_apart(
    x_ND: Tensor,
    experts_NK: Tensor,
    weights_NJ: Tensor,
    gate_up_EFD: Tensor,
    down_EDF: Tensor,
    *,
    num_routed: int,
) -> Tensor:
    """`moe_experts` with plain products for the shared experts; its order of sums, and its bits,
    are not kept."""
    chosen = experts_NK.shape[1]
    routed = (gate_up_EFD[:num_routed], down_EDF[:num_routed])
    sum_ND = moe_experts(x_ND, experts_NK, weights_NJ[:, :chosen].contiguous(), *routed)
    for i in range(weights_NJ.shape[1] - chosen):
        gate_up_NF = matmul(x_ND, gate_up_EFD[num_routed + i], out_dtype=torch.float32)
        hidden_NF = swiglu(gate_up_NF, out_dtype=x_ND.dtype)
        y_ND = matmul(hidden_NF, down_EDF[num_routed + i], out_dtype=x_ND.dtype)
        sum_ND = torch.addcmul(sum_ND, y_ND, weights_NJ[:, chosen + i, None].to(y_ND.dtype))
    return sum_ND


def biased_before(
    q_NHC: Tensor,
    k_NUC: Tensor,
    v_NUC: Tensor,
    r_NHB: Tensor,
    proj_BE: Tensor,
    starts_S1: Tensor,
    *,
    window: int | None,
) -> Tensor:
    """`relative_attention` of one sequence: the whole bias [H, N, N] is written out and given to
    torch's attention as its mask."""
    tokens, heads, channels = q_NHC.shape
    reach = proj_BE.shape[1]
    at_N = torch.arange(tokens, device=q_NHC.device)
    distance_NN = at_N[:, None] - at_N[None, :]
    near_HNE = torch.matmul(r_NHB.transpose(0, 1), proj_BE)
    index_HNN = distance_NN.clamp(0, reach - 1).expand(heads, -1, -1)
    bias_HNN = near_HNE.gather(2, index_HNN)
    bias_HNN = bias_HNN.masked_fill(distance_NN >= reach, 0.0)
    hidden_NN = distance_NN < 0
    if window is not None:
        hidden_NN = hidden_NN | (distance_NN >= window)
    bias_HNN = bias_HNN.masked_fill(hidden_NN, float("-inf"))
    q, k, v = (x.transpose(0, 1)[None] for x in (q_NHC, k_NUC, v_NUC))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=bias_HNN[None], scale=1.0 / channels, enable_gqa=True
    )
    return out[0].transpose(0, 1)


# The run and the page


def run(options: argparse.Namespace) -> dict[str, Any]:
    begin = time.perf_counter()
    config = {name: value for name, value in vars(options).items() if name not in ("out", "page")}
    device = device_named(options.device, f"--device {options.device}")
    document = header("ablations", device, config) | {"rows": [], "left_out": []}
    for case in Ablations(options).cases():
        name = f"{case.what}, {case.cell}"
        if time.perf_counter() - begin > options.seconds:
            document["left_out"].append({"case": name, "reason": "no time was left"})
            continue
        try:
            a_ms, b_ms = case.measure()
        except (NotImplementedError, RuntimeError, ValueError) as error:
            why = str(error).splitlines()[0] if str(error) else type(error).__name__
            document["left_out"].append({"case": name, "reason": why})
            print(f"{name}: left out: {why}", flush=True)
            continue
        finally:
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
        row = {"what": case.what, "cell": case.cell, "a": case.a, "b": case.b}
        row |= {"a_ms": a_ms, "b_ms": b_ms, "ratio": b_ms / a_ms}
        document["rows"].append(row)
        write(options.out, document)
        print(f"{name}: {a_ms:.4f} | {b_ms:.4f} ms, {b_ms / a_ms:.2f} x", flush=True)
    write(options.out, document)
    return document


def page(document: dict[str, Any], source: str) -> str:
    """docs/ablations.md."""
    where = document["hardware"]["gpu"] or "a CPU (compare figures with each other only)"
    lines = [
        "# Ablations: what each way of computing is worth",
        "",
        f"{where}, torch {document['fingerprint'].get('torch', '?')}, {document['date'][:10]}, "
        f"commit {document['commit']}; shapes of `{document['config']['model']}`, "
        f"{document['config']['dtype']}, random weights. Rendered from `{source}` by "
        "`scripts/reproduce/ablations.py --render`; times are medians. x: how many times as long "
        "the second way takes.",
    ]
    rows: list[dict[str, Any]] = document["rows"]
    for what in dict.fromkeys(row["what"] for row in rows):
        some = [row for row in rows if row["what"] == what]
        lines += ["", f"## {what[0].upper()}{what[1:]}"]
        lines += [f"| cell | {some[0]['a']}, ms | {some[0]['b']}, ms | x |", "|---|---|---|---|"]
        lines += [
            f"| {row['cell']} | {row['a_ms']:.4g} | {row['b_ms']:.4g} | {row['ratio']:.2f} |"
            for row in some
        ]
    if document["left_out"]:
        lines += ["", "## Left out"]
        lines += [f"- {one['case']}: {one['reason']}" for one in document["left_out"]]
    return "\n".join(lines) + "\n"


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("model", nargs="?", default="benchmarks/shapes/L6E64")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--steps", nargs="*", help="cells: decode and prefill")
    parser.add_argument("--tokens", type=int, nargs="*", default=[1, 64, 1024, 8192])
    parser.add_argument("--attention", type=int, nargs="*", default=[1024, 4096])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--decode-steps", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=140.0)
    parser.add_argument("--out")
    parser.add_argument("--render", help="a result file: render it, measure nothing")
    parser.add_argument("--page", type=Path, help="write the page here")
    parser.set_defaults(steps=["prefill:1x1024", "decode:1x1024", "decode:64x1024"])
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    options = parse(words)
    if options.render is not None:
        document = json.loads(Path(options.render).read_text("utf-8"))
    else:
        try:
            document = run(options)
        except ValueError as error:
            raise SystemExit(f"ablations: {error}") from None
    if options.page is not None:
        options.page.write_text(page(document, options.render or options.out or "a run"), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
