"""`suzuri bench kernels`: no figures on red tests, and figures that mean what they say."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from suzuri.model.config import preset
from suzuri.model.presets import DOCUMENTS
from suzuri.tools.bench import kernels
from suzuri.tools.bench.config import KernelsConfig
from suzuri.tools.bench.kernels import run_kernels
from suzuri.tools.bench.kernels_attention import CHANNELS, INKLING, SMALL, pairs_of, seen_of
from suzuri.tools.bench.kernels_matmul import shapes
from suzuri.tools.bench.op_tests import Verdict, files_of, run_tests
from suzuri.tools.bench.ops import OPS, Op, folder, ops_named
from suzuri.tools.bench.shapes import ROOT
from suzuri.tools.bench.timing import bytes_of, copied, tensors_in

CPU = KernelsConfig(device="cpu", repeats=1, cases=("tiny",))
GREEN = Verdict(passed=3, problem="")


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def test_every_folder_of_kernels_is_an_op_with_true_shapes() -> None:
    folders = {path.parent.name for path in (ROOT / "suzuri" / "kernels").glob("*/cases.py")}
    assert {folder(op) for op in OPS.values()} == folders
    lacking = [op.name for op in OPS.values() if not op.true_cases]
    assert lacking == []
    for op in OPS.values():
        assert files_of(folder(op))
    with pytest.raises(ValueError, match="'nothing' is no op; there are attention_prologue"):
        ops_named(("gelu", "nothing"))
    assert [op.name for op in ops_named(("nvfp4",))] == ["nvfp4", "nvfp4 dequantize"]


@pytest.mark.parametrize("op", OPS.values(), ids=lambda op: op.name)
def test_bytes_are_at_most_all_of_inputs_and_outputs_and_at_least_the_outputs(op: Op) -> None:
    for name in (name for name in op.shapes if name.startswith("tiny")):
        given = op.build(name, op.dtype, generator())
        out = op.run(given)
        moved = op.moved(given, out)
        # What is written in place is an input here.
        assert max(bytes_of(out), 1) <= moved <= 2 * bytes_of(given) + bytes_of(out)
        assert op.flops(given) >= 0


def test_bytes_and_flops_by_hand() -> None:
    def of(op: str, case: str) -> tuple[int, int]:
        one = OPS[op]
        given = one.build(case, one.dtype, generator())
        return one.moved(given, one.run(given)), one.flops(given)

    assert of("matmul", "tiny") == (2 * (5 * 64 + 96 * 64 + 5 * 96), 2 * 5 * 64 * 96)
    # 9 rows of 16 bf16 values: 9 of a table of 40 are read, 9 are written, with 9 ids.
    assert of("embedding", "tiny") == (9 * 16 * 2 * 2 + 9 * 8, 0)
    assert of("kv_write", "tiny") == (2 * 2 * 9 * 2 * 16 * 2, 0)
    assert of("rms_norm", "tiny")[0] == 2 * (9 * 64 * 2 + 64)
    # Rows at positions 23; 0, 1, 2; 70, over keys of 2 heads of 16 channels.
    num_bytes, flops = of("paged_attention", "tiny_global")
    assert flops == 4 * (24 + 6 + 71) * 4 * 16
    rows = 5 * 4 * (16 + 4 + 16) + 4 * 12
    assert num_bytes == 2 * ((24 + 3 + 71) * 2 * 2 * 16 + rows)
    # A window of 8 keys.
    assert of("paged_attention", "tiny_local")[1] == 4 * (8 + 6 + 8) * 4 * 16
    assert of("relative_attention", "tiny_local")[1] == 4 * (28 + 17 * 8 + 1 + 28 + 16) * 4 * 16


def test_visible_keys_of_the_attention_sweep() -> None:
    for window in (None, 4):
        for work in ([(3, 10)], [(1, 2), (5, 5)], [(2, 9), (1, 1)]):
            keys = [
                [p - d for d in range(min(p + 1, window or p + 1))]
                for n, end in work
                for p in range(end - n, end)
            ]
            assert pairs_of(work, window) == sum(map(len, keys))
            rows = iter(keys)
            seen = sum(len({k for _ in range(n) for k in next(rows)}) for n, _ in work)
            assert seen_of(work, window) == seen


@pytest.mark.parametrize("model", ["inkling", "inkling-small"])
def test_the_attention_of_the_sweep_is_that_of_the_models(model: str) -> None:
    text = preset(model).text
    for shape in (INKLING if model == "inkling" else SMALL).values():
        (own,) = {
            (a.num_heads, a.num_kv_heads, a.rel_extent, a.window)
            for a in map(text.attention, range(text.num_hidden_layers))
            if a.window == shape.window
        }
        assert own == shape
        assert text.global_attention().head_dim == CHANNELS


def test_the_products_of_the_sweep_are_those_of_the_model() -> None:
    found = {what: (n, k) for what, n, k in shapes(DOCUMENTS["inkling"]["text_config"])}
    assert found["qkvr, local"] == (64 * 128 + 2 * 16 * 128 + 64 * 16, 6144)
    assert found["router"] == (258, 6144)
    assert found["head"] == (200058, 6144)
    assert found["dense down"] == (6144, 24576)
    assert len(found) == 7


def test_copies_share_nothing_and_keep_their_form() -> None:
    for name in ("attention_prologue", "nvfp4 dequantize", "moe_combine"):
        given = OPS[name].build("tiny", torch.bfloat16, generator())
        other = copied(given)
        pairs = list(zip(tensors_in(given), tensors_in(other), strict=True))
        assert len(pairs) >= 3
        assert all(a.data_ptr() != b.data_ptr() and torch.equal(a, b) for a, b in pairs)
        ours, theirs = (tensors_in(OPS[name].run(one)) for one in (given, other))
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


TESTS = {
    "test_green.py": "def test_a():\n    pass\n",
    "test_green_kernel.py": "import pytest\n\n@pytest.mark.gpu\ndef test_b():\n    assert 0\n",
    "test_red.py": "def test_a():\n    pass\n\ndef test_c():\n    assert 0\n",
    "test_torn.py": "import nothing_of_this_name\n",
    "test_idle.py": "import pytest\n\n@pytest.mark.skip\ndef test_a():\n    pass\n",
}


def test_an_op_is_green_when_some_of_its_tests_passed_and_none_failed(tmp_path: Path) -> None:
    place = tmp_path / "tests" / "kernels"
    place.mkdir(parents=True)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    for name, text in TESTS.items():
        (place / name).write_text(text)
    found = run_tests(["green", "red", "torn", "idle"], on_gpu=False, folder=place)
    assert found["green"] == Verdict(passed=1, problem="")
    assert found["red"] == Verdict(passed=1, problem="1 red: test_c")
    assert found["torn"].problem.startswith("1 red: ")
    assert found["idle"] == Verdict(passed=0, problem="no test ran")
    with pytest.raises(ValueError, match=r"other: no tests in .* give --no-test"):
        run_tests(["other"], on_gpu=False, folder=place)


def test_the_tests_of_a_true_op_run_and_are_counted(tmp_path: Path) -> None:
    out = tmp_path / "result.json"
    config = dataclasses.replace(CPU, ops=("gelu",), out=str(out))
    assert run_kernels(config) == 0
    document = json.loads(out.read_text())
    assert document["tests"]["gelu"]["problem"] == ""
    assert document["tests"]["gelu"]["passed"] > 5
    (row,) = document["rows"]
    assert (row["op"], row["case"], row["timing"], row["bytes"]) == ("gelu", "tiny", "clock", 2304)
    assert row["us"] > 0 and row["terabytes_per_second"] == pytest.approx(2304 / row["us"] / 1e6)
    assert "share_of_limit" not in row and row["price"] is None
    assert document["what"] == "suzuri bench kernels"


def test_red_is_refused_and_green_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    red = Verdict(passed=8, problem="2 red: test_values")
    monkeypatch.setattr(kernels, "run_tests", lambda ops, on_gpu: dict.fromkeys(ops, red))
    out = tmp_path / "result.json"
    config = dataclasses.replace(CPU, ops=("swiglu",), out=str(out))
    assert run_kernels(config) == 1
    document = json.loads(out.read_text())
    assert document["rows"] == []
    assert document["refused"] == [{"op": "swiglu", "reason": f"not reported: {red.problem}"}]
    some = {"swiglu": red, "gelu": GREEN}
    monkeypatch.setattr(kernels, "run_tests", lambda ops, on_gpu: some)
    assert run_kernels(dataclasses.replace(config, ops=("gelu", "swiglu"))) == 1
    assert [row["op"] for row in json.loads(out.read_text())["rows"]] == ["gelu"]
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"1 cases of 2 ops timed, 1 refused; written to {out}"
    )


def test_without_tests_the_file_says_untested(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "result.json"
    config = dataclasses.replace(
        CPU,
        ops=("paged_attention", "rms_norm"),
        cases=("tiny", "tiny_global", "tiny_local"),
        no_test=True,
        card="h200",
        out=str(out),
    )
    assert run_kernels(config) == 0
    document = json.loads(out.read_text())
    assert document["tests"] == {"paged_attention": "untested", "rms_norm": "untested"}
    assert [row["case"] for row in document["rows"]] == ["tiny_global", "tiny_local", "tiny"]
    for row in document["rows"]:
        limit = 1e6 * max(row["bytes"] / 4.2e12, row["flops"] / 7e14)
        assert row["limit_us"] == pytest.approx(limit)
        assert row["share_of_limit"] == pytest.approx(limit / row["us"])
    assert "(untested)" in capsys.readouterr().out.splitlines()[-1]
    wrong = dataclasses.replace(config, ops=("gelu",), cases=("huge",))
    with pytest.raises(ValueError, match="--cases huge: there are tiny, odd, inkling_vision"):
        run_kernels(wrong)
