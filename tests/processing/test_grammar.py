"""Forms of outputs: which rows may be drawn, and that whatever is drawn then fits."""

import dataclasses
import json
import random
import re
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from suzuri.model.config import FIRST_SPECIAL, preset
from suzuri.processing.grammar import Grammar, GrammarCompiler, Matcher, allowed_rows
from suzuri.processing.grammar_request import GrammarSpec, chat_grammar, text_grammar
from suzuri.processing.tokenizer import CONTENT_MODEL_END_SAMPLING
from suzuri.processing.vocabulary import FullVocabulary, KeptVocabulary, Vocabulary
from tests.processing.turns import BYTES, TOKENIZER, call, ids, parse

TINY = KeptVocabulary(list(preset("tiny").kept_vocabulary or ()), TOKENIZER.token_bytes)


@dataclasses.dataclass(frozen=True)
class World:
    vocabulary: Vocabulary
    compiler: GrammarCompiler

    def rows(self, written: str) -> list[int]:
        return self.vocabulary.to_rows(self.vocabulary.expand(ids(written)))

    def row(self, written: str) -> int:
        (row,) = self.rows(written)
        return row

    def mask(self, matcher: Matcher) -> NDArray[np.bool_]:
        return allowed_rows(matcher.mask(), self.vocabulary.num_rows)

    def allowed(self, matcher: Matcher) -> list[int]:
        return self.mask(matcher).nonzero()[0].tolist()

    def begin(self, spec: GrammarSpec | None, written: str = "") -> Matcher:
        """After this output, each row of which the mask must have allowed."""
        assert spec is not None
        matcher = self.compiler.compile(spec).matcher()
        for place, row in enumerate(self.rows(written)):
            assert self.mask(matcher)[row], f"{place} of {written}"
            matcher.advance(row)
        return matcher

    def takes(self, spec: GrammarSpec | None, written: str) -> bool | None:
        """Whether the output may end there; None if it cannot come that far."""
        assert spec is not None
        matcher = self.compiler.compile(spec).matcher()
        for row in self.rows(written):
            if not self.mask(matcher)[row]:
                return None
            matcher.advance(row)
        assert matcher.is_complete == self.mask(matcher)[self.row("[S]")]
        return matcher.is_complete


FULL = World(FullVocabulary(), GrammarCompiler(FullVocabulary(), TOKENIZER.token_bytes))
KEPT = World(TINY, GrammarCompiler(TINY, TOKENIZER.token_bytes))
worlds = pytest.mark.parametrize("world", [FULL, KEPT], ids=["full", "kept"])


