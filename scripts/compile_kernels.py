"""Compiles the GPU kernels for GPUs that are not here, and says what they ask of one.

    python scripts/compile_kernels.py OUT.json [--target sm_80 --target gfx942 ...]

The launchers run at Inkling's shapes with tensors that hold nothing, and every launch is compiled
for the target instead (needs triton, no GPU). Per target and kernel: the shared memory of a
program, or the compiler's error. A kernel fits where its shared memory does.
"""

import argparse
import contextlib
import json
import platform
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from suzuri.engine.compile_server import NoDriver
from suzuri.kernels.attention_prologue import Scaling, Sequences, State
from suzuri.kernels.attention_prologue import kernel as prologue
from suzuri.kernels.draw_tokens import kernel as draw
from suzuri.kernels.draw_tokens.draws import Draws
from suzuri.kernels.embedding_norm import kernel as beginning
from suzuri.kernels.grouped_gemm import kernel as grouped
from suzuri.kernels.matmul import kernel as matmul
from suzuri.kernels.moe_combine import kernel as combine
from suzuri.kernels.moe_permute import kernel as permute
from suzuri.kernels.paged_attention import kernel as paged
from suzuri.kernels.relative_attention import kernel as attention
from suzuri.kernels.residual_norm import kernel as seam
from suzuri.kernels.rms_norm import kernel as norm
from suzuri.kernels.router import kernel as router
from suzuri.kernels.short_conv import kernel as conv
from suzuri.kernels.swiglu import kernel as swiglu

TARGETS = {
    **{f"sm_{n}": GPUTarget("cuda", n, 32) for n in (80, 89, 90, 100, 103, 120, 121)},
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
}


class _Absent(NoDriver):
    """A GPU that is not there, one of several: Triton keeps what it compiled by their numbers."""

    def get_current_device(self) -> int:
        return [*TARGETS.values()].index(self.get_current_target())


@contextlib.contextmanager
def compiling(target: GPUTarget) -> Generator[dict[str, Any]]:
    """Launches inside the block are compiled for `target`; {kernel: bytes or error}."""
    found: dict[str, Any] = {}
    run: Callable[..., Any] = JITFunction.run

    def compiled(self: Any, *args: Any, **words: Any) -> None:
        name = f"{self.fn.__module__.split('.')[-2]}.{self.fn.__name__}"
        try:
            kernel = run(self, *args, **(words | {"warmup": True}))
            found[name] = max(kernel.metadata.shared, found.get(name, 0))
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}".splitlines()[0][:200]

    stand_in: Any = _Absent(target)
    driver.set_active(stand_in)
    JITFunction.run = compiled
    try:
        yield found
    finally:
        JITFunction.run = run


