"""Other systems beside ours: stand-ins for vLLM, and what is said when it is not there."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from suzuri.tools.bench import adapter
from suzuri.tools.bench.cells import cell_named
from suzuri.tools.bench.peers import Task, missing, run_peer, task_of
from suzuri.tools.bench.shapes import ROOT, SHAPES

VLLM = '''
"""Stands in for vLLM: notes what it is asked, and answers with tokens."""
import json, pathlib
__version__ = "9.9"
NOTES = pathlib.Path(__file__).with_name("notes.jsonl")

def note(**fields):
    with NOTES.open("a") as file:
        print(json.dumps(fields), file=file)

class SamplingParams:
    def __init__(self, **fields):
        self.fields = fields

class LLM:
    def __init__(self, **fields):
        note(made=fields)

    def generate(self, prompts, params, use_tqdm):
        ids = [prompt["prompt_token_ids"] for prompt in prompts]
        if FAIL_AT and len(ids[0]) == FAIL_AT:
            raise ValueError("no room for that")
        note(lengths=[len(one) for one in ids], first=[one[0] for one in ids], **params.fields)
        class Output:
            token_ids = [7] * params.fields["max_tokens"]
        class Request:
            outputs = [Output]
        return [Request for _ in ids]
'''


@pytest.fixture
def task() -> Task:
    cells = [cell_named(word) for word in ("decode:3x20", "prefill:2x50", "trace:2")]
    cells.append(cell_named("decode:3x20:skewed"))
    config = SHAPES / "L6E64" / "config.json"
    return task_of(config, cells, repeats=2, steps=4, token_budget=64, seed=5)


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, fail_at: int = 0) -> Path:
    (folder / "vllm.py").write_text(VLLM.replace("FAIL_AT", str(fail_at)))
    monkeypatch.setenv("PYTHONPATH", f"{folder}:{ROOT}")
    monkeypatch.syspath_prepend(str(folder))
    return folder / "notes.jsonl"


def test_a_system_that_is_not_installed_is_named() -> None:
    assert missing("no_such_system") == "no_such_system is not installed"
    assert missing("json") == ""


def test_vllm_is_asked_for_the_same_cells(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = stand_in(tmp_path, monkeypatch)
    assert missing("vllm") == ""
    answer = run_peer("vllm", task)
    assert (answer["version"], answer["problem"]) == ("9.9", "")
    assert list(answer["cells"]) == ["decode:3x20", "prefill:2x50"]
    made, *asked = [json.loads(line) for line in notes.read_text().splitlines()]
    assert made["made"]["model"] == str(SHAPES / "L6E64")
    assert made["made"]["load_format"] == "dummy"
    assert made["made"]["max_model_len"] == 50 + 4 + 2
    assert (made["made"]["max_num_seqs"], made["made"]["max_num_batched_tokens"]) == (3, 64)
    assert made["made"]["enable_prefix_caching"] is False
    # Decode: warmed up with both lengths, then pairs of one token and steps + 1 tokens.
    decode = [one for one in asked if one["lengths"] == [20, 20, 20]]
    assert [one["max_tokens"] for one in decode] == [5, 1, 1, 5, 1, 5]
    prefill = [one for one in asked if one["lengths"] == [50, 50]]
    assert [one["max_tokens"] for one in prefill] == [1, 1, 1, 1]
    assert len(decode) + len(prefill) == len(asked)
    firsts = [id for one in asked for id in one["first"]]
    assert len(set(firsts)) > len(firsts) - 3 and max(firsts) < 200058
    assert all(one["ignore_eos"] and one["temperature"] == 0 for one in asked)


def test_a_system_that_gives_up_keeps_what_it_answered(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, fail_at=50)
    answer = run_peer("vllm", task)
    assert list(answer["cells"]) == ["decode:3x20"]
    assert answer["problem"] == "ValueError: no room for that"
    assert "never answers" not in run_peer("vllm", task, "suzuri.no_such_module")["version"]
    assert "No module named" in run_peer("vllm", task, "suzuri.no_such_module")["problem"]


def test_a_decode_step_is_what_each_further_token_costs(
    task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(adapter.time, "perf_counter", lambda: now[0])
    seen: list[Any] = []

    def generate(prompts: list[list[int]], tokens: int) -> None:
        seen.append(prompts)
        now[0] += 0.030 + 0.002 * (tokens - 1)

    decode, prefill = adapter.cells_of(task)
    waits = lambda: None  # noqa: E731
    assert adapter.time_cell(task, decode, generate, waits) == pytest.approx(2.0)
    assert adapter.time_cell(task, prefill, generate, waits) == pytest.approx(30.0)
    assert len({json.dumps(prompts) for prompts in seen}) == len(seen)


TRANSFORMERS = '''
"""Stands in for transformers: a model whose next id is the number of tokens that it has seen."""
import json, pathlib, torch
__version__ = "8.8"
NOTES = pathlib.Path(__file__).with_name("notes.jsonl")

class InklingConfig:
    @classmethod
    def from_dict(cls, document):
        config = cls()
        config.text = document["text_config"]
        return config

    def get_text_config(self):
        return self.text

class Output:
    pass

class InklingForCausalLM(torch.nn.Module):
    def __init__(self, text):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(40, text["head_dim"]))
        self.select_bias = torch.nn.Parameter(torch.full((8,), 3.0))
        self.norm = torch.nn.Parameter(torch.zeros(8))

    def forward(self, input_ids, past_key_values, use_cache, logits_to_keep):
        assert self.weight.dtype == torch.bfloat16 and use_cache and logits_to_keep == 1
        assert 0.01 < float(self.weight.detach().float().std()) < 0.03
        assert bool((self.norm == 1).all()) and bool((self.select_bias == 0).all())
        seen = (past_key_values or 0) + input_ids.shape[1]
        with NOTES.open("a") as file:
            print(json.dumps([past_key_values or 0, input_ids[:, -1].tolist()]), file=file)
        out = Output()
        out.past_key_values = seen
        out.logits = torch.nn.functional.one_hot(torch.tensor(seen), 400).expand(
            input_ids.shape[0], 1, 400
        )
        return out
'''


def test_transformers_runs_prompts_in_one_pass_and_feeds_back_what_it_drew(
    task: Task, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "transformers.py").write_text(TRANSFORMERS)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{ROOT}")
    long = dataclasses.asdict(cell_named("prefill:1x8193"))
    answer = run_peer("transformers", dataclasses.replace(task, cells=[*task.cells, long]))
    assert (answer["version"], answer["problem"]) == ("8.8", "")
    assert list(answer["cells"]) == ["decode:3x20", "prefill:2x50"]
    assert list(answer["skipped"]) == ["prefill:1x8193"]
    lines = (tmp_path / "notes.jsonl").read_text().splitlines()
    calls = [json.loads(line) for line in lines]
    # The first run of the decode cell: a prompt of 20, then four tokens, each the one before drew.
    assert [seen for seen, _ in calls[:5]] == [0, 20, 21, 22, 23]
    assert [ids for _, ids in calls[1:5]] == [[n] * 3 for n in (20, 21, 22, 23)]
    assert len(calls) == (5 + 1) * 3 + 4
