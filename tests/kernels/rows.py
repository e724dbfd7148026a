"""Does a row's result depend on its neighbours? The check, and the layouts an input may have."""

from collections.abc import Callable, Iterable

from torch import Tensor

from tests.kernels.compare import assert_same_bits, threads

TOTAL = 70
EVERY_COUNT = tuple(range(1, TOTAL + 1))
COUNTS = (1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 31, 33, 64, 65, 70)

Outputs = Tensor | tuple[Tensor, ...]
RowOp = Callable[[slice], Outputs]
"""The op evaluated on these rows of a fixed input alone; every output has one row per row."""


def _second_columns(x: Tensor) -> Tensor:
    wide = x.new_zeros(*x.shape[:-1], 2 * x.shape[-1])
    wide[..., ::2] = x
    return wide[..., ::2]


def _transposed(x: Tensor) -> Tensor:
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x.contiguous(),
    "every second column": _second_columns,
    "transposed": _transposed,
}


def _tuple(outputs: Outputs) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else outputs


def assert_rows_alone(
    op: RowOp,
    *,
    others: Iterable[RowOp] = (),
    counts: Iterable[int] = COUNTS,
    causal: bool = False,
    device: str = "cpu",
) -> None:
    """Any `counts` first or last rows alone, on 1 and 2 CPU threads, have the bits they have among
    all TOTAL rows. `others` are further ways to compute the same (other strides); with `causal`
    only first rows are tried, as later rows look back at them.
    """
    with threads(1):
        whole = _tuple(op(slice(0, TOTAL)))
    for num_threads in (1, 2) if device == "cpu" else (1,):
        with threads(num_threads):
            for variant, run in enumerate([op, *others]):
                for count in counts:
                    starts = {0} if causal else {0, TOTAL - count}
                    for start in starts:
                        rows = slice(start, start + count)
                        what = f"{rows}, {num_threads} threads, variant {variant}"
                        for part, all_rows in zip(_tuple(run(rows)), whole, strict=True):
                            assert_same_bits(part, all_rows[rows], what)
