"""The conversation itself: a line comes, is a command or a turn, and an answer is shown."""

import contextlib
import dataclasses
import time
from typing import Any

from suzuri.engine.sampling_params import SamplingParams
from suzuri.interrupts import interrupts_wait
from suzuri.processing.chat_output import Piece, collect
from suzuri.processing.media import Kind
from suzuri.tools.chat.backend import AnswerFailed, Ask, Backend, Ended
from suzuri.tools.chat.commands import Command, media_part, parse_line, read_file, usage
from suzuri.tools.chat.config import parse_effort
from suzuri.tools.chat.conversation import Conversation
from suzuri.tools.chat.display import Display, clean
from suzuri.tools.chat.lines import Lines

INTERRUPTED = 130


class ChatLoop:
    """Reads lines until there are none. A turn that fails is told and leaves the conversation as it
    was; in a pipe it makes the exit code 1."""

    def __init__(
        self,
        backend: Backend,
        display: Display,
        lines: Lines,
        *,
        params: SamplingParams,
        tools: list[dict[str, Any]],
        effort: str | float,
        system: str | None,
    ) -> None:
        self._backend, self._display, self._lines = backend, display, lines
        self._params, self._tools, self._effort, self._system = params, tools, effort, system
        self._talk = Conversation()
        self._has_failed = False
        self._was_interrupted = False
        """Whether the last thing that happened was Ctrl-C."""

    def run(self) -> int:
        """The exit code."""
        while True:
            try:
                line = self._next_line()
                if line is None or not self._take(line):
                    break
            except ValueError as error:
                self._fail(str(error))
            except KeyboardInterrupt:
                # One that comes just after the end of an answer was meant for the answer.
                self._display.interrupted()
                if self._was_interrupted or not self._lines.is_terminal:
                    return INTERRUPTED
                self._was_interrupted = True
                self._display.note("Ctrl-C again leaves, as do Ctrl-D and /exit")
        return 1 if self._has_failed and not self._lines.is_terminal else 0

    def _next_line(self) -> str | None:
        waiting = self._talk.waiting
        line = self._lines.read(f"result of {clean(waiting[0].name)}> " if waiting else "> ")
        self._was_interrupted = False
        return line

    def _take(self, line: str) -> bool:
        """Do what a line says; whether to go on. Raises ValueError for a line at fault."""
        meant = parse_line(line)
        if isinstance(meant, Command):
            return self._do(meant)
        if self._talk.waiting:
            if self._talk.answer_call(meant):
                self._turn()
        elif meant.strip():
            self._talk.say(meant)
            self._turn()
        return True

    def _do(self, command: Command) -> bool:
        argument = command.argument
        match command.name:
            case "exit":
                return False
            case "help":
                self._display.text(usage())
            case "clear":
                self._talk.clear()
                self._display.note("the conversation is empty")
            case "effort":
                self._effort = parse_effort(argument) if argument else self._effort
                self._display.note(f"effort {self._effort}")
            case "system":
                self._set_system(argument)
            case "image":
                self._attach("image", argument)
            case "audio":
                self._attach("audio", argument)
            case "skip":
                if not self._talk.waiting:
                    raise ValueError("/skip: no tool call waits for a result")
                if self._talk.answer_call(None):
                    self._turn()
            case _:
                if not self._talk.retry():
                    raise ValueError("/retry: nothing has been asked yet")
                self._turn()
        return True

    def _set_system(self, text: str) -> None:
        if text:
            self._system = None if text == "-" else text
        told = "nothing is told first" if self._system is None else f"told first: {self._system}"
        self._display.note(told)

    def _attach(self, kind: Kind, argument: str) -> None:
        name, data = read_file(argument, kind)
        try:
            words = self._backend.check_media(kind, data)
        except ValueError as error:
            raise ValueError(f"/{kind} {name}: {error}") from error
        self._talk.media.append(media_part(kind, name, data))
        size = f"{len(data)} bytes{', ' if words else ''}{words}"
        self._display.note(f"{name} ({size}) goes with the next message")

    def _turn(self) -> None:
        """Ask for the answer to what the conversation tries, show it and keep it."""
        talk, pieces, watch = self._talk, list[Piece](), _Watch()
        ended: Ended | None = None
        try:
            with (
                contextlib.closing(self._backend.answer(self._ask())) as parts,
                self._display.waiting(f"waiting for {self._backend.name}") as wait,
            ):
                for part in parts:
                    if isinstance(part, Ended):
                        ended = part
                        continue
                    watch.tick()
                    if part:
                        pieces += part  # before anything that Ctrl-C may come in between
                        wait.stop()
                        self._display.show(part)
        except AnswerFailed as error:
            talk.fail()
            self._display.end()
            self._fail(f"{error} (the conversation is as before; /retry asks again)")
            return
        except KeyboardInterrupt:
            self._was_interrupted = True
            self._display.interrupted()
        with interrupts_wait():
            self._keep(pieces)
        self._display.note(watch.summary(ended))
        if talk.waiting and self._lines.is_terminal:
            self._display.note("type the result on a line; /skip goes on without one")
        if self._was_interrupted and not self._lines.is_terminal:
            raise KeyboardInterrupt

    def _keep(self, pieces: list[Piece]) -> None:
        self._display.end()
        turn = collect(pieces)
        if not turn.blocks:
            self._talk.fail()
            self._display.note("nothing was written; the conversation is as before")
            return
        for call in self._talk.keep(turn):
            self._display.note(f"the call of {call.name} is not kept: it is no JSON object")

    def _ask(self) -> Ask:
        params, talk = self._params, self._talk
        if params.seed is not None:
            # The same seed would bring the same answer again.
            params = dataclasses.replace(params, seed=params.seed + talk.num_retries)
        return Ask(
            messages=talk.request(self._system),
            tools=self._tools,
            effort=self._effort,
            params=params,
        )

    def _fail(self, message: str) -> None:
        self._has_failed = True
        self._display.error(message)


class _Watch:
    """The times of one answer."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._first: float | None = None
        self._parts = 0

    def tick(self) -> None:
        """A token has come, as far as the stream shows."""
        self._parts += 1
        if self._first is None:
            self._first = time.monotonic()

    def summary(self, ended: Ended | None) -> str:
        """A line; without `ended`, of an answer that was stopped."""
        now = time.monotonic()
        count = ended.num_tokens if ended is not None else None
        words = [f"{count} tokens" if count is not None else f"about {self._parts} tokens"]
        count = self._parts if count is None else count
        if self._first is not None:
            if count > 1:
                words.append(f"{(count - 1) / max(now - self._first, 1e-9):.1f} tokens/s")
            words.append(f"first after {self._first - self._start:.2f} s")
        if ended is None:
            return ", ".join(["stopped", *words])
        if ended.num_prompt is not None:
            cached = "" if ended.num_cached is None else f", {ended.num_cached} of them cached"
            words.append(f"{ended.num_prompt} prompt tokens{cached}")
        if ended.finish != "stop":
            words.append("cut at the limit" if ended.finish == "length" else ended.finish)
        return ", ".join(words)
