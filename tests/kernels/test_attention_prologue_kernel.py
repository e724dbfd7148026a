"""attention_prologue's kernel: the bits of the kernels of its parts, one after the other."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from suzuri.kernels import dispatch
from suzuri.kernels.attention_prologue import Scaling, Sequences, State, attention_prologue, cases
from tests.kernels.compare import LOW, Arguments, assert_same_bits, changed, generator
from tests.kernels.conv_batches import BATCHES, batch
from tests.kernels.on_triton import in_interpreter, kernel_cases, nan_filled, on_gpu
from tests.kernels.row_kernels import without_sync
from tests.kernels.triton_interpreter import patch_loop_bounds

pytest.importorskip("triton")
from suzuri.kernels.attention_prologue import kernel
from suzuri.kernels.kv_write import kernel as write_kernel
from suzuri.kernels.log_scaling import kernel as scaling_kernel
from suzuri.kernels.rms_norm import kernel as norm_kernel
from suzuri.kernels.short_conv import kernel as conv_kernel
from suzuri.kernels.short_conv import kernel_rows as conv_rows

SCALINGS = (None, Scaling(3.0, 0.1), Scaling(5.0, 0.2, 2))
OPTIONS: tuple[Arguments, ...] = (
    {},
    {"rows": 3, "elements": 16, "num_warps": 1},
    {"rows": 8, "elements": 64},
)
GPU = [pytest.param("cuda", dtype, marks=on_gpu) for dtype in LOW]
CPU = [pytest.param("cpu", dtype, marks=in_interpreter) for dtype in LOW]
devices = pytest.mark.parametrize(("device", "dtype"), [*CPU[:1], *GPU])


@pytest.fixture(autouse=True)
def loops(monkeypatch: pytest.MonkeyPatch) -> None:
    patch_loop_bounds(monkeypatch)


def parts(given: Arguments, scaling: Scaling | None, state: State | None) -> list[Tensor | None]:
    """The kernels of the separate ops."""
    x, eps, channels = given["qkvr_NX"], given["eps"], len(given["q_norm_C"])
    heads, kv_heads, rows = given["heads"], given["kv_heads"], len(given["qkvr_NX"])
    q_end, kv_end = heads * channels, (heads + 2 * kv_heads) * channels
    positions, seq_ids, starts = given["sequences"]
    ring, slots = (None, None) if state is None else (state.conv_LRC, state.conv_slots_S)
    where = (positions, seq_ids, starts, ring, slots)
    kv = conv_kernel.short_conv(x[:, q_end:kv_end], given["conv_CK"], *where)
    kv = kv.reshape(rows, 2, kv_heads, channels)
    q = x[:, :q_end].reshape(rows, heads, channels)
    q = norm_kernel.rms_norm(q, given["q_norm_C"], eps, x.dtype)
    k = norm_kernel.rms_norm(kv[:, 0], given["k_norm_C"], eps, x.dtype)
    r, v = x[:, kv_end:].reshape(rows, heads, -1), kv[:, 1]
    if scaling is not None:
        how = (positions + scaling.offset, scaling.n_floor, scaling.alpha)
        q, r = scaling_kernel.log_scaling(q, *how), scaling_kernel.log_scaling(r, *how)
    if state is None:
        return [q, r, k, v]
    pages = (state.k_pages_PTUC, state.v_pages_PTUC)
    write_kernel.kv_write(k, v, *pages, state.page_slots_N)
    return [q, r, None, None]


def joined(given: Arguments, scaling: Scaling | None, state: State | None, **options: Any) -> Any:
    names = ("qkvr_NX", "conv_CK", "q_norm_C", "k_norm_C", "sequences", "heads", "kv_heads", "eps")
    run: Any = kernel.attention_prologue
    return run(*(given[x] for x in names), scaling, state, **options)


def assert_all_same(found: Any, expected: Any, what: str) -> None:
    for one, wanted in zip(found, expected, strict=True):
        assert (one is None) == (wanted is None)
        if one is not None:
            assert_same_bits(one, wanted, what)


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize(("device", "case", "dtype"), kernel_cases(cases.SHAPES))
def test_without_state(device: str, case: str, dtype: torch.dtype, scaling: Scaling | None):
    given = cases.build(case, dtype, generator(1, device))
    expected = parts(given, scaling, None)
    for options in OPTIONS:
        with nan_filled():
            found = joined(given, scaling, None, **options)
        assert_all_same(found, expected, str(options))


def with_rings(
    name: str, device: str, dtype: torch.dtype, taps: int, spare: int, channels: int
) -> tuple[Arguments, dict[str, Tensor]]:
    """A batch that goes on from rings, and its memory; one sequence is kept nowhere. In bf16 in the
    interpreter, which cuts where a GPU rounds, of integers, so that only norms and scales round."""
    heads, kv_heads, width = 4, 3, 5
    drawn = batch(name, device, dtype, taps=taps, channels=heads * (channels + width))
    g = generator(6, device)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, device=device).to(dtype)

    rows, kv = len(drawn["positions_N"]), 2 * kv_heads * channels
    given = {
        "qkvr_NX": torch.cat([drawn["x_NC"], normal(rows, kv)], 1),
        "conv_CK": normal(kv, taps),
        "q_norm_C": normal(channels),
        "k_norm_C": normal(channels),
        "sequences": Sequences(drawn["positions_N"], drawn["seq_ids_N"], drawn["seq_starts_S1"]),
        "heads": heads,
        "kv_heads": kv_heads,
        "eps": 1e-6,
    }
    memory = cases.memory(given, spare, g)
    memory["conv_slots_S"][1] = -1
    if device == "cpu" and dtype == torch.bfloat16:
        for field in ("qkvr_NX", "conv_CK"):
            given[field] = given[field].round()
        memory["conv_LRC"] = memory["conv_LRC"].round()
    return given, memory


def check(given: Arguments, memory: dict[str, Tensor], scaling: Scaling | None) -> None:
    expected_state = State(**{name: x.clone() for name, x in memory.items()})
    expected = parts(given, scaling, expected_state)
    for options in OPTIONS:
        state = State(**{name: x.clone() for name, x in memory.items()})
        with nan_filled():
            found = joined(given, scaling, state, **options)
        assert_all_same((*found, *state), (*expected, *expected_state), str(options))
        if len(state.conv_slots_S) == len(given["qkvr_NX"]):
            state = State(**{name: x.clone() for name, x in memory.items()})
            found = joined(given, scaling, state, **options, single_rows=True)
            assert_all_same((*found, *state), (*expected, *expected_state), "single rows")


@devices
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize(("taps", "spare"), [(4, 0), (4, 4), (1, 0), (2, 11)])
def test_with_state(device: str, dtype: torch.dtype, name: str, taps: int, spare: int):
    """Old inputs are read before new ones overwrite them, however the batch is cut."""
    given, memory = with_rings(name, device, dtype, taps, spare, 8)
    check(given, memory, SCALINGS[taps % 3])


@in_interpreter
@pytest.mark.parametrize("channels", [8, 5])
def test_taps_as_one_integer(channels: int):
    given, memory = with_rings("verify", "cpu", torch.bfloat16, 4, 2, channels)
    assert conv_rows.is_packed(given["conv_CK"])
    check(given, memory, None)


@devices
def test_state_of_any_strides(device: str, dtype: torch.dtype):
    given, memory = with_rings("ragged", device, dtype, 4, 2, 5)
    views: dict[str, Tensor] = {}
    for name, x in memory.items():
        wide = x.new_zeros(*x.shape[:-1], 2 * x.shape[-1])
        views[name] = wide[..., ::2].copy_(x)
    wide = given["qkvr_NX"].new_zeros(len(given["qkvr_NX"]), 2 * given["qkvr_NX"].shape[1])
    strided = changed(given, qkvr_NX=wide[:, ::2].copy_(given["qkvr_NX"]))
    found = joined(strided, SCALINGS[1], State(**views))
    expected = parts(given, SCALINGS[1], State(**memory))
    assert_all_same((*found, *views.values()), (*expected, *memory.values()), "")


@in_interpreter
def test_what_is_not_covered_and_no_rows():
    given, memory = with_rings("decode", "cpu", torch.float32, 4, 0, 8)
    names = ("qkvr_NX", "conv_CK", "q_norm_C", "k_norm_C")
    numbers, covers = [given[name] for name in names], cast(Any, kernel.covers)
    state = State(**memory)
    assert covers(*numbers, state) and covers(*numbers, None)
    assert not covers(*(x.double() for x in numbers), None)
    assert not covers(*numbers, state._replace(k_pages_PTUC=state.k_pages_PTUC.bfloat16()))
    other = state.k_pages_PTUC.transpose(0, 1).contiguous().transpose(0, 1)
    assert not covers(*numbers, state._replace(k_pages_PTUC=other))
    none = changed(given, qkvr_NX=given["qkvr_NX"][:0])
    assert [len(x) for x in joined(none, None, None)] == [0] * 4


@on_gpu
def test_the_op_runs_the_kernel_without_waiting():
    given = cases.build("inkling_local", torch.bfloat16, generator(1, "cuda"))
    given["sequences"] = Sequences(*given["sequences"])
    memory = cases.memory(given, 2, generator(2, "cuda"))
    states = [State(**{name: x.clone() for name, x in memory.items()}) for _ in range(2)]
    expected = parts(given, SCALINGS[2], states[1])
    with without_sync():
        found = attention_prologue(**given, scaling=SCALINGS[2], state=states[0])
    assert_all_same((*found, *states[0]), (*expected, *states[1]), "")
    with dispatch.force("reference"):
        assert attention_prologue(**given, scaling=None).k_NUC is not None
