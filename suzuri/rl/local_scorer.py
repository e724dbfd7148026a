"""A model in this process that says how likely it finds what another one drew."""

import asyncio
import collections
from collections.abc import Sequence
from typing import Literal

import numpy as np

from suzuri.engine.config import EngineConfig
from suzuri.engine.engine import Engine
from suzuri.engine.load import load_engine
from suzuri.engine.request import Request
from suzuri.engine.sampling_params import SamplingParams
from suzuri.processing.tokenizer import Tokenizer
from suzuri.processing.vocabulary import KeptVocabulary, Vocabulary, vocabulary_of
from suzuri.rl.local_sampler import media_of
from suzuri.rl.scores import tokens_of
from suzuri.training.initial import find_model
from suzuri.types import Array, Sample

AT_ONCE = 8
PAGE = 128


class LocalScorer:
    """Reads conversations as prompts; nothing of one is left for the next."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._is_free = asyncio.Lock()

    async def logprobs(self, samples: Sequence[Sample]) -> list[Array | str]:
        """As `Scorer` (scores.py)."""
        async with self._is_free:
            return await self._logprobs(samples)

    async def _logprobs(self, samples: Sequence[Sample]) -> list[Array | str]:
        waiting = collections.deque(enumerate(samples))
        found: list[Array | str] = ["not asked"] * len(samples)
        running: dict[str, tuple[int, Request]] = {}
        try:
            while waiting or running:
                while waiting and len(running) < self.engine.config.max_running:
                    index, sample = waiting.popleft()
                    try:
                        running[str(index)] = index, self._ask(str(index), sample)
                    except ValueError as error:
                        found[index] = str(error)
                for event in self.engine.step():
                    if event.finish is not None:
                        index, request = running.pop(event.sequence.request.id)
                        found[index] = _read(request, samples[index], event.sequence.error)
                await asyncio.sleep(0)
        finally:
            for id in running:
                self.engine.abort(id)
            self.engine.run()
        return found

    def _ask(self, id: str, sample: Sample) -> Request:
        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        return self.engine.add(
            id, tokens_of(sample), params, media=[media_of(item) for item in sample.media]
        )


def _read(request: Request, sample: Sample, error: str | None) -> Array | str:
    records = request.prompt_logprobs or []
    if len(records) != sample.num_tokens:
        return error or f"it reads {len(records) + 1} tokens where {sample.num_tokens + 1} are"
    return np.array([np.nan if one.raw is None else one.raw for one in records], np.float32)


def load_scorer(
    field: str,
    model: str,
    vocabulary: Vocabulary,
    tokenizer: Tokenizer,
    *,
    dtype: Literal["bfloat16", "float32"],
    device: str,
    max_context: int,
) -> LocalScorer:
    """`model`: a folder or a hub id; `vocabulary`: of the model that draws. Raises ValueError
    naming the config's `field`."""
    try:
        shape, _ = find_model(model, random_weights=False)
        check_vocabulary(vocabulary, vocabulary_of(shape.kept_vocabulary, tokenizer.token_bytes))
        most = shape.text.model_max_length
        if most <= max_context:
            raise ValueError(f"it takes {most - 1} tokens; lower limits.max_context to that")
        pages = AT_ONCE * (-(-(max_context + 1) // PAGE) + 1)
        config = EngineConfig(
            dtype=dtype,
            max_context=max_context + 1,
            max_running=AT_ONCE,
            page_size=PAGE,
            prefix_cache=False,
            global_pages=pages,
            local_pages=pages,
            snapshots=2 * AT_ONCE,
        )
        return LocalScorer(load_engine(model, config, tokenizer, device=device))
    except (ValueError, OSError) as error:
        raise ValueError(f"{field} = {model!r}: {error}") from error


def check_vocabulary(ours: Vocabulary, theirs: Vocabulary) -> None:
    """Raises ValueError where a scorer would read other tokens than a model draws."""
    if not isinstance(theirs, KeptVocabulary):
        return
    lacking = range(ours.num_rows) if not isinstance(ours, KeptVocabulary) else ours.ids
    missing = sorted(set(lacking) - set(theirs.ids))
    if missing:
        raise ValueError(
            f"its vocabulary lacks {len(missing)} tokens that the model draws, {missing[0]} the "
            "first; give a model whose vocabulary has them all"
        )