def launch_all() -> None:
    """Every kernel once, forward and backward, at Inkling's shapes (no memory is touched)."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def whole(*values: int) -> torch.Tensor:
        return torch.tensor(values)

    for kv_heads, reach, window in ((8, 1024, None), (16, 512, 512)):
        rows, new = 256, 2
        q, r = empty(rows, 64, 128), empty(rows, 64, 16)
        k, proj = empty(rows, kv_heads, 128), empty(16, reach)
        attention.relative_attention(q, k, k, r, proj, whole(0, rows), window)
        pages, table = empty(8, 128, kv_heads, 128), torch.zeros(new, 4, dtype=torch.int64)
        few = (q[:new], r[:new], proj, pages, pages, table, whole(300, 200), whole(0, 1, 2))
        paged.paged_attention(*few, window)
        many = (q, r, proj, pages, pages, table[:1], whole(100), whole(0, rows))
        paged.paged_attention(*many, window)
    weight = empty(4096, 6144)
    for rows in (1, 64, 512):
        matmul.matmul(empty(rows, 6144), weight, 1.0, torch.bfloat16)
    head, rows = empty(8192, 6144), torch.arange(8)
    ask = Draws(empty(8, dtype=torch.float32), rows, rows, rows)
    draw.draw_tokens(empty(8, 6144), head, None, None, 0.25, 0)
    draw.draw_tokens(empty(8, 6144), head, ask, rows, 0.25, 0)
    experts, offsets = empty(8, 6144, 6144), torch.arange(0, 72, 8)
    for rows in (8, 64, 4096):
        given = (empty(rows, 6144), experts, offsets, torch.bfloat16)
        order = torch.arange(rows)
        grouped.grouped_gemm(*given)
        grouped.grouped_gemm(*given, swiglu=True)
        grouped.grouped_gemm(*given, swiglu=True, order_M=order, num_slots=8)
    wide = torch.float32
    router.router(
        empty(9, 6144), empty(258, 6144), empty(256, dtype=wide), empty(1, dtype=wide), 6, 8.0
    )
    for rows in (1, 8, 64):
        logits = (empty(258, 6144), empty(256, dtype=wide), empty(1, dtype=wide), 6, 8.0)
        router.route(empty(rows, 6144), *logits)
        router.route(empty(rows, 6144), *logits, num_rows_1=torch.ones(1, dtype=torch.int64))
    swiglu.swiglu(empty(64, 6144, dtype=wide), torch.bfloat16)
    norm.rms_norm(empty(64, 6144), empty(6144), 1e-6, torch.bfloat16)
    positions = torch.arange(64)
    state, slots = empty(70, 6, 6144), torch.arange(64)
    starts = torch.arange(65)
    conv.short_conv(empty(64, 6144), empty(6144, 4), positions, positions, starts, state, slots)
    stream, taps, factor = empty(64, 6144), empty(6144, 4), empty(6144)
    where = (positions, positions, starts)
    seam.residual_norm(stream, stream, taps, factor, *where, 1e-6, state, slots)
    beginning.embedding_norm(positions, empty(512, 6144), factor, factor, 1e-6, 500)
    alone = (stream, taps, factor, positions, 1e-6, state, slots)
    seam.single_rows(stream, None, None, *alone)
    of_experts = (empty(512, 6144), torch.arange(512), empty(64, 8, dtype=wide))
    seam.single_rows(*of_experts, *alone)
    for kv_heads, scaling in ((8, Scaling(128_000.0, 0.1)), (16, None)):
        kv = 2 * kv_heads * 128
        pages = empty(8, 128, kv_heads, 128)
        memory = State(empty(70, 6, kv), slots, pages, pages, slots)
        rows_of = (empty(64, 64 * 144 + kv), empty(kv, 4), empty(128), empty(128))
        order = (Sequences(*where), 64, kv_heads, 1e-6, scaling, memory)
        prologue.attention_prologue(*rows_of, *order)
    narrow, heads = empty(64, 6144), empty(64, 64, 128)
    for x, factor in ((narrow, empty(6144)), (heads, empty(128))):
        norm.rms_norm_backward(x, factor, 1e-6, x)
    conv.short_conv_backward(narrow, empty(6144, 4), positions, starts, narrow)
    swiglu.swiglu_backward(empty(64, 6144), empty(64, 3072))
    slots_of = empty(64, 3072, dtype=wide)
    swiglu.slots_backward(
        empty(64, 6144, dtype=wide), slots_of, empty(64, dtype=wide), torch.bfloat16
    )
    grouped.of_inputs(empty(64, 6144), experts, offsets)
    grouped.of_weights(empty(64, 3072), narrow, offsets)
    for tokens in (9, 1024):
        chosen, rows = torch.zeros(tokens, 6, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
        given = {"num_slots": 8, "num_rows_1": rows}
        permute.moe_permute(empty(tokens, 6144), chosen, 258, num_slots=8)
        permute.moe_permute(None, chosen, 258, **given)
    order = torch.arange(72)
    combine.moe_combine(empty(72, 6144), order, empty(9, 8, dtype=wide), torch.bfloat16)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--target", action="append", choices=TARGETS)
    args = parser.parse_args()
    targets: dict[str, dict[str, Any]] = {}
    for name in args.target or TARGETS:
        with compiling(TARGETS[name]) as found:
            launch_all()
        targets[name] = dict(sorted(found.items()))
        print(name, json.dumps(targets[name]), flush=True)
    result = {
        "what": "shared memory in bytes of each kernel at Inkling's shapes, compiled without a GPU",
        "machine": platform.machine(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "targets": targets,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
