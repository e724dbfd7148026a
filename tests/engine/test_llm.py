"""`suzuri.LLM`: what comes out equals the engine alone; what goes wrong is said and harmless."""

import dataclasses
import json
import math
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from safetensors.torch import load_file

import suzuri
from suzuri.engine import load
from suzuri.engine.llm import LLM, Job
from suzuri.engine.outputs import CompletionOutput, RequestOutput
from suzuri.engine.sampling_params import SamplingParams
from suzuri.model import checkpoint_files
from suzuri.model.locate import locate
from suzuri.processing.images import image_patches
from suzuri.tools.loading import load_model

GOLDEN = Path(__file__).parents[1] / "golden"
BASE = GOLDEN / "base" / "original"
SIZES: dict[str, Any] = {"max_running": 8, "token_budget": 64, "page_size": 8, "max_context": 200}
PROMPTS = ["Hello there", "日本語 🙂", [5, 6, 7, 8], "x", "a longer prompt " * 4]


def greedy(count: int = 6, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, **fields)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("tiny", dtype="float32", **SIZES)


@pytest.fixture(autouse=True)
def nothing_is_left_behind(llm: LLM) -> Iterator[None]:
    yield
    assert not llm.engine.has_work
    llm.engine.check()


def alone(llm: LLM, prompt: Any, params: SamplingParams) -> list[list[int]]:
    """Token ids of each sample, from the engine with nothing beside."""
    ids = llm.get_tokenizer().encode(prompt) if isinstance(prompt, str) else prompt
    request = llm.engine.add("alone", ids, params, salt=object())
    tokens: list[list[int]] = [[] for _ in request.sequences]
    for event in llm.engine.run():
        if event.token is not None:
            tokens[event.sequence.index].append(event.token)
    return tokens


def token_ids(output: RequestOutput) -> list[list[int]]:
    return [one.token_ids for one in output.outputs]


def test_outputs_equal_the_engine_one_by_one(llm: LLM) -> None:
    params = [
        greedy(),
        SamplingParams(max_tokens=9, seed=3, n=3, top_p=0.8),
        SamplingParams(max_tokens=5, seed=4, temperature=1.5, repetition_penalty=1.3),
        greedy(1),
        SamplingParams(max_tokens=7, seed=5, top_k=20),
    ]
    outputs = llm.generate(PROMPTS, params)
    expected = [alone(llm, prompt, own) for prompt, own in zip(PROMPTS, params, strict=True)]
    assert [token_ids(output) for output in outputs] == expected
    assert len({tuple(ids) for ids in expected[1]}) == 3
    assert [len(output.outputs) for output in outputs] == [1, 3, 1, 1, 1]
    assert [o.outputs[0].finish_reason for o in outputs] == ["length"] * 5
    assert [o.prompt for o in outputs] == ["Hello there", "日本語 🙂", None, "x", PROMPTS[4]]
    assert [o.error for o in outputs] == [None] * 5


def test_golden_base_is_read_from_its_folder_and_gives_the_recorded_ids() -> None:
    record = load_file(GOLDEN / "base" / "expected.safetensors")
    prompt = record["text.input_ids"][0].tolist()
    base = LLM(str(BASE), dtype="float32", **SIZES)
    (output,) = base.generate(
        [{"prompt_token_ids": prompt}], SamplingParams(temperature=0, max_tokens=32, logprobs=0)
    )
    assert output.outputs[0].token_ids == record["text.greedy_ids"].tolist()
    rows = record["text.greedy_logits"].double().log_softmax(-1)
    wanted = [float(rows[i, id]) for i, id in enumerate(output.outputs[0].token_ids)]
    assert output.outputs[0].logprobs is not None
    got = [
        entry[id].logprob
        for id, entry in zip(output.outputs[0].token_ids, output.outputs[0].logprobs, strict=True)
    ]
    assert got == pytest.approx(wanted, abs=2e-4)
    assert output.outputs[0].cumulative_logprob == pytest.approx(sum(got))
    with pytest.raises(ValueError, match=r"prompt 0: .*outside this model's vocabulary of 301"):
        base.generate("text whose ids are beyond the three hundred")
    with pytest.raises(ValueError, match=r"prompt 0: .*301"):
        base.generate([[301]])


