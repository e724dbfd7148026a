"""penalize_logits against plain Python, and what must not change a bit."""

import math

import pytest
import torch

from suzuri.kernels.penalize_logits import cases, penalize_logits
from tests.kernels.compare import (
    FP32_EPS,
    FP64_NOISE,
    Arguments,
    assert_close,
    assert_same_bits,
    changed,
    device_cases,
    each_dtype,
    generator,
)


def plain(arguments: Arguments) -> list[list[float]]:
    """The contract, number by number."""
    rows: list[list[float]] = []
    for row, logits in enumerate(arguments["logits_NV"].tolist()):
        slot = int(arguments["slots_N"][row])
        repetition, frequency, presence = (
            float(arguments[name][row]) for name in ("repetition_N", "frequency_N", "presence_N")
        )
        new: list[float] = []
        for v, logit in enumerate(logits):
            count = int(arguments["output_LV"][slot, v])
            x = logit
            if bool(arguments["prompt_LV"][slot, v]) or count:
                x = x / repetition if x > 0 else x * repetition
            new.append(x - frequency * count - (presence if count else 0.0))
        rows.append(new)
    return rows


@each_dtype
@pytest.mark.parametrize(("device", "case"), device_cases(["tiny", "odd"]), indirect=["device"])
def test_against_plain_python(device: str, case: str, dtype: torch.dtype):
    arguments: Arguments = cases.build(case, dtype, generator(1, device))
    found = penalize_logits(**arguments)
    expected = torch.tensor(plain(arguments), dtype=torch.float64, device=device)
    assert (found[:, 5] == -math.inf).all()
    noise = FP64_NOISE if dtype == torch.float64 else 3 * FP32_EPS
    size = torch.full_like(expected, 20.0)
    assert_close(found, expected, noise=noise, magnitude=size)
    wide = arguments["logits_NV"].to(found.dtype)
    assert_same_bits(found[0], wide[0])
    assert (found[1:] != wide[1:]).sum() > found[1:].numel() / 8


def test_by_hand():
    arguments: Arguments = {
        "logits_NV": torch.tensor([[4.0, -4.0, 4.0, -4.0, 4.0, 0.0]]),
        "prompt_LV": torch.tensor([[1, 1, 0, 0, 0, 1]]).bool(),
        "output_LV": torch.tensor([[0, 0, 3, 1, 0, 0]], dtype=torch.int32),
        "slots_N": torch.tensor([0]),
        "repetition_N": torch.tensor([2.0]),
        "frequency_N": torch.tensor([0.25]),
        "presence_N": torch.tensor([0.5]),
    }
    expected = [[2.0, -8.0, 2 - 0.75 - 0.5, -8 - 0.25 - 0.5, 4.0, 0.0]]
    assert penalize_logits(**arguments).tolist() == expected


def test_only_the_slot_of_the_row_counts(device: str):
    arguments: Arguments = cases.build("tiny", torch.float32, generator(2, device))
    found = penalize_logits(**arguments)
    used = arguments["slots_N"].tolist()
    for row, slot in enumerate(used):
        output = torch.zeros_like(arguments["output_LV"])
        prompt = torch.zeros_like(arguments["prompt_LV"])
        output[slot], prompt[slot] = arguments["output_LV"][slot], arguments["prompt_LV"][slot]
        alone = penalize_logits(**changed(arguments, prompt_LV=prompt, output_LV=output))
        assert_same_bits(alone[row], found[row])


def test_other_tables_are_refused():
    arguments: Arguments = cases.build("odd", torch.float32, generator(3))
    for name in ("prompt_LV", "output_LV"):
        with pytest.raises(ValueError, match=r"must be torch\.bool and torch\.int32"):
            penalize_logits(**changed(arguments, **{name: arguments[name].to(torch.int64)}))
