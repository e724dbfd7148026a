"""What a model writes in a chat, id by id, to thoughts, text and tool calls in their order.

`ChatOutputParser.push` first; docs/chat.md has the rules for what is not as it should be.
Torch-free. tool_calls.py reads the calls; chat.py renders what this inverts.
"""

import codecs
import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Literal

import msgspec

from suzuri.model.config import FIRST_SPECIAL
from suzuri.processing.tokenizer import (
    CONTENT_AUDIO_INPUT,
    CONTENT_IMAGE,
    CONTENT_INVOKE_TOOL_JSON,
    CONTENT_INVOKE_TOOL_TEXT,
    CONTENT_MODEL_END_SAMPLING,
    CONTENT_TEXT,
    CONTENT_THINKING,
    CONTENT_TOOL_ERROR,
    CONTENT_XML,
    END_MESSAGE,
    MESSAGE_MODEL,
    MESSAGE_SYSTEM,
    MESSAGE_TOOL,
    MESSAGE_USER,
)
from suzuri.processing.tool_calls import MAX_NAME, CallReader

PieceKind = Literal["reasoning", "content", "tool_start", "tool_arguments", "tool_end"]
State = Literal["header", "reasoning", "content", "call"]

_ROLES: Final = {MESSAGE_MODEL, MESSAGE_USER, MESSAGE_SYSTEM, MESSAGE_TOOL}
_TEXTS: Final = {
    CONTENT_TEXT,
    CONTENT_INVOKE_TOOL_TEXT,
    CONTENT_TOOL_ERROR,
    CONTENT_XML,
    CONTENT_IMAGE,
    CONTENT_AUDIO_INPUT,
}
_KINDS: Final = {CONTENT_THINKING, CONTENT_INVOKE_TOOL_JSON, *_TEXTS}
_STRUCTURE: Final = {END_MESSAGE, CONTENT_MODEL_END_SAMPLING, *_ROLES, *_KINDS}


class Piece(msgspec.Struct, frozen=True, gc=False):
    """A part of the turn, in the order of writing.

    reasoning, content: more `text` of thoughts or of the answer; an empty block is one piece with
    "". tool_start: a call of function `name` begins; tool_arguments: more of its JSON, verbatim;
    tool_end: it is over, and `complete` says whether its arguments are. `index` counts from 0: the
    calls for the tool pieces, the blocks of its kind for the others. One comes per token, and this
    kind of record is made four times as fast as a frozen dataclass.
    """

    kind: PieceKind
    text: str = ""
    index: int = 0
    name: str = ""
    complete: bool = True


