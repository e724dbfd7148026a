"""From conversations to samples: weights, bytes, media, bad lines, and the order of a run."""

import base64
import io
import itertools
import json
import os
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from suzuri.envs.mixture import Mixture
from suzuri.model.config import preset
from suzuri.processing.chat import EFFORTS, ChatRenderer, TrainingExample
from suzuri.processing.chat_blocks import to_blocks
from suzuri.processing.tokenizer import (
    CONTENT_MODEL_END_SAMPLING,
    END_MESSAGE,
    ENDOFTEXT,
    Tokenizer,
)
from suzuri.processing.vocabulary import FullVocabulary, vocabulary_of
from suzuri.training.batches import Batches
from suzuri.training.config import SftConfig
from suzuri.training.data import Checked, Order, SampleMaker, check_data, make_batch
from suzuri.training.data_workers import DataWorkers
from suzuri.training.jsonl import JsonlData, parse_line
from suzuri.types import Conversation

TINY = preset("tiny")
TOKENIZER = Tokenizer()
KEPT = vocabulary_of(TINY.kept_vocabulary, TOKENIZER.token_bytes)
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
]
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
LONG: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "reasoning_content": "greet", "content": "Hello"},
    {"role": "user", "content": "sum?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "a", "content": "2"},
    {"role": "assistant", "reasoning_content": "so two", "content": "two"},
]
SHORT: list[Any] = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


def maker(max_tokens: int = 4096, kept: bool = True) -> SampleMaker:
    return SampleMaker(TOKENIZER, TINY, KEPT if kept else FullVocabulary(), max_tokens)


def renderer() -> ChatRenderer:
    return ChatRenderer(TOKENIZER, TINY, local_files=True)


def picture(width: int = 90, height: int = 50) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (width, height), (200, 30, 30)).save(file, "PNG")
    return file.getvalue()


def clip(seconds: float = 0.5) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as sound:
        sound.setnchannels(1)
        sound.setsampwidth(2)
        sound.setframerate(16000)
        wave_N = 8000 * np.sin(np.arange(int(16000 * seconds)) / 9)
        sound.writeframes(wave_N.astype("<i2").tobytes())
    return file.getvalue()


def write(path: Path, lines: list[Any]) -> str:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts) + "\n", "utf-8")
    return str(path)


def long_by_hand() -> list[Any]:
    """LONG as tml-renderers' own messages, without our code."""
    from tml_renderers import chat

    def model(content: Any) -> Any:
        return chat.Message(content, chat.Author(chat.AuthorKind.Model))

    call = chat.StructuredToolCall("f", [chat.ToolArg("x", "1")])
    return [
        chat.Message(chat.Text("Be brief."), chat.Author(chat.AuthorKind.System)),
        chat.Message(chat.Text("Hi"), chat.Author(chat.AuthorKind.User)),
        *(model(chat.Thinking("greet")), model(chat.Text("Hello")), model(chat.ModelEndSampling())),
        chat.Message(chat.Text("sum?"), chat.Author(chat.AuthorKind.User)),
        *(model(chat.InvokeTool(call)), model(chat.ModelEndSampling())),
        chat.Message(chat.Text("2"), chat.Author(chat.AuthorKind.Tool, "f")),
        *(model(chat.Thinking("so two")), model(chat.Text("two")), model(chat.ModelEndSampling())),
    ]


@pytest.mark.parametrize("effort", [None, *EFFORTS, 0.0, 0.125, 0.333, 0.515, 0.989])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_a_prompt_is_the_beginning_of_what_is_learned(effort: Any, tools: Any) -> None:
    (example,) = renderer().render_for_training(LONG, tools, effort)
    for end in (2, 4, 6):
        prompt = renderer().render(LONG[:end], tools, effort).token_ids
        assert example.token_ids[: len(prompt)] == prompt
        assert example.weights[len(prompt) - 1] == 1, "the model's header is learned"
        assert example.weights[len(prompt) - 2] == 0, "what stands before it is not"
    whole = renderer().render(LONG, tools, effort, add_generation_prompt=False)
    assert example.token_ids == whole.token_ids


