"""What a model writes becomes thoughts, text and calls in order; and what becomes of faults."""

import json

import pytest

from suzuri.processing.chat_output import ChatOutputParser, Piece, TextBlock, ToolCall, collect
from suzuri.processing.tokenizer import SPECIAL_IDS, SPECIAL_NAMES
from tests.processing.turns import (
    TOKENIZER,
    call,
    ids,
    one_byte_each,
    parse,
    parser,
    read,
)

MARKERS = [f"<|{name}|>" for name in SPECIAL_NAMES.values()]


def text(text: str) -> TextBlock:
    return TextBlock(kind="content", text=text)


def thought(text: str) -> TextBlock:
    return TextBlock(kind="reasoning", text=text)


def tool(name: str, arguments: str, complete: bool = True) -> ToolCall:
    return ToolCall(name=name, arguments=arguments, complete=complete)


def test_blocks_keep_their_order_and_calls_their_letters() -> None:
    written = (
        "[TH]hm[E][M][TX]a[E][M]"
        'f[TJ]{"name":"f","args":{"z": 1.50e3 , "a":"\\u00e9\\/"}}[E]'
        "[M][TX]b[E][M]" + call("g", {}) + "[S]"
    )
    message = parse(written)
    assert message.blocks == (
        thought("hm"),
        text("a"),
        tool("f", '{"z": 1.50e3 , "a":"\\u00e9\\/"}'),
        text("b"),
        tool("g", "{}"),
    )
    assert (message.reasoning, message.content) == ("hm", "ab")
    assert [call.name for call in message.tool_calls] == ["f", "g"]
    assert parse("[M]" + written) == message


def test_pieces_say_what_they_belong_to() -> None:
    pieces = read([ids("[TH][E][M][TX]a[E][M]" + call("f", {"a": 1}) + "[M][TX]b[E][S]")])
    assert pieces == [
        Piece("reasoning", "", 0),
        Piece("content", "a", 0),
        Piece("tool_start", index=0, name="f"),
        Piece("tool_arguments", '{"a":1}', 0),
        Piece("tool_end", index=0),
        Piece("content", "b", 1),
    ]


@pytest.mark.parametrize("before", ["", "[M]", "[TH]t[E][M]"])
def test_p01_a_turn_may_open_with_a_call(before: str) -> None:
    message = parse(before + call("f", {"q": "x"}) + "[S]")
    assert message.tool_calls == (tool("f", '{"q":"x"}'),)
    assert message.content is None
    assert message.reasoning == ("t" if "TH" in before else None)


def test_p03_text_after_a_call_and_a_call_cut_at_every_byte() -> None:
    assert parse("[TX]a[E][M]" + call("f", {}) + "[M][TX]b[E][S]").blocks == (
        text("a"),
        tool("f", "{}"),
        text("b"),
    )
    body = '{"name":"f","args":{"a":[1,"}"]}}'
    begins = body.index('{"a"')
    for length in range(len(body) + 1):
        cut = [*ids("[TX]a[E][M]f[TJ]"), *one_byte_each(body[:length])]
        made = parser()
        broken = collect([*made.push(cut), *made.finish()])
        assert made.cut == "call"
        assert broken.content == "a"
        if length <= begins:
            assert (broken.tool_calls, made.unfinished) == ((), body[:length])
        else:
            arguments = body[begins:length].removesuffix("}" if length == len(body) else "")
            complete = length >= len(body) - 1
            assert broken.tool_calls == (tool("f", arguments, complete),)
        # The same, ended by the model: what has not become a call is text.
        ended = parse([*cut, *ids("[E][M][TX]b[E][S]")])
        assert ended.tool_calls == broken.tool_calls
        assert ended.content == "a" + body[: length if length <= begins else 0] + "b"


@pytest.mark.parametrize("end", ["<", "<|", "<|content", "<|end_message|>", "<|message_user|>"])
def test_p05_text_may_end_like_a_marker_or_be_one(end: str) -> None:
    """Markers are ids; spelled in ordinary tokens they are text, in every field."""
    for close in ("[E][S]", "[S]", ""):
        assert parse([*ids(f"[TX]a {end}"), *ids(close)]).content == f"a {end}"
        assert parse([*ids(f"[TH]a {end}"), *ids(close)]).reasoning == f"a {end}"
    assert parse(call("f", {"a": end})).tool_calls == (
        tool("f", json.dumps({"a": end}).replace(": ", ":")),
    )


def test_p08_a_cut_keeps_blocks_apart() -> None:
    """At every token: fields are beginnings of the whole ones, and finish says what is open."""
    given = ids("[TH]so it is[E][M][TX]an answer[E][M]" + call("get_w", {"city": "SF"}) + "[S]")
    whole = collect(read([given]))
    states: list[str | None] = []
    for length in range(len(given)):
        made = parser()
        message = collect([*made.push(given[:length]), *made.finish()])
        assert (whole.reasoning or "").startswith(message.reasoning or "")
        assert (whole.content or "").startswith(message.content or "")
        for cut, full in zip(message.tool_calls, whole.tool_calls, strict=False):
            assert cut.name == full.name and full.arguments.startswith(cut.arguments)
            assert cut.complete == (cut.arguments == full.arguments)
        assert not made.ended
        if not states or states[-1] != made.cut:
            states.append(made.cut)
    assert states == [None, "reasoning", None, "content", None, "header", "call", None]


