"""How much of what agents repeat the prefix cache saves: 10 conversations of 8 turns.

    python benchmarks/agent_pattern.py --json benchmarks/results/agent-pattern.json

Each turn's prompt is the whole history and a tool result of 200-2000 tokens; all conversations
begin with the same instructions, and come back a while after their last answer. The scheduler, the
pools and the prefix cache are the engine's own with Inkling's window and pages of 128 tokens; the
tokens come from a stand-in instead of a model, so nothing here says how fast a GPU is. Pools are
given as a share of what all conversations hold in the end; "dropped": the client leaves the middle
of each answer out of the history, as many do with thoughts.

A shared token is one of the longest prefix that a prompt has in common with any earlier request,
answer included: counted here, not by the engine.
"""

import argparse
import collections
import dataclasses
import json
import platform
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from suzuri.engine.config import EngineConfig
from suzuri.engine.engine import Engine, TokenLogprobs
from suzuri.engine.plan import Plan
from suzuri.engine.runner import Launched
from suzuri.engine.sampling_params import SamplingParams
from suzuri.engine.transfers import Download
from suzuri.model.config import preset
from suzuri.processing.vocabulary import FullVocabulary

PAGE = 128
SHARES = (1.5, 1.0, 0.9, 0.75, 0.5)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pattern:
    """What the agents do. Ranges are inclusive, in tokens; `pause` in engine steps."""

    vocabulary: int
    conversations: int = 10
    turns: int = 8
    instructions: int = 500
    task: tuple[int, int] = (50, 300)
    result: tuple[int, int] = (200, 2000)
    skew: float = 1.0
    """Where in the range a result is: a uniform number to this power, so above 1 more are short."""
    answer: tuple[int, int] = (50, 300)
    pause: tuple[int, int] = (0, 40)
    live: int = 10
    """Conversations that go on at one time; the next one begins when one ends."""
    dropped: bool = False
    """Leave the second quarter of each answer up to its third out of the history."""
    seed: int = 0


@dataclasses.dataclass(kw_only=True)
class Turn:
    """One request and what came of it. `number` counts from 0."""

    conversation: int
    number: int
    prompt: list[int]
    params: SamplingParams
    shared: int
    """Tokens in common with an earlier request, at most len(prompt) - 1 of which can be saved."""
    cached: int = 0
    tokens: list[int] = dataclasses.field(default_factory=list[int])
    logprobs: list[TokenLogprobs | None] = dataclasses.field(
        default_factory=list["TokenLogprobs | None"]
    )


