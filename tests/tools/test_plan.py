"""`suzuri plan`: verdicts, changes that hold what they say, refusals, and what is printed."""

import contextlib
import dataclasses
import io
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from suzuri.model.config import Quantization
from suzuri.tools.plan.config import CARD_RANGES, PlanConfig
from suzuri.tools.plan.request import request_of
from suzuri.tools.plan.run import run_plan
from suzuri.tools.plan.verdict import sizes_of
from tests.model.models import GOLDEN
from tests.tools.planning import BY_NUMBERS, CARD, CONFIG, L6E64, NVFP4, ROOT, Plan, planner


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Plan:
    """(exit code, lines of stdout, stderr or the refusal) of a command line."""
    return planner(capsys)


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


def floors_of(plan: Plan, *words: str) -> dict[str, Any]:
    return json.loads("\n".join(plan(*words, "--json")[1]))["floors"]


def test_throughput_counts_copies_that_have_a_sequence(plan: Plan) -> None:
    words = ("inkling-small", *NVFP4, "--gpu", "b200", "--tp", "1", "--context", "4096")
    one = floors_of(plan, *words, "--num-gpus", "1", "--concurrency", "1")
    three = floors_of(plan, *words, "--num-gpus", "72", "--concurrency", "3")
    assert one["tokens_per_second"] == pytest.approx(1 / one["decode"]["seconds"])
    assert three["tokens_per_second"] == pytest.approx(3 * one["tokens_per_second"])
    shown = " ".join(" ".join(plan(*words, "--num-gpus", "72", "--concurrency", "3")[1]).split())
    assert f"{3 / one['decode']['seconds']:.0f} tok/s in all" in shown


def test_throughput_of_copies_that_do_not_come_out_even(plan: Plan) -> None:
    words = ("inkling", *NVFP4, "--gpu", "h200", "--tp", "8")
    steps = {
        number: floors_of(plan, *words, "--num-gpus", "8", "--concurrency", f"{number}")["decode"]
        for number in (1, 2, 3)
    }
    times = {number: step["seconds"] for number, step in steps.items()}
    two = floors_of(plan, *words, "--num-gpus", "16", "--concurrency", "3")
    assert two["tokens_per_second"] == pytest.approx(2 / times[2] + 1 / times[1])
    assert two["decode"]["seconds"] == times[2]
    three = floors_of(plan, *words, "--num-gpus", "24", "--concurrency", "8")
    assert three["tokens_per_second"] == pytest.approx(2 * 3 / times[3] + 2 / times[2])


def test_random_weights_change_nothing_but_say_so(plan: Plan) -> None:
    words = ("inkling", *NVFP4, "--gpu", "h200", "--num-gpus", "8", "--json")
    _, lines, _ = plan(*words)
    _, random_lines, _ = plan(*words, "--random-weights")
    document, drawn = (json.loads("\n".join(one)) for one in (lines, random_lines))
    added = set(drawn["notes"]) - set(document.pop("notes"))
    assert len(added) == 1 and "only the shape counts" in added.pop()
    del drawn["notes"]
    assert drawn == document
    command = plan(*words[:-1], "--command", "--random-weights")[1][0]
    assert command.startswith("suzuri serve inkling --tp 8 --experts nvfp4 --random-weights ")


def test_experts_lie_as_asked_or_as_is_better(plan: Plan) -> None:
    words = ("inkling", *NVFP4, "--gpu", "h200", "--num-gpus", "8")

    def places(*more: str) -> tuple[str, str]:
        found = floors_of(plan, *words, *more)
        return found["decode"]["experts"], found["prefill"]["experts"]

    assert places() == ("hidden units", "whole experts")
    assert places("--ep", "1") == ("hidden units", "hidden units")
    assert places("--ep", "8") == ("whole experts", "whole experts")
    assert places("--ep", "2") == ("groups", "groups")
    shown = " ".join(" ".join(plan(*words)[1]).split())
    assert "decode: hidden units of each over the GPUs (a); prefill: whole experts per" in shown
    assert "266 per step, each after the one before: 1.06 ms of waiting" in shown
    assert "memory is counted for --ep 1" in shown


def test_our_own_cap_is_called_one(plan: Plan) -> None:
    words = ("tiny", "--gpu", "b300", "--context", "1")
    shown = " ".join(" ".join(plan(*words)[1]).split())
    assert "most sequences of 1 65536 or more" in shown
    limits = json.loads("\n".join(plan(*words, "--json")[1]))["limits"]
    assert (limits["largest_concurrency"], limits["largest_concurrency_or_more"]) == (65536, True)
    assert "or more" not in " ".join(plan("inkling-small", *NVFP4, "--gpu", "b300")[1])


