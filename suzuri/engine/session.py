"""The requests of one caller in an engine: added, stepped, collected, and never left behind."""

import collections
from collections.abc import Callable
from collections.abc import Sequence as Many

from suzuri.engine.engine import Engine
from suzuri.engine.outputs import OutputBuilder, RequestOutput
from suzuri.engine.prompts import Prepared
from suzuri.engine.sampling_params import SamplingParams
from suzuri.interrupts import interrupts_wait


class Session:
    """Finished outputs come out in the order in which their requests were added.

    `decode` spells ids (Tokenizer.decode). An interrupt (Ctrl-C) waits for the end of the step, so
    that the engine stays whole.
    """

    def __init__(self, engine: Engine, decode: Callable[[Many[int]], str]) -> None:
        self.engine = engine
        self._decode = decode
        self._order: collections.deque[str] = collections.deque()
        self._running: dict[str, OutputBuilder] = {}
        self._done: dict[str, RequestOutput] = {}
        self.num_tokens = 0
        self.num_finished = 0

    @property
    def num_held(self) -> int:
        """Requests that were added and not taken out yet."""
        return len(self._order)

    @property
    def is_running(self) -> bool:
        return bool(self._running)

    @property
    def is_ready(self) -> bool:
        """Whether `take` would bring an output."""
        return bool(self._order) and self._order[0] in self._done

    def add(
        self, id: str, prepared: Prepared, params: SamplingParams, *, priority: int = 0
    ) -> None:
        """Raises ValueError for a request that cannot run; nothing is kept of it."""
        request = self.engine.add(
            id,
            prepared.token_ids,
            params,
            media=prepared.media,
            priority=priority,
            salt=prepared.salt,
        )
        self._running[id] = OutputBuilder(request, prepared.text, prepared.token_ids)
        self._order.append(id)

    def add_failed(self, id: str, prompt: str | None, error: str) -> None:
        """Takes the place of a request that could not be added."""
        self._done[id] = RequestOutput(
            request_id=id, prompt=prompt, prompt_token_ids=[], outputs=[], error=error
        )
        self._order.append(id)
        self.num_finished += 1

    def step(self) -> None:
        """One step of the engine, if it has work."""
        if not self.engine.has_work:
            return
        with interrupts_wait():
            for event in self.engine.step():
                id = event.sequence.request.id
                if id not in self._running:
                    continue  # somebody else's
                self.num_tokens += event.token is not None
                if self._running[id].add(event):
                    self._done[id] = self._running.pop(id).build(self._decode)
                    self.num_finished += 1

    def take(self) -> RequestOutput | None:
        """The oldest request's output, if it is finished."""
        return self._done.pop(self._order.popleft()) if self.is_ready else None

    def abort(self) -> None:
        """End whatever runs and let the engine forget it."""
        if not self._running:
            return
        with interrupts_wait():
            for id in self._running:
                self.engine.abort(id)
            while self.engine.has_work:
                self.engine.step()
        self._running.clear()