@pytest.mark.parametrize(
    "args",
    [
        {"c": 'a } b { " \\ '},
        {"a": "<|end_message|>", "b": ["]", "[", {"{": "}"}]},
        {"\\": '\\"', "": None},
        {"deep": json.loads("[" * 100 + "]" * 100)},
    ],
)
def test_p09_brackets_and_markers_within_strings(args: dict[str, object]) -> None:
    (found,) = parse(call("f", args)).tool_calls
    assert json.loads(found.arguments) == args
    assert found.complete


@pytest.mark.parametrize(
    ("body", "found"),
    [
        ('{"name":"f","args":{}}', ("f", "{}")),
        ('{"name":"f"}', ("f", "{}")),
        ('{"name":"f","args":null}', ("f", "{}")),
        (' { "name" : "f" , "args" : { } } ', ("f", "{ }")),
        ('{"args":{"a":1},"name":"f"}', ("f", '{"a":1}')),
        ('{"args":{"a":1}}', ("f", '{"a":1}')),
        ('{"name":"g","args":{}}', ("g", "{}")),
        ('{"name":"\\u0066","args":{}}', ("f", "{}")),
        ('{"name":"f","args":{"a":&quot;}}', ("f", '{"a":&quot;}')),
        ('{"name":"f\\\\","args":{}}', ("f\\", "{}")),
        ('{"name":"\\"f\\"","args":{}}', ('"f"', "{}")),
    ],
)
def test_p11_empty_missing_and_misplaced_arguments(body: str, found: tuple[str, str]) -> None:
    message = parse(f"f[TJ]{body}[E][S]")
    assert message.blocks == (tool(*found),)


NO_CALLS = [
    "",
    "hello",
    "[1]",
    "{}",
    "{",
    '{"name"}',
    '{"name":3,"args":{}}',
    '{"name":"","args":{}}',
    '{"name":"a\\nb","args":{}}',
    '{"name":"\\ud800","args":{}}',
    '{"name":"f","args":[1]}',
    '{"name":"f","args":"{}"}',
    '{"name":"f","args":nil}',
    '{"name":"f","arguments":{}}',
    '{"name":"f","x":1,"args":{}}',
    '{"name":"f","name":"g","args":{}}',
    '{"name":"f","args":',
    '{"name":"' + "f" * 5000,
    "{" + " " * 5000,
]


@pytest.mark.parametrize("body", NO_CALLS, ids=lambda body: body[:40])
def test_p03_a_body_that_is_no_call_is_text(body: str) -> None:
    message = parse(f"f[TJ]{body}[E][M][TX]b[E][S]")
    assert message.tool_calls == ()
    assert message.content == body + "b"


def test_a_body_that_goes_on_without_arguments_is_shown_before_it_ends() -> None:
    for body in ("{" + " " * 5000, '{"name":"' + "f" * 5000, '{"args":n' + "u" * 5000):
        made = parser()
        (piece,) = made.push(ids(f"f[TJ]{body}"))
        assert (piece.kind, piece.text) == ("content", body)


def test_a_call_without_a_name_anywhere_is_text() -> None:
    assert parse('[TJ]{"args":{"a":1}}[E]').blocks == (text('{"args":{"a":1}}'),)
    assert parse('[TJ]{"args":{"a":1},"name":"g"}[E]').blocks == (tool("g", '{"a":1}'),)


@pytest.mark.parametrize(
    ("body", "blocks"),
    [
        ('{"name":"f","args":{"a":1},"x":2}', (tool("f", '{"a":1}'), text(',"x":2}'))),
        ('{"name":"f","args":{}} more', (tool("f", "{}"), text("} more"))),
        ('{"name":"f","args":{},"args":{}}', (tool("f", "{}"), text(',"args":{}}'))),
        ('{"name":"f","args":{}', (tool("f", "{}"),)),
        ('{"name":"f","args":{},', (tool("f", "{}"), text(","))),
        ('{"name":"f","args":{"a":]}}', (tool("f", '{"a":]}}', False),)),
        ('{"name":"f","args":{"a":"', (tool("f", '{"a":"', False),)),
    ],
)
def test_p03_what_follows_arguments_is_kept(
    body: str, blocks: tuple[TextBlock | ToolCall, ...]
) -> None:
    assert parse(f"f[TJ]{body}[E][S]").blocks == blocks


