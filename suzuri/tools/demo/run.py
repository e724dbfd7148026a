"""`suzuri demo`: loads the model, asks, shows answers as they come, says what to try next."""

import contextlib
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from suzuri.envs.task import Message, strict_json
from suzuri.model.presets import DEFAULT_MODEL
from suzuri.processing.chat_output import ChatMessage, Piece, collect
from suzuri.tools.chat.backend import AnswerFailed, Ask, Ended
from suzuri.tools.chat.config import ChatConfig
from suzuri.tools.chat.conversation import Conversation
from suzuri.tools.chat.display import Display
from suzuri.tools.chat.local import LocalBackend
from suzuri.tools.demo.config import DemoConfig
from suzuri.tools.demo.pixels import show_picture, show_sound
from suzuri.tools.demo.questions import THINKING, Question, questions, sum_for_the_calculator
from suzuri.tools.demo.tools import DECLARED, run_tool

MOST_TURNS = 4
"""Of the model, in the question with tools."""
NEXT = """
Try next:
  suzuri chat{model}                    talk to it; /help says how to show it a picture or a sound
  suzuri serve{model}                   OpenAI's API; in another terminal:
  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{{"messages": [{{"role": "user", "content": "What is 58 + 67?"}}]}}'
  suzuri eval{model}                    held-out tasks of every kind, graded
  suzuri sft --model {named} --train YOUR.jsonl --run_dir runs/mine --steps 50 \\
    --optimizer.learning_rate 5e-4      teach it something
"""


def run_demo(config: DemoConfig) -> int:
    """Returns the exit code: 0, or 1 when an answer is wrong. Raises ValueError or OSError for a
    model or a folder that cannot be used."""
    display = Display(sys.stdout, sys.stdout)
    display.note(f"loading {config.model}")
    demo = _Demo(config, display)
    asked = questions(config.seed)
    rights = [demo.ask(question) for question in asked if demo.can(question)]
    rights.append(demo.ask_with_tools(config.seed))
    right = sum(rights)
    display.text(
        f"\n{right} of {len(rights)} answers are right; {demo.speed()}; "
        f"loaded in {demo.backend.load_seconds:.2f} s"
    )
    model = "" if config.model == DEFAULT_MODEL else f" {config.model}"
    display.text(NEXT.format(model=model, named=config.model))
    return 0 if right == len(rights) else 1


class _Demo:
    def __init__(self, config: DemoConfig, display: Display) -> None:
        self._config, self._display = config, display
        self._console = Console(highlight=False)
        self._chat: ChatConfig = config.chat().resolve()
        self.backend = LocalBackend(self._chat, display)
        self._folder: Path | None = None if config.out is None else Path(config.out)
        self._tokens, self._seconds = 0, 0.0
        display.note(
            f"loaded in {self.backend.load_seconds:.2f} s, warm after "
            f"{self.backend.warm_up_seconds:.2f} s more"
        )

    def speed(self) -> str:
        """Of all answers, from the first token of each on."""
        return f"{self._tokens / max(self._seconds, 1e-9):.0f} tokens/s, one answer at a time"

    def can(self, question: Question) -> bool:
        """Whether the model has the tower for it; says so if not."""
        if question.needs is None or self.backend.has(question.needs):
            return True
        self._display.text(f"\n{question.title}: left out, {self.backend.name} has no tower for it")
        return False

    def ask(self, question: Question) -> bool:
        """One question without tools; whether the answer is right."""
        self._head(question.title, question.text)
        if question.media is not None:
            self._show_media(question, question.media)
        effort = question.task.effort or 0.0
        turn = self._answer(list(question.task.messages), effort, [])
        if turn is None:
            return False
        message: Message = {"role": "assistant", "content": turn.content}
        if turn.reasoning is not None:
            message["reasoning_content"] = turn.reasoning
        if turn.tool_calls or question.task.grade(message) < 1:
            return self._verdict(f"wrong, expected: {question.expected}")
        return self._verdict("")

    def ask_with_tools(self, seed: int) -> bool:
        """A question that needs the calculator, which runs here."""
        wanted = sum_for_the_calculator(seed)
        self._head("a tool that really runs", wanted.text)
        talk, calls = Conversation(), list[tuple[str, Any]]()
        talk.say(wanted.text)
        for _ in range(MOST_TURNS):
            turn = self._answer(talk.request(None), THINKING, DECLARED)
            if turn is None:
                return False
            talk.keep(turn)
            if not talk.waiting:
                break
            for call in turn.tool_calls[: len(talk.waiting)]:
                result = run_tool(call.name, call.arguments)
                calls.append((call.name, strict_json(call.arguments)))
                self._display.note(f"{call.name} ran: {result}")
                talk.answer_call(result)
        if talk.waiting or not wanted.is_right(calls, talk.messages[-1]):
            return self._verdict(f"wrong, expected: {wanted.expression} is {wanted.value}")
        return self._verdict("")

    def _head(self, title: str, text: str) -> None:
        self._display.text(f"\n{title}\n> {text}")

    def _verdict(self, fault: str) -> bool:
        self._display.note(fault or "right")
        return not fault

    def _show_media(self, question: Question, data: bytes) -> None:
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix="suzuri-demo-"))
        self._folder.mkdir(parents=True, exist_ok=True)
        is_picture = question.needs == "vision"
        path = self._folder / ("picture.png" if is_picture else "sound.wav")
        path.write_bytes(data)
        (show_picture if is_picture else show_sound)(self._console, data)
        self._display.note(str(path))

    def _answer(
        self, messages: list[Message], effort: float, tools: list[dict[str, Any]]
    ) -> ChatMessage | None:
        """A turn, shown as it comes; None if there is none, with the reason shown."""
        ask = Ask(messages=messages, tools=tools, effort=effort, params=self._chat.sampling())
        pieces, ended = list[Piece](), None
        first = start = time.monotonic()
        try:
            with contextlib.closing(self.backend.answer(ask)) as parts:
                for part in parts:
                    if isinstance(part, Ended):
                        ended = part
                        continue
                    first = first if first > start else time.monotonic()
                    pieces += part
                    self._display.show(part)
        except AnswerFailed as error:
            self._display.end()
            self._display.error(str(error))
            return None
        seconds = time.monotonic() - first
        self._display.end()
        count = (ended.num_tokens or 0) if ended is not None else 0
        self._tokens += max(count - 1, 0)
        self._seconds += seconds
        self._display.note(
            f"{count} tokens, {max(count - 1, 0) / max(seconds, 1e-9):.0f} tokens/s, first after "
            f"{first - start:.2f} s"
        )
        return collect(pieces)
