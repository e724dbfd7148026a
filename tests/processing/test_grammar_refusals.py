"""Forms that cannot be: refused with their place, soon, and without harm to others."""

import json
import threading
from concurrent.futures import Future
from typing import Any

import pytest

from suzuri.model.config import NUM_IDS, preset
from suzuri.processing import grammar as grammar_module
from suzuri.processing.errors import GrammarError
from suzuri.processing.grammar import Grammar, GrammarCompiler, Matcher, allowed_rows
from suzuri.processing.grammar_request import GrammarSpec, chat_grammar, text_grammar
from suzuri.processing.grammar_schema import MAX_BYTES, shortened
from suzuri.processing.vocabulary import FullVocabulary, KeptVocabulary
from tests.processing.turns import TOKENIZER

TINY = KeptVocabulary(list(preset("tiny").kept_vocabulary or ()), TOKENIZER.token_bytes)
COMPILER = GrammarCompiler(TINY, TOKENIZER.token_bytes)
SCHEMA = "response_format.json_schema.schema"


def shaped(schema: object, strict: object = True) -> GrammarSpec | None:
    kind = {"name": "x", "schema": schema, "strict": strict}
    return chat_grammar({"type": "json_schema", "json_schema": kind})


def compiled(spec: GrammarSpec | None) -> Matcher:
    """Ends in bounded time: `compile` itself waits for no longer than that."""
    assert spec is not None
    return COMPILER.compile(spec).matcher()


def of(**properties: object) -> dict[str, object]:
    return {"type": "object", "properties": properties}


def nested(depth: int) -> Any:
    value: Any = {}
    for _ in range(depth):
        value = {"items": value}
    return value


REFUSED_SCHEMAS: list[tuple[object, str]] = [
    ("", " = '': must be an object"),
    (False, " = False: must be an object"),
    ({"type": "not-a-type"}, r".type = 'not-a-type': must be of object, array"),
    ({"type": []}, r".type = \[\]: must be of object"),
    (of(a={"type": "string", "pattern": "("}), r".properties.a: regex parse error"),
    (of(a={"pattern": 3}), r".properties.a.pattern = 3: must be a string"),
    ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    ({"patternProperties": {"(": {}}, "type": "object"}, "regex parse error"),
    (of(a=of(b={"$ref": "#/$defs/c"})), r".properties.a.properties.b.\$ref = '#/\$defs/c': there"),
    (of(a={"$ref": "http://127.0.0.1/x"}), r".properties.a.\$ref = .*nothing is fetched"),
    ({"properties": [1]}, r".properties = \[1\]: must be an object of schemas"),
    ({"anyOf": []}, r".anyOf = \[\]: must be a list of schemas"),
    ({"anyOf": [{}, 3]}, r".anyOf\[1\] = 3: must be a schema"),
    ({"enum": []}, r".enum = \[\]: must be a list with a value"),
    ({"required": "a"}, r".required = 'a': must be a list of names"),
    ({"minLength": -1}, r".minLength = -1: must be a count"),
    ({"maxItems": 1.5}, r".maxItems = 1.5: must be a count"),
    ({"minimum": "3"}, r".minimum = '3': must be a number"),
    ({"minimum": 10**400}, r".minimum = 1000.*: must be a number"),
    ({"const": float("nan")}, "cannot be written as JSON"),
    ({"title": "\ud800"}, "cannot be written as JSON"),
    ({"type": "string", "minLength": 5, "maxLength": 2}, r"minLength \(5\) is greater"),
    ({"allOf": [{"type": "string"}, {"type": "null"}]}, "Unsatisfiable"),
    (of(a=False) | {"required": ["a"]}, "Unsatisfiable"),
    ({"$ref": "#"}, "no text that it allows"),
    ({"allOf": [{"$ref": "#"}, {"type": "null"}]}, "circular references"),
    (
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        "no text that it allows",
    ),
    # Hostile.
    (nested(500), "nested more than 64 deep"),
    (nested(100_000), "nested more than 64 deep"),
    ({"enum": ["x" * 100] * 20_000}, f"has 20.* bytes; at most {MAX_BYTES}"),
    (of(**{f"k{i}": {} for i in range(401)}), r".properties has 401 entries; at most 400"),
    ({"type": "integer", "multipleOf": 7919 * 104729}, "too complex"),
    (
        {"allOf": [{"anyOf": [of(**{f"p{i}{j}": {}}) for j in range(7)]} for i in range(7)]},
        "too complex|too large",
    ),
]


