"""Time to compile a form of output, and per token to make the mask and to advance, one thread.

    python benchmarks/grammar_mask.py --json benchmarks/results/grammar-mask.json

The full vocabulary. Each output is one that the form allows, long enough for a median; `thoughts`
is the reasoning before a bound answer. CPU time of this process, so that others on the machine do
not count.
"""

import argparse
import json
import platform
import statistics
import time
from typing import Any

from suzuri.model.config import NUM_IDS
from suzuri.processing.chat_output import ChatOutputParser
from suzuri.processing.grammar import GrammarCompiler
from suzuri.processing.grammar_request import GrammarSpec, chat_grammar, text_grammar
from suzuri.processing.tokenizer import (
    CONTENT_INVOKE_TOOL_JSON,
    CONTENT_TEXT,
    CONTENT_THINKING,
    END_MESSAGE,
    MESSAGE_MODEL,
    Tokenizer,
)
from suzuri.processing.vocabulary import FullVocabulary

WORDS = "The inkstone holds what the brush needs, and 16 words more. "
ITEM = {
    "type": "object",
    "properties": {
        "id": {"type": "integer"},
        "label": {"type": "string"},
        "kind": {"enum": ["stone", "brush", "ink"]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "size": {"anyOf": [{"type": "number"}, {"type": "null"}]},
    },
    "required": ["id", "label", "kind", "tags", "size"],
    "additionalProperties": False,
}
LIST = {"type": "object", "properties": {"items": {"type": "array", "items": ITEM}}}
WIDE = {"type": "object", "properties": {f"key_{i}": {"type": "string"} for i in range(400)}}
CALC = 'start: e\ne: e ("+" | "-") t | t\nt: t "*" f | f\nf: /[0-9]+/ | "(" e ")"'
MANY_WAYS = "start: s\ns: s s | s s s | /[a-z]/"


def items(count: int) -> dict[str, Any]:
    kinds = ["stone", "brush", "ink"]
    return {
        "items": [
            {"id": i, "label": WORDS, "kind": kinds[i % 3], "tags": ["a", "é"], "size": i / 7}
            for i in range(count)
        ]
    }


def cases(tokenizer: Tokenizer) -> dict[str, tuple[GrammarSpec | None, list[int]]]:
    encode = tokenizer.encode

    def answer(text: str) -> list[int]:
        return [CONTENT_TEXT, *encode(text), END_MESSAGE]

    def schema(value: object) -> GrammarSpec | None:
        kind = {"name": "x", "schema": value, "strict": True}
        return chat_grammar({"type": "json_schema", "json_schema": kind})

    tools = [
        {"type": "function", "function": {"name": f"tool_{i}", "parameters": LIST}}
        for i in range(20)
    ]
    args = json.dumps(items(60), ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    written = '{"name":"tool_7","args":' + args + "}"
    thoughts = [CONTENT_THINKING, *encode(WORDS * 1500), END_MESSAGE, MESSAGE_MODEL]
    json_object = chat_grammar({"type": "json_object"})
    return {
        "json_object": (json_object, answer(json.dumps(items(60), ensure_ascii=False, indent=2))),
        "json_schema": (schema(LIST), answer(json.dumps(items(60), ensure_ascii=False))),
        "400 optional properties": (
            schema(WIDE),
            answer(json.dumps({f"key_{i}": "v" for i in range(0, 400, 2)})),
        ),
        "required call, 20 tools": (
            chat_grammar(tools=tools, tool_choice="required"),
            [*encode("tool_7"), CONTENT_INVOKE_TOOL_JSON, *encode(written), END_MESSAGE],
        ),
        "thoughts": (json_object, thoughts),
        "choice of 5000": (
            text_grammar(choice=[f"choice {i * 7919}" for i in range(5000)]),
            encode("choice 7919"),
        ),
        "regex": (text_grammar(regex=r"([a-z]+ ){1,200}\d{3}-\d{4}"), encode("stone " * 150)),
        "grammar": (text_grammar(grammar=CALC), encode("+".join(["(12+3)*45-(6*78)"] * 100))),
        "grammar read in many ways": (
            text_grammar(grammar=MANY_WAYS),
            [tokenizer.encode("a")[0]] * 200,
        ),
    }


def measure(compiler: GrammarCompiler, spec: GrammarSpec | None, ids: list[int]) -> dict[str, Any]:
    assert spec is not None
    start = time.process_time()
    grammar = compiler.compile(spec, 60)
    compiled = time.process_time() - start
    start = time.process_time()
    matcher = grammar.matcher()
    copied = time.process_time() - start
    masks: list[float] = []
    advances: list[float] = []
    ended: str | None = None
    for id in ids:
        start = time.process_time()
        try:
            matcher.mask()
        except ValueError as error:
            ended = f"token {len(masks)}: {error}"
            break
        finally:
            masks.append(time.process_time() - start)
        start = time.process_time()
        matcher.advance(id)
        advances.append(time.process_time() - start)
    found = {
        "tokens": len(masks),
        "compile_ms": round(compiled * 1e3, 2),
        "matcher_us": round(copied * 1e6, 1),
        "mask_us": spread(masks),
        "advance_us": spread(advances),
    }
    return found | ({} if ended is None else {"ended": ended})


def spread(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "p50": round(statistics.median(ordered) * 1e6, 1),
        "p99": round(ordered[int(0.99 * (len(ordered) - 1))] * 1e6, 1),
        "max": round(ordered[-1] * 1e6, 1),
    }


def parser_us(tokenizer: Tokenizer, ids: list[int]) -> float:
    """Per token of the output parser, pushed one by one as a stream comes."""
    table = [tokenizer.token_bytes(id) for id in range(NUM_IDS)]
    parser = ChatOutputParser(table.__getitem__)
    start = time.process_time()
    for id in ids:
        parser.push([id])
    return round((time.process_time() - start) / len(ids) * 1e6, 2)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--json")
    given = options.parse_args()
    tokenizer = Tokenizer()
    start = time.process_time()
    compiler = GrammarCompiler(FullVocabulary(), tokenizer.token_bytes)
    built = time.process_time() - start
    made = cases(tokenizer)
    result = {
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "rows": NUM_IDS,
        "compiler_s": round(built, 2),
        "parser_us_per_token": {
            "text": parser_us(tokenizer, made["json_object"][1]),
            "call": parser_us(tokenizer, made["required call, 20 tools"][1]),
        },
        "cases": {name: measure(compiler, spec, ids) for name, (spec, ids) in made.items()},
    }
    print(json.dumps(result, indent=1))
    if given.json:
        with open(given.json, "w") as file:
            file.write(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
