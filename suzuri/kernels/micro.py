"""The innermost part of a product, as vector instructions: a few rows times a panel of columns, the
sums kept in registers over K. A compiler does not keep a loop's array in registers by itself.

Read `_emit` first. In fp64 it does what `products` of loops.py promises: K in order, one product
and one sum at a time. The length of a vector and the number of sums decide the speed only. In fp32
it is for gradients: twice as many numbers in a vector.
"""

from collections.abc import Callable
from typing import Any

import llvmlite.ir
from numba.core import cgutils, types
from numba.core.registry import cpu_target
from numba.extending import intrinsic

ir: Any = llvmlite.ir
helpers: Any = cgutils
numba_types: Any = types
target: Any = cpu_target
DOUBLE, FLOAT, BYTE = ir.DoubleType(), ir.FloatType(), ir.IntType(8)
INT, WORD = ir.IntType(64), ir.IntType(32)
LINE = 64
"""Bytes of a line of a cache."""


def vectors_of(triple: str, features: str) -> tuple[int, int]:
    """(fp64 numbers in a vector, vectors in a panel) of a machine: four rows of sums and what they
    are multiplied with fit into its registers."""
    has = set(features.split(","))
    if "+avx512f" in has:
        return 8, 4
    if "+avx" in has:
        return 4, 3
    return (2, 4) if triple.startswith(("aarch64", "arm64")) else (2, 3)


def _machine() -> tuple[int, int]:
    """Of the machine that numba compiles for. What it keeps on disk bears the same marks."""
    triple, _, features = target.target_context.codegen().magic_tuple()
    return vectors_of(triple, features)


LANES, VECTORS = _machine()
WIDTH = LANES * VECTORS
"""Columns of a panel; in fp32 it has twice as many."""


class _Matrix:
    """Addresses in an array [rows, columns] whose columns lie side by side."""

    def __init__(self, context: Any, builder: Any, kind: Any, value: Any) -> None:
        array = context.make_array(kind)(context, builder, value)
        self.builder, self.data = builder, array.data
        self.row_bytes = helpers.unpack_tuple(builder, array.strides)[0]
        self.size = 4 if kind.dtype == numba_types.float32 else 8

    def at(self, row: Any, column: Any, kind: Any) -> Any:
        offset = self.builder.mul(column, INT(self.size))
        offset = self.builder.add(self.builder.mul(row, self.row_bytes), offset)
        return moved(self.builder, self.data, offset, kind)


def moved(builder: Any, pointer: Any, offset: Any, kind: Any) -> Any:
    """The pointer `offset` bytes on, to a `kind`."""
    return helpers.pointer_add(builder, pointer, offset, kind.as_pointer())


def _emit(
    builder: Any,
    shape: tuple[int, int, int],
    matrices: tuple[_Matrix, _Matrix, _Matrix],
    places: list[Any],
    is_exact: bool,
    is_turned: bool,
) -> None:
    """The loop over K of `tile`. With `is_exact` a product and its sum may be one instruction."""
    (rows, vectors, lanes), (x, w, totals) = shape, matrices
    i, k, n, j, fresh, count = places
    flags = ("contract",) if is_exact else ()
    single = DOUBLE if totals.size == 8 else FLOAT
    wide = ir.VectorType(single, lanes)
    nothing, everywhere = ir.Constant(wide, ir.Undefined), [0] * lanes
    lanes_of_one = ir.Constant(ir.VectorType(WORD, lanes), everywhere)
    tile = [(r, v) for r in range(rows) for v in range(vectors)]

    places_of_sums = {
        (r, v): totals.at(INT(r), builder.add(j, INT(lanes * v)), wide) for r, v in tile
    }
    zero = ir.Constant(wide, [0.0] * lanes)
    begun = {at: builder.load(places_of_sums[at], align=totals.size) for at in tile}
    begun = {at: builder.select(fresh, zero, begun[at]) for at in tile}
    lines = [builder.add(i, INT(r)) for r in range(rows)]
    x_rows = [x.at(INT(0), r, BYTE) if is_turned else x.at(r, INT(0), BYTE) for r in lines]
    x_step = x.row_bytes if is_turned else INT(x.size)
    w_first = w.at(k, n, BYTE)

    before, loop = builder.block, builder.append_basic_block("k")
    after = builder.append_basic_block("after")
    builder.branch(loop)
    builder.position_at_end(loop)
    step, w_row = builder.phi(INT), builder.phi(BYTE.as_pointer())
    sums = {at: builder.phi(wide) for at in tile}
    if w.size < totals.size and vectors > 1:
        _fetch_ahead(builder, w_row, w.size * lanes * vectors)
    numbers: dict[int, Any] = {}
    weights: dict[int, Any] = {}
    joined: dict[tuple[int, int], Any] = {}
    # What there is less of stays in registers; the others are read when it is their turn.
    for r, v in tile if rows > vectors else sorted(tile, key=lambda at: at[1]):
        if v not in weights:
            weights[v] = _vector(builder, w, w_row, v, wide)
        if r not in numbers:
            place = moved(builder, x_rows[r], builder.mul(step, x_step), single)
            number = builder.load(place, align=x.size)
            number = builder.insert_element(nothing, number, WORD(0))
            numbers[r] = builder.shuffle_vector(number, nothing, lanes_of_one)
        product = builder.fmul(numbers[r], weights[v], flags=flags)
        joined[r, v] = builder.fadd(sums[r, v], product, flags=flags)
    next_step, next_row = builder.add(step, INT(1)), moved(builder, w_row, w.row_bytes, BYTE)
    for phi, first, later in (
        (step, INT(0), next_step),
        (w_row, w_first, next_row),
        *((sums[at], begun[at], joined[at]) for at in tile),
    ):
        phi.add_incoming(first, before)
        phi.add_incoming(later, loop)
    builder.cbranch(builder.icmp_signed("<", next_step, count), loop, after)
    builder.position_at_end(after)
    for at in tile:
        builder.store(joined[at], places_of_sums[at], align=totals.size)


