"""Stop strings and stop ids, which the engine looks for before the parser sees the output."""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from suzuri.engine.sampling_params import SamplingParams
from suzuri.engine.stopping import StopChecker
from suzuri.processing.chat_output import ChatMessage, ChatOutputParser, Piece, collect, merged
from suzuri.processing.tokenizer import CONTENT_MODEL_END_SAMPLING
from tests.processing.turns import TOKENIZER, all_cuts, call, ids, one_byte_each, read


def through(parts: list[Any], **params: Any) -> tuple[list[Piece], ChatOutputParser]:
    """The pieces of an output that the engine's StopChecker has looked at, part by part."""
    checker = StopChecker(
        SamplingParams(**params),
        TOKENIZER.token_bytes,
        eos_token_id=CONTENT_MODEL_END_SAMPLING,
    )
    parser = ChatOutputParser(TOKENIZER.token_bytes, stops=True)
    pieces: list[Piece] = []
    for part in parts:
        text, stop, num_ids = checker.push(part)
        pieces += parser.push(part[:num_ids], text)
        if stop is not None:
            break
    return merged([*pieces, *parser.finish(checker.finish())]), parser


def message(written: str, stop: str | list[str], **params: Any) -> ChatMessage:
    given = ids(written)
    whole, _ = through([given], stop=stop, **params)
    for parts in all_cuts(given) if len(given) <= 12 else [[[id] for id in given]]:
        assert through(parts, stop=stop, **params)[0] == whole
    return collect(whole)


def test_a_stop_string_ends_the_block_that_it_is_in() -> None:
    found = message("[TX]one two three four[E][S]", "o thr")
    assert found.content == "one tw"
    assert message("[TX]one two three[E][S]", "absent").content == "one two three"
    assert message("[TH]one two[E][M][TX]x[E][S]", "two").content is None
    assert message("[TX]one two[E]", "two", include_stop_str_in_output=True).content == "one two"


def test_a_stop_string_within_one_token_or_over_several() -> None:
    assert len(TOKENIZER.encode(" extraordinary")) == 1
    assert message("[TX]an extraordinary day[E][S]", "ordin").content == "an extra"
    assert message("[TX]a day in may[E][S]", "y in m").content == "a da"


def test_what_may_become_a_stop_string_is_held_back_but_not_lost() -> None:
    given = ids("[TX]one STO[E][M][TX]x[E][S]")
    pieces, parser = through([[id] for id in given], stop="STOP")
    assert [(p.text, p.index) for p in pieces] == [("one STO", 0), ("x", 1)]
    assert parser.ended
    # Cut off while held back.
    pieces, parser = through([given[:3]], stop="STOP")
    assert collect(pieces).content == "one STO"
    assert parser.cut == "content"


def test_stop_strings_are_looked_for_in_the_text_of_all_blocks_joined() -> None:
    """Markers are no text: none can be a stop string or stand in the way of one."""
    assert message("[TX]a[E][M][TX]b[E][S]", "<|").content == "ab"
    assert message("[TX]a[E][M][TX]b[E][S]", "model").content == "ab"
    found = message("[TX]EN[E][M][TX]D more[E][S]", "END")
    assert found.content == ""
    call_of_f = "[TX]x[E][M]" + call("f", {"a": "stop here"}) + "[S]"
    (cut,) = message(call_of_f, " here").tool_calls
    assert (cut.arguments, cut.complete) == ('{"a":"stop', False)


def test_a_stop_id_shows_no_text() -> None:
    (word,) = TOKENIZER.encode(" two")
    given = ids("[TX]one two three[E][S]")
    assert collect(through([given], stop_token_ids=[word])[0]).content == "one"
    # A marker as a stop id, here the end of a block, does what it says.
    pieces, parser = through([given], stop_token_ids=[ids("[E]")[0]])
    assert collect(pieces).content == "one two three"
    assert parser.cut is None


@pytest.mark.parametrize("min_tokens", [0, 3])
def test_broken_characters_count_as_the_engine_counts_them(min_tokens: int) -> None:
    """Half a character at the end of a block, and a stop string after it."""
    half = one_byte_each("日")
    for split in (1, 2):
        given = [*ids("[TX]a"), *half[:split], *ids("[E][M][TX]"), *half[split:], *ids("b stop c")]
        pieces, _ = through([[id] for id in given], stop=" stop", min_tokens=min_tokens)
        assert pieces == through([given], stop=" stop", min_tokens=min_tokens)[0]
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
    whole, _ = through([given], stop=stops)
    parts: list[list[int]] = []
    while given:
        size = draw.randrange(1, 6)
        parts.append(given[:size])
        given = given[size:]
    assert through(parts, stop=stops)[0] == whole
    given = [id for part in parts for id in part]
    shown = "".join(p.text for p in whole if p.kind in ("reasoning", "content"))
    ends = [place for s in stops if (place := (thought + answer).find(s)) >= 0]
    if ends:
        # The string that is complete first counts, and of those the one that began first.
        joined = thought + answer
        end = min(joined.find(s) + len(s) for s in stops if s in joined)
        begun = min(end - len(s) for s in stops if joined[:end].endswith(s))
        assert shown == joined[:begun]
    elif not any(
        s in thought + answer + 'f{"name":"f","args":{"a":"' + answer + '"}}' for s in stops
    ):
        assert whole == read([given])


@pytest.mark.parametrize("skip", [True, False])
def test_p06_what_the_engine_spells_changes_nothing(skip: bool) -> None:
    """The parser reads ids, so markers in or out of the engine's text are the same to it."""
    given = ids("[TH]hm[E][M][TX]a <|x|>[E][M]" + call("f", {"a": "<"}) + "[S]")
    checker = StopChecker(
        SamplingParams(skip_special_tokens=skip), TOKENIZER.token_bytes, eos_token_id=None
    )
    parser = ChatOutputParser(TOKENIZER.token_bytes)
    pieces = [p for id in given for p in parser.push([id], checker.push([id]).text)]
    assert merged([*pieces, *parser.finish(checker.finish())]) == read([given])
