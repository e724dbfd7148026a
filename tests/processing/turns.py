"""What models write in chats, as ids, and all the ways to cut them. For the tests of the parser."""

import json
import re
from collections.abc import Callable, Iterator, Sequence

from suzuri.processing.chat_output import ChatMessage, ChatOutputParser, Piece, collect, merged
from suzuri.processing.tokenizer import SPECIAL_IDS, Tokenizer

TOKENIZER = Tokenizer()
SHORT = {"TH": "content_thinking", "TX": "content_text", "TJ": "content_invoke_tool_json"}
SHORT |= {"E": "end_message", "M": "message_model", "S": "content_model_end_sampling"}
TT = SPECIAL_IDS["content_invoke_tool_text"]


def ids(written: str, encode: Callable[[str], list[int]] = TOKENIZER.encode) -> list[int]:
    """`[TX]` and the like are special tokens, by SHORT or by name; everything else is text."""
    found: list[int] = []
    for part in re.split(r"(\[[A-Za-z_]+\])", written):
        name = SHORT.get(part[1:-1], part[1:-1])
        found += [SPECIAL_IDS[name]] if part[:1] == "[" and name in SPECIAL_IDS else encode(part)
    return found


def one_byte_each(text: str) -> list[int]:
    """As ids of single bytes, the way a small vocabulary spells what it has no token for."""
    return [BYTES[bytes([byte])] for byte in text.encode()]


BYTES = {TOKENIZER.token_bytes(id): id for id in range(256)}


def call(name: str, args: object) -> str:
    body = json.dumps({"name": name, "args": args}, ensure_ascii=False, separators=(",", ":"))
    return f"{name}[TJ]{body}[E]"


def parser(tools: bool = True) -> ChatOutputParser:
    return ChatOutputParser(TOKENIZER.token_bytes, tools=tools)


def read(parts: Sequence[Sequence[int]], tools: bool = True) -> list[Piece]:
    """All pieces of an output that comes in these parts, as far as cuts may not matter."""
    made = parser(tools)
    pieces = [piece for part in parts for piece in made.push(part)]
    return merged([*pieces, *made.finish()])


def parse(written: str | Sequence[int], tools: bool = True) -> ChatMessage:
    given = ids(written) if isinstance(written, str) else written
    return collect(read([given], tools))


def all_cuts(given: Sequence[int]) -> Iterator[list[Sequence[int]]]:
    """Every way to cut a sequence into consecutive parts."""
    for bits in range(2 ** max(len(given) - 1, 0)):
        parts: list[Sequence[int]] = []
        start = 0
        for place in range(1, len(given)):
            if bits >> (place - 1) & 1:
                parts.append(given[start:place])
                start = place
        yield [*parts, given[start:]]