def test_forms_of_prompts(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("Hello")
    kept = llm.engine.vocabulary.expand(ids)
    forms: list[Any] = [
        "Hello",
        {"prompt": "Hello"},
        {"prompt_token_ids": ids},
        {"prompt_token_ids": np.array(ids)},
        {"prompt": "another", "prompt_token_ids": ids, "multi_modal_data": None},
        ids,
        tuple(ids),
        {"prompt": "Hello", "cache_salt": "mine"},
    ]
    together = llm.generate(forms, greedy())
    assert [output.prompt_token_ids for output in together] == [kept] * len(forms)
    assert len({tuple(output.outputs[0].token_ids) for output in together}) == 1
    for form in ("Hello", ids, {"prompt": "Hello"}):  # one prompt, not a list of them
        assert token_ids(llm.generate(form, greedy())[0]) == token_ids(together[0])
    assert llm.generate([]) == []


def test_names_that_vllm_users_know(llm: LLM) -> None:
    (output,) = llm.generate("Hello", greedy(3, logprobs=2, prompt_logprobs=1), use_tqdm=False)
    assert output.finished and output.num_cached_tokens >= 0 and output.request_id
    assert output.metrics is not None and output.metrics.num_generation_tokens == 3
    assert output.metrics.arrival_time <= output.metrics.finished_time
    (one,) = output.outputs
    assert isinstance(one, CompletionOutput) and one.finished() and one.index == 0
    assert one.logprobs is not None and len(one.logprobs) == 3
    for id, entry in zip(one.token_ids, one.logprobs, strict=True):
        assert next(iter(entry)) == id  # greedy: the likeliest, so two entries
        assert [value.rank for value in entry.values()] == [1, 2]
        assert entry[id].decoded_token == llm.get_tokenizer().decode([id])
        assert sum(math.exp(value.logprob) for value in entry.values()) <= 1
    assert one.cumulative_logprob == sum(
        e[i].logprob for i, e in zip(one.token_ids, one.logprobs, strict=True)
    )
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    for id, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
        assert entry is not None and id in entry
    assert suzuri.LLM is LLM and suzuri.SamplingParams is SamplingParams
    with pytest.raises(AttributeError, match="no attribute 'Engine'"):
        suzuri.Engine  # noqa: B018


def test_prompt_logprobs_are_those_of_decoding(llm: LLM) -> None:
    (first,) = llm.generate([[5, 6, 7]], greedy(5, logprobs=0))
    drawn = first.outputs[0]
    whole = [*first.prompt_token_ids, *drawn.token_ids]
    (second,) = llm.generate([whole], greedy(1, prompt_logprobs=0))
    assert second.prompt_logprobs is not None and drawn.logprobs is not None
    assert second.prompt_logprobs[3:] == [
        {id: dataclasses.replace(entry[id], rank=None)}
        for id, entry in zip(drawn.token_ids, drawn.logprobs, strict=True)
    ]


def test_sampled_logprobs_are_of_what_can_be_drawn(llm: LLM) -> None:
    params = SamplingParams(max_tokens=4, seed=1, top_k=3, logprobs=5, sampled_logprobs=True)
    one = llm.generate("Hello", params)[0].outputs[0]
    assert one.sampled_logprobs is not None and one.logprobs is not None
    for id, raw, drawn in zip(one.token_ids, one.logprobs, one.sampled_logprobs, strict=True):
        assert len(drawn) == 3 and id in drawn and len(raw) >= 5
        assert sum(math.exp(value.logprob) for value in drawn.values()) == pytest.approx(
            1, abs=1e-5
        )
    plain = llm.generate("Hello", greedy(2, detokenize=False, logprobs=1))[0].outputs[0]
    assert plain.text == "" and plain.logprobs is not None
    assert next(iter(plain.logprobs[0].values())).decoded_token is None


def test_p15_stop_strings_of_any_script_end_the_text(llm: LLM) -> None:
    whole = llm.generate("Hello", greedy(40))[0].outputs[0].text
    beyond = [place for place, character in enumerate(whole) if ord(character) > 127 and place > 3]
    stop = whole[beyond[0] - 1 : beyond[0] + 1]
    place = whole.index(stop)
    (cut,) = llm.generate("Hello", greedy(40, stop=["no such text", stop]))[0].outputs
    assert (cut.text, cut.finish_reason, cut.stop_reason) == (whole[:place], "stop", stop)
    kept = greedy(40, stop=stop, include_stop_str_in_output=True)
    assert llm.generate("Hello", kept)[0].outputs[0].text == whole[: place + len(stop)]
    ids = llm.generate("Hello", greedy(40))[0].outputs[0].token_ids
    (ended,) = llm.generate("Hello", greedy(40, stop_token_ids=[ids[5]]))[0].outputs
    assert (ended.token_ids, ended.stop_reason) == (ids[: ids.index(ids[5]) + 1], ids[5])


def test_the_end_of_turn_stops_and_is_no_text(llm: LLM) -> None:
    params = SamplingParams(max_tokens=9, temperature=0, logit_bias={200006: 100.0})
    (one,) = llm.generate("Hello", params)[0].outputs
    assert (one.token_ids, one.text) == ([200006], "")
    assert (one.finish_reason, one.stop_reason) == ("stop", None)


# Errors

FAULTY: list[tuple[Any, str]] = [
    ("", "the prompt is empty"),
    ([], "the prompt is empty"),
    ([1, -2], "not token ids"),
    ([1, 10**9], "not token ids"),
    ([1, 2.5], "prompt token 2.5 is not an integer"),
    ([True], "prompt token True is not an integer"),
    (list(range(200)), "has 200 tokens; with at least one token of answer at most 199 fit"),
    (3, "a prompt of type int"),
    (None, "a prompt of type NoneType"),
    ("\ud800", "half of a surrogate pair"),
    ({}, "needs 'prompt' or 'prompt_token_ids'"),
    ({"prompt": 3}, "prompt = 3: must be a string"),
    ({"prompt": "x", "lora": 1}, "'lora' is no part of a prompt"),
    ({"prompt": "x", "cache_salt": 3}, "cache_salt = 3"),
    ({"prompt": "x", "multi_modal_data": {"video": 1}}, "there is no 'video'"),
    ({"prompt": "x", "multi_modal_data": {"image": 3}}, "a picture of type int"),
]


def test_faulty_prompts_are_all_named_before_anything_runs(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = llm.engine.scheduler.counters.computed_tokens
    prompts = ["good", *(prompt for prompt, _ in FAULTY[:5]), "good"]
    with pytest.raises(ValueError, match=r"prompt 1: the prompt is empty; .*prompt 5: prompt t"):
        llm.generate(prompts)
    many = ["good"] + [""] * 25
    with pytest.raises(ValueError, match=r"prompt 10: the prompt is empty.*; and 15 more"):
        llm.generate(many)
    assert llm.engine.scheduler.counters.computed_tokens == steps


def test_faulty_prompts_leave_the_others_alone(llm: LLM) -> None:
    expected = token_ids(llm.generate("good", greedy())[0])
    prompts: list[Any] = []
    for prompt, _ in FAULTY:
        prompts += ["good", prompt]
    outputs = llm.generate(prompts, greedy(), on_error="return")
    assert len(outputs) == len(prompts)
    assert all(token_ids(output) == expected for output in outputs[::2])
    for (prompt, words), output in zip(FAULTY, outputs[1::2], strict=True):
        assert output.error is not None and words in output.error, prompt
        assert output.outputs == [] and output.finished


def test_faulty_parameters_are_refused(llm: LLM) -> None:
    long = greedy(199)
    with pytest.raises(ValueError, match=r"prompt 1: prompt .* more than max_context = 200; lower"):
        llm.generate(["x", "Hello"], [greedy(), long])
    with pytest.raises(ValueError, match=r"prompt 0: logit_bias: .*lacks the ids 5000"):
        llm.generate("x", greedy(logit_bias={5000: 1.0}))
    with pytest.raises(ValueError, match="sampling_params: 2 given for 1 prompts"):
        llm.generate("x", [greedy(), greedy()])
    wrong: Any = {"temperature": 0}
    with pytest.raises(ValueError, match="sampling_params: must be one SamplingParams"):
        llm.generate("x", wrong)
    with pytest.raises(ValueError, match="on_error = 'ignore': must be 'raise' or 'return'"):
        llm.generate("x", on_error="ignore")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="priority: must be one int"):
        llm.generate("x", priority=["high"])  # pyright: ignore[reportArgumentType]
    assert [len(o.outputs) for o in llm.generate(["x", "y"], greedy(2), priority=[1, 0])] == [1, 1]


def test_ctrl_c_aborts_and_leaves_the_engine_usable(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = token_ids(llm.generate("Hello there", greedy())[0])
    step, steps = llm.engine.step, 0

    def interrupted() -> Any:
        nonlocal steps
        steps += 1
        if steps == 3:
            signal.raise_signal(signal.SIGINT)
            # Still here: an interrupt within a step would leave the engine between two states.
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, greedy(100))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert not llm.engine.has_work
    llm.engine.check()
    monkeypatch.undo()
    assert token_ids(llm.generate("Hello there", greedy())[0]) == expected


# Streams


def test_stream_keeps_the_order_and_a_bounded_window(llm: LLM) -> None:
    taken: list[int] = []

    def jobs() -> Iterator[Job | None]:
        for index in range(30):
            taken.append(index)
            if index % 7 == 3:
                yield Job(error=f"fault {index}")
            else:
                yield None
                count = 20 if index == 0 else 1 + index % 4
                yield Job(prompt=[index + 1], params=greedy(count))

    ahead: list[int] = []
    outputs: list[RequestOutput] = []
    for output in llm.stream(jobs(), window=5):
        outputs.append(output)
        ahead.append(len(taken) - len(outputs))
    assert max(ahead) <= 5
    for index, output in enumerate(outputs):
        if index % 7 == 3:
            assert output.error == f"fault {index}"
        else:
            assert output.prompt_token_ids == [index + 1]
            assert len(output.outputs[0].token_ids) == (20 if index == 0 else 1 + index % 4)
    assert len(outputs) == 30


def test_a_closed_stream_aborts_what_runs(llm: LLM) -> None:
    stream = llm.stream(
        Job(prompt=[index + 1], params=greedy(1 + 50 * index)) for index in range(4)
    )
    assert len(next(stream).outputs[0].token_ids) == 1
    assert llm.engine.has_work
    stream.close()
    assert not llm.engine.has_work


# Conversations


def test_chat_renders_and_answers(llm: LLM) -> None:
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "Hi"}]
    (output,) = llm.chat(messages, greedy())
    text = llm.get_tokenizer().decode(output.prompt_token_ids)
    assert text == (
        "<|message_system|><|content_text|>S<|end_message|>"
        "<|message_system|><|content_text|>Thinking effort level: 0.9<|end_message|>"
        "<|message_user|><|content_text|>Hi<|end_message|><|message_model|>"
    )
    both = llm.chat([messages, messages[1:]], greedy(), reasoning_effort="none")
    texts = [llm.get_tokenizer().decode(o.prompt_token_ids) for o in both]
    assert texts[1].startswith("<|message_system|><|content_text|>Thinking effort level: 0<|end_")
    assert texts[0].startswith("<|message_system|><|content_text|>S<|end_message|>")
    bare = llm.chat(messages, greedy(1), add_generation_prompt=False)[0]
    assert [*bare.prompt_token_ids, 200001] == output.prompt_token_ids
    with pytest.raises(ValueError, match="reasoning effort 'huge': must be one of none, minimal"):
        llm.chat(messages, reasoning_effort="huge")
    with pytest.raises(ValueError, match=r"conversation 1: messages\[0\].role = 'bot'"):
        llm.chat([messages, [{"role": "bot", "content": ""}]])
    with pytest.raises(ValueError, match=r"tools\[0\].type = None"):
        llm.chat(messages, tools=[{}])
    specials = llm.chat(messages, greedy(40, skip_special_tokens=False))[0].outputs[0]
    assert specials.text == llm.get_tokenizer().decode(specials.token_ids)


