"""short_conv against torch's own depthwise convolution, and its state ring against no state."""

from itertools import accumulate, pairwise
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from suzuri.kernels.short_conv import cases, short_conv
from tests.kernels.compare import (
    FP32_EPS,
    FP64_NOISE,
    Arguments,
    assert_close,
    assert_same_bits,
    changed,
    check_gradients,
    check_low_precision_gradients,
    device_cases,
    each_dtype,
    each_low_dtype,
    generator,
    gradients,
)


def plain(
    x_NC: Tensor, weight_CK: Tensor, positions_N: Tensor, seq_ids_N: Tensor, seq_starts_S1: Tensor
) -> Tensor:
    """Each sequence through conv1d, zero padded on the left, plus its input."""
    taps = weight_CK.shape[1]
    parts: list[Tensor] = []
    for begin, end in pairwise(seq_starts_S1.tolist()):
        x_CT = functional.pad(x_NC[begin:end].T, (taps - 1, 0))
        y_CT = functional.conv1d(x_CT, weight_CK[:, None], groups=len(weight_CK))
        parts.append(x_NC[begin:end] + y_CT.T)
    return torch.cat(parts)


def packed(x_NC: Tensor, weight_CK: Tensor, lengths: list[int], firsts: list[int]) -> Arguments:
    """Arguments for rows of several sequences, sequence s going on at position firsts[s]."""
    device = x_NC.device
    starts = torch.tensor([0, *accumulate(lengths)], device=device)
    positions = [p for a, n in zip(firsts, lengths, strict=True) for p in range(a, a + n)]
    seq_ids = [s for s, n in enumerate(lengths) for _ in range(n)]
    return {
        "x_NC": x_NC,
        "weight_CK": weight_CK,
        "positions_N": torch.tensor(positions, dtype=torch.int64, device=device),
        "seq_ids_N": torch.tensor(seq_ids, dtype=torch.int64, device=device),
        "seq_starts_S1": starts,
    }


@each_dtype
@pytest.mark.parametrize(("device", "case"), device_cases(cases.SHAPES), indirect=["device"])
def test_one_rounding_of_the_convolution(device: str, case: str, dtype: torch.dtype):
    arguments: Arguments = cases.build(case, dtype, generator(1, device))
    y_NC = short_conv(**arguments)
    assert y_NC.dtype == dtype
    wide = arguments | {k: arguments[k].double() for k in ("x_NC", "weight_CK")}
    size = plain(**changed(wide, x_NC=wide["x_NC"].abs(), weight_CK=wide["weight_CK"].abs()))
    noise = FP64_NOISE if dtype == torch.float64 else 4 * FP32_EPS
    assert_close(y_NC, plain(**wide), magnitude=size, noise=noise)


def test_oldest_tap_first_and_residual_last_in_fp32(device: str):
    """Values that show the order: 2^24 + 1 is not an fp32 number."""
    big = 2.0**24
    x = torch.tensor([[1.0], [1.0], [1.0]], device=device)
    weight = torch.tensor([[big, 1.0, -big]], device=device)
    y_NC = short_conv(**packed(x, weight, [3], [0]))
    # ((big + 1) - big) + 1 with big + 1 rounded to big; any other order gives 2 or 0 in the end.
    assert y_NC[2].item() == 1.0


@pytest.mark.parametrize("taps", [1, 2, 4, 5])
@each_dtype
def test_a_zero_weight_returns_the_input(device: str, taps: int, dtype: torch.dtype):
    x = torch.randn(9, 6, generator=generator(2, device), device=device).to(dtype)
    weight = torch.zeros(6, taps, dtype=dtype, device=device)
    assert_same_bits(short_conv(**packed(x, weight, [4, 1, 4], [0, 0, 0])), x)