def tool(name: str, parameters: object = None, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


def named(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def shaped(schema: object, strict: bool = True) -> GrammarSpec | None:
    kind = {"name": "x", "schema": schema, "strict": strict}
    return chat_grammar({"type": "json_schema", "json_schema": kind})


PLACE = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [tool("get_w", PLACE), tool('say "é"'), tool("get", {"type": "object"})]
THOUGHT = '[TH]hm "} <|end_message|>[E][M]'
GET_W = call("get_w", {"city": "São 日本 <|end_message|>", "n": 2})


@worlds
def test_a_required_call_comes_after_the_thoughts(world: World) -> None:
    spec = chat_grammar(tools=TOOLS, tool_choice="required")
    for thoughts in ("", THOUGHT, THOUGHT * 2):
        assert world.takes(spec, thoughts) is False
        assert world.takes(spec, thoughts + GET_W) is True
        assert world.takes(spec, thoughts + GET_W + "[M]" + call('say "é"', {})) is True
        assert world.takes(spec, thoughts + GET_W + "[M]") is False
        assert world.takes(spec, thoughts + "[TX]") is None
        assert world.takes(spec, thoughts + call("other", {})) is None
    assert world.takes(spec, GET_W + "[M][TH]") is None
    assert world.takes(spec, "[M]" + GET_W) is None
    bare = chat_grammar(tools=TOOLS, tool_choice="required", add_generation_prompt=False)
    assert world.takes(bare, "[M]" + THOUGHT + GET_W) is True
    assert world.takes(bare, GET_W) is None


@worlds
@pytest.mark.parametrize(
    ("arguments", "fits"),
    [
        ('{"city":"x","n":-3}', True),
        ('{"city":"x"}', True),
        ('{"n":1,"city":"x"}', None),  # the model is shown them sorted, and writes them so
        ('{"city":"x","n":"3"}', None),
        ('{"city":3}', None),
        ('{"n":1}', None),
        ('{"city":"x","other":1}', None),
        ('{"city": "x"}', None),  # compact, as in all calls the model has seen
    ],
)
def test_arguments_follow_their_schema(world: World, arguments: str, fits: bool | None) -> None:
    spec = chat_grammar(tools=TOOLS, tool_choice="required")
    assert world.takes(spec, 'get_w[TJ]{"name":"get_w","args":' + arguments + "}[E]") is fits


@worlds
def test_a_named_call_is_that_call_once(world: World) -> None:
    spec = chat_grammar(tools=TOOLS, tool_choice=named("get"))
    once = call("get", {"any": [1, {"x": None}]})
    assert world.takes(spec, THOUGHT + once) is True
    assert world.takes(spec, GET_W) is None
    assert world.takes(spec, once + "[M]") is None
    no_more = chat_grammar(tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert world.takes(no_more, GET_W) is True
    assert world.takes(no_more, GET_W + "[M]") is None
    # Without parameters a function takes none (OpenAI); {} declares nothing of them.
    none = chat_grammar(tools=[tool("f"), tool("g", {})], tool_choice="required")
    assert world.takes(none, call("f", {})) is True
    assert world.takes(none, call("f", {"a": 1})) is None
    assert world.takes(none, call("g", {"a": 1})) is True


@worlds
def test_offered_tools_bind_only_where_asked(world: World) -> None:
    assert chat_grammar(tools=TOOLS) is None
    assert chat_grammar(tools=TOOLS, tool_choice="auto", parallel_tool_calls=True) is None
    strict = chat_grammar(tools=[tool("get_w", PLACE, strict=True)])
    assert world.takes(strict, "[TX]any <x>[E]") is True
    assert world.takes(strict, "[TX]a[E][M]" + GET_W + "[M][TH]b[E][M][TX]c[E]") is True
    assert world.takes(strict, "[TX]a[E][M]" + THOUGHT) is False
    assert world.takes(strict, call("get_w", {"n": 1})) is None
    single = chat_grammar(tools=TOOLS, parallel_tool_calls=False)
    assert world.takes(single, "[TX]a[E][M]" + GET_W) is True
    assert world.takes(single, GET_W + "[M]") is None
    assert chat_grammar({"type": "text"}, TOOLS, "none", False) is None


@worlds
def test_json_objects_and_schemas(world: World) -> None:
    spec = chat_grammar({"type": "json_object"})
    assert world.takes(spec, THOUGHT + '[TX]{"a": [1, "<|x|>"],\n "b": {}}[E]') is True
    assert world.takes(spec, '[TX]{"a"') is False
    for wrong in ("[TX][", "[TX] {", "[TX]{}[E][M]", "[TX]{'", "[TX]{" + "\n" * 70, "[TX]{} "):
        assert world.takes(spec, wrong) is None
    spec = shaped(PLACE)
    assert world.takes(spec, '[TX]{"n": 1, "city": "x"}[E]') is True
    assert world.takes(spec, '[TX]{"city"') is False
    assert world.takes(spec, '[TX]{"city": "x", "n"') is None  # the order of the schema
    tree = {"type": "object", "properties": {"kids": {"type": "array", "items": {"$ref": "#"}}}}
    assert world.takes(shaped(tree), '[TX]{"kids": [{"kids": [{}]}, {}]}[E]') is True
    loose = shaped({"type": "array", "uniqueItems": True, "items": {"format": "x"}}, strict=False)
    assert world.takes(loose, "[TX][1, 1][E]") is True


@worlds
def test_an_answer_in_json_or_calls(world: World) -> None:
    spec = chat_grammar({"type": "json_object"}, TOOLS)
    assert world.takes(spec, THOUGHT + "[TX]{}[E]") is True
    assert world.takes(spec, THOUGHT + GET_W + "[M]" + GET_W) is True
    assert world.takes(spec, GET_W + "[M][TX]") is None
    assert world.takes(spec, "[TX]{}[E][M]") is None


@worlds
def test_regexes_grammars_and_choices(world: World) -> None:
    regex = text_grammar(regex=r"[0-9]+/x\/|é \"")
    assert [world.takes(regex, text) for text in ("12/x/", 'é "', "12/", "x")] == [
        True,
        True,
        False,
        None,
    ]
    choice = text_grammar(choice=["a", "ab", 'q"\n<|x|>'])
    assert [world.takes(choice, text) for text in ("a", "ab", 'q"\n<|x|>', "b", "abc", "")] == [
        True,
        True,
        True,
        None,
        None,
        False,
    ]
    lark = text_grammar(grammar='start: "a"+ ITEM // <no token>\nITEM: /b\\/<x>/ | "@"')
    assert world.takes(lark, "aab/<x>") is True
    assert world.takes(lark, "a@") is True
    ebnf = text_grammar(grammar='root ::= "(" root ")" | [0-9]+')
    assert world.takes(ebnf, "((7))") is True
    assert world.takes(ebnf, "((7)") is False
    assert world.takes(chat_grammar(choice=["yes", "no"]), THOUGHT + "[TX]no[E]") is True


@worlds
def test_thoughts_are_free(world: World) -> None:
    """Any ordinary token, halves of characters too; but no other block and no end of the turn."""
    matcher = world.begin(chat_grammar({"type": "json_object"}), "[TH]some")
    ordinary = [
        row
        for row, id in enumerate(world.vocabulary.to_ids(range(world.vocabulary.num_rows)))
        if id < FIRST_SPECIAL
    ]
    assert world.allowed(matcher) == [*ordinary, world.row("[E]")]
    matcher.advance(world.vocabulary.to_rows([BYTES[b"\xe6"]])[0])
    assert world.allowed(matcher) == [*ordinary, world.row("[E]")]


POINTS = ["", "g", "get", 'get_w[TJ]{"na', 'get_w[TJ]{"name":"get_w","args":{"city":"a"']


@pytest.mark.parametrize("written", POINTS)
def test_the_mask_has_exactly_the_rows_that_can_be_taken(written: str) -> None:
    spec = chat_grammar(tools=TOOLS, tool_choice="required")
    matcher = KEPT.begin(spec, written)
    allowed = KEPT.allowed(matcher)
    assert allowed == [r for r in range(TINY.num_rows) if matcher.count_valid([r]) == 1]
    with pytest.raises(ValueError, match="not allowed here"):
        matcher.advance(KEPT.row("[S]"))


def draw(world: World, grammar: Grammar, seed: int) -> list[int] | None:
    """An output drawn at random under the masks, but for a liking of what closes things."""
    draws = random.Random(seed)
    closing = set(world.rows('"}],') + world.rows("[E][S][TX][M]"))
    matcher = grammar.matcher()
    written: list[int] = []
    for _ in range(2000):
        allowed = world.allowed(matcher)
        assert allowed
        assert (grammar.end_row in allowed) == matcher.is_complete
        ends = [row for row in allowed if row in closing]
        row = draws.choice(ends if ends and draws.random() < 0.5 else allowed)
        matcher.advance(row)
        if row == grammar.end_row:
            assert world.allowed(matcher) == [grammar.end_row]
            return world.vocabulary.to_ids(written)
        written.append(row)
    return None


SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["a", "bc"]},
        "list": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
        "word": {"type": "string", "pattern": "^[x-z]{2,4}$"},
        "sum": {"anyOf": [{"type": "integer", "minimum": 5, "maximum": 17}, {"type": "null"}]},
    },
    "required": ["kind", "list", "word", "sum"],
    "additionalProperties": False,
}