def picture(seed: int) -> Image.Image:
    noise = np.random.default_rng(seed).integers(0, 256, (90, 100, 3), dtype=np.uint8)
    return Image.fromarray(noise)


def about(*parts: Any) -> list[dict[str, Any]]:
    text = {"type": "text", "text": "What is 日本?"}  # words that the small vocabulary spells out
    return [{"role": "user", "content": [text, *parts]}]


def test_m20_pictures_and_clips_reach_their_places(llm: LLM) -> None:
    seen: dict[str, list[Any]] = {"image": [], "audio": []}
    towers = {"image": llm.engine.model.vision, "audio": llm.engine.model.audio}
    for kind, tower in towers.items():
        assert tower is not None
        tower.register_forward_pre_hook(lambda _, inputs, kind=kind: seen[kind].append(inputs[0]))
    first, second = ({"type": "image_pil", "image_pil": picture(seed)} for seed in (1, 2))
    clip = {"type": "audio", "audio": (np.sin(np.arange(4000) / 9).astype(np.float32), 16000)}
    conversations = [about(), about(first), about(second, clip), about(first, second)]
    together = llm.chat(conversations, greedy())
    assert {array.shape[0] for array in seen["image"]} == {9}
    assert any(np.array_equal(array, image_patches(picture(2))) for array in seen["image"])
    assert [array.shape for array in seen["audio"]] == [(5, 80)]
    singly = [llm.chat(conversation, greedy())[0] for conversation in conversations]
    assert [token_ids(o) for o in together] == [token_ids(o) for o in singly]
    other = llm.chat(about(second), greedy(logprobs=0))[0]
    same = llm.chat(about(first), greedy(logprobs=0))[0]
    assert other.outputs[0].logprobs != same.outputs[0].logprobs
    # The same prompt from ids: places are counted and must be there.
    ids = together[1].prompt_token_ids
    raw = {"prompt_token_ids": ids, "multi_modal_data": {"image": picture(1)}}
    (output,) = llm.generate([raw], greedy())
    assert token_ids(output) == token_ids(together[1])
    raw = {"prompt_token_ids": ids, "multi_modal_data": {"image": [picture(1), picture(2)]}}
    with pytest.raises(ValueError, match=r"has 9 image places \(id 200054\), .* needs 18"):
        llm.generate([raw], greedy())
    raw = {"prompt": "a picture", "multi_modal_data": {"image": picture(1)}}
    with pytest.raises(ValueError, match=r"has 0 image places \(id 200054\), .* needs 9; build"):
        llm.generate([raw], greedy())
    cut = [*ids[: ids.index(200054) + 1], 5, *ids[ids.index(200054) + 1 :]]
    raw = {"prompt_token_ids": cut, "multi_modal_data": {"image": picture(1)}}
    with pytest.raises(ValueError, match=r"image 0 needs 9 places .* in a row"):
        llm.generate([raw], greedy())