class ChatOutputParser:
    """One output of a model: ids go in, pieces come out, the same however the ids are cut.

    Never raises for what a model may write. token_bytes: the bytes of an ordinary id
    (Tokenizer.token_bytes, or the items of a table of it). tools: without, a call is shown as text.
    starts_in: where the prompt ends; "header" takes a turn with or without its first message_model,
    "reasoning" and "content" are for prompts that opened such a block.

    ended: whether the model ended its turn. cut: what `finish` had to close, None if nothing.
    unfinished: text that was cut off before it was clear what it is: a function's name, or the head
    of a call. problems: how often the model broke which rule of the format.
    """

    def __init__(
        self,
        token_bytes: Callable[[int], bytes],
        *,
        tools: bool = True,
        starts_in: Literal["header", "reasoning", "content"] = "header",
    ) -> None:
        self.ended = False
        self.cut: State | None = None
        self.unfinished = ""
        self.problems: Counter[str] = Counter()
        self._token_bytes = token_bytes
        self._tools = tools
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        assert isinstance(decoder, codecs.BufferedIncrementalDecoder)
        self._decoder = decoder
        self._pieces: list[Piece] = []
        self._counts: Counter[str] = Counter()
        self._state: State = "header"
        self._name = ""
        self._call: CallReader | None = None
        self._is_empty = True  # the open block
        self._finished = False
        if starts_in != "header":
            self._open(starts_in)

    @property
    def block(self) -> State:
        """What is open."""
        return self._state

    @property
    def is_in_content(self) -> bool:
        """Whether a block of the answer's text is open."""
        return self._state == "content"

    def push_text(self, id: int) -> str | None:
        """What `push` gives for one id of text within an open block: its text, "" where it ends
        within a character. None, and nothing is taken, where there is more to it."""
        state = self._state
        if id >= FIRST_SPECIAL or state not in ("content", "reasoning") or self._finished:
            return None
        data, decoder = self._token_bytes(id), self._decoder
        if decoder.buffer or not data.isascii():
            text = decoder.decode(data)
        else:
            text = data.decode("ascii")
        if text:
            self._is_empty = False
        return text

    def push(self, ids: Sequence[int]) -> list[Piece]:
        """Takes the next ids."""
        assert not self._finished, "push after finish"
        for id in ids:
            if id < FIRST_SPECIAL:
                decoded = self._decoder.decode(self._token_bytes(id))
                if decoded:
                    self._write(decoded)
            elif id in _STRUCTURE:
                rest = self._decoder.decode(b"", final=True)
                if rest:
                    self._write(rest)
                self._read(id)
            else:
                self.problems["a special token that means nothing here"] += 1
        return self._taken()

    def finish(self) -> list[Piece]:
        """The output is over: closes what is open."""
        if self._finished:
            return []
        self._finished = True
        rest = self._decoder.decode(b"", final=True)
        if rest:
            self._write(rest)
        if self._state != "header" or self._name:
            self.cut = self._state
        if self._state == "call":
            assert self._call is not None
            self.unfinished = self._call.unfinished
            self._end_call()
        elif self._state != "header":
            self._close()
        elif self._name and not self._tools:
            self._write_block("content", self._name)
        else:
            self.unfinished = self._name
        return self._taken()

    def _taken(self) -> list[Piece]:
        pieces = self._pieces
        if not pieces:
            return []
        self._pieces = []
        return pieces if len(pieces) == 1 else merged(pieces)

    # What the state machine does with structure and text

    def _read(self, id: int) -> None:
        """A token of the format. One that comes within a block ends it."""
        if self._state != "header":
            if id != END_MESSAGE:
                self.problems["a block without its end_message"] += 1
            self._close()
        name, self._name = self._name, ""
        if id not in _KINDS:
            if name:
                self.problems["text outside of blocks"] += 1
                self._write_block("content", name)
            self.ended = self.ended or id == CONTENT_MODEL_END_SAMPLING
        elif id == CONTENT_INVOKE_TOOL_JSON and self._tools:
            self._state, self._call = "call", CallReader(name)
        else:
            if name and id != CONTENT_INVOKE_TOOL_JSON:
                self.problems["a name before text or thoughts"] += 1
            self._open("reasoning" if id == CONTENT_THINKING else "content")

    def _write(self, text: str) -> None:
        if self._state == "header":
            for place, char in enumerate(text):
                long = len(self._name) == MAX_NAME
                if long or not char.isprintable() or (char == " " and not self._name):
                    # No function is called that, so this is an answer without its frame.
                    self.problems["text outside of blocks"] += 1
                    text, self._name = self._name + text[place:], ""
                    self._open("content")
                    self._add("content", text)
                    return
                self._name += char
        elif self._state == "call":
            self._write_call(text)
        else:
            self._add(self._state, text)

    def _write_call(self, text: str) -> None:
        assert self._call is not None
        index = self._counts["call"]
        for event in self._call.push(text):
            if event.kind == "start":
                self._pieces.append(Piece("tool_start", index=index, name=event.text))
            elif event.kind == "arguments":
                self._pieces.append(Piece("tool_arguments", event.text, index))
            else:
                if self._state == "call":
                    self.problems["a call that is none"] += 1
                    self._end_call()
                    self._open("content")
                self._add("content", event.text)

    def _open(self, kind: Literal["reasoning", "content"]) -> None:
        self._state, self._is_empty = kind, True

    def _add(self, kind: Literal["reasoning", "content"], text: str) -> None:
        self._is_empty = False
        self._pieces.append(Piece(kind, text, self._counts[kind]))

    def _close(self) -> None:
        """Ends the open block as the model ended it."""
        state = self._state
        if state == "call":
            assert self._call is not None
            rest = self._call.close()
            if self._call.is_started and not self._call.is_complete:
                self.problems["arguments that break off"] += 1
            self._end_call()
            for event in rest:
                self.problems["a call that is none"] += 1
                self._write_block("content", event.text)
        elif state != "header":
            if self._is_empty:
                self._add(state, "")
            self._counts[state] += 1
        self._state, self._call = "header", None

    def _write_block(self, kind: Literal["reasoning", "content"], text: str) -> None:
        self._open(kind)
        self._add(kind, text)
        self._close()

    def _end_call(self) -> None:
        assert self._call is not None
        if self._call.is_started:
            complete = self._call.is_complete
            self._pieces.append(Piece("tool_end", index=self._counts["call"], complete=complete))
            self._counts["call"] += 1


def merged(pieces: Iterable[Piece]) -> list[Piece]:
    """The same pieces with neighbours of one block joined: what does not depend on how a stream
    was cut."""
    parts: list[tuple[Piece, list[str]]] = []
    for piece in pieces:
        if parts and piece.kind not in ("tool_start", "tool_end"):
            last, texts = parts[-1]
            if last.kind == piece.kind and last.index == piece.index:
                texts.append(piece.text)
                continue
        parts.append((piece, [piece.text]))
    return [
        piece if len(texts) == 1 else msgspec.structs.replace(piece, text="".join(texts))
        for piece, texts in parts
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TextBlock:
    """Thoughts, or text of the answer."""

    kind: Literal["reasoning", "content"]
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolCall:
    """arguments: JSON as the model wrote it, which without `complete` breaks off."""

    name: str
    arguments: str
    complete: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChatMessage:
    """blocks: the turn in order. reasoning, content: all text of the kind, one block after the
    other without anything between them; None where there is no block of the kind."""

    blocks: tuple[TextBlock | ToolCall, ...]

    @property
    def reasoning(self) -> str | None:
        return self._text("reasoning")

    @property
    def content(self) -> str | None:
        return self._text("content")

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        return tuple(block for block in self.blocks if isinstance(block, ToolCall))

    def _text(self, kind: str) -> str | None:
        texts = [b.text for b in self.blocks if isinstance(b, TextBlock) and b.kind == kind]
        return "".join(texts) if texts else None


def collect(pieces: Iterable[Piece]) -> ChatMessage:
    """The message that all pieces of an output make."""
    blocks: list[TextBlock | ToolCall] = []
    name, arguments = "", ""
    for piece in merged(pieces):
        match piece.kind:
            case "reasoning" | "content":
                blocks.append(TextBlock(kind=piece.kind, text=piece.text))
            case "tool_start":
                name, arguments = piece.name, ""
            case "tool_arguments":
                arguments = piece.text
            case "tool_end":
                blocks.append(ToolCall(name=name, arguments=arguments, complete=piece.complete))
    return ChatMessage(blocks=tuple(blocks))
