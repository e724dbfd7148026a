"""Environments that never return, never give way, or say nonsense: what that costs, and whom."""

import asyncio
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

from suzuri.envs import guard
from suzuri.envs.env import Env, Outcome, Trajectory
from suzuri.envs.guard import Fault, Stage
from suzuri.envs.rollout import Limits, play_group, rollout
from suzuri.types import Answer, Prompt, SampleParams, SamplerLost
from tests.waiting import until, until_async

ROOT = Path(__file__).parents[2]


class One:
    """Answers with one token: the seed."""

    version = 0

    async def sample(self, prompt: Prompt, params: SampleParams) -> Answer:
        await asyncio.sleep(0)
        return Answer(tokens=[params.seed or 0], logprobs=[-1.0], versions=[0], finish="stop")


class Acting:
    """Does something when it is asked to judge."""

    def __init__(self, act: Callable[[], Any], first: Callable[[], Any] | None = None) -> None:
        self._act, self._first = act, first or (lambda: Prompt(tokens=[1]))

    async def initial(self) -> Prompt:
        return self._first()

    async def step(self, answer: Answer) -> Outcome:
        found = self._act()
        return found if not isinstance(found, float) else Outcome(reward=found)


class Group:
    name = "acting"

    def __init__(
        self,
        envs: Callable[[int], Any],
        rewards: Callable[[int], Any] = lambda count: [0.0] * count,
    ) -> None:
        self._envs, self._rewards = envs, rewards

    def envs(self, count: int) -> Sequence[Env]:
        return self._envs(count)

    async def rewards(self, trajectories: Sequence[Trajectory]) -> Sequence[float]:
        return self._rewards(len(trajectories))


def play(env: Any, seconds: float = 60.0) -> Trajectory:
    return asyncio.run(rollout(env, One(), Limits(env_seconds=seconds), seed=7))


def play_all(group: Any, count: int = 2, seconds: float = 60.0) -> list[Trajectory]:
    limits = Limits(env_seconds=seconds)
    return asyncio.run(play_group(group, One(), limits, list(range(count))))


@pytest.fixture
def gate() -> Generator[threading.Event]:
    """What somebody waits for in vain until the test is over."""
    event = threading.Event()
    yield event
    event.set()


def test_code_that_never_gives_way_holds_up_nobody(gate: threading.Event) -> None:
    """The others end while it still sits there: it would let nobody else run on their thread."""

    async def both() -> Trajectory:
        limits = Limits(env_seconds=3600.0)
        stuck = asyncio.ensure_future(rollout(Acting(gate.wait), One(), limits, seed=0))
        others = await asyncio.gather(
            *(rollout(Acting(lambda: 0.5), One(), limits, seed=i) for i in range(5))
        )
        assert [one.reward for one in others] == [0.5] * 5
        assert not stuck.done()
        stuck.cancel()
        await asyncio.gather(stuck, return_exceptions=True)
        return others[0]

    assert asyncio.run(both()).status == "over"


def forever() -> float:
    while True:
        pass


def test_it_is_timed_out_wherever_it_sits(gate: threading.Event) -> None:
    for env in (Acting(gate.wait), Acting(lambda: 1.0, gate.wait), Acting(forever)):
        found = play(env, seconds=0.2)
        assert (found.status, found.reward) == ("timed_out", None)
        assert found.error == "the environment took more than 0.2 s"
    found = play_all(Group(lambda count: gate.wait()), seconds=0.2)
    assert {one.status for one in found} == {"timed_out"} and len(found) == 2
    group = Group(lambda count: [Acting(lambda: 1.0)] * count, lambda count: gate.wait())
    found = play_all(group, seconds=1.0)
    assert {(one.status, one.reward) for one in found} == {("timed_out", None)}
    assert all("rewards of the group" in (one.error or "") for one in found)


def test_a_loop_without_end_is_broken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "GRACE", 0.0)
    ended = threading.Event()

    async def endless() -> None:
        try:
            forever()
        finally:
            ended.set()

    async def run() -> None:
        stage = await Stage.opened(60.0)
        with pytest.raises(Fault, match="took more than"):
            await stage.run(endless, 0.05)
        with pytest.raises(Fault, match="may still run"):
            await stage.run(endless, 0.05)
        assert await asyncio.to_thread(ended.wait, 600)

    asyncio.run(run())


def test_it_is_broken_off_though_the_loop_that_asked_has_ended() -> None:
    """One that spins on takes the turns of everything else in the process, for good."""
    before = set(threading.enumerate())
    assert play(Acting(forever), seconds=0.2).status == "timed_out"
    until(lambda: not set(threading.enumerate()) - before)


def test_where_no_thread_can_start_the_loop_breaks_it_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def run() -> None:
        before = set(threading.enumerate())
        stage = await Stage.opened(60.0)
        monkeypatch.setattr(threading.Timer, "start", start)
        with pytest.raises(Fault, match="took more than"):
            await stage.run(act, 0.05)
        await until_async(lambda: not set(threading.enumerate()) - before)

    async def act() -> None:
        forever()

    asyncio.run(run())


def test_what_waits_is_cancelled() -> None:
    ended = threading.Event()

    async def asleep() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    async def run() -> None:
        stage = await Stage.opened(60.0)
        with pytest.raises(Fault, match="took more than"):
            await stage.run(asleep, 0.05)

    asyncio.run(run())
    assert ended.wait(600)


