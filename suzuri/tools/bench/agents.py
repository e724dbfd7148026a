"""Agents: long conversations that go on, of which the prefix cache holds all but the newest part.

Each agent has a history; a turn's prompt is all that came before, its answer included, and about a
tenth more. Over its turns a prompt has `length` tokens in the median, nine tenths of it known. An
agent asks again when its tool has answered, after a time of its own; a turn's clock starts then,
whatever the engine is doing.
"""

import bisect
import dataclasses
import itertools
import random
import statistics
import time
from typing import Any

from suzuri.engine.engine import Engine
from suzuri.tools.bench.cells import AGENT_TOKENS, Cell
from suzuri.tools.bench.measure import Bench, params
from suzuri.tools.bench.state import DoesNotFit, Load, build_engine, fill_caches, prepare
from suzuri.tools.bench.trace import Seen, over_time
from suzuri.tools.bench.watch import Watch, synchronise

TURNS = 3
"""That are measured, after the one that leaves the history."""
NEW, ANSWER = 0.1, 400 / AGENT_TOKENS
"""Tokens of a turn that are new, and of its answer, over those of its prompt."""
SPREAD = 0.25
"""Agents' sizes are spread evenly, so much to both sides of the cell's."""
TOOL_SECONDS = 1.0
"""Until a tool has answered, in the mean, for prompts of AGENT_TOKENS; in proportion for others."""


@dataclasses.dataclass(kw_only=True)
class Agent:
    """`new` tokens come with a turn, `answer` tokens are drawn; `pauses` before each turn."""

    new: int
    answer: int
    pauses: list[float]
    history: list[int]
    turn: int = 0


@dataclasses.dataclass(kw_only=True)
class Turn(Seen):
    """Of one prompt: its tokens, those that an earlier turn has left, those that the cache had."""

    prompt: int
    shared: int
    cached: int = 0


def agents_of(bench: Bench, number: int, length: int) -> list[Agent]:
    """With the first prompt of each, before anything was asked."""
    draw = random.Random(f"{bench.seed} agents")
    found: list[Agent] = []
    for i in range(number):
        middle = length * (1 + SPREAD * (2 * (i + 0.5) / number - 1))
        new, answer = max(round(NEW * middle), 1), max(round(ANSWER * middle), 2)
        first = max(round(middle) - (TURNS + 1) // 2 * (new + answer), 1)
        mean = TOOL_SECONDS * middle / AGENT_TOKENS
        found.append(
            Agent(
                new=new,
                answer=answer,
                pauses=[draw.expovariate(1.0) * mean for _ in range(TURNS)],
                history=bench.prompt(first, 5, i),
            )
        )
    return found


def longest(agent: Agent) -> int:
    """Tokens of its last prompt and answer."""
    return len(agent.history) + TURNS * (agent.new + agent.answer) + agent.answer


def length_for(bench: Bench, cell: Cell) -> int:
    """The cell's median prompt; where it names none, AGENT_TOKENS or what the context holds."""
    most = bench.model.config.text.model_max_length
    grown = (1 + SPREAD) * (1 + NEW + 2 * ANSWER)
    return cell.length or min(AGENT_TOKENS, int(most / grown) - 8)


def measure_agents(bench: Bench, cell: Cell) -> dict[str, Any]:
    """All turns of all agents, after the turn that leaves each one's history. Of that only the last
    row of a prompt is computed, over caches full of random numbers; points are made as ever."""
    length = length_for(bench, cell)
    agents = agents_of(bench, cell.batch, length)
    context = max(map(longest, agents)) + 1
    # A conversation keeps two points between its turns: pools as for twice as many sequences.
    load = Load(sequences=2 * cell.batch, context=context, token_budget=bench.token_budget)
    if length < 1:
        raise DoesNotFit(f"{length} tokens are no prompt")
    engine, watch = build_engine(bench.model, load, bench.dtype)
    bench.tick("leaving histories")
    prepare(engine, watch)
    _leave_histories(bench, engine, watch, agents)
    watch.steps.clear()
    preemptions = engine.scheduler.counters.preemptions
    bench.tick(f"{TURNS} turns of {len(agents)} agents")
    turns, seconds = _run(bench, engine, agents)
    engine.check()
    assert len(turns) == TURNS * len(agents), "turns are missing"
    first = [turn.tokens[0] - turn.at for turn in turns]
    gaps = [b - a for turn in turns for a, b in itertools.pairwise(turn.tokens)]
    prompts, cached = sum(turn.prompt for turn in turns), sum(turn.cached for turn in turns)
    answers = sum(len(turn.tokens) for turn in turns)
    return {
        "seconds": seconds,
        "requests": len(turns),
        "median_prompt": statistics.median(turn.prompt for turn in turns),
        "prompt_tokens": prompts,
        "answer_tokens": answers,
        "cached_tokens": cached,
        "shared_tokens": sum(turn.shared for turn in turns),
        "hit_rate": cached / sum(turn.shared for turn in turns),
        "hit_of_prompt": cached / prompts,
        "preemptions": engine.scheduler.counters.preemptions - preemptions,
        "tokens_per_s": answers / seconds,
        "new_tokens_per_s": (prompts - cached + answers) / seconds,
    } | over_time(bench, engine, watch, first, gaps)


def _leave_histories(bench: Bench, engine: Engine, watch: Watch, agents: list[Agent]) -> None:
    """The turn before those that are measured: it compiles, and records decode steps of many
    sizes, as agents come in and end one after the other."""
    fill_caches(watch, bench.seed)
    watch.skip_prompts = True
    for i, agent in enumerate(agents):
        engine.add(f"{i} 0", agent.history, params(agent.answer))
    for event in engine.run():
        if event.token is not None:
            agents[int(event.sequence.request.id.split()[0])].history.append(event.token)
    watch.skip_prompts = False
    synchronise(bench.device)


def _run(bench: Bench, engine: Engine, agents: list[Agent]) -> tuple[list[Turn], float]:
    """All turns, and the seconds from the first one's beginning to the last one's end."""
    waiting = sorted((agent.pauses[0], i) for i, agent in enumerate(agents))
    turns: dict[str, Turn] = {}
    done: list[Turn] = []
    origin = waiting[0][0]
    start = time.perf_counter() - origin
    while waiting or engine.has_work:
        now = time.perf_counter() - start
        while waiting and waiting[0][0] <= now:
            at, i = waiting.pop(0)
            agent = agents[i]
            known = len(agent.history) - 1  # the last token of an answer is never run
            agent.history += bench.prompt(agent.new, 6, i, agent.turn)
            agent.turn += 1
            turns[f"{i} {agent.turn}"] = Turn(at=at, prompt=len(agent.history), shared=known)
            engine.add(f"{i} {agent.turn}", agent.history, params(agent.answer))
        if not engine.has_work:
            time.sleep(min(max(waiting[0][0] - now, 0.0), 0.01))
            continue
        events = engine.step()
        now = time.perf_counter() - start
        for event in events:
            id = event.sequence.request.id
            i = int(id.split()[0])
            agent, turn = agents[i], turns[id]
            if event.token is not None:
                if not turn.tokens:
                    turn.cached = event.sequence.num_cached
                turn.tokens.append(now)
                agent.history.append(event.token)
            if event.finish is not None:
                done.append(turn)
                if agent.turn < TURNS:
                    bisect.insort(waiting, (now + agent.pauses[agent.turn], i))
    synchronise(bench.device)
    return done, time.perf_counter() - start - origin
