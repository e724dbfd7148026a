"""What has been said, in OpenAI's form: the messages that the model is sent, and how they grow.

A turn is tried first and kept when its answer is there, so that one that fails leaves everything as
it was. Thoughts, tool calls and results go back to the model with the text, as it wrote them.
"""

import collections
import dataclasses
from typing import Any

from suzuri.processing.chat_blocks import to_blocks
from suzuri.processing.chat_output import ChatMessage, TextBlock, ToolCall
from suzuri.tools.chat.backend import Message


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """A tool call that has no result yet."""

    id: str
    name: str


class Conversation:
    """messages: what is settled. waiting: calls whose results come next. media: parts that go with
    the next text of the user. num_retries: how often the last request was sent again."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.waiting: collections.deque[Call] = collections.deque()
        self.media: list[dict[str, Any]] = []
        self.num_retries = 0
        self._results: list[Message] = []
        self._asked: list[Message] = []
        self._calls: list[Call] = []
        """Of the last answer."""
        self._back: list[Call] = []
        """Which of them wait again if the turn that is tried fails."""
        self._num_calls = 0

    def clear(self) -> None:
        """Forget all that was said and attached."""
        self.__init__()

    def request(self, system: str | None) -> list[Message]:
        """The messages of the turn that is being tried."""
        first = [] if system is None else [{"role": "system", "content": system}]
        return [*first, *self._asked]

    def say(self, text: str) -> None:
        """Try a turn with a text of the user, and what is attached."""
        content = [*self.media, {"type": "text", "text": text}] if self.media else text
        self.media = []
        self._back = []
        self._try([*self.messages, {"role": "user", "content": content}])

    def answer_call(self, result: str | None) -> bool:
        """The result of the first waiting call, None for none; whether a turn is tried now."""
        call = self.waiting.popleft()
        if result is not None:
            self._results.append({"role": "tool", "tool_call_id": call.id, "content": result})
        if self.waiting:
            return False
        results, self._results = self._results, []
        if results:
            self._back = self._calls
            self._try([*self.messages, *results])
        return bool(results)

    def retry(self) -> bool:
        """Try the last turn again; False when there was none."""
        if self._asked:
            self._back = self._calls if self.waiting else []
            self._results.clear()
            self.waiting.clear()
            self.num_retries += 1
        return bool(self._asked)

    def _try(self, messages: list[Message]) -> None:
        self._asked, self.num_retries = messages, 0

    def fail(self) -> None:
        """The turn that was tried brought nothing: back to where it began."""
        self.waiting = collections.deque(self._back)

    def keep(self, turn: ChatMessage) -> list[ToolCall]:
        """The turn that was tried brought this. Returns the calls that are left out, because their
        arguments cannot be sent back; if that leaves nothing, the turn failed."""
        usable: list[tuple[Call, Message]] = []
        left_out: list[ToolCall] = []
        for call in turn.tool_calls:
            id = f"call_{self._num_calls}"
            function = {"name": call.name, "arguments": call.arguments}
            sent = {"id": id, "type": "function", "function": function}
            if call.complete and _can_be_sent(sent):
                self._num_calls += 1
                usable.append((Call(id=id, name=call.name), sent))
            else:
                left_out.append(call)
        message = _assistant(turn, [sent for _, sent in usable])
        if message is None:
            self.fail()
            return left_out
        self.messages = [*self._asked, message]
        self._calls = [call for call, _ in usable]
        self.waiting = collections.deque(self._calls)
        return left_out


def _assistant(turn: ChatMessage, calls: list[Message]) -> Message | None:
    """The message of a turn, None if nothing of it can be sent."""
    texts = [block for block in turn.blocks if isinstance(block, TextBlock)]
    if not texts and not calls:
        return None
    message: Message = {"role": "assistant", "content": turn.content}
    kinds = [block.kind for block in texts]
    if kinds in ([], ["reasoning"], ["content"], ["reasoning", "content"]):
        if turn.reasoning is not None:
            message["reasoning_content"] = turn.reasoning
    else:  # parts keep the order
        message["content"] = [
            {"type": "text", "text": block.text}
            if block.kind == "content"
            else {"type": "thinking", "thinking": block.text}
            for block in texts
        ]
    if calls:
        message["tool_calls"] = calls
    return message


def _can_be_sent(call: Message) -> bool:
    try:
        to_blocks([{"role": "assistant", "content": None, "tool_calls": [call]}], None)
    except ValueError:
        return False
    return True