def test_sequences_shorter_than_the_taps_see_only_themselves(device: str):
    weight = torch.tensor([[1000.0, 100.0, 10.0, 1.0]], device=device)
    x = torch.tensor([[1.0], [2.0], [3.0], [4.0], [5.0], [6.0]], device=device)
    y_NC = short_conv(**packed(x, weight, [1, 2, 3], [0, 0, 0]))
    expected = [1 + 1, 2 + 2, 3 + 20 + 3, 4 + 4, 5 + 40 + 5, 6 + 400 + 50 + 6]
    assert y_NC[:, 0].tolist() == expected


class Ring(NamedTuple):
    """A state ring with strange contents: slots are reused, so the old inputs must not show."""

    state_LRC: Tensor
    slots_S: Tensor

    @classmethod
    def make(cls, rows: int, like: Tensor, slots: tuple[int, ...] = (3, 0)) -> "Ring":
        state = torch.full((5, rows, like.shape[1]), 1e4, dtype=like.dtype, device=like.device)
        return cls(state, torch.tensor(slots, device=like.device))

    def untouched(self) -> Tensor:
        others = sorted(set(range(len(self.state_LRC))) - set(self.slots_S.tolist()))
        return self.state_LRC[others]


def in_pieces(
    sequences: list[Tensor], weight_CK: Tensor, ends: list[list[int]], ring: Ring
) -> list[Tensor]:
    """Runs every sequence piece by piece, step i up to position ends[s][i], all in one batch."""
    outputs: list[list[Tensor]] = [[] for _ in sequences]
    steps = max(len(e) for e in ends)
    for step in range(steps):
        firsts = [([0, *e] + [e[-1]] * steps)[step] for e in ends]
        lasts = [(e + [e[-1]] * steps)[step] for e in ends]
        lengths = [b - a for a, b in zip(firsts, lasts, strict=True)]
        rows = [x[a:b] for x, a, b in zip(sequences, firsts, lasts, strict=True)]
        arguments = packed(torch.cat(rows), weight_CK, lengths, firsts)
        y_NC = short_conv(**arguments, state_LRC=ring.state_LRC, slots_S=ring.slots_S)
        for out, part in zip(outputs, y_NC.split(lengths), strict=True):
            out.append(part)
    return [torch.cat(out) for out in outputs]


def all_splits(length: int) -> list[list[int]]:
    """Every way to cut a sequence, as the ends of the pieces."""
    return [
        [cut for cut in range(1, length) if mask >> (cut - 1) & 1] + [length]
        for mask in range(2 ** (length - 1))
    ]


def sequences_and_weight(dtype: torch.dtype, device: str, taps: int) -> tuple[list[Tensor], Tensor]:
    g = generator(3, device)
    x = torch.randn(12, 5, generator=g, device=device).to(dtype)
    weight = torch.randn(5, taps, generator=g, device=device).to(dtype)
    return list(x.split([6, 6])), weight


@each_dtype
@pytest.mark.parametrize(("taps", "rows"), [(4, 3), (4, 6), (1, 0), (1, 3), (2, 1), (5, 7)])
def test_every_split_equals_no_state(device: str, taps: int, rows: int, dtype: torch.dtype):
    sequences, weight = sequences_and_weight(dtype, device, taps)
    whole = short_conv(**packed(torch.cat(sequences), weight, [6, 6], [0, 0])).split([6, 6])
    splits = all_splits(6)
    for ends, other_ends in zip(splits, reversed(splits), strict=True):
        ring = Ring.make(rows, sequences[0])
        before = ring.untouched().clone()
        pieces = in_pieces(sequences, weight, [ends, other_ends], ring)
        for piece, expected, x, slot in zip(
            pieces, whole, sequences, ring.slots_S.tolist(), strict=True
        ):
            assert_same_bits(piece, expected, f"{ends} {other_ends}")
            for position in range(max(0, 6 - rows), 6):
                assert_same_bits(ring.state_LRC[slot, position % rows], x[position])
        assert_same_bits(ring.untouched(), before)


