"""attention_prologue is the composition of its parts, bit for bit, in the loops too."""

from typing import Any

import pytest
import torch
from torch import Tensor

from suzuri.kernels import dispatch
from suzuri.kernels.attention_prologue import (
    Scaling,
    Sequences,
    State,
    attention_prologue,
    cases,
)
from suzuri.kernels.kv_write import kv_write
from suzuri.kernels.log_scaling import log_scaling
from suzuri.kernels.rms_norm import rms_norm
from suzuri.kernels.short_conv import short_conv
from tests.kernels.compare import (
    Arguments,
    assert_same_bits,
    changed,
    check_gradients,
    device_cases,
    each_dtype,
    generator,
    threads,
)

SCALINGS = [None, Scaling(3.0, 0.1), Scaling(5.0, 0.2, 2)]


def arguments_of(case: str, dtype: torch.dtype, device: str = "cpu") -> Arguments:
    return cases.build(case, dtype, generator(1, device))


def many_rows(given: Arguments, least: int = 150) -> Arguments:
    """The rows of a case again and again, as sequences of their own."""
    times = least // len(given["qkvr_NX"]) + 1
    positions, seq_ids, starts = given["sequences"]
    repeats = range(times)
    x = torch.cat([given["qkvr_NX"] * (1 + 0.1 * (i % 7)) for i in repeats])
    ids = torch.cat([seq_ids + i * (len(starts) - 1) for i in repeats])
    begins = torch.cat([starts[:-1] + i * starts[-1] for i in repeats] + [starts[-1:] * times])
    return changed(given, qkvr_NX=x, sequences=Sequences(positions.repeat(times), ids, begins))


def parts(
    given: Arguments, scaling: Scaling | None, state: State | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Written out here once more, from the separate ops."""
    sequences, eps = given["sequences"], given["eps"]
    heads, kv_heads, channels = given["heads"], given["kv_heads"], len(given["q_norm_C"])
    rows = given["qkvr_NX"].shape[0]
    q_end, kv_end = heads * channels, (heads + 2 * kv_heads) * channels
    memory: dict[str, Any] = {}
    if state is not None:
        memory = {"state_LRC": state.conv_LRC, "slots_S": state.conv_slots_S}
    kv = short_conv(
        given["qkvr_NX"][:, q_end:kv_end].contiguous(), given["conv_CK"], *sequences, **memory
    ).reshape(rows, 2, kv_heads, channels)
    q = rms_norm(given["qkvr_NX"][:, :q_end].reshape(rows, heads, channels), given["q_norm_C"], eps)
    k = rms_norm(kv[:, 0].contiguous(), given["k_norm_C"], eps)
    r = given["qkvr_NX"][:, kv_end:].reshape(rows, heads, -1)
    if scaling is not None:
        positions = sequences[0] + scaling.offset
        q = log_scaling(q, positions, scaling.n_floor, scaling.alpha)
        r = log_scaling(r, positions, scaling.n_floor, scaling.alpha)
    v = kv[:, 1].contiguous()
    if state is not None:
        kv_write(k, v, state.k_pages_PTUC, state.v_pages_PTUC, state.page_slots_N)
    return q, r, k, v


@each_dtype
@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize(("device", "case"), device_cases(cases.SHAPES), indirect=["device"])
def test_without_state(device: str, case: str, scaling: Scaling | None, dtype: torch.dtype):
    given = arguments_of(case, dtype, device)
    with dispatch.force("reference"):
        fields = attention_prologue(**given, scaling=scaling)
        expected = parts(given, scaling, None)
    for found, wanted in zip(fields, expected, strict=True):
        assert found is not None
        assert_same_bits(found, wanted)


@each_dtype
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize("case", [name for name in cases.SHAPES if not name.startswith("inkling")])
def test_without_state_in_loops(
    case: str, scaling: Scaling | None, num_threads: int, dtype: torch.dtype
):
    given = many_rows(arguments_of(case, dtype))
    with dispatch.force("reference"):
        expected = parts(given, scaling, None)
    with threads(num_threads):
        fields = attention_prologue(**given, scaling=scaling)
    for found, wanted in zip(fields, expected, strict=True):
        assert found is not None
        assert_same_bits(found, wanted)


@each_dtype
@pytest.mark.parametrize("spare", [0, 1, 4])
@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize("case", [name for name in cases.SHAPES if not name.startswith("inkling")])
def test_with_state(case: str, scaling: Scaling | None, spare: int, dtype: torch.dtype):
    given = arguments_of(case, dtype)
    taps = given["conv_CK"].shape[1]
    memory = cases.memory(given, max(spare, 2 - taps), generator(2))  # a ring has rows
    positions, seq_ids, starts = given["sequences"]
    for later in (0, 1, 5):
        moved = Sequences(positions + later * (seq_ids + 1), seq_ids, starts)
        now = changed(given, sequences=moved)
        with dispatch.force("reference"):
            expected_state = State(**{name: x.clone() for name, x in memory.items()})
            q, r, _, _ = parts(now, scaling, expected_state)
        for num_threads in (1, 2):
            state = State(**{name: x.clone() for name, x in memory.items()})
            with threads(num_threads):
                fields = attention_prologue(**now, scaling=scaling, state=state)
            assert fields.k_NUC is None and fields.v_NUC is None
            assert_same_bits(fields.q_NHC, q)
            assert_same_bits(fields.r_NHB, r)
            for name, found, wanted in zip(State._fields, state, expected_state, strict=True):
                assert_same_bits(found, wanted, name)


def test_gradients():
    given = arguments_of("odd", torch.float64)

    def run(**arguments: Any) -> Tensor:
        fields = attention_prologue(**arguments, scaling=Scaling(2.0, 0.3))
        return torch.cat([x.flatten(1) for x in fields if x is not None], 1)

    check_gradients(run, given, ["qkvr_NX", "conv_CK", "q_norm_C", "k_norm_C"])


def test_rows_of_a_wrong_width_are_refused():
    given = arguments_of("tiny", torch.float32)
    for wrong in (given["qkvr_NX"][:, :-1], given["qkvr_NX"][:, :128]):
        with pytest.raises(ValueError, match="attention_prologue: rows of"):
            attention_prologue(**changed(given, qkvr_NX=wrong))