def test_weights_are_those_of_tml_renderers() -> None:
    """P22: reasoning, text, calls, block ends and ends of turns are learned, nothing else is."""
    from tml_renderers import v0

    theirs = v0.Renderer(TOKENIZER.native).render_for_sft(long_by_hand())
    ours = renderer().render_for_training(LONG)
    assert len(theirs) == len(ours) == 1
    spans: list[Any] = [one.span for one in theirs[0].input_token_spans]
    assert ours[0].token_ids == [id for span in spans for id in span.tokens]
    assert ours[0].weights == theirs[0].per_token_loss_weight_unshifted
    learned = [id for id, w in zip(ours[0].token_ids, ours[0].weights, strict=True) if w]
    assert learned.count(CONTENT_MODEL_END_SAMPLING) == 3
    assert learned.count(END_MESSAGE) == 5, "two thoughts, two texts and a call"


def test_messages_may_have_weights_of_their_own() -> None:
    plain = renderer().render_for_training(LONG)[0]
    weighted = [{**m, "weight": 0} if i == 2 else m for i, m in enumerate(LONG)]
    weighted[4] = {**LONG[4], "weight": 1}
    found = renderer().render_for_training(weighted)[0]
    assert found.token_ids == plain.token_ids
    before = len(renderer().render(LONG[:2]).token_ids) - 1
    after = len(renderer().render(LONG[:3], add_generation_prompt=False).token_ids)
    assert plain.weights[before:after] == [1.0] * (after - before)
    assert found.weights[before:after] == [0.0] * (after - before)
    assert found.weights[after:] == plain.weights[after:]
    cut = renderer().render_for_training([*SHORT, SHORT[0], {**SHORT[1], "weight": 0}])
    assert cut[0].token_ids == renderer().render_for_training(SHORT)[0].token_ids
    assert renderer().render_for_training([SHORT[0], {**SHORT[1], "weight": 0}]) == []
    for bad in (-1, 0.5, "1", True, float("nan"), [1]):
        with pytest.raises(ValueError, match=r"messages\[1\]\.weight"):
            renderer().render_for_training([SHORT[0], {**SHORT[1], "weight": bad}])
    with pytest.raises(ValueError, match=r"messages\[0\]\.weight"):
        renderer().render_for_training([{**SHORT[0], "weight": 1}, SHORT[1]])


def test_targets_are_one_place_on_and_bytes_share_the_weight_of_their_token() -> None:
    example = TrainingExample(
        token_ids=[200000, *TOKENIZER.encode("a Quintessential"), 200010],
        weights=[0.0, *[0.5] * (len(TOKENIZER.encode("a Quintessential"))), 2.0],
    )
    sample = maker().sample(example)
    ids = KEPT.expand(example.token_ids)
    assert len(ids) > len(example.token_ids), "some token is spelled in bytes"
    assert list(sample.tokens) == ids[:-1]
    assert sample.inputs["target_tokens"].tolist() == ids[1:]
    assert sample.inputs["weights"].tolist() == [0.5] * (len(ids) - 2) + [2.0]
    full = maker(kept=False).sample(example)
    assert list(full.tokens) == example.token_ids[:-1]
    assert full.inputs["weights"].tolist() == example.weights[1:]


def test_texts_are_learned_whole() -> None:
    (sample,) = maker(kept=False).samples(Conversation(text="Ink and stone."))
    ids = [*TOKENIZER.encode("Ink and stone."), ENDOFTEXT]
    assert [*sample.tokens, ENDOFTEXT] == ids
    assert sample.inputs["weights"].tolist() == [1.0] * (len(ids) - 1)