@pytest.mark.parametrize("undone", [1, 2, 3])
@pytest.mark.parametrize("step", [1, 2, 5])
def test_rollback_is_going_on_from_an_earlier_position(device: str, undone: int, step: int):
    (draft, accepted), weight = sequences_and_weight(torch.bfloat16, device, taps=4)
    ring = Ring.make(3 + 3, draft, slots=(2,))
    in_pieces([draft], weight, [[*range(step, 6, step), 6]], ring)
    kept = 6 - undone
    spliced = torch.cat([draft[:kept], accepted])
    arguments = packed(accepted, weight, [6], [kept])
    y_NC = short_conv(**arguments, state_LRC=ring.state_LRC, slots_S=ring.slots_S)
    expected = short_conv(**packed(spliced, weight, [len(spliced)], [0]))[kept:]
    assert_same_bits(y_NC, expected)


@pytest.mark.parametrize("layout", ["channels apart", "rows last", "every second slot"])
def test_n25_a_state_view_of_any_strides(device: str, layout: str):
    sequences, weight = sequences_and_weight(torch.bfloat16, device, taps=4)
    ends = [[2, 3, 6], [1, 5, 6]]
    straight = Ring.make(4, sequences[0])
    expected = in_pieces(sequences, weight, ends, straight)
    filled = straight.state_LRC.new_full((10, 8, 10), 1e4)
    view = {
        "channels apart": filled[:5, :4, ::2],
        "rows last": filled[:5, :5, :4].transpose(1, 2),
        "every second slot": filled[::2, 1:5, 3:8],
    }[layout]
    assert not view.is_contiguous()
    found = in_pieces(sequences, weight, ends, Ring(view, straight.slots_S))
    for a, b in zip(found, expected, strict=True):
        assert_same_bits(a, b)
    assert_same_bits(view, straight.state_LRC)


def test_a_fresh_sequence_ignores_even_nan_in_its_slot(device: str):
    sequences, weight = sequences_and_weight(torch.float32, device, taps=4)
    ring = Ring.make(3, sequences[0])
    ring.state_LRC.fill_(torch.nan)
    pieces = in_pieces(sequences, weight, [[1, 2, 6], [6]], ring)
    whole = short_conv(**packed(torch.cat(sequences), weight, [6, 6], [0, 0])).split([6, 6])
    for piece, expected in zip(pieces, whole, strict=True):
        assert_same_bits(piece, expected)


@pytest.mark.parametrize("case", ["odd", "one_tap"])
def test_gradients_are_those_of_finite_differences(case: str):
    arguments: Arguments = cases.build(case, torch.float64, generator(4))
    arguments["x_NC"] = arguments["x_NC"][:, :3]
    arguments["weight_CK"] = arguments["weight_CK"][:3]
    check_gradients(short_conv, arguments, ["x_NC", "weight_CK"])


def test_gradients_agree_with_the_library(device: str):
    arguments: Arguments = cases.build("five_taps", torch.float64, generator(5, device))
    ours = gradients(short_conv, arguments, ["x_NC", "weight_CK"])
    theirs = gradients(plain, arguments, ["x_NC", "weight_CK"])
    for a, b in zip(ours, theirs, strict=True):
        assert_close(a, b, magnitude=torch.full_like(b, 20.0))


@each_low_dtype
def test_gradients_in_the_dtype_of_their_tensors(device: str, dtype: torch.dtype):
    arguments: Arguments = cases.build("tiny", dtype, generator(6, device))
    arguments["weight_CK"] = arguments["weight_CK"].float()  # as the model keeps it
    check_low_precision_gradients(short_conv, arguments, ["x_NC", "weight_CK"])


def test_arguments_that_do_not_fit_are_refused():
    x, weight = torch.zeros(3, 5), torch.zeros(5, 4)
    good = packed(x, weight, [3], [0])
    slots = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="weight"):
        short_conv(**changed(good, weight_CK=torch.zeros(6, 4)))
    with pytest.raises(ValueError, match="ring of 2 rows for 4 taps"):
        short_conv(**good, state_LRC=torch.zeros(1, 2, 5), slots_S=slots)
    with pytest.raises(ValueError, match="together"):
        short_conv(**good, state_LRC=torch.zeros(1, 3, 5))
    with pytest.raises(ValueError, match="together"):
        short_conv(**good, slots_S=slots)
