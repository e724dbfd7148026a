"""`suzuri plan`: verdicts, changes that hold what they say, refusals, and what is printed."""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from suzuri.config import parse
from suzuri.model.config import Quantization, preset
from suzuri.tools.plan.card import find_card
from suzuri.tools.plan.changes import find_changes
from suzuri.tools.plan.config import PlanConfig
from suzuri.tools.plan.request import request_of
from suzuri.tools.plan.run import run_plan
from suzuri.tools.plan.verdict import fits, make_plan, sizes_of
from tests.model.models import GOLDEN

ROOT = Path(__file__).parents[2]
L6E64 = ROOT / "benchmarks" / "configs" / "L6E64.json"
NVFP4 = ("--experts", "nvfp4")
BY_NUMBERS = ("--memory", "96", "--bandwidth", "1.8", "--tflops", "400")
Plan = Callable[..., tuple[int, list[str], str]]


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Plan:
    """(exit code, lines of stdout, stderr or the refusal) of a command line."""

    def run(*words: str) -> tuple[int, list[str], str]:
        try:
            code = run_plan(parse(PlanConfig, prog="suzuri plan", args=words).resolve())
        except ValueError as error:
            return 2, capsys.readouterr().out.splitlines(), str(error)
        out, err = capsys.readouterr()
        return code, out.splitlines(), err

    return run


YES = [
    ("inkling-small", *NVFP4, "--gpu", "RTX PRO 6000", "--num-gpus", "2"),
    ("inkling-small", *NVFP4, *BY_NUMBERS, "--num-gpus", "2"),
    ("inkling-small", *NVFP4, "--gpu", "h200", "--num-gpus", "2"),
    ("inkling", *NVFP4, "--gpu", "h200", "--num-gpus", "8"),
    # 592 GB on 640 GB: just, with what is asked by default.
    ("inkling", *NVFP4, "--gpu", "h100-sxm", "--num-gpus", "8"),
    ("inkling", *NVFP4, "--gpu", "a100 80gb", "--num-gpus", "8"),
    (str(L6E64), "--gpu", "h200"),
    ("tiny", "--gpu", "cpu", "--memory", "8"),
    ("inkling", "--gpu", "mi355x", "--num-gpus", "8", "--tp", "8", "--ep", "8"),
]
NO = [
    ("inkling-small", *NVFP4, "--gpu", "RTX PRO 6000"),
    ("inkling", "--gpu", "h200", "--num-gpus", "8"),
    ("inkling", *NVFP4, "--gpu", "h100-sxm", "--num-gpus", "8", "--concurrency", "20"),
    ("inkling", *NVFP4, "--gpu", "h100-sxm", "--num-gpus", "8", "--context", "262144"),
    ("inkling", *NVFP4, "--gpu", "h100-sxm", "--num-gpus", "8", "--tp", "8", "--ep", "8"),
    ("inkling", "--gpu", "4090"),
    ("inkling", "--gpu", "a100-40gb", "--num-gpus", "8", "--tp", "4"),
    ("inkling-small", *NVFP4, "--gpu", "b300", "--context", "1048576", "--concurrency", "64"),
    ("inkling-small", *NVFP4, "--gpu", "spark", "--context", "1048576"),
    ("inkling-small", *NVFP4, "--gpu", "mac ultra", "--context", "1048576", "--concurrency", "50"),
    ("inkling-small", "--gpu", "strix halo"),
    ("inkling-small", *NVFP4, "--gpu", "b200", "--kv-dtype", "fp8", "--concurrency", "999"),
]


@pytest.mark.parametrize("words", YES, ids=" ".join)
def test_yes(plan: Plan, words: tuple[str, ...]) -> None:
    code, lines, _ = plan(*words)
    assert (code, lines[-1].split(":")[0]) == (0, "YES")
    assert " <= " in lines[-1]


@pytest.mark.parametrize("words", NO, ids=" ".join)
def test_no_names_changes_that_make_it_a_yes_when_applied(
    plan: Plan, words: tuple[str, ...]
) -> None:
    code, lines, _ = plan(*words, "--json")
    document = json.loads("\n".join(lines))
    assert (code, document["verdict"]) == (1, "no")
    assert document["changes"]
    assert document["changes"][0]["words"] in document["sentence"]
    for change in document["changes"]:
        assert plan(*words, *change["flags"].split())[0] == 0, change["flags"]


def test_a_change_is_the_smallest_step(plan: Plan) -> None:
    words = ("inkling", *NVFP4, "--gpu", "h100-sxm", "--num-gpus", "8", "--concurrency", "10")
    _, lines, _ = plan(*words, "--json")
    flags = [change["flags"] for change in json.loads("\n".join(lines))["changes"]]
    for name, step in (("--concurrency", 1), ("--context", 1), ("--mtp", 1)):
        value = next(int(flag.split()[1]) for flag in flags if flag.split()[0] == name)
        assert plan(*words, name, str(value))[0] == 0
        assert plan(*words, name, str(value + step))[0] == 1
    assert "--num-gpus 16 --tp 16" in flags


