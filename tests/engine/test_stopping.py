"""Stop ids, stop strings and detokenisation, against a definition over the whole text."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from suzuri.engine.sampling_params import SamplingParams
from suzuri.engine.stopping import Detokenizer, Pushed, Stop, StopChecker
from suzuri.model.config import FIRST_SPECIAL
from suzuri.processing.tokenizer import SPECIAL_NAMES, Tokenizer

EOS = 200006
PIECES = [*"abcxé日", "ab", "ba", "abc", "cab", " end", "é日", "aé", "😀"]
TABLE = {
    **{id: bytes([id]) for id in range(256)},
    **{256 + place: piece.encode() for place, piece in enumerate(PIECES)},
    **{id: f"<|{name}|>".encode() for id, name in SPECIAL_NAMES.items()},
}


def token_bytes(id: int) -> bytes:
    return TABLE[id]


def ids_of(text: str) -> list[int]:
    """One id per byte."""
    return list(text.encode())


def checker(*, eos: int | None = EOS, limit: int | None = None, **fields: Any) -> StopChecker:
    params = SamplingParams(max_tokens=None, **fields)
    return StopChecker(params, token_bytes, eos_token_id=eos, limit=limit)


Result = tuple[str, Stop | None, int]


def play(check: StopChecker, ids: Sequence[int], cuts: Sequence[int]) -> tuple[Result, list[str]]:
    """(the whole text, the stop, the number of ids), and the text shown after each push."""
    text, stop, taken = "", None, 0
    shown: list[str] = []
    for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True):
        pushed = check.push(ids[start:end])
        text, taken = text + pushed.text, taken + pushed.num_ids
        shown.append(text)
        if pushed.stop is not None:
            assert stop is None, "a second end"
            stop = pushed.stop
    return (text + check.finish(), stop, taken), shown


def by_definition(ids: Sequence[int], limit: int | None, fields: dict[str, Any]) -> Result:
    """Token by token over the text decoded anew each time: quadratic and plain."""
    params = SamplingParams(max_tokens=None, **fields)
    skip, include = params.skip_special_tokens, params.include_stop_str_in_output
    data = b""

    def tail(given: bytes) -> str:
        return given.decode("utf-8", errors="replace")

    def settled(given: bytes) -> str:
        """Without an unfinished character at the end."""
        for cut in range(4):
            end = given[len(given) - cut :] if cut else b""
            try:
                end.decode()
            except UnicodeDecodeError as error:
                if error.reason == "unexpected end of data" and error.start == 0:
                    return tail(given[: len(given) - cut])
        return tail(given)

    for count, id in enumerate(ids, 1):
        may_stop = count > params.min_tokens
        own = b"" if skip and id >= FIRST_SPECIAL else token_bytes(id)
        is_eos = id == EOS and not params.ignore_eos
        if may_stop and (id in params.stop_token_ids or is_eos):
            matched = id if id in params.stop_token_ids else None
            return tail(data + own if include else data), Stop("stop", matched), count
        before = len(settled(data))
        data += own
        text = settled(data)
        if may_stop:
            for end in range(before + 1, len(text) + 1):
                ending = [s for s in params.stop_strings if text[:end].endswith(s)]
                if ending:
                    found = max(ending, key=len)
                    kept = text[:end] if include else text[: end - len(found)]
                    return kept, Stop("stop", found), count
        if count == limit:
            return tail(data), Stop("length"), count
    return tail(data), None, len(ids)


IDS = st.one_of(
    st.sampled_from([*range(256, 256 + len(PIECES)), *b"abcx", *"é日😀".encode()]),
    st.integers(0, 255),
    st.sampled_from([EOS, 200010, 200000]),
)
STOPS = st.lists(
    st.one_of(
        st.sampled_from(["ab", "abc", "b", "cab", "aé", "日", "é日a", "x end", "\ufffd", "<|e"]),
        st.text("abc", min_size=1, max_size=5),
    ),
    max_size=4,
    unique=True,
)
FIELDS = st.fixed_dictionaries(
    {"stop": STOPS},
    optional={
        "stop_token_ids": st.sampled_from([[97], [200010], [258, 99]]),
        "include_stop_str_in_output": st.booleans(),
        "skip_special_tokens": st.booleans(),
        "ignore_eos": st.booleans(),
        "min_tokens": st.integers(0, 6),
    },
)


@settings(max_examples=600, deadline=None)
@given(
    ids=st.lists(IDS, max_size=14),
    fields=FIELDS,
    limit=st.none() | st.integers(1, 12),
    data=st.data(),
)
def test_any_stream_cut_anywhere(ids: list[int], fields: dict[str, Any], limit: int, data: Any):
    """The result is that of the definition, however the ids come; what was shown stays."""
    expected = by_definition(ids, limit, fields)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=6)))
    for places in (cuts, range(1, len(ids)), []):
        result, shown = play(checker(limit=limit, **fields), ids, places)
        assert result == expected, (places, fields)
        for text in shown:
            assert expected[0].startswith(text)


@pytest.mark.parametrize("include", [False, True])
def test_every_cut_of_a_stream_with_a_stop_string(include: bool):
    """All 2^9 ways to cut ten ids whose stop string begins inside one token, runs over the bytes
    of two characters and ends inside another token."""
    ids = [99, 262, *ids_of("é日"), 268, 99, 120]
    fields = {"stop": ["é日x", "日aéc", "bé日a"], "include_stop_str_in_output": include}
    expected = by_definition(ids, None, fields)
    assert expected == ("cabé日a" if include else "ca", Stop("stop", "bé日a"), 8)
    for ways in range(1 << (len(ids) - 1)):
        cuts = [place for place in range(1, len(ids)) if ways >> (place - 1) & 1]
        assert play(checker(**fields), ids, cuts)[0] == expected


@settings(max_examples=200, deadline=None)
@given(data=st.lists(st.binary(max_size=4), max_size=8))
@example(data=[b"\xe6\x97", b"\xa5\xf0\x9f", b"\x98", b"a"])
def test_all_pieces_are_the_decoding_of_all_bytes(data: list[bytes]):
    detokenizer = Detokenizer(lambda id: data[id])
    text = "".join(map(detokenizer.push, range(len(data)))) + detokenizer.flush()
    assert text == b"".join(data).decode("utf-8", errors="replace")


def test_an_unfinished_character_is_held_back_and_given_up_at_the_end():
    check = checker()
    assert check.push(ids_of("日")[:2]) == Pushed("", None, 2)
    assert check.push(ids_of("日")[2:]) == Pushed("日", None, 1)
    assert check.push(ids_of("😀")[:3]) == Pushed("", None, 3)
    assert check.finish() == "\ufffd"
    assert check.finish() == ""
    at_stop = checker()
    assert at_stop.push([*ids_of("😀")[:3], EOS]) == Pushed("\ufffd", Stop("stop"), 4)


def test_special_tokens_within_a_character():
    """Left out, they do not break it; spelled, they do."""
    ids = [*ids_of("é")[:1], 200010, *ids_of("é")[1:]]
    assert checker().push(ids).text == "é"
    spelled = checker(skip_special_tokens=False).push(ids).text
    assert spelled == "\ufffd<|end_message|>\ufffd"


def test_with_the_real_tokenizer():
    tokenizer = Tokenizer()
    text = "Hello, 世界! 👋🏽 naïve façade — done."
    ids = tokenizer.encode(text)
    check = StopChecker(SamplingParams(stop="done"), tokenizer.token_bytes, eos_token_id=EOS)
    pieces = [check.push([id]) for id in ids]
    assert "".join(piece.text for piece in pieces) == text.removesuffix("done.")
    assert [piece.stop for piece in pieces if piece.stop] == [Stop("stop", "done")]
    assert sum(piece.num_ids for piece in pieces) <= len(ids)


def test_a_partial_stop_string_is_never_shown_and_comes_out_if_it_was_none():
    check = checker(stop=["STOP", "TOPPLE"])
    assert check.push(ids_of("go ST")).text == "go "
    assert check.push(ids_of("O")).text == ""
    assert check.push(ids_of("x")).text == "STOx"
    assert check.push(ids_of("TOPPL")).text == ""
    assert check.push(ids_of("S")).text == "TOPPL"
    assert check.push(ids_of("TOP!")) == Pushed("", Stop("stop", "STOP"), 3)
    assert check.push([5, 6]) == Pushed("", None, 0)


def test_held_back_text_comes_out_at_each_kind_of_end():
    assert checker(stop="abc").push([*b"xab", EOS]) == Pushed("xab", Stop("stop"), 4)
    assert checker(stop="abc", limit=3).push(b"xab") == Pushed("xab", Stop("length"), 3)
    aborted = checker(stop="abc")
    assert aborted.push(b"xab").text == "x"
    assert aborted.finish() == "ab"
    assert aborted.push(b"c") == Pushed("", None, 0)


def test_the_stop_that_is_complete_first_wins():
    assert checker(stop=["abcd", "bc"]).push(b"xabcd") == Pushed("xa", Stop("stop", "bc"), 4)
    assert checker(stop=["bc", "abc"]).push(b"xabcd") == Pushed("x", Stop("stop", "abc"), 4)
    tokens = [262, EOS]  # "b" "a" in one token, then the end of turn
    assert checker(stop=["a"]).push([263, EOS]) == Pushed("b", Stop("stop", "a"), 1)
    assert checker(stop=["z"]).push(tokens).stop == Stop("stop")
    last = checker(stop=["c"], limit=2).push(b"bc")
    assert last == Pushed("b", Stop("stop", "c"), 2)


def test_stop_ids():
    assert checker(stop_token_ids=[98]).push(b"abc") == Pushed("a", Stop("stop", 98), 2)
    both = checker(stop_token_ids=[EOS]).push([97, EOS])
    assert both == Pushed("a", Stop("stop", EOS), 2)
    assert checker(ignore_eos=True).push([97, EOS, 98]) == Pushed("ab", None, 3)
    assert checker(eos=None).push([97, EOS, 98]) == Pushed("ab", None, 3)
    shown = checker(stop_token_ids=[98], include_stop_str_in_output=True).push(b"abc")
    assert shown == Pushed("ab", Stop("stop", 98), 2)
    spelled = {"include_stop_str_in_output": True, "skip_special_tokens": False}
    assert checker(**spelled).push([97, EOS]).text == "a<|content_model_end_sampling|>"
    assert checker(include_stop_str_in_output=True).push([97, EOS]).text == "a"


def test_min_tokens_come_before_any_stop():
    fields = {"min_tokens": 3, "stop_token_ids": [98], "stop": ["c", "dd"]}
    assert checker(**fields).push([98, 99, EOS, 98]) == Pushed("bc", Stop("stop", 98), 4)
    assert checker(**fields).push([97, 97, 97, 99]) == Pushed("aaa", Stop("stop", "c"), 4)
    # A string may begin among the first tokens.
    assert checker(**fields).push(b"aaddd") == Pushed("aa", Stop("stop", "dd"), 4)
    # One that was complete there is not held back.
    suppressed = checker(**fields)
    assert suppressed.push(b"dd").text == "d"
    assert suppressed.push(b"a").text == "da"


def test_without_text():
    params = SamplingParams(detokenize=False, stop_token_ids=[98])
    check = StopChecker(params, None, eos_token_id=EOS)
    assert check.push(b"aab") == Pushed("", Stop("stop", 98), 3)
    with pytest.raises(ValueError, match="detokenize = True: needs token_bytes"):
        StopChecker(SamplingParams(), None, eos_token_id=EOS)


def test_the_work_of_a_push_does_not_grow_with_the_output():
    """Table look-ups and characters looked at, for an id at the start and after 20,000; with a stop
    string of 5,000 characters that is nearly complete all the time."""
    looked_up: list[int] = []

    def counted(id: int) -> bytes:
        looked_up.append(id)
        return token_bytes(id)

    params = SamplingParams(stop=["a" * 5000 + "b", "ac"], max_tokens=None)
    check = StopChecker(params, counted, eos_token_id=EOS)
    text = "".join(check.push([97]).text for _ in range(20_000))
    assert len(text) == 15_000
    assert len(looked_up) == 20_000
    assert check.push([99]) == Pushed("a" * 4999, Stop("stop", "ac"), 1)
    assert len(looked_up) == 20_001