def test_a_number_in_another_spelling_is_refused_in_words(
    plan: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    for flag, value, complaint in (
        ("--context", "1e6", "'1e6' is no whole number; write 1000000"),
        ("--concurrency", "8.0", "'8.0' is no whole number; write 8"),
        ("--num-gpus", "1.5", "'1.5' is no whole number"),
        ("--tp", "two", "'two' is no whole number"),
        ("--ep", "inf", "'inf' is no whole number"),
    ):
        with pytest.raises(SystemExit) as ended:
            plan("tiny", "--gpu", "h200", flag, value)
        assert ended.value.code == 2
        shown = " ".join(capsys.readouterr().err.replace("│", " ").split())
        assert f"Error parsing {flag}: {complaint}" in shown
        assert "write" not in shown or "write" in complaint


ANY_NUMBER = st.floats(allow_nan=True, allow_infinity=True) | st.sampled_from(
    [0.1, 0.001, 1e6, 5e-324, 1e308, 0.0999, 1000001.0]
)


@settings(max_examples=60, deadline=None)
@given(ANY_NUMBER, ANY_NUMBER, ANY_NUMBER, ANY_NUMBER, st.sampled_from([1, 2, 4]))
def test_json_is_json_for_any_card(
    memory: float, bandwidth: float, tflops: float, link: float, num_gpus: int
) -> None:
    _check_json(memory, bandwidth, tflops, link, num_gpus)


def test_json_is_json_at_every_corner_of_the_allowed_cards() -> None:
    for corner in itertools.product(*((least, most) for least, most, _ in CARD_RANGES.values())):
        _check_json(*corner, num_gpus=2)


def _check_json(memory: float, bandwidth: float, tflops: float, link: float, num_gpus: int) -> None:
    numbers = {"memory": memory, "bandwidth": bandwidth, "tflops": tflops, "link": link}
    asked = PlanConfig(
        model="tiny",
        num_gpus=num_gpus,
        memory=memory,
        bandwidth=bandwidth,
        tflops=tflops,
        link=link,
        json=True,
    )
    within = all(CARD_RANGES[name][0] <= n <= CARD_RANGES[name][1] for name, n in numbers.items())
    out = io.StringIO()
    if not within:
        with pytest.raises(ValueError, match=r"^--(memory|bandwidth|tflops|link) .*: must be a n"):
            asked.resolve()
        return
    with contextlib.redirect_stdout(out):
        run_plan(asked.resolve())

    def refuse(constant: str) -> None:
        pytest.fail(f"{constant} is not JSON")

    json.loads(out.getvalue(), parse_constant=refuse)


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
        (
            ("tiny", "--gpu", "h200", "--bandwidth", "1e-300"),
            "--bandwidth 1e-300: must be a number from 0.001 to 1000000 (TB/s)",
        ),
        (("tiny", "--gpu", "h200", "--tflops", "0"), "from 0.001 to 1000000 (TFLOP/s)"),
        (("tiny", "--gpu", "h200", "--link", "1e9"), "--link 1000000000.0: must be a number"),
        (("tiny", "--gpu", "cpu", "--num-gpus", "4"), "is one device; leave --num-gpus away"),
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
        ("mi300", "gfx942: attention needs 73,728 bytes of shared memory"),
        ("strix halo", "gfx1151: of AMD's GPUs the kernels were compiled for gfx942, gfx950 alone"),
        ("mac ultra", "planned by arithmetic alone"),
        ("rtx 4090", "sm_89: the kernels compile, but nobody has run them there yet"),
        ("h200", "sm_90: tested and measured on an H200"),
        ("cpu", "runs on the CPU's kernels"),
    ):
        assert words in " ".join(" ".join(plan("tiny", "--gpu", gpu)[1]).split())
    lines = plan("inkling", *NVFP4, "--gpu", "h200", "--num-gpus", "16")[1]
    assert "the engine runs on one GPU so far" in " ".join(" ".join(lines).split())
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
    assert "relative bias" not in long  # kernels of a GPU keep it to themselves
    shown = plan(*words, "--context", "262144", "--concurrency", "1")[1]
    assert any(line.split()[:2] == ["workspace", "logits"] for line in shown)


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


@pytest.mark.parametrize("width", [20, 24, 30, 39, 40, 47, 48, 52, 60, 79])
@pytest.mark.parametrize("words", [("inkling", "--num-gpus", "8"), ("tiny",)])
def test_narrow_terminals_break_no_word(
    width: int, words: tuple[str, ...], plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each word and number of the report is there in one piece."""

    def shown(columns: int) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(columns))
        return plan(*words, "--gpu", "h200")[1]

    wide, narrow = shown(200), shown(width)
    assert narrow[-1] == wide[-1]
    assert max(map(len, narrow[:-1])) <= width
    whole, wanted = (
        {word.rstrip(":") for line in lines for word in line.split()} for lines in (narrow, wide)
    )
    wanted = {w for w in wanted if len(w) < width - 4 and any(map(str.isalnum, w))}
    # Lines without a table have no shares and do not name the ranks.
    left_out = {"share", "part", "rank", "ranks", "0-7", *(w for w in wanted if w[-2:-1] == ".")}
    assert wanted - whole - left_out == set()


WITHOUT_TORCH = """
import sys
from suzuri.config import parse
from suzuri.tools.plan.config import PlanConfig
from suzuri.tools.plan.run import run_plan
code = run_plan(parse(PlanConfig, prog="suzuri plan", args=sys.argv[1:]).resolve())
loaded = {"torch", "triton", "huggingface_hub", "tml_renderers", "numpy"} & set(sys.modules)
sys.exit(f"loaded {loaded}" if loaded else code)
"""
