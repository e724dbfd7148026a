"""Every golden case in fp32, item by item; and what the golden data themselves promise."""

import pytest
import torch
from rich.console import Console

from suzuri.kernels import dispatch
from suzuri.model.batch import pack
from suzuri.model.moe import MoE
from suzuri.tools.golden import compute, recorded
from suzuri.tools.trace import golden_rows
from tests.model.models import CASES, expected, golden_model


def failures(case: str, dtype: torch.dtype, device: str = "cpu") -> list[str]:
    """The items out of tolerance."""
    values = {name: value.to(device) for name, value in expected(case).items()}
    got = compute(golden_model(case, dtype, device), values, lambda part: None)
    rows = golden_rows(got, values, Console(quiet=True))
    assert len(rows) > 20
    return [f"{row.name}: {row.problem}" for row in rows if not row.ok]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_within_tolerance(case: str, dtype: torch.dtype) -> None:
    assert failures(case, dtype) == []


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_within_tolerance_on_gpu(case: str) -> None:
    with dispatch.force("reference"):
        assert failures(case, torch.float32, "cuda") == []


@pytest.mark.parametrize("case", CASES)
def test_bf16_follows_fp32_layer_by_layer(case: str) -> None:
    """Each layer on the expected input: whole models of random weights amplify rounding too much.

    A row whose expert choice flips under bf16 inputs is another function: left out, and counted.
    """
    model, values = golden_model(case, torch.bfloat16), expected(case)
    batch = pack([values["text.input_ids"][0].tolist()])
    h_ND = values["text.embed"][0]
    for i, layer in enumerate(model.decoder.blocks):
        with recorded(model) as records:
            layer(h_ND.to(torch.bfloat16), batch)
        kept_N = torch.ones(len(h_ND), dtype=torch.bool)
        if isinstance(layer.mlp, MoE):
            experts_NK = records[layer.mlp.router][0]
            kept_N = (experts_NK == values[f"text.layer.{i}.router.topk_ids"]).all(-1)
        assert int((~kept_N).sum()) <= 2
        for module, item in (
            (layer.attn, "attn"),
            (layer.attn_conv, "attn_sconv"),
            (layer.mlp, "mlp"),
        ):
            wanted_ND = values[f"text.layer.{i}.{item}"][0][kept_N]
            error = (records[module][kept_N] - wanted_ND).norm() / wanted_ND.norm()
            assert error < 0.012, (i, item, float(error))
        h_ND = values[f"text.layer.{i}.out"][0]


def test_every_expected_item_is_compared() -> None:
    """A key that nobody computes must fail, not vanish."""
    values = dict(expected("base"))
    values["text.layer.99.attn"] = values["text.layer.0.attn"]
    got = compute(golden_model("base"), values, lambda part: None)
    rows = golden_rows(got, values, Console(quiet=True))
    bad = [row for row in rows if not row.ok]
    assert [row.name for row in bad] == ["text.layer.99.attn"]
    assert "nothing here computes it" in bad[0].problem
    skipped = [n for n in values if n.startswith("mtp.raw.")]
    inputs = [n for n in values if n.endswith(("input_ids", "pixel_values", "hidden_in", ".bins"))]
    assert len(rows) + len(skipped) + len([n for n in inputs if n not in skipped]) == len(values)