def test_a_second_turn_hits_the_cache(llm: LLM) -> None:
    messages: list[Any] = [{"role": "user", "content": "Tell me all about ink, slowly. " * 2}]
    (first,) = llm.chat(messages, greedy())
    messages += [{"role": "assistant", "content": "It is black."}, {"role": "user", "content": "?"}]
    (second,) = llm.chat(messages, greedy())
    assert second.num_cached_tokens >= len(first.prompt_token_ids) - 2


# Construction


def test_s07_what_does_not_fit_is_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were read")

    monkeypatch.setattr(load, "load_weights", read)
    monkeypatch.setattr(load, "Inkling", read)
    with pytest.raises(
        ValueError, match=r"does not fit: weights 0.00, .* in GB, are more than the"
    ):
        LLM(str(BASE), memory_gb=0.001)
    monkeypatch.setattr(load, "free_memory", lambda _: 50 * 10**9)
    with pytest.raises(ValueError, match=r"inkling: the model does not fit: weights 1[0-9]{3}\."):
        LLM("inkling", random_weights=True)
    with pytest.raises(ValueError, match=r"memory_gb = 60: only 50.00 GB are free on cpu"):
        LLM("tiny", memory_gb=60)
    for wrong in (0, -1, math.nan, math.inf):
        with pytest.raises(ValueError, match=r"memory_gb = .*: must be a positive number"):
            LLM("tiny", memory_gb=wrong)


