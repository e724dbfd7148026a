"""Cells, command lines, floors and recorded figures of `suzuri bench`: no engine runs here."""

import dataclasses
import itertools
import json
import math
from pathlib import Path

import pytest

from suzuri.model.config import ModelConfig, preset
from suzuri.model.sizes import Layout
from suzuri.tools.bench.card import card_for
from suzuri.tools.bench.cells import LARGE, SMALL, cell_named, chosen_cells, default_cells
from suzuri.tools.bench.config import ServingConfig, parse_bench
from suzuri.tools.bench.floors import StepFloors
from suzuri.tools.bench.shapes import NAMES, SHAPES, decoder_only, default_models, recorded
from suzuri.tools.plan.card import match
from suzuri.tools.plan.floors import Floors

H200 = match("h200")
TABLE = {
    "decode:1x1024": (2.22, 3.18),
    "decode:1x8192": (2.23, 3.36),
    "decode:1x65536": (2.29, 5.84),
    "decode:8x8192": (6.88, 7.60),
    "decode:64x1024": (12.0, 13.8),
    "decode:256x1024": (13.2, 28.2),
    "prefill:1x1024": (11.7, 26.0),
    "prefill:1x8192": (84.4, 145),
    "prefill:8x8192": (675, 1097),
    "prefill:1x65536": (763, 1444),
}
"""Floors and vLLM's milliseconds of the benchmark shape L6E64 on one H200."""


def shape(name: str) -> ModelConfig:
    return decoder_only(ModelConfig.from_file(SHAPES / name))


def spans(name: str) -> list[tuple[int, int, bool]]:
    cell = cell_named(name)
    one = (cell.length, 1, True) if cell.kind == "decode" else (0, cell.length, True)
    return [one] * cell.batch


def test_a_cell_is_its_name() -> None:
    more = ("trace:0.5", "prefill:3x7:skewed", "agents:3", "agents:3x700", "agents:5:skewed")
    for cell in (*LARGE, *SMALL, *map(cell_named, more)):
        assert cell_named(cell.name) == cell
    assert (cell_named("agents:3").batch, cell_named("agents:3").length) == (3, 0)
    assert math.isinf(cell_named("trace:inf").rate)
    assert cell_named("decode:8x8192:skewed").skewed
    assert [cell.name for cell in LARGE[:10]] == list(TABLE)


@pytest.mark.parametrize(
    "word",
    [
        *("decode", "decode:", "decode:8", "decode:x8", "decode:8x8:skew", "train:8x8"),
        *("decode:-1x8", "decode:0x8", "decode:1x0", "decode:5000x1", "prefill:1x4194305"),
        *("trace:0", "trace:-1", "trace:nan", "trace:fast", "decode:8x8:skewed:skewed"),
        *("agents", "agents:", "agents:0", "agents:513", "agents:2x0", "agents:x", "agents:-1"),
    ],
)
def test_what_is_no_cell_is_refused_by_name(word: str) -> None:
    with pytest.raises(ValueError, match=f"--cells {word}: "):
        cell_named(word)


