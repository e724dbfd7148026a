"""The command line: exit codes, the last line, and errors that name the fix."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from suzuri.cli import main
from suzuri.tools import loading
from suzuri.tools.rows import EXACT, LAYERS, LOGITS, TOWERS, Tolerance, compare, tolerance
from tests.model.models import GOLDEN


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, list[str], str]:
    """(exit code, lines of stdout, stderr) of the command."""
    with pytest.raises(SystemExit) as ended:
        main(list(words))
    out, err = capsys.readouterr()
    code = ended.value.code
    assert isinstance(code, int)
    return code, out.strip().splitlines(), err


TINY = ("--random-weights", "--config", "tiny")


def altered(tmp_path: Path, **changes: torch.Tensor) -> Path:
    """A copy of the golden case `base` whose expected values were changed."""
    folder = tmp_path / "case"
    shutil.copytree(GOLDEN / "base", folder)
    values = load_file(folder / "expected.safetensors")
    for name, value in changes.items():
        key = name.replace("__", ".")
        assert key in values
        values[key] = value
    save_file(values, folder / "expected.safetensors")
    return folder


def test_a_golden_case_passes(capsys: pytest.CaptureFixture[str]) -> None:
    code, lines, _ = run(capsys, "trace", str(GOLDEN / "base"), "--layout", "released")
    assert code == 0
    assert lines[-1].startswith("OK: all 73 items")
    shown = "\n".join(lines)
    for item in ("text.layer.7.router.topk_ids", "vision.features", "audio.features", "mm.logits"):
        assert item in shown
    for item in ("text.greedy_ids", "mm.greedy_ids", "mtp.normed.drafts", "text.logits"):
        assert item in shown
    assert "FAILED" not in shown


def test_text_only_leaves_the_towers_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """w06: of a golden folder, of files whose config has no towers, of a shape."""
    code, lines, _ = run(capsys, "trace", str(GOLDEN / "base"), "--text-only")
    assert code == 0 and lines[-1].startswith("OK: all 68 items")
    assert "towers: 5 items skipped, --text-only" in lines
    assert "note: vision: 6 tensors skipped, not wanted" in lines

    folder = tmp_path / "model"
    shutil.copytree(GOLDEN / "base" / "original", folder)
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(document | {"audio_config": None}))
    code, _, err = run(capsys, "trace", str(folder))
    assert code == 2 and "model.audio.* is surplus: 2 tensors" in err and "--text-only" in err
    code, lines, _ = run(capsys, "trace", str(folder), "--text-only")
    assert code == 0 and not any("vision.features" in line for line in lines)
    code, lines, _ = run(capsys, "trace", "tiny", "--random-weights", "--text-only")
    assert code == 0 and not any("vision.features" in line for line in lines)


def test_records_that_are_a_pipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "case"
    folder.mkdir()
    os.mkfifo(folder / "expected.safetensors")
    code, _, err = run(capsys, "trace", str(folder))
    assert code == 2 and "expected.safetensors is not a plain file" in err


def test_media_preprocessing_passes(capsys: pytest.CaptureFixture[str]) -> None:
    code, lines, _ = run(capsys, "trace", str(GOLDEN / "media"))
    assert code == 0
    assert "audio.2.bins" in "\n".join(lines)


def test_a_wrong_value_fails_and_the_last_line_names_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    values = load_file(GOLDEN / "base" / "expected.safetensors")
    wrong = values["text.layer.5.mlp"].clone()
    wrong[0, 3, 7] += 0.01
    ids = values["mm.greedy_ids"].clone()
    ids[-1] += 1
    folder = altered(tmp_path, text__layer__5__mlp=wrong, mm__greedy_ids=ids)
    code, lines, _ = run(capsys, "trace", str(folder))
    assert code == 1
    assert lines[-1].startswith("FAILED 2 of 73 items, first text.layer.5.mlp: differs by 0.01")
    assert "[0, 3, 7]" in lines[-1]


def test_nan_is_never_within_tolerance() -> None:
    expected = torch.tensor([1.0, float("nan")])
    assert not compare("x", torch.tensor([1.0, 2.0]), expected, LAYERS).ok
    assert not compare("x", expected, torch.tensor([1.0, 2.0]), LAYERS).ok
    assert not compare("x", torch.zeros(3), torch.zeros(4), LAYERS).ok
    assert not compare("x", torch.zeros(2, 3), torch.zeros(3, 2), LAYERS).ok
    assert compare("x", torch.zeros(2, 3), torch.zeros(1, 2, 3), EXACT).ok


def test_tolerances_are_those_of_the_golden_readme() -> None:
    assert tolerance("text.logits") == tolerance("mm.greedy_logits") == LOGITS
    assert Tolerance(atol=1e-4) == LOGITS
    assert tolerance("text.layer.0.out") == tolerance("text.final_norm") == LAYERS
    assert Tolerance(atol=1e-3, rtol=1e-5) == LAYERS
    assert tolerance("vision.features") == tolerance("audio.features") == TOWERS
    assert Tolerance(atol=1e-5) == TOWERS
    assert tolerance("mtp.normed.depth.0.hidden") == Tolerance(atol=1e-4)
    for name in ("text.greedy_ids", "text.layer.2.router.topk_ids", "mtp.normed.drafts"):
        assert tolerance(name) == EXACT


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trace"], "give a golden folder or a model"),
        (["trace", "no/such/folder"], "no/such/folder"),
        (["trace", str(GOLDEN)], "expected.safetensors is missing"),
        (["trace", "--random-weights"], "give a golden folder or a model"),
        (["trace", "--random-weights", "--config", "tinny"], "did you mean 'tiny'"),
        (["trace", "--random-weights", "--config", "no/config.json"], "no/config.json"),
        (["trace", "--random-weights", "--config", "tiny", "x"], "two models, x and --config tiny"),
        (["trace", *TINY, "--layout", "released"], "--random-weights reads none"),
        (["trace", "tiny"], "shape without weights"),
        (["trace", str(GOLDEN / "odd" / "original"), "--layout", "released"], "tell their own"),
        (["trace", str(GOLDEN / "media"), "--layout", "released"], "has no effect"),
        (["trace", str(GOLDEN / "media"), "--text-only"], "--text-only has no effect"),
        (["trace", "x", "--config", "tiny"], "--config goes with --random-weights"),
        (["trace", *TINY, "--num-tokens", "1"], "--num-tokens 1: must be from 2 to 100000"),
        (["trace", *TINY, "--num-tokens", "5000"], "model_max_length is 4096"),
        (["trace", *TINY, "--seed", "-1"], "--seed -1: must be from 0"),
        (["trace", str(GOLDEN / "odd" / "original"), "--num-tokens", "0"], "must be from 2"),
        (["trace", str(GOLDEN / "odd"), "--seed", "3"], "have no effect on a folder with expected"),
        (["trace", "--random-weights", "--config", "inkling"], "GB are free; give a smaller"),
        (["trace", "--layout", "transformer", "x"], "transformers"),
        (["trace", "--dtypo", "float32", "x"], "--dtypo"),
        (["trase"], "no command 'trase'"),
        ([], ""),
    ],
)
def test_wrong_input_is_refused_with_the_fix(
    capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    code, _, err = run(capsys, *words)
    assert code == 2
    assert message in err.replace("\n", " ")


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    code, lines, _ = run(capsys, "--help")
    assert code == 0
    assert any(line.strip().startswith("trace ") for line in lines)
    code, lines, _ = run(capsys, "trace", "--help")
    assert code == 0
    assert any("--random-weights" in line for line in lines)
    code, lines, _ = run(capsys, "--version")
    assert (code, len(lines)) == (0, 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("config", ["tiny", str(GOLDEN / "odd" / "original" / "config.json")])
def test_a_shape_with_random_weights_proves_itself(
    capsys: pytest.CaptureFixture[str], config: str, dtype: str
) -> None:
    words = ("--random-weights", "--config", config, "--dtype", dtype, "--num-tokens", "21")
    code, lines, _ = run(capsys, "trace", *words)
    assert code == 0
    assert lines[-1].startswith("OK: all ")
    assert "one by one = whole" in "\n".join(lines)


def test_a_broken_checkpoint_is_an_input_error(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = altered(tmp_path)
    shard = folder / "original" / "mtp.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    code, _, err = run(capsys, "trace", str(folder))
    assert code == 2
    assert "mtp.safetensors" in err
    assert "100" in err


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("text.input_ids", torch.tensor([[1, 100000]]), "text.input_ids has ids outside 0..300"),
        ("text.input_ids", torch.tensor([[1]]), "text.input_ids must hold at least 2 token ids"),
        ("text.greedy_ids", torch.zeros(0, dtype=torch.int64), "text.greedy_ids is empty"),
        (
            "mtp.normed.hidden_in",
            torch.zeros(1, 3, 64),
            "mtp.normed.hidden_in has shape [1, 3, 64]",
        ),
        ("mtp.normed.hidden_in", torch.zeros(1, 39, 60), "this model needs [..., (39, 64)]"),
        ("vision.pixel_values", torch.zeros(5, 2, 5, 6, 3), "vision.pixel_values has shape"),
        ("audio.bins", torch.full((1, 7, 20), 16, dtype=torch.int32), "levels outside 0..15"),
        (
            "audio.bins",
            torch.zeros(1, 6, 20, dtype=torch.int32),
            "7 placeholders, audio.bins holds 6",
        ),
        ("mm.input_ids", torch.zeros(1, 34), "mm.input_ids must hold at least 2 token ids"),
    ],
)
def test_records_that_do_not_fit_the_model_are_refused(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    name: str,
    value: torch.Tensor,
    message: str,
) -> None:
    folder = altered(tmp_path, **{name.replace(".", "__"): value})
    code, _, err = run(capsys, "trace", str(folder))
    assert code == 2
    assert message in err
    assert "expected.safetensors: " in err
    assert "are these the records of" in err


def test_the_records_of_another_checkpoint_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = altered(tmp_path)
    for other in ("wide", "odd", "alldense"):
        shutil.rmtree(folder / "original")
        shutil.copytree(GOLDEN / other / "original", folder / "original")
        code, lines, err = run(capsys, "trace", str(folder))
        assert code == 2, lines
        assert "are these the records of" in err


@pytest.mark.parametrize("name", ["expected.safetensors", "media.safetensors"])
def test_damaged_records_are_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    source = GOLDEN / ("base" if name.startswith("expected") else "media")
    folder = tmp_path / "[/red] x"
    shutil.copytree(source, folder)
    code, lines, _ = run(capsys, "trace", str(folder))
    assert code == 0
    assert "[/red] x" in lines[-1]
    file = folder / name
    for damaged in (file.read_bytes()[:-5], b"garbage", b""):
        file.write_bytes(damaged)
        code, _, err = run(capsys, "trace", str(folder))
        assert code == 2
        assert f"{name} is damaged" in err
    file.unlink()
    file.mkdir()
    code, _, err = run(capsys, "trace", str(folder))
    assert code == 2
    assert name in err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("weird", "'weird', which this version cannot compute"),
        ("image.0.xfoo.pixel_values_frame0", "the tag 'xfoo' is neither plain nor x and a factor"),
        ("audio.9.bins", "audio.9.bins has no source 'audio.9.waveform'"),
    ],
)
def test_odd_media_items_are_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str, message: str
) -> None:
    values = load_file(GOLDEN / "media" / "media.safetensors")
    save_file({**values, name: torch.zeros(2)}, tmp_path / "media.safetensors")
    code, _, err = run(capsys, "trace", str(tmp_path))
    assert code == 2
    assert message in err


def test_a_weight_that_is_not_finite_fails_wherever_it_is(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint"
    shutil.copytree(GOLDEN / "odd" / "original", folder)
    shard = folder / "model-00001-of-00001.safetensors"
    values = load_file(shard)
    values["model.llm.embed.weight"][215, 0] = float("nan")
    save_file(values, shard)
    code, lines, _ = run(capsys, "trace", str(folder))
    assert code == 1
    assert "first weights: decoder.embed.weight finite: 1 of" in lines[-1]


def test_a_model_that_cannot_fit_is_refused_in_every_mode(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = altered(tmp_path)
    file = folder / "original" / "config.json"
    config = json.loads(file.read_text())
    for size in (10**12, 10**310):
        config["text_config"]["vocab_size"] = size
        file.write_text(json.dumps(config))
        for words, message in (
            ([str(folder)], "does not fit the config"),
            ([str(folder / "original")], "does not fit the config"),
            (["--random-weights", str(file)], "GB are free; give a smaller"),
            (["--random-weights", "--config", str(file)], "GB are free; give a smaller"),
        ):
            code, _, err = run(capsys, "trace", *words)
            assert code == 2
            assert message in err


def test_a_checkpoint_that_cannot_fit_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "available_memory", lambda: 10**8)
    code, _, err = run(capsys, "trace", str(GOLDEN / "base"))
    assert code == 0, err
    monkeypatch.setattr(loading, "available_memory", lambda: 10)
    monkeypatch.setattr(loading, "GB", 1)
    for words in ([str(GOLDEN / "base")], [str(GOLDEN / "base" / "original")]):
        code, _, err = run(capsys, "trace", *words)
        assert code == 2
        assert "GB are free; give a smaller" in err


def test_the_log_level_is_checked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUZURI_LOG", "bogus")
    code, _, err = run(capsys, "trace", str(GOLDEN / "alldense"))
    assert code == 2
    assert "SUZURI_LOG='bogus' is not one of" in err
