"""`suzuri verify`: its table and verdict, what it refuses, and that a vacuous check fails."""

import dataclasses
from pathlib import Path

import pytest
import torch
from rich.console import Console

from suzuri.config import parse
from suzuri.model.inkling import Inkling
from suzuri.tools.verify.config import VerifyConfig
from suzuri.tools.verify.lab import Lab, Mismatch, NotTested, default_tokens
from suzuri.tools.verify.matrix import checks, odd_page
from suzuri.tools.verify.reference import Digester, Reference
from suzuri.tools.verify.run import Outcome, load, run_verify, show
from tests.model.models import GOLDEN, random_ids, random_model

TINY = VerifyConfig(model="tiny", random_weights=True, dtype="float32", fast=True)


def lab_of(model: Inkling, config: VerifyConfig = TINY) -> Lab:
    return Lab(model, config, Reference(model))


def test_every_check_passes_on_tiny(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_verify(dataclasses.replace(TINY, dtype="bfloat16")) == 0
    lines = capsys.readouterr().out.strip().splitlines()
    words = lines[-1].split()
    num_checks, num_rows = int(words[1]), int(words[3])
    assert lines[-1] == f"OK: {num_checks} checks, {num_rows} rows, all equal bits"
    shown = [line for line in lines if line.rstrip().endswith("equal bits")]
    assert len(shown) == num_checks + 1
    assert num_rows > 3000
    assert not any(" 0   equal bits" in line for line in lines)
    for name in ("learned branch", "copy on write", "preemption", "neighbours abort", "media"):
        assert any(name in line for line in shown)


def test_the_verdict_names_the_first_check_that_fails(capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = [
        Outcome(name="one", rows=3, problem=""),
        Outcome(name="two [/]", rows=4, problem="logits of [x]: first differs in layer 0 attn"),
        Outcome(name="three", rows=0, problem="not tested: no hit"),
    ]
    assert show(Console(), TINY, outcomes) == 1
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert last == (
        "FAILED 2 of 3 checks: first two [/]: logits of [x]: first differs in layer 0 attn"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([" "], "MODEL is empty"),
        (["tiny", "--tokens", "5"], "--tokens 5: must be from 24"),
        (["tiny", "--seed", "-1"], "--seed -1: must be from 0"),
        (["tiny", "--device", "gpu"], "--device gpu: must be cpu, cuda or cuda:N"),
        (["tiny", "--device", "cuda:x"], "--device cuda:x: must be"),
    ],
)
def test_wrong_flags_are_refused_by_name(words: list[str], message: str) -> None:
    config = parse(VerifyConfig, prog="suzuri verify", args=words)
    with pytest.raises(ValueError, match=message):
        config.resolve()


def test_what_cannot_be_verified_is_refused() -> None:
    with pytest.raises(ValueError, match="'tiny' is a shape without weights"):
        run_verify(dataclasses.replace(TINY, random_weights=False))
    with pytest.raises(ValueError, match="--tokens 3000: the checks need sequences of 6000"):
        run_verify(dataclasses.replace(TINY, tokens=3000))
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match=r"--device cuda: .*(CPU alone|no GPU)"):
            run_verify(dataclasses.replace(TINY, device="cuda"))


def test_a_digest_changes_with_every_bit() -> None:
    digest = Digester()
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(5, 33, generator=generator).to(dtype)
        bits = x.view(torch.int32 if dtype == torch.float32 else torch.int16)
        seen = {int(digest(x[:1])[0])}
        for place in range(33):
            for bit in range(16):
                changed = bits[:1].clone()
                changed[0, place] ^= 1 << bit if bit < 15 else -(1 << 15)
                seen.add(int(digest(changed.view(dtype))[0]))
        assert len(seen) == 1 + 33 * 16
        assert torch.equal(digest(x)[2:3], digest(x[2:3]))
    zeros = torch.zeros(2, 3)
    zeros[1] = -0.0
    assert digest(zeros)[0] != digest(zeros)[1]


def test_a_hit_that_did_not_happen_is_no_proof() -> None:
    """c03: equal numbers without a hit would prove nothing."""
    lab = lab_of(random_model())
    serving = lab.serving(page=4, context=64, prefix_cache=False)
    prompt = lab.ids(20)
    serving.serve(prompt)
    again = serving.serve(prompt)
    serving.compare()
    with pytest.raises(NotTested, match="took 0 tokens from the cache, expected 19"):
        serving.expect_cached(again, 19)


def test_a_changed_row_is_found_with_its_place() -> None:
    lab = lab_of(random_model())
    serving = lab.serving(page=4, context=64, max_chunk=5)
    request = serving.serve(lab.ids(20), max_tokens=4)
    serving.compare()
    sequence = request.sequences[0]
    rows = serving.recorder.rows[sequence]
    at = next(i for i, row in enumerate(rows) if row.position == 12)
    rows[at] = rows[at]._replace(hidden=rows[at].hidden ^ 1)
    with pytest.raises(Mismatch, match="hidden row of request 0, sample 0, token 12 in step 3"):
        serving.compare()
    rows[at] = rows[at]._replace(hidden=rows[at].hidden ^ 1, logits=0)
    with pytest.raises(Mismatch, match="logits of request 0, sample 0, token 12 in step 3"):
        serving.compare()


def test_every_line_of_the_matrix_has_a_name_of_its_own() -> None:
    for fast in (False, True):
        lab = lab_of(random_model(), dataclasses.replace(TINY, fast=fast))
        names = [check.name for check in checks(lab)]
        assert len(set(names)) == len(names)
        for page in (4, odd_page(16)) if fast else (4, odd_page(16), 16, 128):
            assert any(name.endswith(f"pages of {page}") for name in names)


def test_sizes_follow_the_window() -> None:
    assert default_tokens(512) > 512 + 128
    assert default_tokens(0) == 40
    for window in (4, 6, 7, 8, 16, 512):
        assert odd_page(window) == 3 or (window - 1) % odd_page(window) == 0


def test_random_weights_hide_nothing() -> None:
    """With norm weights of one or conv taps near zero a broken cache could give the same bits."""
    for name, parameter in load(TINY, Console()).named_parameters():
        assert float(parameter.abs().max()) != 1.0, name
        assert parameter.numel() == 1 or float(parameter.std()) > 0.005, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "dtype"),
    # Each case once; both dtypes of all of them: tests/engine/test_exact.py.
    [
        ("base", "bfloat16"),
        ("narrow", "float32"),
        ("chain", "bfloat16"),
        ("odd", "float32"),
        ("alldense", "bfloat16"),
        ("wide", "float32"),
    ],
)
def test_golden_checkpoints_pass(case: str, dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder: Path = GOLDEN / case / "original"
    words = [str(folder), "--dtype", dtype, "--fast"]
    config = parse(VerifyConfig, prog="suzuri verify", args=words).resolve()
    code = run_verify(config)
    last = capsys.readouterr().out.strip().splitlines()[-1]
    assert (code, last[:4]) == (0, "OK: "), last


def test_prompts_are_the_same_for_a_seed_and_others_for_another() -> None:
    model = random_model()
    first, again = lab_of(model), lab_of(model)
    other = lab_of(model, dataclasses.replace(TINY, seed=1))
    assert first.ids(20, 3) == again.ids(20, 3)
    assert first.ids(20, 3) != other.ids(20, 3)
    assert first.ids(20, 3) != first.ids(20, 4)
    assert max(first.ids(2000)) < model.config.text.unpadded_vocab_size
    assert random_ids(model, 3) != first.ids(3)