def test_words_choose_among_the_defaults_or_name_any_cell() -> None:
    defaults = default_cells(1_048_576, quick=False)
    assert defaults == LARGE
    assert default_cells(4096, quick=False) == SMALL
    assert chosen_cells((), defaults) == list(LARGE)
    prefill = [cell.name for cell in chosen_cells(("prefill",), defaults)]
    assert prefill == [cell.name for cell in LARGE if cell.kind == "prefill"]
    assert all(cell.skewed for cell in chosen_cells(("skewed",), defaults))
    both = chosen_cells(("decode:3x100", "trace:2", "trace"), defaults)
    assert [cell.name for cell in both] == ["decode:3x100", "trace:2", "trace:8", "trace:inf"]
    with pytest.raises(ValueError, match="no such cells by default"):
        chosen_cells(("trace",), LARGE[:3])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["serving", "--device", "gpu"], "--device gpu: must be cpu, cuda or cuda:N"),
        (["serving", "--cells", "decode:1"], "--cells decode:1: no such cell"),
        (["serving", "--repeats", "0"], "--repeats 0: must be from 1"),
        (["serving", "--steps", "0"], "--steps 0"),
        (["serving", "--token-budget", "0"], "--token-budget 0"),
        (["serving", "--requests", "0"], "--requests 0"),
        (["serving", "--seed", "-1"], "--seed -1"),
        (["serving", " "], "MODEL is empty"),
        (["kernels", "--repeats", "0"], "--repeats 0"),
        (["plot"], "at least one file"),
        (["plot", "a.json", "--out", "a.svg"], "must end with .png"),
    ],
)
def test_wrong_words_are_refused_by_flag(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_bench(words).resolve()


def test_a_command_line_becomes_its_config() -> None:
    words = ["serving", "tiny", "--cells", "decode", "trace:4", "--quick", "--steps", "3"]
    config = parse_bench(words).resolve()
    assert isinstance(config, ServingConfig)
    assert (config.models, config.cells) == (("tiny",), ("decode", "trace:4"))
    assert (config.num_repeats, config.num_steps, config.num_requests) == (3, 3, 16)
    assert (config.device, config.no_peers, config.out) == ("cuda", False, None)


@pytest.mark.parametrize(("name", "figures"), TABLE.items())
def test_floors_and_recorded_figures_of_the_table(name: str, figures: tuple[float, float]) -> None:
    """The table counts a token's experts as draws that may repeat, which is up to 2.3 % lower for
    few tokens (tests/tools/test_plan_floors.py shows it); its prefill rows are rounded."""
    floors, cell = StepFloors(shape("L6E64"), H200), cell_named(name)
    close = 0.025 if cell.kind == "decode" else 0.005
    assert floors.step(spans(name)).ms == pytest.approx(figures[0], rel=close)
    tokens = cell.batch if cell.kind == "decode" else cell.batch * cell.length
    repeated = 64 * (1 - (1 - 1 / 64) ** (6 * tokens))
    as_drawn = floors.step(spans(name), experts=repeated)
    assert as_drawn.ms == pytest.approx(figures[0], rel=0.0045)
    found = {one.system: one.ms for one in recorded(shape("L6E64"), cell)}
    assert found["vllm-0.26.0"] == pytest.approx(figures[1], rel=0.003)


@pytest.mark.parametrize("model", [*NAMES, "tiny", "inkling"])
def test_floors_are_those_of_the_plan(model: str) -> None:
    config = decoder_only(preset(model)) if model not in NAMES else shape(model)
    ours, plan = StepFloors(config, H200), Floors(config, Layout(), H200)
    for sequences, length in ((1, 3), (1, 700), (64, 1024), (3, 4000)):
        decode = ours.step([(length, 1, True)] * sequences)
        wanted = plan.decode(sequences, length)
        assert decode.num_bytes == pytest.approx(wanted.num_bytes, rel=1e-12)
        # The plan leaves out a row's score with its own key.
        assert wanted.flops < decode.flops < wanted.flops * (1 + 1 / length)
        prefill = ours.step([(0, length, True)] * sequences)
        wanted = plan.prefill(sequences, length)
        assert prefill.num_bytes == pytest.approx(wanted.num_bytes, rel=1e-12)
        assert prefill.flops == pytest.approx(wanted.flops, rel=1e-12)
        assert prefill.ms == pytest.approx(1e3 * wanted.seconds, rel=1e-12)
        assert (prefill.bound, decode.bound) == (wanted.bound, "memory")


def test_chunks_compute_what_one_pass_does_and_read_the_weights_again() -> None:
    floors = StepFloors(shape("L6E64"), H200)
    whole = floors.step([(0, 5000, True)])
    cuts = [0, 1, 300, 513, 2048, 5000]
    chunks = [floors.step([(a, b - a, b == 5000)]) for a, b in itertools.pairwise(cuts)]
    assert sum(chunk.flops for chunk in chunks) == pytest.approx(whole.flops, rel=1e-12)
    assert sum(chunk.num_bytes for chunk in chunks) > 3 * whole.num_bytes
    together = floors.step([(300, 213, False), (700, 1, True)])
    apart = floors.step([(300, 213, False)]).flops + floors.step([(700, 1, True)]).flops
    assert together.flops == pytest.approx(apart, rel=1e-12)


def test_counted_experts_replace_the_expected_ones() -> None:
    floors = StepFloors(shape("L4E256"), H200)
    one_expert = 2 * 3 * 3072 * 6144
    few, many = (floors.step(spans("decode:64x1024"), experts=n) for n in (10, 110))
    assert many.num_bytes - few.num_bytes == pytest.approx(100 * 4 * one_expert, rel=1e-12)
    expected = floors.expected_experts(64)
    assert floors.step(spans("decode:64x1024")).num_bytes == pytest.approx(
        floors.step(spans("decode:64x1024"), experts=expected).num_bytes, rel=1e-12
    )
    assert 190 < expected < 200


def test_figures_are_recorded_for_a_model_by_its_numbers(tmp_path: Path) -> None:
    cell = cell_named("decode:1x1024")
    assert {one.system for one in recorded(shape("L6E64"), cell)} == {
        "vllm-0.26.0",
        "transformers-5.17.0 sdpa",
    }
    assert recorded(shape("L4E256"), cell) == []
    assert recorded(decoder_only(preset("tiny")), cell) == []
    assert recorded(shape("L6E64"), dataclasses.replace(cell, skewed=True)) == []
    assert recorded(shape("L6E64"), cell_named("trace:2")) == []
    other = dataclasses.replace(shape("L6E64").text, route_scale=4.0)
    assert recorded(dataclasses.replace(shape("L6E64"), text=other), cell) == []
    (tmp_path / "L6E64").mkdir()
    text = (SHAPES / "L6E64" / "config.json").read_text()
    (tmp_path / "L6E64" / "config.json").write_text(text)
    rows = [{"peer": "x", "model": "L6E64", "B": 1, "prompt": 1024, "tpot_ms": 7.0}]
    rows.append(rows[0] | {"peer": "x TP2"})
    rows.append(rows[0] | {"model": "L6E64-NVFP4 (some)", "tpot_ms": 5.0})
    document = {"gpu": "a card", "date": "2026-01-01", "rows": rows}
    (tmp_path / "peers-a.json").write_text(json.dumps(document))
    (found,) = recorded(shape("L6E64"), cell, tmp_path)
    assert (found.system, found.ms, found.hardware, found.source) == (
        *("x", 7.0, "a card"),
        "peers-a.json",
    )


def test_the_256_expert_shape_is_the_other_one_with_more_experts_and_fewer_layers() -> None:
    large, small = shape("L4E256").text, shape("L6E64").text
    changed = dataclasses.replace(
        large, n_routed_experts=64, num_hidden_layers=6, local_layer_ids=(0, 1, 2, 3, 4)
    )
    assert changed == small
    assert [large.is_local(i) for i in range(4)] == [True, True, True, False]


def test_cards_and_models_without_being_named() -> None:
    assert card_for(None, None) == H200
    assert card_for(None, "NVIDIA H200") == H200
    assert card_for(None, "a card that nobody sold") is None
    assert card_for("b200", None) == match("b200")
    with pytest.raises(ValueError, match=r"^--card 'foo' is no card"):
        card_for("foo", None)
    assert default_models("cpu") == ("tiny",)
    assert [Path(folder).name for folder in default_models("cuda")] == list(NAMES)
