"""Chat messages to the ids a model reads, rendered by tml-renderers.

`ChatRenderer.render` first, `render_for_training` for what a model learns; chat_blocks.py checks
the messages, media.py the pictures and clips. tml-renderers is imported when something is
rendered, because it loads torch.
"""

import base64
import dataclasses
import io
import wave
from collections.abc import Mapping, Sequence
from typing import Any, cast

from suzuri.model.config import ModelConfig
from suzuri.processing.chat_blocks import Block, to_blocks, tool_block
from suzuri.processing.errors import MediaError
from suzuri.processing.media import MediaReader, PlacedMedia
from suzuri.processing.tokenizer import MESSAGE_MODEL, Tokenizer

EFFORTS = {
    "none": 0.0,
    "minimal": 0.1,
    "low": 0.2,
    "medium": 0.7,
    "high": 0.9,
    "xhigh": 0.99,
    "max": 0.99,
}
"""How hard the model is told to think, by name."""
DEFAULT_EFFORT = EFFORTS["high"]
MAX_EFFORT = 0.99
TOOL_DECLARE = "tool_declare"
"""The author of tool declarations."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rendered:
    """A prompt: tokenizer ids, with a slot id at each place that media fill."""

    token_ids: list[int]
    media: tuple[PlacedMedia, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingExample:
    """A conversation to learn from: tokenizer ids as in `Rendered`, and how much the loss of each
    token counts (`weights[i]` belongs to token i itself, not to the one after it)."""

    token_ids: list[int]
    weights: list[float]
    media: tuple[PlacedMedia, ...] = ()


def effort_level(effort: object) -> float:
    """The number behind an effort: a name of EFFORTS, or a number from 0 to 0.99. ValueError."""
    match effort:
        case str() if effort in EFFORTS:
            return EFFORTS[effort]
        case int() | float() if effort is not False and 0 <= effort <= MAX_EFFORT:  # never NaN
            return float(effort)
        case _:
            pass
    raise ValueError(
        f"reasoning effort {effort!r}: must be one of {', '.join(EFFORTS)}, or a number from 0 to "
        f"{MAX_EFFORT}"
    )


class ChatRenderer:
    """Renders conversations for one model. `local_files`: whether media may be read from this
    machine's disk; leave it off for messages that others sent."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        config: ModelConfig | None = None,
        *,
        local_files: bool = False,
    ) -> None:
        from tml_renderers import v0

        self._renderer = v0.Renderer(tokenizer.native)
        self._reader = None if config is None else MediaReader(config, local_files=local_files)

    def render(
        self,
        messages: object,
        tools: object = None,
        effort: str | float | None = None,
        add_generation_prompt: bool = True,
        *,
        max_tokens: int | None = None,
    ) -> Rendered:
        """The prompt of a conversation in OpenAI's form.

        Tool declarations come first, then the messages; a system message with the effort stands
        before the first message that is not a system's (none without `effort`). The generation
        prompt is the header of the model's next message, so that it cannot start as anybody else's.
        Raises ValueError naming the message and part; MediaError, one of these, for a picture or
        clip. A prompt above `max_tokens` is refused before its media are decoded.
        """
        level = None if effort is None else effort_level(effort)
        blocks = to_blocks(messages, self._reader)
        declared = tool_block(tools)
        if declared is not None:
            blocks.insert(0, declared)
        native = [_native(block) for block in blocks]
        if level is None:
            spans, _ = self._renderer.render_for_completion(native)
        else:
            spans, _ = self._renderer.render_for_completion_with_effort(native, level)
        token_ids, places = self._join(spans, [block for block in blocks if block.media])
        if add_generation_prompt:
            token_ids.append(MESSAGE_MODEL)
        _refuse_long(token_ids, places, max_tokens)
        return Rendered(token_ids=token_ids, media=tuple(self._placed(*place) for place in places))

    def render_for_training(
        self,
        messages: object,
        tools: object = None,
        effort: str | float | None = None,
        *,
        max_tokens: int | None = None,
    ) -> list[TrainingExample]:
        """A conversation and the weights of its tokens: 1 for what the model says, headers and
        ends included, else 0.

        An assistant's message with "weight": 0 is not learned (1 changes nothing). What comes
        after the last one that is learned is left out; without any the list is empty. What `render`
        gives for the first messages, with the same tools and effort, is the beginning of the ids.
        Raises as `render`, and for empty messages.
        """
        messages, turns = _take_weights(messages)
        blocks = to_blocks(messages, self._reader)
        for block in blocks:
            if block.kind == "text" and block.role != "tool" and not block.text.strip():
                raise ValueError(f"{block.where} is empty; there is nothing to learn from it")
        learned = _is_learned(blocks, turns)
        blocks = blocks[: max((i + 1 for i, one in enumerate(learned) if one), default=0)]
        if not blocks:
            return []
        native = [
            _unlearned(block) if block.role == "assistant" and not one else _native(block)
            for block, one in zip(blocks, learned, strict=False)
        ]
        declared = tool_block(tools)
        if declared is not None:
            native.insert(0, _native(declared))
        if effort is not None:
            leading = next(i for i, block in enumerate(blocks) if block.role != "system")
            native.insert(leading + (declared is not None), _effort(effort_level(effort)))
        with_media = [block for block in blocks if block.media]
        examples: list[TrainingExample] = []
        for example in self._renderer.render_for_sft(native):
            spans = example.input_token_spans
            token_ids, places = self._join(spans, with_media)
            _refuse_long(token_ids, places, max_tokens)
            examples.append(
                TrainingExample(
                    token_ids=token_ids,
                    weights=_spread(spans, example.per_token_loss_weight_unshifted, places),
                    media=tuple(self._placed(*place) for place in places),
                )
            )
        return examples

    def _join(
        self, spans: list[Any], with_media: list[Block]
    ) -> tuple[list[int], list[tuple[Block, int, int]]]:
        """All ids, and (block, index, count) of the media."""
        from tml_renderers import chat

        token_ids: list[int] = []
        places: list[tuple[Block, int, int]] = []
        waiting = iter(with_media)
        for holder in spans:
            span = holder.span
            if isinstance(span, chat.EncodedTextTokenSpan):
                token_ids += span.tokens
                continue
            block = next(waiting)
            assert block.media is not None and self._reader is not None
            try:
                count = self._reader.count(block.media)
            except MediaError as error:
                raise MediaError(f"{block.where}: {error}") from error
            places.append((block, len(token_ids), count))
            token_ids += [self._reader.slots[block.media.kind]] * count
        assert next(waiting, None) is None, "a picture or clip was not rendered"
        return token_ids, places

    def _placed(self, block: Block, index: int, count: int) -> PlacedMedia:
        assert block.media is not None and self._reader is not None
        try:
            return self._reader.place(block.media, index, count)
        except MediaError as error:
            raise MediaError(f"{block.where}: {error}") from error


