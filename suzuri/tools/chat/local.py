"""A model in this process that answers a chat."""

import dataclasses
import time
from collections.abc import Generator
from typing import Literal

from rich.console import Console

from suzuri.engine.chat_stops import StoppedTurn
from suzuri.engine.devices import device_named
from suzuri.engine.engine import TokenEvent
from suzuri.engine.load import load_engine
from suzuri.engine.prompts import prepare_chat
from suzuri.engine.request import Request
from suzuri.engine.warm_up import warm_up
from suzuri.interrupts import interrupts_wait
from suzuri.model.presets import DEFAULT_MODEL
from suzuri.processing.chat import ChatRenderer
from suzuri.processing.grammar import Grammar, GrammarCompiler
from suzuri.processing.grammar_request import chat_grammar
from suzuri.processing.media import Kind, MediaReader
from suzuri.processing.tokenizer import Tokenizer
from suzuri.tools.chat.backend import AnswerFailed, Ask, Ended, Part
from suzuri.tools.chat.config import ChatConfig
from suzuri.tools.chat.display import Display


class LocalBackend:
    """Loads the model; what does not fit is refused before a weight is read (ValueError).

    load_seconds: until it could take a request. warm_up_seconds: what the first one takes more,
    most of it compiling where nothing of this machine is kept yet.
    """

    def __init__(self, config: ChatConfig, display: Display) -> None:
        device_named(config.device, f"--device {config.device}")
        self.name = config.model or DEFAULT_MODEL
        start = time.monotonic()
        binding = chat_grammar(tools=config.tool_list())
        self._tokenizer = Tokenizer()
        self._engine = load_engine(
            self.name,
            config.engine(),
            self._tokenizer,
            random_weights=config.random_weights,
            seed=config.seed or 0,
            device=config.device,
            text_only=config.text_only,
            console=Console(stderr=True),
        )
        self.max_context: int | None = self._engine.capacity.max_context
        held = self._engine.model
        shape = dataclasses.replace(
            held.config,
            vision=None if held.vision is None else held.config.vision,
            audio=None if held.audio is None else held.config.audio,
        )
        self._reader = MediaReader(shape, local_files=False)
        self._renderer = ChatRenderer(self._tokenizer, shape)
        self._grammar: Grammar | None = None
        self.load_seconds = time.monotonic() - start
        with display.waiting("warming up"):
            if binding is not None:
                compiler = GrammarCompiler(self._engine.vocabulary, self._tokenizer.token_bytes)
                self._grammar = compiler.compile(binding)
            warm_up(self._engine)
        self.warm_up_seconds = time.monotonic() - start - self.load_seconds
        self._count = 0

    def has(self, tower: Literal["vision", "audio"]) -> bool:
        """Whether the model has this tower."""
        return getattr(self._engine.model, tower) is not None

    def check_media(self, kind: Kind, data: bytes) -> str:
        return f"{self._reader.count(self._reader.source(kind, data))} tokens"

    def answer(self, ask: Ask) -> Generator[Part]:
        engine = self._engine
        self._count += 1
        id = str(self._count)
        try:
            request = self._add(id, ask)
        except ValueError as error:
            raise AnswerFailed(str(error)) from error
        turn = StoppedTurn(ask.params, self._tokenizer.token_bytes, tools=bool(ask.tools))
        num_tokens = num_cached = 0
        try:
            while engine.has_work:
                with interrupts_wait():
                    events = engine.step()
                for event in events:
                    if event.sequence.request is not request or turn.found is not None:
                        continue
                    if event.token is not None:
                        num_tokens += 1
                        num_cached = event.sequence.num_cached if num_tokens == 1 else num_cached
                        yield turn.push((event.token,))
                    if event.finish is not None:
                        yield turn.finish()
                    if event.finish is not None or turn.found is not None:
                        finish = "stop" if turn.found is not None else event.finish
                        yield _ended(event, finish, num_tokens, num_cached)
                if turn.found is not None:
                    return
        finally:
            with interrupts_wait():
                engine.abort(id)
                engine.run()

    def _add(self, id: str, ask: Ask) -> Request:
        """Raises ValueError for what cannot run; nothing is kept of it."""
        most = self._engine.capacity.max_context - 1
        rendered = self._renderer.render(
            ask.messages, ask.tools or None, ask.effort, max_tokens=most
        )
        prepared = prepare_chat(rendered, self._engine.vocabulary, self._reader)
        # Stop strings are found by the reader of the turn, in the answer's text alone.
        params = dataclasses.replace(ask.params, stop=None, detokenize=False)
        return self._engine.add(
            id,
            prepared.token_ids,
            params,
            media=prepared.media,
            grammar=self._grammar if ask.tools else None,
        )


def _ended(event: TokenEvent, finish: str | None, num_tokens: int, num_cached: int) -> Ended:
    if finish not in ("stop", "length"):
        raise AnswerFailed(event.sequence.error or f"the answer ended early ({finish})")
    return Ended(
        finish=finish,
        num_tokens=num_tokens,
        num_prompt=len(event.sequence.request.prompt),
        num_cached=num_cached,
    )
