"""The process in which functions are called that may not end: `python -m suzuri.envs.worker`.

workers.py starts it and says what it speaks. No torch here.
"""

# pyright: strict

import json
import os
import pkgutil
import resource
import signal
import sys
import types
from typing import Any


def main() -> None:
    """Reads a greeting, {"modules", "memory"}, then calls, {"call", "arguments", "cpu", "wall"}, a
    line each, and answers each with a line: {"value"} or {"error"}."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what the functions print is no answer

    def answer(**fields: Any) -> None:
        try:
            text = json.dumps(fields)
        except (TypeError, ValueError) as error:
            text = json.dumps({"error": f"{type(error).__name__}: {error}"})
        answers.write(text + "\n")
        answers.flush()

    greeting = json.loads(sys.stdin.readline())
    for name in greeting["modules"]:
        pkgutil.resolve_name(f"{name}:")
    if greeting["memory"] is not None:
        resource.setrlimit(resource.RLIMIT_AS, (greeting["memory"],) * 2)
    answer(value=None)
    for line in sys.stdin:
        call = json.loads(line)
        # Both signals end the process: whatever it does, and also if nobody watches it any more.
        signal.setitimer(signal.ITIMER_PROF, call["cpu"] or 0)
        signal.setitimer(signal.ITIMER_REAL, call["wall"])
        with Caught() as caught:
            value = pkgutil.resolve_name(call["call"])(*call["arguments"])
            answer(value=value)
        if caught.error is not None:
            answer(error=caught.text)
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


class Caught:
    """What code of anybody's raised, if it was an `Exception`: its errors are no reason to stop."""

    error: BaseException | None = None

    @property
    def text(self) -> str:
        return f"{type(self.error).__name__}: {self.error}"

    def __enter__(self) -> "Caught":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> bool:
        self.error = error
        return isinstance(error, Exception)


if __name__ == "__main__":
    main()
