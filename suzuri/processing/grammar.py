"""From a checked form of an output (grammar_request.py) to the rows that may be drawn next.

`GrammarCompiler.submit` first, then `Matcher`. llguidance does the work. Torch-free.
"""

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, cast

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, regex_to_lark
from llguidance.gbnf_to_lark import any_to_lark
from numpy.typing import NDArray

from suzuri.model.config import FIRST_SPECIAL, NUM_BYTE_TOKENS
from suzuri.processing.errors import GrammarError
from suzuri.processing.grammar_request import GrammarSpec, TextShape, ToolShape
from suzuri.processing.grammar_schema import inner_schemas
from suzuri.processing.tokenizer import (
    CONTENT_INVOKE_TOOL_JSON,
    CONTENT_MODEL_END_SAMPLING,
    CONTENT_TEXT,
    CONTENT_THINKING,
    END_MESSAGE,
    MESSAGE_MODEL,
)
from suzuri.processing.vocabulary import Vocabulary

CACHE_SIZE: Final = 64
"""Compiled grammars that are kept, the least recently used go first."""
COMPILE_SECONDS: Final = 5.0
"""How long `compile` waits. What llguidance itself allows is bounded well below that."""
_PLACE_SECONDS = 0.5
# Without forcing, every spelling of the text in tokens is allowed and the model chooses.
_OPTIONS = '%llguidance {"no_forcing": true}\n'
MAX_ITEMS: Final = 10_000
"""Of llguidance's parser for one token: what a mask may cost. A grammar that reads its text in many
ways at one time reaches it soon, and its request ends; all JSON that was tried stays below."""
_GBNF_BYTES: Final = 16 * 1024
_NOTHING = "there is no text that it allows"
_COMPLEX = "it is too complex to be compiled; make it simpler"
_WORK = "it takes too much work for one token; make it simpler"
_WAYS = "its text can be read in too many ways at one time; make it simpler"
_WORDS = {
    "NoExtension": _NOTHING,
    "Unsatisfiable schema: schema is false": _NOTHING,
    "oneOf constraints are not supported": (
        "oneOf cannot be enforced where its cases may overlap; use anyOf, or set strict to false"
    ),
    "fuel": _COMPLEX,
    "too large": _COMPLEX,
    "too big": _COMPLEX,
    "too many expressions": _COMPLEX,
    "Too many items": _WAYS,
    "Current row has": _WAYS,
}
_LITERALS = re.compile(
    r'"(?:\\.|[^"\\])*"|//[^\n]*|\#[^\n]*|/(?:\\.|[^/\\\n])+/|(?P<special>[<@])', re.DOTALL
)


class Grammar:
    """A compiled form. Any number of outputs may follow it at one time, each with its matcher."""

    def __init__(self, matcher: LLMatcher, num_rows: int, end_row: int, where: str) -> None:
        self._matcher = matcher
        self.where = where
        """The field that asks for it."""
        self.num_rows = num_rows
        self.end_row = end_row

    def matcher(self) -> "Matcher":
        return Matcher(self._matcher.deep_copy(), self)


class Matcher:
    """One output on its way through a grammar: ask for the mask, draw a row, advance by it.

    The end of the turn (its row) is allowed where the output is complete, and nothing else is once
    it has been drawn. Rows are the model's. Not for use from several threads at one time.
    """

    def __init__(self, matcher: LLMatcher, grammar: Grammar) -> None:
        self._matcher = matcher
        self._grammar = grammar
        self.where = grammar.where

    def mask(self) -> bytes:
        """A bit per row, 1 for allowed: bit r % 8 of byte r // 8, padded to whole 32-bit words.

        GrammarError where the grammar needs more work for a token than is allowed, or nothing may
        come next.
        """
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise self._stuck()
        if not self._matcher.is_stopped() and mask.count(0) == len(mask):
            raise GrammarError(f"{self.where}: the output cannot go on: {_NOTHING}")
        return mask

    def _stuck(self) -> GrammarError:
        message = _message(self._matcher.get_error())
        why = _WORK if message == _COMPLEX else message
        return GrammarError(f"{self.where}: the output cannot go on: {why}")

    def advance(self, row: int) -> None:
        """Take a drawn row. ValueError if the grammar does not allow it, GrammarError if finding
        out takes too much work; the matcher is then of no more use."""
        if not self._matcher.consume_token(row):
            message = _message(self._matcher.get_error())
            if message in (_COMPLEX, _WAYS):
                raise self._stuck()
            raise ValueError(f"row {row} is not allowed here: {message}")

    def count_valid(self, rows: Sequence[int]) -> int:
        """How many of these rows could be taken, one after the other (drafts)."""
        return self._matcher.validate_tokens(list(rows))

    def rollback(self, num_rows: int) -> None:
        """Take back the last rows."""
        if num_rows and not self._matcher.rollback(num_rows):
            raise ValueError(f"cannot take back {num_rows} rows: {self._matcher.get_error()}")

    @property
    def is_complete(self) -> bool:
        """Whether the output may end here."""
        return self._matcher.is_accepting()


