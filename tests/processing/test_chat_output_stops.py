"""Stop strings and stop ids in a chat: the engine and the reader of its ids find the same end."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from suzuri.engine.chat_stops import ChatStopChecker, StoppedTurn
from suzuri.engine.sampling_params import SamplingParams
from suzuri.engine.stopping import Stop, StopChecker
from suzuri.processing.chat_output import ChatMessage, ChatOutputParser, Piece, collect, merged
from suzuri.processing.tokenizer import CONTENT_MODEL_END_SAMPLING
from tests.processing.turns import TOKENIZER, all_cuts, call, ids, one_byte_each, read


def through(parts: Sequence[Sequence[int]], *, tools: bool = True, **params: Any) -> list[Piece]:
    """The pieces of an output that comes part by part, once engine and reader agree on its end."""
    asked = SamplingParams(**params)
    checker = ChatStopChecker(
        asked, TOKENIZER.token_bytes, tools=tools, eos_token_id=CONTENT_MODEL_END_SAMPLING
    )
    turn = StoppedTurn(asked, TOKENIZER.token_bytes, tools=tools)
    pieces: list[Piece] = []
    for part in parts:
        text, stop, num_ids = checker.push(part)
        assert text == ""
        pieces += turn.push(part[:num_ids])
        assert turn.found == (stop.matched if stop is not None else None)
        if stop is not None:
            break
    checker.finish()
    return merged([*pieces, *turn.finish()])


def message(written: str, stop: str | list[str], **params: Any) -> ChatMessage:
    given = ids(written)
    whole = through([given], stop=stop, **params)
    for parts in all_cuts(given) if len(given) <= 12 else [[[id] for id in given]]:
        assert through(parts, stop=stop, **params) == whole
    return collect(whole)


def test_a_stop_string_ends_the_answer() -> None:
    assert message("[TX]one two three four[E][S]", "o thr").content == "one tw"
    assert message("[TX]one two three[E][S]", "absent").content == "one two three"
    assert message("[TX]one two[E]", "two", include_stop_str_in_output=True).content == "one two"
    assert message("[TX]two[E]", "two").content == ""
    assert message("[TX]a END b[E]", ["absent", "END", "ND"]).content == "a "


def test_thoughts_names_and_calls_are_not_searched() -> None:
    """A model that thinks aloud repeats what it was asked, and what ends an answer."""
    found = message("[TH]Question: one[E][M][TX]two Question: three[E][S]", "Question:")
    assert (found.reasoning, found.content) == ("Question: one", "two ")
    written = "[TX]x[E][M]" + call("stop", {"a": "stop here"}) + "[M][TX]y stop z[E][S]"
    found = message(written, ["stop", "}"])
    assert [(c.name, c.arguments, c.complete) for c in found.tool_calls] == [
        ("stop", '{"a":"stop here"}', True)
    ]
    assert found.content == "xy "


def test_what_is_shown_as_text_is_searched() -> None:
    """A call that is none, a call without tools, text without its frame."""
    given = ids("[M]f[TJ]" + '{"nothing": "a stop"}' + "[E][S]")
    assert collect(through([given], stop="stop")).content == '{"nothing": "a '
    given = ids("[TX]x[E][M]" + call("f", {"a": "stop here"}) + "[S]")
    assert (
        collect(through([given], tools=False, stop="stop")).content == 'x{"name":"f","args":{"a":"'
    )
    given = TOKENIZER.encode(" no frame, and a stop here")
    assert collect(through([given], stop="stop")).content == " no frame, and a "


def test_a_stop_string_within_one_token_or_over_several() -> None:
    assert len(TOKENIZER.encode(" extraordinary")) == 1
    assert message("[TX]an extraordinary day[E][S]", "ordin").content == "an extra"
    assert message("[TX]a day in may[E][S]", "y in m").content == "a da"


def test_what_may_become_a_stop_string_is_held_back_but_not_lost() -> None:
    given = ids("[TX]one STO[E][M][TX]x[E][S]")
    turn = StoppedTurn(SamplingParams(stop="STOP"), TOKENIZER.token_bytes, tools=True)
    came = [[piece.text for piece in turn.push([id])] for id in given]
    end = given.index(ids("[E]")[0])
    assert "".join(text for texts in came[:end] for text in texts) == "one "
    assert came[end] == ["STO"], "its block is over"
    pieces = through([[id] for id in given], stop="STOP")
    assert [(p.text, p.index) for p in pieces] == [("one STO", 0), ("x", 1)]
    # Cut off while held back.
    assert collect(through([given[:3]], stop="STOP")).content == "one STO"


def test_a_stop_string_is_looked_for_within_one_block() -> None:
    """Markers are no text: none can be a stop string."""
    assert message("[TX]a[E][M][TX]b[E][S]", "<|").content == "ab"
    assert message("[TX]a[E][M][TX]b[E][S]", "model").content == "ab"
    assert message("[TX]EN[E][M][TX]D more[E][S]", "END").content == "END more"


def test_min_tokens_and_limits() -> None:
    given = ids("[TX]a stop b stop c[E][S]")
    assert collect(through([given], stop=" stop", min_tokens=4)).content == "a stop b"
    checker = ChatStopChecker(
        SamplingParams(stop=" stop"),
        TOKENIZER.token_bytes,
        tools=True,
        eos_token_id=None,
        limit=3,
    )
    assert checker.push(given).stop == Stop("stop", " stop"), "a stop at the limit comes first"
    checker = ChatStopChecker(
        SamplingParams(stop="absent"), TOKENIZER.token_bytes, tools=True, eos_token_id=None, limit=3
    )
    assert checker.push(given).stop == Stop("length")


def test_stop_ids_act_beside_stop_strings() -> None:
    (word,) = TOKENIZER.encode(" two")
    checker = ChatStopChecker(
        SamplingParams(stop="three", stop_token_ids=[word]),
        TOKENIZER.token_bytes,
        tools=True,
        eos_token_id=None,
    )
    assert checker.push(ids("[TX]one two three[E][S]")) == ("", Stop("stop", word), 3)


@pytest.mark.parametrize("min_tokens", [0, 3])
def test_broken_characters(min_tokens: int) -> None:
    """Half a character at the end of a block, and a stop string after it."""
    half = one_byte_each("日")
    for split in (1, 2):
        given = [*ids("[TX]a"), *half[:split], *ids("[E][M][TX]"), *half[split:], *ids("b stop c")]
        pieces = through([[id] for id in given], stop=" stop", min_tokens=min_tokens)
        assert pieces == through([given], stop=" stop", min_tokens=min_tokens)
        first, second = collect(pieces).blocks
        assert getattr(first, "text", None) == "a\ufffd"
        assert getattr(second, "text", "").strip("\ufffd") == "b"


alphabet = st.text("ab <|🙂日}\n", max_size=30)


@settings(max_examples=200, deadline=None)
@given(
    alphabet,
    alphabet,
    st.lists(st.text("ab <🙂日}", min_size=1, max_size=3), min_size=1, max_size=3, unique=True),
    st.integers(0, 2**32),
)
def test_stop_strings_at_any_cut(thought: str, answer: str, stops: list[str], seed: int) -> None:
    draw = random.Random(seed)
    given = [*ids("[TH]"), *TOKENIZER.encode(thought), *ids("[E][M][TX]")]
    given += [*one_byte_each(answer), *ids("[E][M]" + call("f", {"a": answer}) + "[S]")]
    whole = through([given], stop=stops)
    parts: list[list[int]] = []
    left = given
    while left:
        size = draw.randrange(1, 6)
        parts.append(left[:size])
        left = left[size:]
    assert through(parts, stop=stops) == whole
    found = collect(whole)
    assert found.reasoning == thought
    if any(stop in answer for stop in stops):
        # The string that is complete first counts, and of those the one that began first.
        end = min(answer.find(s) + len(s) for s in stops if s in answer)
        begun = min(end - len(s) for s in stops if answer[:end].endswith(s))
        assert found.content == answer[:begun]
        assert not found.tool_calls
    else:
        assert whole == read([given])


@pytest.mark.parametrize("skip", [True, False])
def test_p06_what_the_engine_spells_changes_nothing(skip: bool) -> None:
    """The parser reads ids, so markers in or out of the engine's text are the same to it."""
    given = ids("[TH]hm[E][M][TX]a <|x|>[E][M]" + call("f", {"a": "<"}) + "[S]")
    checker = StopChecker(
        SamplingParams(skip_special_tokens=skip), TOKENIZER.token_bytes, eos_token_id=None
    )
    parser = ChatOutputParser(TOKENIZER.token_bytes)
    pieces: list[Piece] = []
    for id in given:
        checker.push([id])
        pieces += parser.push([id])
    assert merged([*pieces, *parser.finish()]) == read([given])