def test_all_calls_of_an_attempt_run_on_one_loop() -> None:
    """So that what `initial` opens `step` may use."""
    loops = list[Any]()

    class Looking:
        async def initial(self) -> Prompt:
            loops.append(asyncio.get_running_loop())
            self.later = asyncio.get_running_loop().create_future()
            asyncio.get_running_loop().call_soon(self.later.set_result, 0.75)
            return Prompt(tokens=[1])

        async def step(self, answer: Answer) -> Outcome:
            loops.append(asyncio.get_running_loop())
            return Outcome(reward=await self.later)

    assert play(Looking()).reward == 0.75
    assert loops[0] is loops[1]
    assert loops[0].is_closed() or not threading.current_thread().name.startswith("suzuri-env")


def raising(error: BaseException) -> Callable[[], float]:
    def act() -> float:
        raise error

    return act


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (raising(ValueError("no")), "ValueError: no"),
        (raising(SystemExit(3)), "RuntimeError: SystemExit: 3"),
        (raising(KeyboardInterrupt()), "RuntimeError: KeyboardInterrupt: "),
        (raising(StopIteration()), "coroutine raised StopIteration"),
        (raising(asyncio.CancelledError()), "CancelledError"),
        (lambda: None, "gave NoneType, not Outcome"),
        (lambda: Outcome(reward="good"), "could not convert string to float"),  # type: ignore
        (lambda: Outcome(reward=[1.0]), "TypeError"),  # type: ignore
        (lambda: Outcome(prompt=[1, 2]), "gave list, not Prompt"),  # type: ignore
        (lambda: Outcome(metrics=3), "TypeError"),  # type: ignore
    ],
)
def test_what_it_raises_and_nonsense_cost_the_attempt(act: Any, said: str) -> None:
    found = play(Acting(act))
    assert (found.status, found.reward) == ("failed", None)
    assert said in (found.error or "")


def test_a_group_that_fails_costs_its_attempts() -> None:
    def broken(count: int) -> Any:
        raise KeyError("no such problem")

    found = play_all(Group(broken))
    assert [(one.status, one.turns) for one in found] == [("failed", ())] * 2
    assert "environments of the group: KeyError" in (found[0].error or "")
    for rewards in (broken, lambda count: ["x"] * count, lambda count: [0.0]):
        found = play_all(Group(lambda count: [Acting(lambda: 1.0)] * count, rewards))
        assert {(one.status, one.reward) for one in found} == {("failed", None)}
    with pytest.raises(ValueError, match="made 1 environments, asked for 2"):
        play_all(Group(lambda count: [Acting(lambda: 1.0)]))


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), None])
def test_a_reward_that_is_no_number_is_none(reward: Any) -> None:
    group = Group(lambda count: [Acting(lambda: Outcome(reward=reward)) for _ in range(count)])
    assert [one.reward for one in play_all(group)] == [None, None]
    group = Group(lambda count: [Acting(lambda: 1.0) for _ in range(count)], lambda _: [reward, 1])
    assert [one.reward for one in play_all(group)] == [None, 2.0]


def test_threads_end_with_their_attempts() -> None:
    before = set(threading.enumerate())
    play_all(Group(lambda count: [Acting(lambda: 1.0) for _ in range(count)]), count=20)
    for thread in set(threading.enumerate()) - before:
        thread.join(600)
        assert not thread.is_alive()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_more_attempts_than_open_files_are_played_all_the_same() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    hard = min(before[1] if before[1] > 0 else 4096, 4096)
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 12, before[1]))
    try:
        count = min(60, (hard - used) // 4)
        found = play_all(Group(lambda n: [Acting(lambda: 1.0) for _ in range(n)]), count)
        assert [one.reward for one in found] == [1.0] * count
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_where_there_is_no_room_for_a_thread_it_is_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, refusals = threading.Thread.start, iter([True] * 3)

    def start(self: threading.Thread) -> None:
        if self.name == "suzuri-env" and next(refusals, None):
            raise RuntimeError("can't start new thread")
        real(self)

    monkeypatch.setattr(threading.Thread, "start", start)
    assert play(Acting(lambda: 1.0)).reward == 1.0
    refusals = iter([True] * 10**6)
    found = play(Acting(lambda: 1.0), seconds=0.2)
    assert found.status == "failed"
    assert "no thread for an environment: can't start new thread" in (found.error or "")


ENDING = """
import asyncio, threading
from suzuri.envs.rollout import Limits, rollout
from tests.envs.test_guard import Acting, One

found = asyncio.run(rollout(Acting(threading.Event().wait), One(), Limits(env_seconds=0.1), 0))
print(found.status)
"""


def test_a_process_ends_though_something_hangs_in_it() -> None:
    command = [sys.executable, "-c", ENDING]
    found = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=600
    )
    assert found.stdout.strip() == "timed_out"


class Gone(One):
    """A sampler that answers nobody any more."""

    async def sample(self, prompt: Prompt, params: SampleParams) -> Answer:
        raise SamplerLost("the server is gone")


def test_a_sampler_that_is_lost_is_no_fault_of_the_attempt() -> None:
    """It would be that of every attempt from now on: it ends the run."""
    group = Group(lambda count: [Acting(lambda: 1.0) for _ in range(count)])
    with pytest.raises(SamplerLost, match="the server is gone"):
        asyncio.run(play_group(group, Gone(), Limits(), [1, 2, 3]))