@pytest.mark.parametrize(("schema", "words"), REFUSED_SCHEMAS, ids=shortened)
def test_a11_bad_and_hostile_schemas_are_refused_with_their_place(
    schema: object, words: str
) -> None:
    with pytest.raises(ValueError, match=SCHEMA + ".*" + words):
        compiled(shaped(schema))
    parameters = schema if isinstance(schema, dict) else None
    if parameters is not None and parameters.get("type", "object") == "object":
        made = [
            {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
        ]
        with pytest.raises(ValueError, match=r"tools\[0\].function.parameters"):
            compiled(chat_grammar(tools=made, tool_choice="required"))


HARD: list[tuple[str, object]] = [
    ("schema", of(**{f"k{i}": {"type": "string"} for i in range(400)})),
    ("schema", {"enum": [f"value {i}" for i in range(8000)]}),
    ("schema", {"type": "string", "minLength": 10**5, "maxLength": 10**9}),
    ("schema", {"type": "array", "minItems": 10**6, "items": {}}),
    ("schema", {"type": "string", "pattern": "^((a{0,100}){0,100}){0,100}$"}),
    ("schema", {"type": "string", "pattern": "^.*a.{300}$"}),
    ("schema", {"type": "string", "pattern": "^(a*)*(a|aa)+$"}),
    ("schema", of(a={"$ref": "#"}) | {"required": ["a"]}),
    ("schema", nested(30)),
    (
        "schema",
        {
            "$defs": {f"d{i}": of(a={"$ref": f"#/$defs/d{i + 1}"}) for i in range(200)}
            | {"d200": {}},
            "anyOf": [{"$ref": f"#/$defs/d{i}"} for i in range(200)],
        },
    ),
    ("regex", "x*" * 10_000),
    ("regex", "(a{1000}){1000}"),
    ("regex", r"\p{L}{1,500}.*x{900}"),
    ("grammar", 'start: x\nx: "a" x'),
    (
        "grammar",
        "start: r0\n" + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(60)) + '\nr60: "a"',
    ),
    ("grammar", "start: A\nA: /(?s:.*)a.{12}/ & /(?s:.*)b.{13}/ & ~/(?s:.*)d.{15}/"),
    ("grammar", "start: s\ns: s s | s s s | /[a-z]/"),
    ("grammar", "start: j\nj: %json " + json.dumps({"enum": list(range(9000))})),
    ("grammar", "root ::= " + "[a-z]{1,9}" * 1500),
]


@pytest.fixture(scope="module")
def full() -> GrammarCompiler:
    return GrammarCompiler(FullVocabulary(), TOKENIZER.token_bytes)