def _vector(builder: Any, w: _Matrix, row: Any, v: int, wide: Any) -> Any:
    """Vector v of a row of weights, as the sums are."""
    kind = ir.VectorType(DOUBLE if w.size == 8 else FLOAT, wide.count)
    place = moved(builder, row, INT(w.size * wide.count * v), kind)
    found = builder.load(place, align=w.size)
    return found if kind == wide else builder.fpext(found, wide)


def _fetch_ahead(builder: Any, row: Any, num_bytes: int) -> None:
    """Asks for the same row of the panel to the right, which comes next: nothing is read."""
    pointer = BYTE.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, WORD, WORD, WORD])
    fetch = builder.module.declare_intrinsic("llvm.prefetch", (pointer,), kind)
    for offset in range(num_bytes, 2 * num_bytes, LINE):
        place = moved(builder, row, INT(offset), BYTE)
        builder.call(fetch, [place, WORD(0), WORD(3), WORD(1)])


def make_tile(
    rows: int, vectors: int = VECTORS, lanes: int = LANES, *, is_turned: bool = False
) -> Callable[..., None]:
    """A part of compiled loops: tile(x, i, w, k, n, totals, j, fresh, count, source) adds
    x[i : i + rows, : count] @ w[k : k + count, n : n + width] to the same rows of totals, columns
    from j on, or writes it there if `fresh`; width = vectors * lanes. With `is_turned` x is read by
    columns: x[: count, i : i + rows] transposed.

    x and totals are fp64, w fp32 or fp64; the columns of each lie side by side. Nothing is checked:
    all of it must be there, and count >= 1. Where `source` is an array of fp32 numbers, x and w
    hold such numbers only: their products are exact. Or all are fp32, for gradients: the sums then
    are too, and the width is twice as large.
    """

    def tile(typing, x, i, w, k, n, totals, j, fresh, count, source) -> Any:
        def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
            kinds = signature.args
            x, w, totals = (_Matrix(context, builder, kinds[a], values[a]) for a in (0, 2, 5))
            i, k, n, j, count = (
                context.cast(builder, values[a], kinds[a], numba_types.intp)
                for a in (1, 3, 4, 6, 8)
            )
            totals.data = totals.at(i, INT(0), BYTE)
            places = [i, k, n, j, values[7], count]
            is_exact = kinds[9].dtype == numba_types.float32
            shape = (rows, vectors, lanes * 8 // totals.size)
            _emit(builder, shape, (x, w, totals), places, is_exact, is_turned)
            return context.get_dummy_value()

        arguments = (x, i, w, k, n, totals, j, fresh, count, source)
        return numba_types.void(*arguments), generate

    return intrinsic(tile)


def _add_product(typing, total, a, b, source) -> Any:

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        flags = ("contract",) if source.dtype == numba_types.float32 else ()
        total, a, b = (
            context.cast(builder, value, kind, numba_types.float64)
            for value, kind in zip(values[:3], signature.args[:3], strict=True)
        )
        return builder.fadd(total, builder.fmul(a, b, flags=flags), flags=flags)

    return numba_types.float64(total, a, b, source), generate


add_product: Callable[..., float] = intrinsic(_add_product)
"""A part of compiled loops: add_product(total, a, b, source) is total + a * b in fp64, with
`source` as for `make_tile`."""
