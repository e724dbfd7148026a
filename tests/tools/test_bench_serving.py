"""`suzuri bench serving` on tiny: that it times what it says, and what its file holds."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from suzuri.engine.config import EngineConfig
from suzuri.model.config import preset
from suzuri.model.inkling import Inkling
from suzuri.tools.bench.agents import TURNS, agents_of, length_for, longest, measure_agents
from suzuri.tools.bench.cells import AGENT_TOKENS, cell_named
from suzuri.tools.bench.config import ServingConfig
from suzuri.tools.bench.floors import StepFloors
from suzuri.tools.bench.measure import Bench, measure_decode, measure_prefill, params
from suzuri.tools.bench.serving import run_serving
from suzuri.tools.bench.shapes import decoder_only
from suzuri.tools.bench.state import DoesNotFit, Load, build_engine, fill_caches
from suzuri.tools.bench.trace import arrivals, measure_trace
from suzuri.tools.bench.watch import Step, Watch, counted_experts
from suzuri.tools.bench.weights import draw_model, skewed_routing
from suzuri.tools.plan.card import match

SHAPE = decoder_only(preset("tiny"))
CPU = torch.device("cpu")
QUICK = ServingConfig(models=("tiny",), device="cpu", repeats=2, steps=3, requests=2)


@pytest.fixture(scope="module")
def model() -> Inkling:
    return draw_model(SHAPE, dtype=torch.bfloat16, device=CPU, seed=3)


@pytest.fixture
def bench(model: Inkling) -> Bench:
    return Bench(
        model=model,
        floors=StepFloors(SHAPE, match("h200")),
        dtype="bfloat16",
        repeats=2,
        steps=4,
        requests=3,
        token_budget=256,
        seed=1,
        tick=lambda word: None,
    )


@pytest.fixture
def watches(monkeypatch: pytest.MonkeyPatch) -> list[Watch]:
    """Every watch that is made, as it was when its engine had ended."""
    made: list[Watch] = []
    begin = Watch.__init__

    def noted(self: Watch, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        made.append(self)

    monkeypatch.setattr(Watch, "__init__", noted)
    return made


def state_of(watch: Watch) -> list[torch.Tensor]:
    layers = watch.runner.cache.layers
    return [getattr(layer, field.name) for layer in layers for field in dataclasses.fields(layer)]


def test_a_skipped_prompt_over_its_true_state_decodes_the_same_tokens(bench: Bench) -> None:
    """Page tables, slots and positions of the quick way are those of a real prefill."""
    load = Load(sequences=3, context=180, token_budget=600, at_once=True)
    prompts = [bench.prompt(length, 7, length) for length in (150, 40, 131)]

    def run(watch: Watch, engine: Any, tokens: int) -> dict[str, list[int]]:
        for i, prompt in enumerate(prompts):
            engine.add(str(i), prompt, params(tokens))
        found: dict[str, list[int]] = {str(i): [] for i in range(3)}
        for event in engine.run():
            found[event.sequence.request.id].append(event.token)
        engine.check()
        return found

    engine, real = build_engine(bench.model, load, bench.dtype)
    run(real, engine, 1)
    assert sorted(real.steps[0].spans) == [(0, 40, True), (0, 131, True), (0, 150, True)]
    skipping, quick = build_engine(bench.model, load, bench.dtype, skip_prompts=True)
    for ours, theirs in zip(state_of(quick), state_of(real), strict=True):
        ours.copy_(theirs)
    whole, plain = build_engine(bench.model, load, bench.dtype)
    wanted = run(plain, whole, 20)
    assert run(quick, skipping, 20) == wanted
    assert sorted(quick.steps[0].spans) == [(39, 1, True), (130, 1, True), (149, 1, True)]
    assert len({tuple(tokens) for tokens in wanted.values()}) == 3


def test_filled_caches_are_finite_random_and_whole(bench: Bench) -> None:
    load = Load(sequences=2, context=40, token_budget=64)
    _, watch = build_engine(bench.model, load, bench.dtype)
    fill_caches(watch, 5)
    for tensor in state_of(watch):
        values = tensor.float()
        assert bool(values.isfinite().all())
        assert 0.9 < float(values.std()) < 1.1
        assert float((values == 0).float().mean()) < 0.01


def test_a_decode_cell_times_full_steps_behind_its_context(
    bench: Bench, watches: list[Watch]
) -> None:
    found = measure_decode(bench, cell_named("decode:5x300"))
    (watch,) = watches
    timed = [step for step in watch.steps if len(step.spans) == 5]
    assert len(timed) >= bench.repeats * bench.steps
    assert {start for start, _, _ in timed[0].spans} == {300 + 7}
    assert all(span[1:] == (1, True) for step in timed for span in step.spans)
    assert len(found["times_ms"]) == 2 and min(found["times_ms"]) > 0
    assert found["tokens_per_s"] == pytest.approx(5e3 / found["ms"])
    assert found["floor_ms"] == pytest.approx(
        bench.floors.step([(300, 1, True)] * 5, experts=_used(found)).ms
    )
    assert found["launch_ms"] <= found["ms"] * 2
    assert found["gpu_ms"] is None
    assert EngineConfig(**found["engine"]).prefix_cache


def _used(found: dict[str, Any]) -> float | None:
    experts = found["experts"]
    return experts["used"] if experts["floor_counts_used"] else None


def test_a_prefill_cell_runs_every_prompt_whole_and_finds_no_prefix(
    bench: Bench, watches: list[Watch]
) -> None:
    found = measure_prefill(bench, cell_named("prefill:3x200"))
    (watch,) = watches
    rows = sum(count for step in watch.steps for _, count, _ in step.spans)
    assert rows == 3 * 200 * bench.repeats
    assert all(sum(count for _, count, _ in step.spans) <= 256 for step in watch.steps)
    assert found["steps"] >= 3
    assert found["tokens_per_s"] == pytest.approx(6e5 / found["ms"])
    assert found["floor_ms"] == pytest.approx(bench.floors.step([(0, 200, True)] * 3).ms)


def test_agents_go_on_from_what_the_cache_has(bench: Bench, watches: list[Watch]) -> None:
    """Every turn finds all that the one before has left; what is new, and no more, is run."""
    found = measure_agents(bench, cell_named("agents:3x600"))
    (watch,) = watches
    sizes = agents_of(bench, 3, 600)
    assert [agent.new for agent in sizes] == [50, 60, 70]
    assert found["requests"] == 3 * TURNS
    assert found["median_prompt"] == pytest.approx(600, rel=0.01)
    assert found["hit_rate"] == 1.0
    assert found["cached_tokens"] == found["shared_tokens"]
    assert found["hit_of_prompt"] == pytest.approx(0.9, abs=0.01)
    assert found["answer_tokens"] == TURNS * sum(agent.answer for agent in sizes)
    # The last token of an answer is run by the turn that goes on from it. A sequence that has ended
    # may have run one token too many.
    rows = sum(count for step in watch.steps for _, count, _ in step.spans)
    needed = found["prompt_tokens"] - found["cached_tokens"]
    needed += found["answer_tokens"] - found["requests"]
    assert needed <= rows <= needed + found["requests"]
    assert set(found["first_token_ms"]) == {"p50", "p90", "p99", "max"}
    assert found["preemptions"] == 0


@pytest.mark.parametrize("number", [1, 2, 7])
def test_agents_fit_into_the_context_that_the_cell_does_not_name(bench: Bench, number: int) -> None:
    cell = cell_named(f"agents:{number}")
    length, most = length_for(bench, cell), SHAPE.text.model_max_length
    assert 0.6 * most < length < most < AGENT_TOKENS
    assert max(map(longest, agents_of(bench, number, length))) < most
    with pytest.raises(DoesNotFit):
        measure_agents(bench, cell_named(f"agents:1x{most}"))


def test_a_trace_is_the_same_at_every_rate_and_gives_all_its_tokens(bench: Bench) -> None:
    slow, fast, at_once = (arrivals(bench, rate, 40, 0) for rate in (2.0, 8.0, math.inf))
    assert [item.prompt for item in slow] == [item.prompt for item in at_once]
    assert [item.answer for item in slow] == [item.answer for item in fast]
    assert all(item.at == 0 for item in at_once)
    assert all(a.at == pytest.approx(4 * b.at) for a, b in zip(slow, fast, strict=True))
    assert 10 < slow[-1].at < 40
    lengths = [len(item.prompt) for item in slow]
    assert min(lengths) >= 64 and max(lengths) <= 2048 and len(set(lengths)) > 30
    starts = [tuple(item.prompt[:64]) for item in slow]
    assert 4 <= len(starts) - len(set(starts)) <= 20
    found = measure_trace(bench, cell_named("trace:inf"))
    trace = arrivals(bench, math.inf, 3, 0)
    assert found["answer_tokens"] == sum(item.answer for item in trace)
    assert found["prompt_tokens"] == sum(len(item.prompt) for item in trace)
    assert found["between_tokens_ms"]["p50"] <= found["between_tokens_ms"]["p99"]
    assert found["first_token_ms"]["max"] <= 1e3 * found["seconds"]
    assert found["tokens_per_s"] == pytest.approx(found["answer_tokens"] / found["seconds"])
    assert 0 < found["floor_s"] < found["seconds"]


def test_skewed_routing_prefers_some_experts_and_goes_away_again(bench: Bench) -> None:
    names = [name for name, _ in bench.model.named_parameters() if name.endswith("router.bias")]
    parameters = dict(bench.model.named_parameters())
    before = [parameters[name].clone() for name in names]

    def peak() -> float:
        engine, watch = build_engine(
            bench.model, Load(sequences=1, context=600, token_budget=600), bench.dtype
        )
        engine.add("0", bench.prompt(512, 9), params(1))
        with counted_experts(bench.model, watch) as loads:
            engine.run()
        assert len(loads.used) == len(names)
        return sum(loads.peak) / len(loads.peak)

    plain = peak()
    with skewed_routing(bench.model, 4):
        assert all(bool((parameters[name] < 0).any()) for name in names)
        skewed = peak()
    assert skewed > 1.2 * plain
    assert all(torch.equal(parameters[n], old) for n, old in zip(names, before, strict=True))
    assert peak() == plain


def test_drawn_weights_are_of_the_size_of_random_weights(model: Inkling) -> None:
    for name, parameter in model.named_parameters():
        values = parameter.float()
        if parameter.dim() < 2:
            assert bool((values == (0.0 if name.endswith("router.bias") else 1.0)).all()), name
        else:
            assert 0.012 < float(values.std()) < 0.028, name


def test_events_are_asked_of_a_gpu_only() -> None:
    assert Step(spans=[], launch_ms=1.0, events=None).gpu_ms is None


def test_what_does_not_fit_is_said_before_it_is_made(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DoesNotFit, match="needs 5000 tokens of context, the model has 4096"):
        build_engine(bench.model, Load(sequences=1, context=5000, token_budget=64), "bfloat16")
    monkeypatch.setattr("suzuri.tools.bench.state.free_memory", lambda device: 1000)
    with pytest.raises(DoesNotFit, match=r"needs 0\.\d GB, there are 0\.0"):
        build_engine(bench.model, Load(sequences=9, context=900, token_budget=64), "bfloat16")


def test_the_file_has_every_cell_and_how_it_came_about(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep" / "result.json"
    cells = ("decode:2x64", "decode:2x64:skewed", "prefill:2x64", "trace:inf", "decode:1x4096")
    assert run_serving(dataclasses.replace(QUICK, cells=cells, out=str(out))) == 0
    document = json.loads(out.read_text())
    assert [row["cell"] for row in document["cells"]] == list(cells[:4])
    assert [row["cell"] for row in document["skipped"]] == ["decode:1x4096"]
    assert "the model has 4096" in document["skipped"][0]["reason"]
    assert document["what"] == "suzuri bench serving"
    assert document["limits"] == {
        "card": "H200",
        "bytes_per_second": 4.2e12,
        "flops_per_second": 7e14,
    }
    assert document["hardware"]["device"] == "cpu"
    assert document["fingerprint"]["torch"] == torch.__version__
    assert document["config"]["cells"] == list(cells)
    assert document["models"]["tiny"]["text_config"]["hidden_size"] == 48
    assert {name for name in document["peers"]} == {"vllm", "transformers"}
    assert all("share_of_limit" not in row for row in document["cells"])
    shown = capsys.readouterr().out
    assert "compare these figures with each other only" in shown
    assert shown.splitlines()[-1] == f"4 cells measured, 1 skipped; written to {out}"


def test_a_model_without_room_for_its_weights_is_skipped_whole(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("suzuri.tools.bench.serving.free_memory", lambda device: 1000)
    assert run_serving(dataclasses.replace(QUICK, cells=("decode:1x64",), no_peers=True)) == 1
    assert "the weights need 0.0 GB" in capsys.readouterr().out