@pytest.mark.parametrize(("kind", "value"), HARD, ids=shortened)
def test_a11_hard_forms_end_in_time_one_way_or_the_other(
    full: GrammarCompiler, kind: str, value: object
) -> None:
    """Compiled or refused by name, and the same for 30 tokens of an output."""
    fields: dict[str, Any] = {kind: value}
    spec = shaped(value) if kind == "schema" else text_grammar(**fields)
    assert spec is not None
    where = SCHEMA if kind == "schema" else kind
    try:
        matcher = full.compile(spec).matcher()
    except ValueError as error:
        assert str(error).startswith(where)
        return
    try:
        for _ in range(30):
            allowed = allowed_rows(matcher.mask(), NUM_IDS).nonzero()[0]
            matcher.advance(int(allowed[len(allowed) // 2]))
    except ValueError as error:
        assert "cannot go on" in str(error) or "not allowed here" in str(error)


@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        ("not", {}),
        ("if", {}),
        ("uniqueItems", True),
        ("x-guidance", {"whitespace_pattern": "("}),
        ("unheard", 1),
        ("format", "colour"),
    ],
)
def test_what_cannot_be_enforced_is_refused_if_strict_and_ignored_if_not(
    keyword: str, value: object
) -> None:
    schema = of(a={"type": "string"}, b={keyword: value})
    with pytest.raises(ValueError, match=rf"{SCHEMA}.properties.b.{keyword}\b.*cannot be enforced"):
        shaped(schema)
    assert any(compiled(shaped(schema, strict=False)).mask())
    overlapping = {"oneOf": [of(a={"type": "string"}), of(b={"type": "string"})]}
    with pytest.raises(ValueError, match=rf"{SCHEMA}.properties.a: oneOf cannot be enforced"):
        compiled(shaped(of(a=overlapping)))
    assert any(compiled(shaped(overlapping, strict=None)).mask())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"regex": "("}, "regex: .*unclosed group"),
        ({"regex": "(?<=a)b"}, "regex: .*look-around"),
        ({"regex": 3}, "regex = 3: must be a string"),
        ({"regex": "\ud800"}, "regex: character 0 is half of a surrogate pair"),
        ({"regex": "a" * (MAX_BYTES + 1)}, f"regex has {MAX_BYTES + 1} bytes"),
        ({"choice": []}, r"choice = \[\]: must be a list of 1 to"),
        ({"choice": "ab"}, "choice = 'ab': must be a list"),
        ({"choice": ["a", 3]}, r"choice\[1\] = 3: must be a string"),
        ({"grammar": ""}, "grammar: no start rule"),
        ({"grammar": "start: nope"}, 'grammar: .*unknown name: "nope"'),
        ({"grammar": "start: a\na: b\nb: a"}, "grammar: there is no text that it allows"),
        ({"grammar": 'start: a\na: "x"\na: "y"'}, 'grammar: .*duplicate rule: "a"'),
        ({"grammar": "start: /(/"}, "grammar: .*unclosed group"),
        ({"grammar": 'start: "a"\nb: <|message_user|>'}, "grammar, line 2: '<' names special"),
        ({"grammar": 'start: "<" <[200006]>'}, "grammar, line 1: '<' names special"),
        ({"grammar": "start: @answer"}, "grammar, line 1: '@' names special tokens or other"),
        ({"grammar": 'root ::= "a" b'}, "grammar: "),
        ({"grammar": 'root ::= "a\nroot'}, "grammar: "),
        ({"grammar": "root ::= " + "(" * 4000 + '"a"' + ")" * 4000}, "grammar: "),
        ({"grammar": "root ::= " + '"a" ' * 9000}, "grammar: EBNF is compiled up to"),
        ({"regex": "a", "choice": ["a"]}, "regex and choice: only one of them"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "response_format and regex"),
        ({"response_format": {"type": "xml"}}, "response_format.type = 'xml': must be one of"),
        ({"response_format": "json"}, "response_format = 'json': must be an object"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema = None"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {}}},
            f"{SCHEMA} is missing",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {}, "strict": 1},
                }
            },
            "response_format.json_schema.strict = 1: must be true or false",
        ),
    ],
    ids=shortened,
)
def test_a11_other_forms_are_refused_with_their_field(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        compiled(text_grammar(**fields))


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"tool_choice": "required"}, "tool_choice = 'required': needs tools"),
        ({"tool_choice": "any"}, "tool_choice = 'any': must be one of none, auto, required"),
        ({"tool_choice": 3}, "tool_choice = 3: must be one of"),
        ({"tool_choice": {"type": "function"}}, "tool_choice = .*: must be one of"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]},
            r"tool_choice.function.name = 'g': is not among the tools \(f\)",
        ),
        (
            {
                "tool_choice": "required",
                "tools": [TOOL],
                "response_format": {"type": "json_object"},
            },
            "response_format and tool_choice = 'required': a turn that must call",
        ),
        ({"tools": "f"}, "tools = 'f': must be a list"),
        ({"tools": [{"type": "function"}]}, r"tools\[0\].function = None: must be an object"),
        ({"tools": [TOOL, {"function": {"name": ""}}]}, r"tools\[1\].function.name = ''"),
        (
            {"tools": [{"function": {"name": "f", "parameters": {"type": "array"}}}]},
            r"tools\[0\].function.parameters.type = 'array': must be 'object'",
        ),
        (
            {"tools": [{"function": {"name": "f", "strict": "yes"}}]},
            r"tools\[0\].function.strict = 'yes': must be true or false",
        ),
    ],
    ids=shortened,
)
def test_tools_and_choices_are_refused_with_their_field(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        chat_grammar(**fields)


def test_a11_others_are_served_meanwhile() -> None:
    compiler = GrammarCompiler(TINY, TOKENIZER.token_bytes, cache_size=8)
    bad: list[Future[Grammar]] = []
    good: list[Future[Grammar]] = []
    for number in range(20):
        hostile = shaped({"type": "integer", "multipleOf": 7919 * 104729 + number})
        plain = shaped({"const": number})
        assert hostile is not None and plain is not None
        bad.append(compiler.submit(hostile))
        good.append(compiler.submit(plain))
    for number, future in enumerate(good):
        matcher = future.result(60).matcher()
        text = f"{number}"
        head = TOKENIZER.encode(text)
        rows = TINY.to_rows([200004, *TINY.expand(head), 200010, 200006])
        assert matcher.count_valid(rows) == len(rows)
    for future in bad:
        with pytest.raises(ValueError, match="too complex"):
            future.result(60)
    compiler.close()


def test_a_spec_that_takes_too_long_is_told_from_one_that_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    may_end = threading.Event()
    running = threading.Event()
    real = grammar_module.compile_grammar

    def slow(spec: GrammarSpec, rows: Any) -> Grammar:
        running.set()
        assert may_end.wait(60)
        return real(spec, rows)

    monkeypatch.setattr(grammar_module, "compile_grammar", slow)
    compiler = GrammarCompiler(TINY, TOKENIZER.token_bytes)
    first, second = shaped({"const": 1}), shaped({"const": 2})
    assert first is not None and second is not None
    compiler.submit(first)
    assert running.wait(60)
    with pytest.raises(ValueError, match=f"{SCHEMA}: takes more than 0.01 s to compile"):
        compiler.compile(first, 0.01)
    with pytest.raises(TimeoutError):
        compiler.compile(second, 0.01)
    may_end.set()
    assert any(compiler.compile(second, 60).matcher().mask())
    assert any(compiler.compile(first, 60).matcher().mask())
    compiler.close()


def test_an_error_within_an_output_names_the_cause() -> None:
    """A grammar may need more work for one token than is allowed; only its own request ends."""
    parts = " | ".join(f"(/[a-z]{{0,{i}}}/ x{i})" for i in range(1, 3))
    spec = text_grammar(grammar=f'start: {parts}\nx1: "a"\nx2: "b"')
    matcher = compiled(spec)
    assert any(matcher.mask())
    with pytest.raises(ValueError, match="not allowed here"):
        matcher.advance(TINY.to_rows([200006])[0])
    with pytest.raises(ValueError, match="cannot go on"):
        matcher.mask()


def test_a11_a_grammar_read_in_many_ways_ends_its_own_request(full: GrammarCompiler) -> None:
    """Its masks cost more with every token, and would end up costing seconds."""
    spec = text_grammar(grammar="start: s\ns: s s | s s s | /[a-z]/")
    assert spec is not None
    matcher = full.compile(spec).matcher()
    (row,) = TOKENIZER.encode("a")
    words = r"^grammar: the output cannot go on: its text can be read in too many ways"
    with pytest.raises(GrammarError, match=words):
        for _ in range(80):
            matcher.mask()
            matcher.advance(row)


def test_a11_a_regex_that_gets_too_complex_is_at_fault_itself() -> None:
    parts = "|".join(f"[^{letter}]*{letter}[^x]{{3,40}}" for letter in "abcdefghijklmnopqrst")
    matcher = compiled(text_grammar(regex=f"({parts})*"))
    rows = TINY.to_rows(TINY.expand(TOKENIZER.encode("the quick brown fox jumps over a dog " * 9)))
    words = r"^regex: the output cannot go on: it takes too much"
    with pytest.raises(GrammarError, match=words):
        for row in rows:
            matcher.mask()
            matcher.advance(row)


def test_specs_are_plain_values() -> None:
    """They travel between processes as they are."""
    spec = chat_grammar({"type": "json_object"}, [TOOL])
    assert spec is not None
    copy = json.loads(json.dumps(spec, default=vars))
    assert copy["answer"]["kind"] == "json_schema"
    assert hash(spec) == hash(chat_grammar({"type": "json_object"}, [TOOL]))