def allowed_rows(mask: bytes, num_rows: int) -> NDArray[np.bool_]:
    """A mask as one truth value per row."""
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), count=num_rows, bitorder="little")
    return bits.view(np.bool_)


class GrammarCompiler:
    """Compiles specs for one vocabulary on a thread of its own, and keeps what it made.

    Takes about a second to make, for the tree of all tokens. Safe to use from any thread.
    token_bytes: the bytes of an id (Tokenizer.token_bytes, or the items of a table of it).
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        token_bytes: Callable[[int], bytes],
        *,
        cache_size: int = CACHE_SIZE,
        num_threads: int = 1,
    ) -> None:
        self._rows = _Rows(vocabulary, token_bytes)
        self._cache: OrderedDict[GrammarSpec, Future[Grammar]] = OrderedDict()
        self._cache_size = cache_size
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="grammar")
        self.num_hits = 0
        self.num_misses = 0

    def submit(self, spec: GrammarSpec) -> Future[Grammar]:
        """The grammar as soon as it is there, or ValueError with the field at fault. Equal specs
        share one future, the failed ones too; so do not cancel it."""
        with self._lock:
            future = self._cache.get(spec)
            if future is not None:
                self.num_hits += 1
                self._cache.move_to_end(spec)
                return future
            self.num_misses += 1
            future = self._cache[spec] = self._pool.submit(compile_grammar, spec, self._rows)
            if len(self._cache) > self._cache_size:
                self._cache.popitem(last=False)
            return future

    def knows(self, spec: GrammarSpec) -> bool:
        """Whether `submit` would start nothing."""
        with self._lock:
            return spec in self._cache

    def compile(self, spec: GrammarSpec, seconds: float = COMPILE_SECONDS) -> Grammar:
        """`submit` and wait. ValueError as there, and for a spec that takes longer than `seconds`;
        TimeoutError if others were before it for so long."""
        future = self.submit(spec)
        try:
            return future.result(seconds)
        except TimeoutError:
            if not future.running():
                raise
            raise ValueError(
                f"{_where(spec)}: takes more than {seconds:g} s to compile; make it simpler"
            ) from None

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


class _Rows:
    """A vocabulary as llguidance wants it: its tokens are the model's rows."""

    def __init__(self, vocabulary: Vocabulary, token_bytes: Callable[[int], bytes]) -> None:
        self._vocabulary = vocabulary
        self.num_rows = vocabulary.num_rows
        ids = vocabulary.to_ids(range(self.num_rows))
        self.num_ordinary = sum(id < FIRST_SPECIAL for id in ids)
        self.end_row = self.of(CONTENT_MODEL_END_SAMPLING)
        # The names are llguidance's.
        self.eos_token_id = self.end_row
        self.bos_token_id = None
        self.tokens = [token_bytes(id) for id in ids]
        singles = {token: row for row, token in enumerate(self.tokens[:NUM_BYTE_TOKENS])}
        self._byte_rows = [singles[bytes([byte])] for byte in range(256)]
        self.special_token_ids = list(range(self.num_ordinary, self.num_rows))
        self.tree = LLTokenizer(
            TokenizerWrapper(self), n_vocab=self.num_rows, eos_token=self.end_row
        )

    def __call__(self, text: bytes) -> list[int]:
        """Some spelling of the text, byte by byte; it does not matter which, see _OPTIONS."""
        return [self._byte_rows[byte] for byte in text]

    def of(self, id: int) -> int:
        return self._vocabulary.to_rows([id])[0]


def compile_grammar(spec: GrammarSpec, rows: _Rows) -> Grammar:
    """The grammar of a spec. ValueError naming the field at fault."""
    parts: dict[str, dict[str, Any]] = {}
    if spec.answer is not None:
        parts["answer"] = _text_part(spec.answer)
        _check(parts["answer"], spec.answer.where, rows)
    for index, tool in enumerate(spec.tools):
        parts[f"args_{index}"] = {"json_schema": json.loads(tool.parameters)}
        _check(parts[f"args_{index}"], tool.where, rows)
    lark = _OPTIONS + (_turn(spec, rows) if spec.chat else "start: @answer")
    matcher = _matcher([("turn", {"lark_grammar": lark}), *parts.items()], rows)
    if not matcher.is_error():
        matcher.compute_bitmask()  # what the first one finds stays in the copies
    if matcher.is_error():
        raise ValueError(f"{_where(spec)}: {_message(matcher.get_error())}")
    return Grammar(matcher, rows.num_rows, rows.end_row, _where(spec))


def _where(spec: GrammarSpec) -> str:
    return "tools" if spec.answer is None else spec.answer.where