def check_schema(value: Any) -> None:
    assert set(value) == set(SCHEMA["properties"])
    assert value["kind"] in ("a", "bc")
    assert 1 <= len(value["list"]) <= 3
    assert all(item in (True, False) for item in value["list"])
    assert re.fullmatch("[x-z]{2,4}", value["word"])
    assert value["sum"] is None or 5 <= value["sum"] <= 17


@worlds
@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_drawn_fits_and_is_read_back(world: World, seed: int) -> None:
    answer = shaped(SCHEMA)
    calls = chat_grammar(tools=[tool("f", SCHEMA), *TOOLS], tool_choice=named("f"))
    assert answer is not None and calls is not None
    for spec in (answer, calls):
        drawn = draw(world, world.compiler.compile(spec), seed)
        assert drawn is not None
        message = parse(drawn)
        if spec is answer:
            assert message.tool_calls == ()
            check_schema(json.loads(message.content or ""))
        else:
            assert message.content is None
            (found,) = message.tool_calls
            assert (found.name, found.complete) == ("f", True)
            check_schema(json.loads(found.arguments))


@worlds
def test_rows_can_be_taken_back(world: World) -> None:
    """As drafts need it: the masks are those of never having gone on."""
    spec = chat_grammar(tools=TOOLS, tool_choice="required")
    rows = world.rows(THOUGHT + GET_W + "[S]")
    matcher = world.begin(spec)
    masks = [matcher.mask()]
    for row in rows:
        matcher.advance(row)
        masks.append(matcher.mask())
    assert matcher.is_complete
    for back in (1, 2, 7, len(rows)):
        matcher.rollback(back)
        assert matcher.mask() == masks[len(rows) - back]
        assert matcher.count_valid(rows[len(rows) - back :]) == back
        for row in rows[len(rows) - back :]:
            matcher.advance(row)
    matcher.rollback(0)
    assert matcher.mask() == masks[-1]


