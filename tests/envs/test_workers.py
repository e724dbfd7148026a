"""Functions in processes of their own: their values, errors and ends."""

import asyncio
import math
import signal
import subprocess
import sys
from typing import Any

import pytest

from suzuri.envs.workers import CallLimits, WorkerError, Workers

LIMITS = CallLimits(cpu_seconds=60.0, wall_seconds=300.0)


@pytest.fixture(scope="module")
def workers() -> Workers:
    return Workers(memory_mb=2048)


def test_values_come_back(workers: Workers) -> None:
    assert workers.call_now("math:gcd", 12, 18, limits=LIMITS) == 6
    assert workers.call_now("builtins:sorted", ["ü", "a", "\ud800"]) == ["a", "ü", "\ud800"]
    assert math.isnan(workers.call_now("builtins:float", "nan"))
    assert workers.call_now("os.path:join", "a", "b") == "a/b"


def test_what_is_printed_is_no_answer(workers: Workers) -> None:
    assert workers.call_now("builtins:print", '{"value": 3}') is None
    assert workers.call_now("math:gcd", 4, 6) == 2


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (("builtins:eval", "1/0"), "ZeroDivisionError: division by zero"),
        (("builtins:set", [1]), "TypeError: Object of type set is not JSON serializable"),
        (("math:no_such",), "AttributeError"),
        (("no_such_module:x",), "ModuleNotFoundError: No module named 'no_such_module'"),
        (("builtins:bytearray", 10**11), "MemoryError"),
        (("os:_exit", 3), "its process ended (exit code 3)"),
        (("os:abort",), "its process ended (signal 6)"),
        (("builtins:exit", 0), "its process ended (exit code 0)"),
    ],
)
def test_what_goes_wrong_is_told_and_the_next_call_works(
    workers: Workers, call: Any, said: str
) -> None:
    with pytest.raises(WorkerError) as error:
        workers.call_now(*call, limits=LIMITS)
    assert said in str(error.value)
    assert workers.call_now("math:gcd", 12, 18) == 6


def test_a_call_that_does_not_end_is_ended(workers: Workers) -> None:
    with pytest.raises(TimeoutError, match=r"took more than 0\.3 s of processor time"):
        limits = CallLimits(cpu_seconds=0.3, wall_seconds=300.0)
        workers.call_now("builtins:eval", "9**9**9", limits=limits)
    with pytest.raises(TimeoutError, match=r"took more than 0\.3 s"):
        limits = CallLimits(cpu_seconds=None, wall_seconds=0.3)
        workers.call_now("time:sleep", 600, limits=limits)
    assert workers.call_now("math:gcd", 12, 18) == 6


def test_sleep_costs_no_processor_time(workers: Workers) -> None:
    limits = CallLimits(cpu_seconds=0.3, wall_seconds=300.0)
    assert workers.call_now("time:sleep", 0.5, limits=limits) is None


def test_processes_are_used_again_until_they_fail() -> None:
    workers = Workers(count=1)
    first = workers.call_now("os:getpid")
    assert workers.call_now("os:getpid") == first
    with pytest.raises(WorkerError):
        workers.call_now("os:_exit", 1)
    assert workers.call_now("os:getpid") != first


def test_sets_have_one_order_in_all_of_them() -> None:
    text = "[*{str(i) for i in range(100)}]"
    found = [Workers().call_now("builtins:eval", text) for _ in range(2)]
    assert found[0] == found[1] != sorted(found[0])


def test_calls_stand_beside_each_other_and_no_thread_waits_for_ever(workers: Workers) -> None:
    async def many() -> list[Any]:
        limits = CallLimits(cpu_seconds=None, wall_seconds=0.3)
        calls = [workers.call("time:sleep", 600, limits=limits) for _ in range(3)]
        calls += [workers.call("math:gcd", 2 * i, 3 * i, limits=LIMITS) for i in range(1, 9)]
        return await asyncio.gather(*calls, return_exceptions=True)

    found = asyncio.run(many())
    assert [type(one) for one in found[:3]] == [TimeoutError] * 3
    assert found[3:] == [*range(1, 9)]


def test_a_module_that_cannot_be_imported_is_told() -> None:
    with pytest.raises(WorkerError, match="its process ended"):
        Workers(["no_such_module"]).call_now("math:gcd", 1, 1)


PARENT = """
import os, signal
from suzuri.envs.workers import Workers
print(Workers().call_now("os:getpid"), flush=True)
LAST
"""


@pytest.mark.parametrize("last", ["", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_they_end_with_the_process_that_started_them(last: str) -> None:
    """A worker holds the pipe of errors as long as it lives, and this reads it to its end."""
    command = [sys.executable, "-c", PARENT.replace("LAST", last)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert int(done.stdout) > 0
    assert done.returncode == (-signal.SIGKILL if last else 0)