def common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens with which both begin."""
    low, high = 0, min(len(one), len(other))
    while low < high:  # whole slices are compared: ten times faster than token by token
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def play(
    engine: Engine,
    pattern: Pattern,
    after_step: Callable[[], None] = lambda: None,
    **params: Any,
) -> list[Turn]:
    """Runs the conversations to their end; the turns in the order in which they were asked.

    `params`: further fields of SamplingParams. `after_step` is called after every step.
    """
    rng = random.Random(pattern.seed)

    def draw(count: int) -> list[int]:
        return [rng.randrange(pattern.vocabulary) for _ in range(count)]

    def result() -> list[int]:
        low, high = pattern.result
        return draw(low + round((high - low) * rng.random() ** pattern.skew))

    instructions = draw(pattern.instructions)
    history = [
        instructions + draw(rng.randint(*pattern.task)) for _ in range(pattern.conversations)
    ]
    waiting = collections.deque(range(pattern.conversations))
    due = [(0, waiting.popleft()) for _ in range(min(pattern.live, pattern.conversations))]
    number = [0] * pattern.conversations
    past: list[list[int]] = []
    turns: list[Turn] = []
    running: dict[str, Turn] = {}
    step = 0
    while due or engine.has_work:
        for item in [item for item in due if item[0] <= step]:
            due.remove(item)
            conversation = item[1]
            prompt = history[conversation] + result()
            count = rng.randint(*pattern.answer)
            turn = Turn(
                conversation=conversation,
                number=number[conversation],
                prompt=prompt,
                params=SamplingParams(
                    max_tokens=count,
                    seed=len(turns),
                    ignore_eos=True,
                    detokenize=False,
                    **params,
                ),
                shared=max((common_prefix(prompt, other) for other in past), default=0),
            )
            name = f"{conversation}.{turn.number}"
            engine.add(name, prompt, turn.params)
            running[name] = turn
            turns.append(turn)
            past.append(prompt)
        for event in engine.step():
            turn = running[event.sequence.request.id]
            if event.token is not None:
                turn.tokens.append(event.token)
                turn.logprobs.append(event.logprobs)
            if event.finish is None:
                continue
            turn.cached = event.sequence.num_cached
            past.append(turn.prompt + turn.tokens)
            conversation = turn.conversation
            history[conversation] = turn.prompt + kept(turn.tokens, pattern.dropped)
            number[conversation] += 1
            if number[conversation] < pattern.turns:
                due.append((step + 1 + rng.randint(*pattern.pause), conversation))
            elif waiting:
                due.append((step + 1, waiting.popleft()))
        after_step()
        step += 1
    return turns


def kept(answer: list[int], dropped: bool) -> list[int]:
    """What a client keeps of an answer."""
    quarter = len(answer) // 4
    return answer[:quarter] + answer[3 * quarter :] if dropped else answer


def rate(turns: Sequence[Turn]) -> float:
    """Saved tokens of those that were shared."""
    shared = sum(turn.shared for turn in turns)
    return sum(turn.cached for turn in turns) / shared if shared else 0.0


class RandomTokens:
    """A runner that draws any token for every row."""

    def __init__(self, vocabulary: int) -> None:
        self._rng, self._vocabulary = random.Random(1), vocabulary

    def execute(self, plan: Plan) -> Launched:
        sampling = [work for work in plan.works if work.samples]
        ids = [self._rng.randrange(self._vocabulary) for _ in sampling]
        drawn = Download([torch.tensor(ids, dtype=torch.int64)])
        return Launched(sampling=sampling, ids=drawn, raw=None, sampled=None, prompts=[])


class Shell:
    config = preset("inkling")


def build(*, global_pages: int, snapshots: int) -> Engine:
    """An engine over tokens. Local pages for the running ones and for every snapshot's window."""
    window = -(-512 // PAGE) + 2
    config = EngineConfig(
        max_running=10,
        max_context=32768,
        token_budget=2048,
        page_size=PAGE,
        global_pages=max(global_pages, 32768 // PAGE + 1),
        local_pages=(10 + snapshots) * window + 2048 // PAGE,
        snapshots=snapshots,
    )
    shell: Any = Shell()
    runner: Any = RandomTokens(190_000)
    return Engine(shell, config, memory_bytes=1, vocabulary=FullVocabulary(), runner=runner)


def measure(pattern: Pattern, share: float, working_set: int, snapshots: int) -> dict[str, Any]:
    """One run with global pages for a share of the working set."""
    engine = build(global_pages=round(share * working_set), snapshots=snapshots)
    turns = play(engine, pattern)
    engine.check()
    counters, stats = engine.scheduler.counters, engine.cache.stats
    later = [turn for turn in turns if turn.number > 0]
    computed = counters.computed_tokens
    # Each prompt token that was never seen before, and each answer token but the last of a turn.
    needed = sum(len(t.prompt) - t.shared + len(t.tokens) - 1 for t in turns)
    return {
        "live": pattern.live,
        "dropped": pattern.dropped,
        "global_pages": engine.capacity.global_pages - 1,
        "share_of_working_set": share,
        "snapshots": snapshots,
        "hit_rate_from_second_turn": round(rate(later), 4),
        "hit_rate_per_turn": [
            round(rate([t for t in turns if t.number == number]), 4)
            for number in range(pattern.turns)
        ],
        "prompt_tokens": sum(len(turn.prompt) for turn in turns),
        "computed_tokens": computed,
        "computed_again": computed - needed,
        "lost_to_preemption": counters.recomputed_tokens,
        "preemptions": counters.preemptions,
        "evictions": dict(stats.evictions),
    }


def identical() -> dict[str, Any]:
    """The same prompt of 2,500 tokens, one request after the other."""
    engine = build(global_pages=500, snapshots=40)
    prompt = [random.Random(2).randrange(190_000) for _ in range(2500)]
    cached: list[int] = []
    for i in range(4):
        request = engine.add(str(i), prompt, SamplingParams(max_tokens=64, seed=i))
        engine.run()
        cached.append(request.sequences[0].num_cached)
    return {"prompt_tokens": 2500, "cached_tokens": cached}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json")
    options = parser.parse_args()
    start = time.process_time()
    runs: list[dict[str, Any]] = []
    for live in (10, 3):
        for dropped in (False, True):
            pattern = Pattern(vocabulary=190_000, live=live, dropped=dropped)
            whole = play(build(global_pages=4000, snapshots=400), pattern)
            ends = {turn.conversation: len(turn.prompt) + len(turn.tokens) for turn in whole}
            working_set = sum(-(-length // PAGE) for length in ends.values())
            runs += [measure(pattern, share, working_set, 40) for share in SHARES]
    result = {
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "pattern": dataclasses.asdict(Pattern(vocabulary=190_000)),
        "page_size": PAGE,
        "seconds": round(time.process_time() - start, 1),
        "identical": identical(),
        "runs": runs,
    }
    print(json.dumps(result, indent=1))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(result, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