def _refuse_long(
    token_ids: Sequence[int], places: Sequence[tuple[Block, int, int]], max_tokens: int | None
) -> None:
    if max_tokens is not None and len(token_ids) > max_tokens:
        inside = sum(count for _, _, count in places)
        media = f", {inside} of them of pictures and clips" if inside else ""
        raise ValueError(
            f"the conversation has {len(token_ids)} tokens{media}; at most {max_tokens} fit"
        )


def _take_weights(messages: object) -> tuple[object, list[bool]]:
    """The messages without the key "weight" of the assistant's, and in their order whether these
    are learned. What is no message is left for others to refuse."""
    if not isinstance(messages, list | tuple):
        return messages, []
    kept: list[object] = []
    learned: list[bool] = []
    for index, item in enumerate(cast("Sequence[object]", messages)):
        message = dict(cast("Mapping[str, Any]", item)) if isinstance(item, Mapping) else {}
        if message.get("role") != "assistant":
            kept.append(cast("object", item))
            continue
        weight = message.pop("weight", None)
        if weight is not None and (isinstance(weight, bool) or weight not in (0, 1)):
            raise ValueError(f"messages[{index}].weight = {weight!r}: must be 0 or 1")
        learned.append(weight != 0)
        kept.append(message)
    return kept, learned


def _is_learned(blocks: Sequence[Block], turns: Sequence[bool]) -> list[bool]:
    """Of each block; `turns`: of each message of the assistant."""
    found: list[bool] = []
    turn = 0
    for block in blocks:
        found.append(block.role == "assistant" and turns[turn])
        turn += block.kind == "end"
    return found


def _spread(
    spans: Sequence[Any], weights: Sequence[float], places: Sequence[tuple[Block, int, int]]
) -> list[float]:
    """The weights with as many zeros for a picture or clip as it has tokens."""
    from tml_renderers import chat

    found: list[float] = []
    counts = (count for _, _, count in places)
    start = 0
    for holder in spans:
        span = holder.span
        if isinstance(span, chat.ImageAssetPointerTokenSpan):
            there = span.num_tokens
        else:
            there = len(span)
        if isinstance(span, chat.EncodedTextTokenSpan):
            found += weights[start : start + there]
        else:
            found += [0.0] * next(counts)
        start += there
    assert start == len(weights), "tml-renderers gives a weight for every token"
    return found


def _effort(level: float) -> Any:
    """The message in which the model is told its effort."""
    from tml_renderers import chat

    author = chat.Author(chat.AuthorKind.System, None)
    return chat.Message(chat.ThinkingEffort(round(level * 1000)), author)


def _unlearned(block: Block) -> Any:
    from tml_renderers import chat

    metadata = chat.TrainingMetadata(weight=0.0, is_synthetic=False)
    return _native(block).copy(message_metadata=chat.MessageMetadata(training_metadata=metadata))


def _native(block: Block) -> Any:
    from tml_renderers import chat

    kinds = {
        "system": chat.AuthorKind.System,
        "user": chat.AuthorKind.User,
        "assistant": chat.AuthorKind.Model,
        "tool": chat.AuthorKind.Tool,
    }
    author = chat.Author(kinds[block.role], block.name if block.role == "tool" else None)
    content: Any
    match block.kind:
        case "text":
            content = chat.Text(block.text)
        case "thinking":
            content = chat.Thinking(block.text)
        case "end":
            content = chat.ModelEndSampling()
        case "call":
            arguments = [chat.ToolArg(key, value) for key, value in block.arguments]
            content = chat.InvokeTool(chat.StructuredToolCall(block.name, arguments))
        case "tools":
            specs = [
                chat.ToolSpecJson("function", name, description, parameters)
                for name, description, parameters in block.tools
            ]
            author = chat.Author(chat.AuthorKind.System, TOOL_DECLARE)
            content = chat.ToolDeclareJson(specs)
        case "media":
            # Stand-ins of one token or more: the media are read here, only the frame is rendered.
            assert block.media is not None
            if block.media.kind == "image":
                content = chat.ImagePointer("", chat.ImageFormat.Png, 1, 1)
            else:
                content = chat.AudioPointer(_silence(), chat.AudioFormat.Wav, 1, 16000)
    return chat.Message(content, author)


def _silence() -> str:
    """One sample as a data: URL."""
    file = io.BytesIO()
    with wave.open(file, "wb") as clip:
        clip.setnchannels(1)
        clip.setsampwidth(2)
        clip.setframerate(16000)
        clip.writeframes(b"\0\0")
    return "data:audio/wav;base64," + base64.b64encode(file.getvalue()).decode()
