"""A trajectory as samples: every token where it stood, and what the sampler said of those it drew.

No torch here.
"""

# pyright: strict

from collections.abc import Sequence
from typing import Literal

import numpy as np

from suzuri.envs.env import Trajectory, Turn
from suzuri.types import Array, MediaInput, Sample

Weighting = Literal["tokens", "answers", "constant"]
"""How much a drawn token counts: 1, so that long answers count more ("tokens", Yu et al., 2025);
1 / the attempt's tokens, so that attempts count equally ("answers", Shao et al., 2024); 1 / the
longest that an answer may be ("constant", Liu et al., "Dr. GRPO", 2025)."""


def samples_of(
    trajectory: Trajectory,
    advantage: float | Sequence[Array],
    *,
    weighting: Weighting = "tokens",
    longest: int = 1,
) -> list[Sample]:
    """One sample for each run of turns of which each prompt begins with the prompt and answer
    before it, id by id; so usually one. `advantage`: of every drawn token, or [T] for each turn.

    Fields of all samples, at the place that predicts the token: "target_tokens", "weights" (0 where
    the token was not drawn), "logprobs" (of the sampler), "advantages". A place says nothing of
    what was not drawn. Where answers say which experts their tokens went to, so does the sample:
    of every token what was recorded when it first ran. Raises ValueError for a record of other
    tokens.
    """
    drawn = trajectory.num_answer_tokens
    weight = {"tokens": 1.0, "answers": 1.0 / max(drawn, 1), "constant": 1.0 / longest}[weighting]
    found: list[Sample] = []
    run: list[tuple[Turn, float | Array]] = []
    for place, turn in enumerate(trajectory.turns):
        own = advantage if isinstance(advantage, int | float) else advantage[place]
        if run and not _goes_on(run[-1][0], turn):
            found.append(_sample(run, weight))
            run = []
        run.append((turn, own))
    if run:
        found.append(_sample(run, weight))
    return [sample for sample in found if np.any(sample.inputs["weights"])]


def versions_of(trajectory: Trajectory) -> list[int]:
    """Versions of the weights that drew its tokens."""
    return [version for turn in trajectory.turns for version in turn.answer.versions]


def _goes_on(before: Turn, turn: Turn) -> bool:
    known = [*before.prompt.tokens, *before.answer.tokens]
    tokens = turn.prompt.tokens
    is_longer = len(tokens) > len(known) and list(tokens[: len(known)]) == known
    return is_longer and _is_beginning(before.prompt.media, turn.prompt.media)


def _is_beginning(before: Sequence[MediaInput], media: Sequence[MediaInput]) -> bool:
    return len(before) <= len(media) and all(
        a.index == b.index and a.kind == b.kind and np.array_equal(a.inputs, b.inputs)
        for a, b in zip(before, media, strict=False)
    )


def _sample(run: Sequence[tuple[Turn, float | Array]], weight: float) -> Sample:
    last = run[-1][0]
    tokens = [*last.prompt.tokens, *last.answer.tokens]
    count = len(tokens)
    fields = {name: np.zeros(count, np.float32) for name in ("weights", "logprobs", "advantages")}
    for turn, advantage in run:
        start = len(turn.prompt.tokens)
        own = slice(start, start + len(turn.answer.tokens))
        fields["weights"][own] = weight
        fields["logprobs"][own] = turn.answer.logprobs
        fields["advantages"][own] = advantage
    inputs: dict[str, Array] = {name: values[1:] for name, values in fields.items()}
    inputs["target_tokens"] = np.array(tokens[1:], np.int64)
    routing, mask = _routing([turn for turn, _ in run], count - 1)
    return Sample(
        tokens=tokens[:-1],
        inputs=inputs,
        media=last.prompt.media,
        routing=routing,
        routing_mask=mask,
    )


def _routing(turns: Sequence[Turn], count: int) -> tuple[Array | None, Array | None]:
    """Experts of `count` tokens, and where they are known; None, None if nowhere."""
    records = [turn.answer.routing for turn in turns]
    known = [record for record in records if record is not None]
    if not known:
        return None, None
    routing_TLK = np.zeros((count, *known[0].shape[1:]), np.uint8)
    mask_T = np.zeros(count, np.bool_)
    first = 0
    for turn, record in zip(turns, records, strict=True):
        end = len(turn.prompt.tokens) + len(turn.answer.tokens) - 1
        if record is not None:
            if len(record) > end:
                raise ValueError(
                    f"routing of {len(record)} tokens for {end}: the sampler read other tokens "
                    "than the prompt's; give it ids that it has rows for"
                )
            own = slice(first, len(record))
            routing_TLK[own], mask_T[own] = record[own], True
        first = end
    return routing_TLK, None if mask_T.all() else mask_T