def test_pictures_and_clips_stand_where_their_tokens_are(tmp_path: Path) -> None:
    """Files are taken from the folder of the JSONL, not from where the run was started."""
    (tmp_path / "red.png").write_bytes(picture())
    (tmp_path / "tone.wav").write_bytes(clip())
    parts = [
        {"type": "text", "text": "Quintessential"},
        {"type": "image_url", "image_url": {"url": "red.png"}},
        {"type": "audio", "audio": "tone.wav"},
        {
            "type": "input_audio",
            "input_audio": {"data": base64.b64encode(clip(0.2)).decode(), "format": "wav"},
        },
        {
            "type": "image_url",
            "image_url": "data:image/png;base64," + base64.b64encode(picture(30, 30)).decode(),
        },
    ]
    line = {"messages": [{"role": "user", "content": parts}, SHORT[1]]}
    data = JsonlData([write(tmp_path / "media.jsonl", [line])])
    (sample,) = maker().samples(data.conversation(0))
    assert [one.kind for one in sample.media] == ["image", "audio", "audio", "image"]
    assert [len(one.inputs) for one in sample.media] == [6, 10, 4, 1]
    for one in sample.media:
        slot = TINY.image_token_id if one.kind == "image" else TINY.audio_token_id
        assert list(sample.tokens)[one.index : one.index + len(one.inputs)] == [slot] * len(
            one.inputs
        )
    tokens, weights = np.array(sample.tokens), sample.inputs["weights"]
    is_slot = np.isin(sample.inputs["target_tokens"], [TINY.image_token_id, TINY.audio_token_id])
    assert is_slot.sum() == 21 == np.isin(tokens, [TINY.image_token_id, TINY.audio_token_id]).sum()
    assert not weights[is_slot].any()
    learned = sample.inputs["target_tokens"][weights > 0]
    (plain,) = maker().samples(Conversation(messages=SHORT))
    assert learned.tolist() == plain.inputs["target_tokens"][plain.inputs["weights"] > 0].tolist()


def asked_about(url: str) -> Any:
    part = {"type": "image_url", "image_url": {"url": url}}
    return {"messages": [{"role": "user", "content": [part]}, SHORT[1]]}