def test_models_that_cannot_be_served_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"'inkling-small' is a shape without weights.*random_weigh"
    ):
        LLM("inkling-small")
    with pytest.raises(ValueError, match="shape without weights"):
        LLM(str(BASE / "config.json"))
    with pytest.raises(ValueError, match="this path does not exist"):
        LLM(str(tmp_path / "none"))
    shutil.copy(BASE / "config.json", tmp_path)
    with pytest.raises(ValueError, match="safetensors"):
        LLM(str(tmp_path))
    with pytest.raises(ValueError, match="LLM has no gpu_memory_utilization, tp; there are model,"):
        LLM(gpu_memory_utilization=0.9, tp=2)
    with pytest.raises(ValueError, match="device = 'tpu': must be cpu, cuda or cuda:N"):
        LLM(device="tpu")
    with pytest.raises(ValueError, match="max_running = 0"):
        LLM(max_running=0)


@pytest.mark.parametrize("name", ["text_only", "language_model_only"])
def test_text_only_leaves_the_towers_out(name: str, tmp_path: Path) -> None:
    """Also those that the files hold and the config does not, which are a fault otherwise."""
    prompt = [[5, 6, 7, 8]]
    flag: Any = {name: True}
    both = LLM(str(BASE), dtype="float32", **SIZES)
    alone = LLM(str(BASE), dtype="float32", **SIZES, **flag)
    assert both.engine.model.vision is not None and both.engine.model.audio is not None
    assert alone.engine.model.vision is None and alone.engine.model.audio is None
    answers = [one.generate(prompt, greedy(4, logprobs=0))[0].outputs[0] for one in (both, alone)]
    assert answers[0] == answers[1]
    raw = {"prompt_token_ids": [5, 6], "multi_modal_data": {"image": picture(1)}}
    with pytest.raises(ValueError, match="this model has no vision tower; leave the picture out"):
        alone.generate([raw])
    document = json.loads((BASE / "config.json").read_text("utf-8"))
    del document["vision_config"]
    folder = tmp_path / "model"
    shutil.copytree(BASE, folder)
    (folder / "config.json").write_text(json.dumps(document), "utf-8")
    with pytest.raises(ValueError, match=r"a tower that config.json does not.*text_only=True"):
        LLM(str(folder), dtype="float32", **SIZES)
    surplus = LLM(str(folder), dtype="float32", **SIZES, **flag)
    assert surplus.generate(prompt, greedy(4, logprobs=0))[0].outputs[0] == answers[0]
    drawn = LLM("tiny", **SIZES, **flag)
    assert drawn.engine.model.vision is None and drawn.engine.model.config.audio is None