def test_a_card_by_numbers_is_changed_by_leaving_the_numbers_away(plan: Plan) -> None:
    words = ("inkling-small", *NVFP4, "--num-gpus", "2")
    numbers = ("--memory", "48", "--bandwidth", "1", "--tflops", "100")
    _, lines, _ = plan(*words, *numbers, "--json")
    changes = json.loads("\n".join(lines))["changes"]
    card = next(change for change in changes if change["flags"].startswith("--gpu"))
    assert "without --memory" in card["words"]
    assert plan(*words, *card["flags"].split())[0] == 0


def test_the_sum_adds_up(plan: Plan) -> None:
    for words in (YES[0], NO[0]):
        _, lines, _ = plan(*words, "--json")
        per_gpu = json.loads("\n".join(lines))["per_gpu"]
        assert sum(per_gpu["groups"].values()) == per_gpu["total_bytes"]
        assert sum(line["num_bytes"] for line in per_gpu["lines"]) == per_gpu["total_bytes"]
        assert per_gpu["memory_bytes"] - per_gpu["total_bytes"] == per_gpu["free_bytes"]
        assert (per_gpu["free_bytes"] >= 0) == (words is YES[0])


def test_limits_are_the_edge_of_the_verdict(plan: Plan) -> None:
    words = ("inkling-small", *NVFP4, "--gpu", "h200", "--num-gpus", "4", "--tp", "2")
    _, lines, _ = plan(*words, "--json", "--concurrency", "40")
    document = json.loads("\n".join(lines))
    assert document["request"]["copies"] == 2
    assert document["request"]["sequences_per_copy"] == 20
    limits = document["limits"]
    context, number = limits["largest_context"], limits["largest_concurrency"]
    for count, length, expected in (
        (40, context, 0),
        (40, context + 1, 1),
        (number, 32768, 0),
        (number + 1, 32768, 1),
    ):
        assert plan(*words, "--concurrency", str(count), "--context", str(length))[0] == expected


def test_command_prints_the_serve_line_alone(plan: Plan) -> None:
    words = ("inkling-small", *NVFP4, "--gpu", "h200", "--num-gpus", "4", "--tp", "2", "--command")
    code, lines, err = plan(*words)
    assert (code, err) == (0, "")
    assert lines == [
        "suzuri serve inkling-small --tp 2 --copies 2 --experts nvfp4 --context 32768 "
        "--concurrency 8 --kv-dtype bf16 --mtp 8 --resume-points 1 --token-budget 8192"
    ]
    code, lines, err = plan("inkling", "--gpu", "h200", "--command")
    assert (code, lines, err.split(":")[0]) == (1, [], "NO")


