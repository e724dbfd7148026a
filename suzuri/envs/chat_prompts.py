"""Conversations as ids for environments: the first prompt, what is added later, and what was said.

No torch here.
"""

# pyright: strict

from collections.abc import Callable, Mapping, Sequence

from suzuri.envs.task import Message
from suzuri.model.config import ModelConfig
from suzuri.processing.chat import ChatRenderer, Rendered
from suzuri.processing.chat_output import ChatOutputParser, collect
from suzuri.processing.tokenizer import Tokenizer
from suzuri.processing.vocabulary import Speller, Vocabulary
from suzuri.types import Answer, MediaInput, Prompt

Tools = Sequence[Mapping[str, object]]


class ChatPrompts:
    """For one model. Ids are those that it has rows for, so a trainer reads what a sampler read."""

    def __init__(self, tokenizer: Tokenizer, config: ModelConfig, vocabulary: Vocabulary) -> None:
        self._tokenizer, self._speller = tokenizer, Speller(vocabulary)
        self._renderer = ChatRenderer(tokenizer, config, local_files=True)

    def first(self, messages: Sequence[Message], tools: Tools, effort: float | None) -> Prompt:
        """The prompt of a conversation. Raises ValueError naming the message."""
        return self._prompt(self._renderer.render(messages, tools or None, effort))

    def after(
        self,
        prompt: Prompt,
        answer: Answer,
        messages: Sequence[Message],
        added: Sequence[Message],
        tools: Tools,
        effort: float | None,
    ) -> Prompt:
        """The prompt that follows `answer`, id by id, and then has the messages `added` (results of
        tools). `messages`: all before those, the answer's own included, which is not rendered
        anew: what stands in the prompt is what the model drew."""
        given = (tools or None, effort)
        before = self._renderer.render(messages, *given, add_generation_prompt=False)
        whole = self._renderer.render([*messages, *added], *given)
        start = len(before.token_ids)
        if whole.token_ids[:start] != before.token_ids or len(whole.media) != len(before.media):
            raise ValueError("what is added to a conversation must be text that changes nothing")
        more, _ = self._speller.spelled(whole.token_ids[start:])
        return Prompt(tokens=[*prompt.tokens, *answer.tokens, *more], media=prompt.media)

    def message(self, answer: Answer, *, tools: bool, first_call: int = 0) -> Message:
        """What an answer says, in OpenAI's form. Its calls are numbered from `first_call` on."""
        table = self._tokenizer.token_bytes
        return read_message(answer.tokens, table, tools=tools, first_call=first_call)

    def _prompt(self, rendered: Rendered) -> Prompt:
        tokens, starts = self._speller.spelled(rendered.token_ids)
        media = tuple(
            MediaInput(kind=one.kind, index=int(starts[one.index]), inputs=one.inputs)
            for one in rendered.media
        )
        return Prompt(tokens=tokens, media=media)


def read_message(
    tokens: Sequence[int], token_bytes: Callable[[int], bytes], *, tools: bool, first_call: int
) -> Message:
    """A whole turn of the model in OpenAI's form. Its calls are numbered from `first_call` on."""
    parser = ChatOutputParser(token_bytes, tools=tools)
    turn = collect([*parser.push(tokens), *parser.finish()])
    message: Message = {"role": "assistant", "content": turn.content}
    if turn.reasoning is not None:
        message["reasoning_content"] = turn.reasoning
    calls = [
        {
            "id": f"call_{first_call + place}",
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for place, call in enumerate(turn.tool_calls)
    ]
    if calls:
        message["tool_calls"] = calls
    return message