def _turn(spec: GrammarSpec, rows: _Rows) -> str:
    """The blocks of a turn. Thoughts are any ordinary tokens, so nothing binds them."""
    model, end = f"<[{rows.of(MESSAGE_MODEL)}]>", f"<[{rows.of(END_MESSAGE)}]>"
    any_text = f"<[0-{rows.num_ordinary - 1}]>*"
    say = "@answer" if spec.answer is not None else any_text
    calls = [f"call_{index}" for index in range(len(spec.tools))]
    more = f"call ({model} call)*" if spec.parallel else "call"
    if not spec.tools:
        blocks = f"(think {model})* say"
    elif spec.must_call:
        blocks = f"(think {model})* {more}"
    elif spec.answer is not None:
        blocks = f"(think {model})* (say | {more})"
    elif spec.parallel:
        blocks = f"((think | say | call) {model})* (say | call)"
    else:
        blocks = f"((think | say) {model})* (say | call)"
    lines = [
        f"start: {'' if spec.role_given else model} {blocks}",
        f"think: <[{rows.of(CONTENT_THINKING)}]> {any_text} {end}",
        f"say: <[{rows.of(CONTENT_TEXT)}]> {say} {end}",
    ]
    if calls:
        lines.append(f"call: {' | '.join(calls)}")
    for index, tool in enumerate(spec.tools):
        lines.append(_call(f"call_{index}", f"@args_{index}", tool, rows, end))
    return "\n".join(lines)


def _call(rule: str, args: str, tool: ToolShape, rows: _Rows, end: str) -> str:
    head = '{"name":' + json.dumps(tool.name, ensure_ascii=False) + ',"args":'
    invoke = f"<[{rows.of(CONTENT_INVOKE_TOOL_JSON)}]>"
    return f'{rule}: {_literal(tool.name)} {invoke} {_literal(head)} {args} "}}" {end}'


def _literal(text: str) -> str:
    return json.dumps(text)


def _text_part(shape: TextShape) -> dict[str, Any]:
    match shape.kind:
        case "json_schema":
            return {"json_schema": json.loads(shape.text)}
        case "regex":
            return {"lark_grammar": f"start: /{regex_to_lark(shape.text)}/"}
        case "choice":
            choices = cast("list[str]", json.loads(shape.text))
            # A name in capitals makes one word of them, which costs far less than as many rules.
            words = " | ".join(map(_literal, choices))
            return {"lark_grammar": f"start: CHOICE\nCHOICE: {words}"}
        case "grammar":
            return {"lark_grammar": _lark(shape.text, shape.where)}


def _lark(text: str, where: str) -> str:
    """Lark, or EBNF as llama.cpp and vLLM write it (with ::=), as Lark."""
    if "::=" in text:
        if len(text.encode()) > _GBNF_BYTES:
            raise ValueError(f"{where}: EBNF is compiled up to {_GBNF_BYTES} bytes; use Lark")
        # On a thread of its own: a stack with room, and its parser raises plain Exception for a
        # grammar that is at fault.
        with ThreadPoolExecutor(1) as pool:
            converted = pool.submit(any_to_lark, text)
            error = converted.exception()
        if error is not None:
            raise ValueError(f"{where}: {_message(str(error))}") from error
        text = converted.result()
    for found in _LITERALS.finditer(text):
        if found["special"]:
            line = text.count("\n", 0, found.start()) + 1
            raise ValueError(
                f"{where}, line {line}: {found[0]!r} names special tokens or other grammars, which "
                "cannot be used here; quote it if it is text"
            )
    return text


def _matcher(parts: list[tuple[str, dict[str, Any]]], rows: _Rows) -> LLMatcher:
    grammars = [{"name": name, **part} for name, part in parts]
    # verbose_errors would put the output so far into error texts.
    limits = LLParserLimits(verbose_errors=False, step_max_items=MAX_ITEMS)
    return LLMatcher(rows.tree, json.dumps({"grammars": grammars}), log_level=0, limits=limits)


def _check(part: dict[str, Any], where: str, rows: _Rows) -> None:
    """Compiles a part by itself, so that an error names its field, and asks for the first token."""
    matcher = _matcher([("part", part)], rows)
    if not matcher.is_error():
        mask = allowed_rows(matcher.compute_bitmask(), rows.num_rows)
        if not matcher.is_error() and mask.any():
            return
    message = _message(matcher.get_error()) or _NOTHING
    raise ValueError(f"{where}{_place(part, message)}: {message}")


def _place(part: dict[str, Any], message: str) -> str:
    """The path of the deepest schema that fails with the same message all by itself, as far as it
    can be found in little time; llguidance does not say."""
    root = part.get("json_schema")
    if root is None:
        return ""
    shared = {key: root[key] for key in ("$defs", "definitions", "x-guidance") if key in root}
    limit = time.monotonic() + _PLACE_SECONDS
    for path, schema in inner_schemas({**root, "x-guidance": 0}):
        if time.monotonic() > limit:
            break
        grammar = LLMatcher.grammar_from_json_schema({**schema, **shared})
        if _message(LLMatcher.validate_grammar(grammar)) == message:
            return path
    return ""


def _message(error: str) -> str:
    """llguidance's words without the source that follows them, or ours where they say nothing to
    somebody who wrote a request."""
    error = re.split(r"\n\s*\d+ \| |\n<state>|<non-verbose/>", error)[0]
    error = re.sub(r"^(at \d+\(\d+\): )?failed to compile JSON schema: ", "", error)
    for words, ours in _WORDS.items():
        if words in error:
            return ours
    error = " ".join(error.split())
    return error if len(error) <= 300 else f"{error[:297]}..."