def test_a_folder_with_spaces_is_quoted(plan: Plan, tmp_path: Path) -> None:
    folder = tmp_path / "my model"
    folder.mkdir()
    text = (GOLDEN / "base" / "original" / "config.json").read_text()
    (folder / "config.json").write_text(text)
    code, lines, _ = plan(str(folder), "--gpu", "h200", "--command")
    assert code == 0
    assert lines[0].startswith(f"suzuri serve '{folder}' --tp 1 --context ")
    assert "--experts" not in lines[0]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("inkling",), "say which card: --gpu NAME (A100 40 GB, "),
        (("inkling", "--memory", "96"), "say which card"),
        (("inkling", "--gpu", "h200", "--num-gpus", "6"), "nearest possible: 4 and 8"),
        (("inkling", "--gpu", "h200", "--tp", "2"), "--tp 2: needs at least --num-gpus 2"),
        (("inkling", "--gpu", "h200", "--num-gpus", "8", "--tp", "3"), "does not divide"),
        (("inkling", "--gpu", "h200", "--ep", "2"), "--ep 2: "),
        (("inkling", "--gpu", "h200", "--context", "1048577"), "limit is 1048576"),
        (("inkling", "--gpu", "h200", "--context", "0"), "--context 0"),
        (("inkling", "--gpu", "h200", "--concurrency", "0"), "--concurrency 0"),
        (("inkling", "--gpu", "h200", "--mtp", "9"), "has 8 draft depths"),
        (("inkling", "--gpu", "h200", "--memory", "nan"), "--memory nan"),
        (("inkling", "--gpu", "h200", "--token-budget", "0"), "--token-budget 0"),
        (("inkling", "--gpu", "h200", "--command", "--json"), "--command and --json"),
        (("inklin", "--gpu", "h200"), "no preset 'inklin'"),
        (("./nowhere/config.json", "--gpu", "h200"), "does not exist"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_input_is_refused_naming_the_flag(
    plan: Plan, words: tuple[str, ...], complaint: str
) -> None:
    code, lines, error = plan(*words)
    assert (code, lines) == (2, [])
    assert complaint in error


def test_experts_default_to_what_the_config_says(plan: Plan) -> None:
    def nvfp4_of(*words: str) -> tuple[bool, str]:
        document = json.loads("\n".join(plan(*words, "--gpu", "b300", "--json")[1]))
        return document["request"]["nvfp4"], " ".join(document["notes"])

    assert nvfp4_of("inkling-small")[0] is False
    planned, notes = nvfp4_of("inkling-small", *NVFP4)
    assert planned
    assert "planned as the releases quantise" in notes
    assert "has FP4 units, which exact bf16 products do not use" in notes
    assert (
        "no routed experts"
        in plan(str(GOLDEN / "alldense" / "original"), "--gpu", "h200", *NVFP4)[2]
    )


def test_a_quantised_config_is_planned_with_its_own_layers() -> None:
    quantization = Quantization(names="modelopt", layers=(5, 9))
    config = dataclasses.replace(CONFIG, quantization=quantization)

    def routed_bytes(experts: Literal["bf16", "nvfp4"] | None) -> int:
        asked = PlanConfig(model="small", experts=experts)
        return sizes_of(config, request_of(config, asked, CARD)).weights["routed experts"]

    layer = 256 * 3 * 2048 * 4096
    assert routed_bytes("bf16") == 40 * layer * 2
    assert routed_bytes(None) == routed_bytes("nvfp4")
    saved = routed_bytes("bf16") - routed_bytes(None)
    # Codes and block scales instead of bf16; per weight 256 scales, an amax and a shape.
    assert saved == 2 * (layer * 2 - layer // 2 - layer // 16 - 2 * (256 * 4 + 2 + 3 * 8))


def test_report_says_what_is_only_arithmetic(plan: Plan) -> None:
    for gpu, words in (
        ("mi300", "planned by arithmetic alone"),
        ("h200", "GPU kernels are not written yet"),
        ("cpu", "runs on the CPU references today"),
    ):
        assert words in " ".join(" ".join(plan("tiny", "--gpu", gpu)[1]).split())
    lines = plan("inkling", *NVFP4, "--gpu", "h200", "--num-gpus", "16")[1]
    assert "network between machines" in " ".join(" ".join(lines).split())


def test_workspace_of_a_long_plan_is_printed_and_bounded_n26(plan: Plan) -> None:
    words = ("inkling-small", *NVFP4, "--gpu", "h200", "--num-gpus", "2", "--token-budget", "1024")

    def workspace(context: int) -> dict[str, int]:
        asked = (*words, "--context", str(context), "--concurrency", "1")
        document = json.loads("\n".join(plan(*asked, "--json")[1]))
        lines = document["per_gpu"]["lines"]
        return {one["name"]: one["num_bytes"] for one in lines if one["group"] == "workspace"}

    long = workspace(262_144)
    assert long == workspace(1024)
    assert long["relative bias"] == 1024 * (32 // 2) * 1024 * 2
    shown = plan(*words, "--context", "262144", "--concurrency", "1")[1]
    assert any(line.split()[:2] == ["workspace", "activations"] for line in shown)


@pytest.mark.parametrize("width", ["30", "44", "80", "200"])
@pytest.mark.parametrize("encoding", ["ascii", "utf-8"])
def test_report_prints_in_any_terminal_and_loads_no_torch(width: str, encoding: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, "inkling", "--gpu", "h200", "--num-gpus", "8"],
        capture_output=True,
        cwd=ROOT,
        env={"COLUMNS": width, "PYTHONIOENCODING": encoding},
        check=False,
    )
    assert (result.returncode, result.stderr) == (1, b"")
    lines = result.stdout.decode(encoding).splitlines()
    assert lines[-1].startswith("NO: 8 x 32768 tokens: weights 223.04 + state ")
    assert all(len(line) <= int(width) for line in lines[:-1])


WITHOUT_TORCH = """
import sys
from suzuri.config import parse
from suzuri.tools.plan.config import PlanConfig
from suzuri.tools.plan.run import run_plan
code = run_plan(parse(PlanConfig, prog="suzuri plan", args=sys.argv[1:]).resolve())
loaded = {"torch", "triton", "huggingface_hub", "tml_renderers", "numpy"} & set(sys.modules)
sys.exit(f"loaded {loaded}" if loaded else code)
"""

CARD = find_card(None, memory=100, bandwidth=2, tflops=500)
CONFIG = preset("inkling-small")


@settings(max_examples=25, deadline=None)
@given(
    st.floats(20, 1500),
    st.integers(1, 1_048_576),
    st.integers(1, 2000),
    st.sampled_from([1, 2, 4, 8]),
    st.integers(0, 8),
    st.booleans(),
)
def test_every_no_of_small_has_a_change_that_fits(
    memory: float, context: int, concurrency: int, tp: int, drafts: int, nvfp4: bool
) -> None:
    asked = PlanConfig(
        model="inkling-small",
        num_gpus=tp,
        context=context,
        concurrency=concurrency,
        mtp=drafts,
        experts="nvfp4" if nvfp4 else "bf16",
    )
    gpu = find_card(None, memory=memory, bandwidth=2, tflops=500)
    request = request_of(CONFIG, asked, gpu)
    if not fits(CONFIG, request):
        changes = find_changes(CONFIG, request)
        assert all(fits(CONFIG, change.request) for change in changes)
        assert changes
    plan = make_plan("inkling-small", CONFIG, request)
    assert plan.fits == fits(CONFIG, request)
    assert (plan.largest_context >= context) == plan.fits
    assert (plan.largest_concurrency >= concurrency) == plan.fits
