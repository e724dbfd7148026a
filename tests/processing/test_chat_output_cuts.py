"""Streamed or not, however cut: the same pieces. And what the renderer writes is read back."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tml_renderers import v0

from suzuri.model.config import FIRST_SPECIAL, preset
from suzuri.processing.chat import ChatRenderer
from suzuri.processing.chat_output import TextBlock, ToolCall, collect
from suzuri.processing.tokenizer import (
    CONTENT_MODEL_END_SAMPLING,
    END_MESSAGE,
    MESSAGE_USER,
    SPECIAL_NAMES,
)
from suzuri.processing.vocabulary import KeptVocabulary
from tests.processing.turns import (
    BYTES,
    TOKENIZER,
    all_cuts,
    call,
    ids,
    one_byte_each,
    parser,
    read,
)

RENDERER = ChatRenderer(TOKENIZER)
TINY = KeptVocabulary(list(preset("tiny").kept_vocabulary or ()), TOKENIZER.token_bytes)
SPELLINGS = [f"<|{name}|>" for name in SPECIAL_NAMES.values()]

words = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
texts = st.lists(
    st.one_of(words, st.sampled_from([*SPELLINGS[:20], '{"name":"f","args":{', "}", "\\", "🙂"])),
    max_size=4,
).map("".join)
values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**53), 2**53), texts),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
names = st.from_regex(r"[a-zA-Z_][a-zA-Z0-9_.-]{0,20}", fullmatch=True)
blocks = st.one_of(
    st.tuples(st.just("text"), texts),
    st.tuples(st.just("thinking"), texts),
    st.tuples(st.just("call"), names, st.dictionaries(texts, values, max_size=3)),
)


def rendered(block: tuple[Any, ...]) -> list[int]:
    """One block as the renderer writes it, without the end of the turn."""
    message: dict[str, Any] = {"role": "assistant"}
    if block[0] == "call":
        function = {"name": block[1], "arguments": json.dumps(block[2])}
        message["tool_calls"] = [{"type": "function", "function": function}]
    else:
        message["content"] = [{"type": block[0], block[0]: block[1]}]
    found = RENDERER.render([message], add_generation_prompt=False).token_ids
    assert found[-1] == CONTENT_MODEL_END_SAMPLING
    return found[:-1]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(blocks, min_size=1, max_size=6),
    st.booleans(),
    st.booleans(),
    st.lists(st.integers(0, 10_000), max_size=20),
)
def test_what_the_renderer_writes_is_read_back(
    turn: list[tuple[Any, ...]], small: bool, without_header: bool, places: list[int]
) -> None:
    """For blocks in any order, in the full and in a small vocabulary, and cut anywhere."""
    given = [id for block in turn for id in rendered(block)] + [CONTENT_MODEL_END_SAMPLING]
    if small:
        given = TINY.expand(given)
    if without_header:
        given = given[1:]
    cuts = sorted({0, len(given), *(place % len(given) for place in places)})
    pieces = read([given[start:end] for start, end in itertools.pairwise(cuts)])
    assert pieces == read([given])
    made = collect(pieces).blocks
    assert len(made) == len(turn)
    for found, block in zip(made, turn, strict=True):
        if isinstance(found, TextBlock):
            kind = {"content": "text", "reasoning": "thinking"}[found.kind]
            assert (kind, found.text) == block
        else:
            assert ("call", found.name, json.loads(found.arguments)) == block
            assert found.complete
            assert list(json.loads(found.arguments)) == sorted(block[2], key=str.encode)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(
        st.one_of(
            blocks.map(rendered),
            st.lists(st.integers(0, 255).map(lambda byte: BYTES[bytes([byte])]), max_size=6),
            st.lists(st.sampled_from(sorted(SPECIAL_NAMES)), max_size=2),
        ),
        max_size=6,
    ),
    st.booleans(),
)
def test_the_short_way_for_text_reads_what_the_long_one_reads(
    parts: list[list[int]], small: bool
) -> None:
    """Any ids, characters cut and bytes that are none included."""
    given = [id for part in parts for id in part]
    given = TINY.expand(given) if small else given
    quick, slow = parser(), parser()
    for id in given:
        before, text = quick.block, quick.push_text(id)
        found = quick.push([id]) if text is None else None
        expected = slow.push([id])
        if found is None:
            assert id < FIRST_SPECIAL and before == quick.block
            assert [(piece.kind, piece.text) for piece in expected] == [(before, text)] * bool(text)
        else:
            assert found == expected
    assert quick.finish() == slow.finish()
    assert (quick.cut, quick.unfinished, quick.problems) == (
        slow.cut, slow.unfinished, slow.problems,
    )  # fmt: skip
    assert quick.push_text(0) is None, "nothing comes after the end"


@settings(max_examples=100, deadline=None)
@given(
    texts, texts, st.lists(st.tuples(names, st.dictionaries(texts, values, max_size=3)), max_size=3)
)
def test_a_whole_message_is_read_back_as_the_reference_reads_it(
    thought: str, content: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    turn = {
        "role": "assistant",
        "reasoning": thought,
        "content": content,
        "tool_calls": [
            {"type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for name, arguments in calls
        ],
    }
    if not thought and not content and not calls:
        turn["content"] = "x"
    given = RENDERER.render([turn], add_generation_prompt=False).token_ids
    message = collect(read([given]))
    user = [{"role": "user", "content": "x"}]
    _, reference = v0.Renderer(TOKENIZER.native).render_for_completion(_native(user))
    theirs = [str(item.content) for item in reference.parse_tokens(given)]
    assert len(theirs) == len(message.blocks) + 1
    for block, other in zip(message.blocks, theirs, strict=False):
        if isinstance(block, ToolCall):
            assert other.startswith("InvokeTool")
        else:
            assert other.startswith("Text" if block.kind == "content" else "Thinking")
    assert (message.reasoning or "") == thought
    assert (message.content or "") == turn["content"]
    assert [(c.name, json.loads(c.arguments)) for c in message.tool_calls] == calls


def _native(messages: list[dict[str, Any]]) -> list[Any]:
    from tml_renderers import chat

    return [
        chat.Message(chat.Text(m["content"]), chat.Author(chat.AuthorKind.User, None))
        for m in messages
    ]


HEAD = BYTES[b"f"]
EXHAUSTIVE = [
    ids("[TH]h🙂[E][M][TX]a[E][S]"),
    ids("[TX]a[E][M]f[TJ]") + ids('{"name":"f"}') + ids("[E][S]"),
    [HEAD, *ids('[TJ]{"args":{"a":"}"}}[E]')],
    [HEAD, *ids('[TJ]{"name":"f","args":{}'), *ids("[E]x[E]")],
    ids("[TX]") + one_byte_each("日") + ids("[E][M][TH]") + one_byte_each("本")[:2] + ids("[S]"),
    [HEAD, *ids("[TJ]oops {[E][M][TX]b[E]")],
    ids("ab\n[E][TH]c[TX]d[S]e"),
    ids("[M][M][TX]a[audio]b[E][E][S][S]"),
    [HEAD, *ids('[TJ]{"name":"f","args":{"a":]')],
    ids("<|end_message|>[TX]<|"),
]


@pytest.mark.parametrize("given", EXHAUSTIVE, ids=TOKENIZER.decode)
@pytest.mark.parametrize("tools", [True, False])
def test_every_way_to_cut_a_short_output(given: list[int], tools: bool) -> None:
    """All 2^(n-1) cuts of the output and of each of its beginnings, up to 12 tokens."""
    given = given[:12]
    assert len(given) > 6
    for length in range(1, len(given) + 1):
        whole = read([given[:length]], tools)
        for parts in all_cuts(given[:length]):
            assert read(parts, tools) == whole


PIECES_OF_JSON = ['{"', "name", '":"', "f", '","', "args", '":', "{", "}", '"', "\\", "null", " "]
chaos = st.lists(
    st.one_of(
        st.sampled_from(sorted(SPECIAL_NAMES)[:12] + ids("[TH][TX][TJ][E][M][S]") * 3),
        st.integers(0, 255),
        st.sampled_from([id for part in PIECES_OF_JSON for id in ids(part)]),
        st.integers(0, FIRST_SPECIAL - 1),
    ),
    max_size=60,
)


@settings(max_examples=400, deadline=None)
@given(chaos, st.booleans(), st.randoms(use_true_random=False))
def test_whatever_comes_it_never_raises_and_cuts_do_not_matter(
    given: list[int], tools: bool, random: Any
) -> None:
    whole = read([given], tools)
    assert read([[id] for id in given], tools) == whole
    parts: list[list[int]] = [[]]
    for id in given:
        parts[-1].append(id)
        parts += [[]] * random.randrange(2)
        parts[-1] = list(parts[-1])
    assert read(parts, tools) == whole
    message = collect(whole)
    assert sum(piece.kind == "tool_start" for piece in whole) == len(message.tool_calls)
    assert all(call.name and call.arguments for call in message.tool_calls)
    assert tools or not message.tool_calls


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.one_of(st.sampled_from(sorted(SPECIAL_NAMES)), st.just(None)), max_size=40),
    st.booleans(),
)
def test_no_word_is_lost_or_doubled(given: list[int | None], tools: bool) -> None:
    """Numbered words between any markers: each is shown once, in order, but for the names that
    stand before a block."""
    kinds = set(ids("[TH][TX][TJ][content_invoke_tool_text][content_tool_error][content_xml]"))
    kinds |= set(ids("[content_image][content_audio_input]"))
    roles = set(ids("[M][S][E][message_user][message_system][message_tool]"))
    written: list[int] = []
    expected: list[str] = []
    header: list[str] | None = []
    for number, id in enumerate(given):
        if id is None:
            word = f"w{number}."
            written += TOKENIZER.encode(word)
            (expected if header is None else header).append(word)
            continue
        written.append(id)
        if id in kinds:
            header = None
        elif id in roles:
            expected += header or []
            header = []
    expected += header or []
    made = parser(tools)
    pieces = [*made.push(written), *made.finish()]
    assert "".join(p.text for p in pieces) + made.unfinished == "".join(expected)


def test_ids_after_the_end_are_read_on() -> None:
    """With ignore_eos an output goes on after the end of the turn."""
    once = ids("[TX]a[E][S]")
    pieces = read([[*once, END_MESSAGE, MESSAGE_USER, *once, *ids(call("f", {}))]])
    assert collect(pieces).content == "aa"
    assert len(collect(pieces).tool_calls) == 1