def test_headers_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    usual = checkpoint_files.read_header

    def counted(path: Path) -> Any:
        read.append(path.name)
        return usual(path)

    monkeypatch.setattr(checkpoint_files, "read_header", counted)
    LLM(str(BASE), dtype="float32", **SIZES)
    files = sorted(path.name for path in BASE.glob("*.safetensors"))
    assert sorted(read) == files and len(files) > 1
    read.clear()
    load_model(locate(str(BASE), weights=True).checkpoint(), "float32", Console())
    assert sorted(read) == files


def test_random_weights_of_any_shape_are_those_of_the_seed(tmp_path: Path) -> None:
    document = json.loads((BASE / "config.json").read_text("utf-8"))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(document), "utf-8")
    first, again, other = (
        LLM(str(path), random_weights=True, seed=seed, dtype="float32", **SIZES)
        for seed in (1, 1, 2)
    )
    answers = [one.generate([[1, 2, 3]], greedy(4, logprobs=0)) for one in (first, again, other)]
    logprobs = [answer[0].outputs[0].logprobs for answer in answers]
    assert logprobs[0] == logprobs[1] != logprobs[2]


def test_progress_is_shown_on_terminals_only(
    llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm.generate("Hello", greedy(2))
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(llm, "_console", Console(stderr=True, force_terminal=True))
    llm.generate("Hello", greedy(2), show_progress=False)
    llm.generate("Hello", greedy(2), use_tqdm=False)
    assert capsys.readouterr() == ("", "")
    llm.generate(["Hello", "x"], greedy(2))
    captured = capsys.readouterr()
    assert captured.out == "" and "generating" in captured.err and "2/2" in captured.err


def test_names_and_values_that_vllm_users_try_first() -> None:
    with pytest.raises(ValueError, match="max_model_len is max_context here"):
        LLM(max_model_len=100)
    for words in (
        {"dtype": "float16"},
        {"dtype": torch.float16},
        {"overlap": "x"},
        {"prefix_cache": None},
        {"max_context": 1},
        {"text_only": "no"},
        {"device": None},
        {"model": 5},
        {"random_weights": 1},
    ):
        given: dict[str, Any] = words
        (name,) = given
        with pytest.raises(ValueError, match=name):
            LLM(**given)


@pytest.mark.parametrize("dtype", ["auto", torch.bfloat16, "bfloat16"])
def test_the_dtype_may_be_named_as_torch_and_vllm_do(dtype: Any) -> None:
    assert LLM("tiny", dtype=dtype, max_context=64).engine.config.dtype == "bfloat16"


def test_a_model_made_in_inference_mode_runs() -> None:
    with torch.inference_mode():
        llm = LLM("tiny", max_context=64)
        (found,) = llm.generate("Hi", SamplingParams(max_tokens=3, temperature=0))
    again = LLM("tiny", max_context=64)
    (expected,) = again.generate("Hi", SamplingParams(max_tokens=3, temperature=0))
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