@pytest.mark.parametrize(
    "written",
    [call("f", {"a": 1}), "f[content_invoke_tool_text]ls -l[E]", "[TX]x[E][M]" + call("g", {})],
)
def test_p12_without_tools_a_call_is_text(written: str) -> None:
    message = parse(written + "[S]", tools=False)
    assert message.tool_calls == ()
    body = written.replace("[TX]", "").replace("[E][M]", "").replace("[E]", "")
    assert message.content == body.replace("f[TJ]", "").replace("g[TJ]", "").replace(
        "f[content_invoke_tool_text]", ""
    )


@pytest.mark.parametrize("spell", [TOKENIZER.encode, one_byte_each], ids=["bpe", "bytes"])
@pytest.mark.parametrize("word", ["👨‍👩‍👧‍👦", "नमस्ते", "\u0301", "日本語", "é\u0000\x7f"])
def test_p15_characters_cut_into_tokens(spell, word: str) -> None:
    given = ids(f"[TH]{word}[E][M][TX]{word}[E][M]" + call("f", {"a": word + "x"}), spell)
    made = parser()
    pieces = [piece for id in given for piece in made.push([id])]
    assert not any("\ufffd" in piece.text for piece in pieces)
    message = collect([*pieces, *made.finish()])
    assert (message.reasoning, message.content) == (word, word)
    assert json.loads(message.tool_calls[0].arguments) == {"a": word + "x"}


def test_p15_bytes_that_are_no_character() -> None:
    half = one_byte_each("日")[:2]
    for end in ([], ids("[E]"), ids("[S]"), ids("[E][M][TX]") + one_byte_each("日")[2:]):
        message = parse([*ids("[TX]a"), *half, *end])
        assert message.content == "a\ufffd" + ("\ufffd" if len(end) > 1 else "")
    assert parse([*half, *ids("[TX]a[E]")]).content == "a"  # a broken name before text


@pytest.mark.parametrize(
    ("written", "blocks", "problem"),
    [
        ("[TX]a[TH]b[E]", (text("a"), thought("b")), "a block without its end_message"),
        ("[TX]a[TX]b[E]", (text("a"), text("b")), "a block without its end_message"),
        ("[TX]a[M][TX]b[E]", (text("a"), text("b")), "a block without its end_message"),
        ("[TX]a[S]", (text("a"),), "a block without its end_message"),
        ("[TX]a[E]stray[E]", (text("a"), text("stray")), "text outside of blocks"),
        ("stray[M][TX]a[E]", (text("stray"), text("a")), "text outside of blocks"),
        ("two\nlines[E]", (text("two\nlines"),), "text outside of blocks"),
        (" Hello", (text(" Hello"),), "text outside of blocks"),
        ("x" * 300, (text("x" * 300),), "text outside of blocks"),
        ("bob[TX]a[E]", (text("a"),), "a name before text or thoughts"),
        ("[TX]a[audio]b[E]", (text("ab"),), "a special token that means nothing here"),
        ("[endoftext][TX]a[E]", (text("a"),), "a special token that means nothing here"),
        ("f[TJ]oops[E]", (text("oops"),), "a call that is none"),
        ('f[TJ]{"args":{"a":[E]', (tool("f", '{"a":', False),), "arguments that break off"),
        ("[TX]a[E][S][TX]b[E][S][S]", (text("a"), text("b")), None),
        ("[message_user][TX]a[E]", (text("a"),), None),
        ("[content_xml]a[E]", (text("a"),), None),
        ("[content_tool_error]a[E]", (text("a"),), None),
        ("[E][E][M][M][S]", (), None),
        ("[TX][E][TH][E]", (text(""), thought("")), None),
    ],
)
def test_malformed_turns_lose_nothing(
    written: str, blocks: tuple[TextBlock | ToolCall, ...], problem: str | None
) -> None:
    made = parser()
    message = collect([*made.push(ids(written)), *made.finish()])
    assert message.blocks == blocks
    assert set(made.problems) == ({problem} if problem else set())


def test_p05_a_name_that_is_cut_off_is_no_text_unless_there_are_no_tools() -> None:
    made = parser()
    assert (made.push(ids("get")), made.finish()) == ([], [])
    assert (made.cut, made.unfinished) == ("header", "get")
    assert made.finish() == []
    assert parse("Hello", tools=False).content == "Hello"


def test_prompts_that_open_a_block() -> None:
    for kind in ("reasoning", "content"):
        made = ChatOutputParser(TOKENIZER.token_bytes, starts_in=kind)
        pieces = [*made.push(ids("a[E][M][TX]b[E][S]")), *made.finish()]
        assert [piece.text for piece in pieces] == ["a", "b"]
        assert pieces[0].kind == kind
        assert made.ended


def test_every_special_id_everywhere_leaves_no_marker() -> None:
    for id in SPECIAL_IDS.values():
        for before in ("", "[TX]a", "[TH]a", "fn", "f[TJ]", 'f[TJ]{"name":"f","args":{"a'):
            made = parser()
            pieces = [*made.push([*ids(before), id, *ids("z[E][S]")]), *made.finish()]
            shown = "".join(piece.text + piece.name for piece in pieces) + made.unfinished
            assert "z" in shown
            assert not any(marker in shown for marker in MARKERS)
