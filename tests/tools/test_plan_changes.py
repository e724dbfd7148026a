"""What `suzuri plan` offers on a no, and what other commands suggest."""

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from suzuri.model.config import ModelConfig, Quantization, preset
from suzuri.model.tensor_table import Storage, released_nvfp4_layers
from suzuri.tools.plan.card import find_card
from suzuri.tools.plan.changes import find_changes
from suzuri.tools.plan.config import PlanConfig
from suzuri.tools.plan.request import request_of
from suzuri.tools.plan.suggest import suggestion
from suzuri.tools.plan.verdict import fits, make_plan
from tests.tools.planning import CONFIG, NVFP4, Plan, planner


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Plan:
    """(exit code, lines of stdout, stderr or the refusal) of a command line."""
    return planner(capsys)


def test_a_change_is_the_smallest_step(plan: Plan) -> None:
    words = ("inkling", *NVFP4, "--gpu", "h100-sxm", "--num-gpus", "8", "--concurrency", "10")
    _, lines, _ = plan(*words, "--json")
    flags = [change["flags"] for change in json.loads("\n".join(lines))["changes"]]
    for name, step in (("--concurrency", 1), ("--context", 1), ("--mtp", 1)):
        value = next(int(flag.split()[1]) for flag in flags if flag.split()[0] == name)
        assert plan(*words, name, str(value))[0] == 0
        assert plan(*words, name, str(value + step))[0] == 1
    # A second copy beside the first, not one that reaches over the network.
    assert "--num-gpus 16 --tp 8" in flags


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        (("inkling", *NVFP4, "--num-gpus", "8", "--tp", "1"), "--tp 8"),
        (("inkling-small", "--num-gpus", "8", "--tp", "1"), "--tp 4"),
        (("inkling-small", *NVFP4, "--num-gpus", "8", "--tp", "1"), "--tp 2"),
        (("inkling", *NVFP4, "--num-gpus", "65536", "--tp", "1"), "--tp 8"),
        # 12 GPUs make no copies of 8: four stay idle.
        (("inkling", *NVFP4, "--num-gpus", "12", "--tp", "1"), "--num-gpus 8 --tp 8"),
        # Smaller copies: each has fewer sequences, and KV heads that are not repeated.
        (("inkling-small", *NVFP4, "--num-gpus", "32", "--concurrency", "1400"), "--tp 16"),
    ],
)
def test_the_gpus_already_asked_for_are_tried_first(
    plan: Plan, words: tuple[str, ...], flags: str
) -> None:
    code, lines, _ = plan(*words, "--gpu", "h200", "--json")
    changes = json.loads("\n".join(lines))["changes"]
    assert (code, changes[0]["flags"]) == (1, flags)
    # Nothing is bought that is not needed.
    for change in changes:
        assert "--gpu" not in change["flags"]
        if "--num-gpus" in change["flags"]:
            assert change["flags"] == flags
    assert plan(*words, "--gpu", "h200", *flags.split())[0] == 0


def test_fewer_groups_of_experts_are_a_change(plan: Plan) -> None:
    words = ("inkling", *NVFP4, "--gpu", "h100-sxm", "--num-gpus", "8", "--ep", "8")
    _, lines, _ = plan(*words, "--json")
    first = json.loads("\n".join(lines))["changes"][0]["flags"]
    assert first == "--ep 4"
    assert plan(*words, "--ep", "4")[0] == 0
    assert plan(*words, "--ep", "8")[0] == 1


def test_more_gpus_of_a_card_are_the_fewest(plan: Plan) -> None:
    words = ("inkling-small", *NVFP4, "--gpu", "h200", "--num-gpus", "4", "--tp", "4")
    _, lines, _ = plan(*words, "--concurrency", "400", "--json")
    flags = [change["flags"] for change in json.loads("\n".join(lines))["changes"]]
    more = next(flag.split() for flag in flags if flag.startswith("--num-gpus"))
    number = int(more[1])
    assert plan(*words, "--concurrency", "400", *more)[0] == 0
    for tp in (1, 2, 4, 8, 16, 32):
        for fewer in range(5, number):
            if fewer % tp == 0:
                cut = ("--num-gpus", str(fewer), "--tp", str(tp))
                assert plan(*words, "--concurrency", "400", *cut)[0] == 1


@pytest.mark.parametrize("name", ["inkling", "inkling-small", "tiny"])
@pytest.mark.parametrize("is_nvfp4", [False, True])
def test_a_suggestion_is_the_smallest_setup_that_fits(
    plan: Plan, name: str, is_nvfp4: bool
) -> None:
    config = preset(name)
    layers = released_nvfp4_layers(config) if is_nvfp4 else ()
    flags = suggestion(config, Storage(nvfp4_layers=layers)).split()
    assert flags[:3] == ["--gpu", "h200", "--num-gpus"]
    assert flags[4:] == (list(NVFP4) if is_nvfp4 else [])
    assert plan(name, *flags)[0] == 0
    number = int(flags[3])
    while number > 1:
        number //= 2
        assert plan(name, *flags, "--num-gpus", str(number))[0] == 1


def test_a_suggestion_says_experts_only_where_the_config_does_not() -> None:
    layers = released_nvfp4_layers(CONFIG)
    quantised = dataclasses.replace(
        CONFIG, quantization=Quantization(names="modelopt", layers=layers)
    )
    assert suggestion(quantised, Storage(nvfp4_layers=layers)) == "--gpu h200 --num-gpus 2"
    assert suggestion(quantised, Storage()) == "--gpu h200 --num-gpus 4 --experts bf16"


def test_a_suggestion_for_a_giant_takes_a_larger_card_or_answers_why() -> None:
    inkling = preset("inkling")

    def wider(times: int) -> ModelConfig:
        text = dataclasses.replace(inkling.text, n_routed_experts=256 * times)
        return dataclasses.replace(inkling, text=text)

    assert suggestion(wider(5), Storage()) == "--gpu b300 --num-gpus 64"
    assert suggestion(wider(100), Storage()) == "--gpu h200 --num-gpus 64"


def test_a_card_by_numbers_is_changed_by_leaving_the_numbers_away(plan: Plan) -> None:
    words = ("inkling-small", *NVFP4, "--num-gpus", "2")
    numbers = ("--memory", "48", "--bandwidth", "1", "--tflops", "100")
    _, lines, _ = plan(*words, *numbers, "--json")
    changes = json.loads("\n".join(lines))["changes"]
    card = next(change for change in changes if change["flags"].startswith("--gpu"))
    assert "without --memory" in card["words"]
    assert plan(*words, *card["flags"].split())[0] == 0


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