AT = r"messages\[0\]\.content\[0\]"
BAD: dict[str, tuple[Any, str]] = {
    "list of conversations": ([{"messages": SHORT}], "must be an object"),
    "M01 no url": (asked_about(""), AT),
    "M01 unreachable": (asked_about("http://127.0.0.1:1/x.png"), f"{AT}.*network"),
    "M01 a text file": (asked_about("note.png"), AT),
    "M01 0 bytes": (asked_about("empty.png"), AT),
    "M01 svg": (asked_about("data:image/svg+xml,<svg/>"), AT),
    "M01 a folder": (asked_about("."), AT),
    "M06 a bomb": (asked_about("bomb.png"), AT),
    "M18 a picture and a long text": (
        {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image", "image": "red.png"},
                        {"type": "text", "text": "ab " * 300},
                    ],
                },
                SHORT[1],
            ]
        },
        r"318 tokens, 6 of them of pictures and clips; at most 201 fit",
    ),
    "M14 a picture as a clip": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "audio", "audio": "red.png"}]},
                SHORT[1],
            ]
        },
        AT,
    ),
    "no JSON": ('{"messages": [', "no JSON"),
    "too deep": ("[" * 200_000, "no JSON"),
    "no object": ("[1]", "must be an object"),
    "unknown key": ({"messages": SHORT, "mesages": []}, "unknown key mesages"),
    "nothing": ({"tools": []}, "neither messages nor text"),
    "both": ({"messages": SHORT, "text": "a"}, "text stands alone"),
    "empty text": ({"text": ""}, "text must be a string that is not empty"),
    "text of tokens": ({"text": [1]}, "text must be a string"),
    "one token": ({"text": "a", "messages": None}, "text stands alone"),
    "messages no list": ({"messages": "hi"}, "messages = 'hi': must be a list"),
    "no messages": ({"messages": []}, "messages is empty"),
    "role": ({"messages": [{"role": "bot", "content": "x"}]}, "role = 'bot'"),
    "no content": ({"messages": [SHORT[0], {"role": "assistant"}]}, "has no content"),
    "empty content": (
        {"messages": [SHORT[0], {"role": "assistant", "content": " "}]},
        r"messages\[1\]\.content is empty",
    ),
    "empty part": (
        {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}]}, SHORT[1]]},
        r"messages\[0\]\.content\[0\] is empty",
    ),
    "long": ({"messages": [{"role": "user", "content": "ab " * 300}, SHORT[1]]}, "at most"),
    "long in bytes": ({"text": "Quintessential " * 20}, "tokens; at most 200 fit"),
    "no picture": (
        {"messages": [{"role": "user", "content": [{"type": "image", "image": "no.png"}]}]},
        "nothing to learn",
    ),
    "broken picture": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image", "image": "broken.png"}]},
                SHORT[1],
            ]
        },
        r"messages\[0\]\.content\[0\]",
    ),
    "absent picture": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image_url", "image_url": "absent.png"}]},
                SHORT[1],
            ]
        },
        "absent.png",
    ),
    "nobody answers": ({"messages": SHORT[:1]}, "nothing to learn"),
    "no weight": ({"messages": [SHORT[0], {**SHORT[1], "weight": 0}]}, "nothing to learn"),
    "effort": ({"messages": SHORT, "reasoning_effort": "hard"}, "reasoning effort 'hard'"),
    "tools": ({"messages": SHORT, "tools": [{"type": "x"}]}, r"tools\[0\]\.type"),
    "call": (
        {"messages": [SHORT[0], {"role": "assistant", "tool_calls": [{"function": {}}]}]},
        r"tool_calls\[0\]\.function\.name",
    ),
    "unknown message key": (
        {"messages": [SHORT[0], {**SHORT[1], "refusal": "x"}]},
        r"messages\[1\]\.refusal",
    ),
    "surrogate": ('{"text": "\\ud800"}', "surrogate"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_line_is_refused_with_its_reason(name: str, tmp_path: Path) -> None:
    line, reason = BAD[name]
    (tmp_path / "broken.png").write_bytes(picture()[:60])
    (tmp_path / "red.png").write_bytes(picture())
    (tmp_path / "note.png").write_text("not a picture")
    (tmp_path / "empty.png").touch()
    if name == "M06 a bomb":
        Image.new("1", (20_000, 20_000)).save(tmp_path / "bomb.png")
    path = write(tmp_path / "data.jsonl", [{"messages": SHORT}, "", line, {"text": "fine"}])
    data = JsonlData([path])
    assert data.size == 3
    checked = check_data(data, maker(200), progress=lambda done, total: None)
    assert checked.indices.tolist() == [0, 2]
    assert checked.num_bad == 1
    assert checked.faults[0].startswith(f"{path}:3: ")
    with pytest.raises(ValueError, match=reason):
        maker(200).samples(data.conversation(1))
    with pytest.raises(ValueError, match=r"1 of 3 conversations .*--skip-bad"):
        checked.refuse_bad()
    batch = make_batch(data, maker(200), [0, 1, 2], skip_bad=True)
    assert (len(batch.samples), batch.num_skipped) == (2, 1)
    with pytest.raises(ValueError, match=r"data\.jsonl:3: "):
        make_batch(data, maker(200), [0, 1, 2], skip_bad=False)


def test_bytes_that_are_no_utf8_are_refused() -> None:
    with pytest.raises(ValueError, match="no UTF-8 at byte 10"):
        parse_line(b'{"text": "\xff"}', Path())


def test_the_first_bad_lines_are_listed_and_the_rest_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "data.jsonl", [*["nonsense"] * 25, {"text": "fine"}])
    checked = check_data(JsonlData([path]), maker(), progress=lambda done, total: None)
    with pytest.raises(ValueError) as error:
        checked.refuse_bad()
    lines = str(error.value).splitlines()
    assert len(lines) == 22
    assert lines[20].strip().startswith(f"{path}:20: no JSON")
    assert lines[21].strip() == "and 5 more"
    empty = write(tmp_path / "none.jsonl", ["", " "])
    with pytest.raises(ValueError, match="no line"):
        JsonlData([empty])
    with pytest.raises(FileNotFoundError):
        JsonlData([str(tmp_path / "absent.jsonl")])


def test_files_follow_each_other_whatever_their_line_ends(tmp_path: Path) -> None:
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    first.write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n\r\n{"text": "two"}')
    second.write_bytes('{"text": "drei ü"}\n'.encode())
    data = JsonlData([str(first), str(second)])
    assert [data.conversation(i).text for i in range(3)] == ["one", "two", "drei ü"]
    assert [data.place(i) for i in range(3)] == [f"{first}:1", f"{first}:3", f"{second}:1"]
    other = JsonlData([str(second), str(first)])
    assert other.digest != data.digest
    assert JsonlData([str(first), str(second)]).digest == data.digest


