"""scripts/reproduce/ablations.py on `tiny`: both ways compute the same, and the page says so."""

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from suzuri.kernels import dispatch
from suzuri.kernels.moe_experts import moe_experts, reference
from suzuri.kernels.relative_attention import relative_attention
from tests.tools.reproduce import load_script


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("ablations")


@pytest.mark.parametrize("window", [None, 9])
def test_a_bias_that_is_written_out_gives_the_same_attention(
    script: ModuleType, window: int | None
) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(23, 4, 8) * 3, torch.randn(23, 2, 8), torch.randn(23, 2, 8)
    r, proj, starts = torch.randn(23, 4, 5), torch.randn(5, 12), torch.tensor([0, 23])
    ours = relative_attention(q, k, v, r, proj, starts, window=window)
    theirs = script.biased_before(q, k, v, r, proj, starts, window=window)
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-5)


def test_shared_experts_apart_give_the_same_sum(script: ModuleType) -> None:
    torch.manual_seed(0)
    x, gate_up, down = torch.randn(7, 16), torch.randn(6, 24, 16), torch.randn(6, 16, 12)
    experts = torch.tensor([[0, 2], [1, 3], [0, 1], [2, 3], [0, 3], [1, 2], [0, 2]])
    weights = torch.rand(7, 4)
    ours = moe_experts(x, experts, weights, gate_up, down)
    theirs = script.shared_apart(x, experts, weights, gate_up, down, num_routed=4)
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-3)
    before = reference.slot_outputs
    given = (x, experts, weights, gate_up, down)
    whole, order = before(*given)
    with script.unjoined():
        assert reference.slot_outputs is not before
        assert dispatch.is_apart()
        parts, same = reference.slot_outputs(*given)
    assert reference.slot_outputs is before
    assert torch.equal(parts, whole)
    assert all(torch.equal(a, b) for a, b in zip(order, same, strict=True))


def test_every_case_is_measured_or_named_and_the_page_has_it(
    script: ModuleType, tmp_path: Path
) -> None:
    out, page = tmp_path / "ablations.json", tmp_path / "ablations.md"
    words = ["tiny", "--device", "cpu", "--steps", "prefill:1x20", "decode:2x20", "--tokens", "4"]
    words += ["--attention", "33", "--repeats", "2", "--decode-steps", "2", "--out", str(out)]
    assert script.main(words) == 0
    document = json.loads(out.read_text())
    assert {row["what"] for row in document["rows"]} >= {
        *("recorded steps", "joined modules", "shared experts", "relative bias", "exact product")
    }
    assert all(row["ratio"] == row["b_ms"] / row["a_ms"] > 0 for row in document["rows"])
    assert any("exact attention" in one["case"] for one in document["left_out"])
    assert script.main(["--render", str(out), "--page", str(page)]) == 0
    text = page.read_text()
    for row in document["rows"]:
        assert f"| {row['cell']} | {row['a_ms']:.4g} |" in text
    for one in document["left_out"]:
        assert one["case"] in text
    assert script.main([*words, "--seconds", "0"]) == 0
    assert json.loads(out.read_text())["rows"] == []