def test_outputs_of_one_grammar_do_not_meet() -> None:
    spec = chat_grammar(choice=["yes", "no"])
    first, second = KEPT.begin(spec, "[TX]ye"), KEPT.begin(spec, "[TX]")
    with pytest.raises(ValueError, match="not allowed here"):
        first.advance(KEPT.row("o"))
    second.advance(KEPT.row("n"))
    assert KEPT.allowed(second) == [KEPT.row("o")]
    assert KEPT.takes(spec, "[TX]yes[E]") is True


def test_equal_specs_share_a_grammar_and_the_oldest_goes() -> None:
    compiler = GrammarCompiler(TINY, TOKENIZER.token_bytes, cache_size=2)
    specs = [text_grammar(choice=[word]) for word in ("a", "b", "c")]
    made = [compiler.compile(spec) for spec in specs[:2] if spec]
    again = text_grammar(choice=["a"])
    assert again is not None and again == specs[0]
    assert compiler.compile(again) is made[0]
    assert specs[2] is not None and specs[1] is not None
    compiler.compile(specs[2])  # takes the place of b
    assert compiler.compile(again) is made[0]
    assert compiler.compile(specs[1]) is not made[1]
    assert (compiler.num_hits, compiler.num_misses) == (2, 4)
    compiler.close()


def test_masks_are_bits_in_words_of_32() -> None:
    matcher = KEPT.begin(text_grammar(choice=["a"]))
    mask = matcher.mask()
    assert len(mask) == (TINY.num_rows + 31) // 32 * 4
    (row,) = KEPT.rows("a")
    assert mask[row // 8] == 1 << row % 8
    assert sum(mask) == mask[row // 8]


def test_the_end_of_a_turn_is_the_one_row() -> None:
    grammar = KEPT.compiler.compile(text_grammar(choice=["a"]) or GrammarSpec(chat=False))
    assert TINY.to_ids([grammar.end_row]) == [CONTENT_MODEL_END_SAMPLING]