def checked(lengths: list[int]) -> Checked:
    count = len(lengths)
    return Checked(indices=np.arange(count) * 2, lengths=np.array(lengths), num_bad=0, faults=())


def test_every_epoch_is_a_permutation_of_its_own() -> None:
    order = Order(checked([1] * 10), seed=3, batch_size=4)
    taken = [index for step in range(1, 6) for index in order.batch(step)]
    assert sorted(taken[:10]) == sorted(taken[10:]) == list(range(0, 20, 2))
    assert taken[:10] != taken[10:]
    # From the number of the step alone, in any order.
    assert Order(checked([1] * 10), seed=3, batch_size=4).batch(4) == order.batch(4)
    assert Order(checked([1] * 10), seed=4, batch_size=4).batch(1) != order.batch(1)
    assert order.num_steps(1) == 3
    assert order.batch(3, 1) == taken[8:10]
    assert order.epoch(5) == 2.0


def test_steps_may_be_as_long_as_tokens_allow() -> None:
    lengths = [3, 9, 4, 2, 30, 5, 1, 8]
    order = Order(checked(lengths), seed=0, batch_size=1, batch_tokens=10)
    per_epoch = order.num_steps(1)
    steps = [order.batch(step) for step in range(1, order.num_steps(3) + 1)]
    assert sorted(i for step in steps[:per_epoch] for i in step) == list(range(0, 16, 2))
    sums = [sum(lengths[i // 2] for i in step) for step in steps]
    assert all(total <= 10 or len(step) == 1 for total, step in zip(sums, steps, strict=True))
    for step, later in itertools.pairwise(steps[:per_epoch]):
        assert sum(lengths[i // 2] for i in [*step, later[0]]) > 10, "one more would have fit"
    assert order.epoch(per_epoch) == 1.0
    assert order.batch(per_epoch + 1) == steps[per_epoch]


def test_what_is_no_message_is_left_to_the_checks() -> None:
    assert len(to_blocks(SHORT, None)) == 3
    for wrong in (None, "x", [3], [["role"]]):
        with pytest.raises(ValueError, match="messages"):
            renderer().render_for_training(wrong)


def test_workers_make_the_batches_of_a_thread() -> None:
    dataset = Mixture(weights={"arithmetic": 1.0, "small_talk": 1.0}, seed=4)
    shape = preset("inkling-nano")
    tokenizer = Tokenizer()
    vocabulary = vocabulary_of(shape.kept_vocabulary, tokenizer.token_bytes)
    maker = SampleMaker(tokenizer, shape, vocabulary, 400)
    config = SftConfig(dataset=dataset, steps=4, batch_size=5)
    workers = DataWorkers(2, dataset, shape, 400, skip_bad=False)
    found: list[list[Any]] = []
    for batches in (
        Batches(config, dataset, maker, None),
        Batches(config, dataset, maker, None, workers),
    ):
        made = [batches.batch(step) for step in (1, 2, 4, 3)]
        batches.close()
        found.append(
            [
                [(list(s.tokens), s.inputs["weights"].tolist()) for s in batch.samples]
                for batch in made
            ]
        )
    assert found[0] == found[1]
    assert [len(batch) for batch in found[0]] == [5] * 4


class Threads(Mixture):
    """Says how many threads the process that renders it computes on."""

    def conversation(self, index: int) -> Conversation:
        return Conversation(text=f"{torch.get_num_threads()} threads")


def test_each_worker_computes_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else every worker's libraries spin on every core, and the trainer waits for one."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    tokenizer = Tokenizer()
    workers = DataWorkers(2, Threads(), preset("inkling-nano"), 400, skip_bad=False)
    made = [part.result() for part in workers.submit([0, 1])]
    workers.close()
    texts = {tokenizer.decode(list(s.tokens)) for part in made for s in part.samples}
    assert len(texts) == 1 and texts.pop().count("1 thread") == 1
    assert os.environ["OMP_NUM_THREADS"] == "2"


def test_a_data_set_that_cannot_be_sent_is_named() -> None:
    class Local(Mixture):
        pass

    with pytest.raises(ValueError, match="data_workers = 2: the data set cannot be sent"):
        DataWorkers(2, Local(), preset("inkling-nano"), 400, skip_bad=False)
