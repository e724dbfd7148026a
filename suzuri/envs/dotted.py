"""Somebody's own problems and rewards, named as "package.module:name". No torch here.

A reward that is `async` is awaited where everything runs; any other is called in a process of its
own (workers.py), so that it can be ended.
"""

# pyright: strict

import dataclasses
import difflib
import inspect
import math
import numbers
import pkgutil
from collections.abc import Mapping, Sequence
from typing import Any, cast

from suzuri.envs.chat_prompts import ChatPrompts
from suzuri.envs.env import Problems
from suzuri.envs.task import Message
from suzuri.envs.worker import Caught
from suzuri.envs.workers import CallLimits, Workers

PARTS = {
    "problems": ("size", "group"),
    "problems' group": ("name", "envs", "rewards"),
    "problems' environment": ("initial", "step"),
}
"""What each must have (env.py)."""


def load(path: str, what: str) -> Any:
    """What stands at "package.module:name". ValueError says what is missing, naming the path."""
    module_name, colon, name = path.partition(":")
    if not colon or not module_name or not name:
        raise ValueError(f'{what} {path!r}: must be "package.module:name"')
    module: Any = None
    with Caught() as caught:
        module = pkgutil.resolve_name(f"{module_name}:")
    match caught.error:
        case None:
            pass
        case ModuleNotFoundError(name=str() as missing):
            if (module_name + ".").startswith(f"{missing}."):
                fix = f"no module {missing}; install it, or name its folder in PYTHONPATH"
            else:
                fix = f"{module_name} imports {missing}, which is not installed"
            raise ValueError(f"{what} {path!r}: {fix}") from caught.error
        case _:
            raise ValueError(
                f"{what} {path!r}: importing {module_name} raised {caught.text}"
            ) from caught.error
    found = module
    for part in name.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), 3)
            raise ValueError(
                f"{what} {path!r}: {module_name} has no {name}"
                + (f"; near it: {', '.join(near)}" if near else "")
            )
        found = getattr(found, part)
    return found


@dataclasses.dataclass(frozen=True, kw_only=True)
class NamedProblems:
    """`problems` of a recipe: what the class or function at `path` makes of the prompts (a
    `ChatPrompts`) and `settings`. ValueError, when they are made, for what is missing."""

    path: str
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])

    def __call__(self, prompts: ChatPrompts) -> Problems:
        make = load(self.path, "problems")
        if not callable(make):
            raise ValueError(f"problems {self.path!r}: is no class or function")
        try:
            found = cast(Any, make(prompts, **self.settings))
        except TypeError as error:
            raise ValueError(f"problems {self.path!r}: {error}") from error
        self._check(found, "problems")
        if found.size == 0:
            raise ValueError(f"problems {self.path!r}: there are none (size = 0)")
        group = found.group(0)
        self._check(group, "problems' group")
        self._check(group.envs(1)[0], "problems' environment")
        return found

    def _check(self, found: Any, what: str) -> None:
        missing = [name for name in PARTS[what] if not hasattr(found, name)]
        if missing:
            raise ValueError(
                f"{what} {self.path!r}: a {type(found).__name__} without {' and '.join(missing)} "
                "(suzuri/envs/env.py says what it must have)"
            )


class NamedReward:
    """The function at `path`: from the prompt's messages, those that followed (the assistant's, and
    results of tools) and the answer of the line, to a number. ValueError for what is missing."""

    def __init__(self, path: str, *, seconds: float = 20.0, processes: int = 2) -> None:
        if not 0 < seconds < math.inf:
            raise ValueError(f"reward {path!r}: seconds = {seconds!r}: must be above 0")
        function = load(path, "reward")
        if not callable(function):
            raise ValueError(f"reward {path!r}: is no function")
        try:
            inspect.signature(function).bind((), (), None)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"reward {path!r}: must take prompt, turns, answer: {error}"
            ) from error
        self.path, self._function = path, function
        self._limits = CallLimits(cpu_seconds=None, wall_seconds=seconds)
        modules = ("suzuri.envs.dotted", path.partition(":")[0])
        self._workers = Workers(modules, count=processes, memory_mb=None)

    async def __call__(
        self, prompt: Sequence[Message], turns: Sequence[Message], answer: Any
    ) -> float:
        """Raises what it raises, TypeError for what is no number, TimeoutError beyond `seconds` (of
        an async one the limit is that of the environment)."""
        if inspect.iscoroutinefunction(self._function):
            return as_reward(await self._function(prompt, turns, answer), self.path)
        return await self._workers.call(
            "suzuri.envs.dotted:reward_of",
            self.path,
            list(prompt),
            list(turns),
            answer,
            limits=self._limits,
        )


def reward_of(path: str, prompt: list[Message], turns: list[Message], answer: Any) -> float:
    """For a process of its own."""
    return as_reward(load(path, "reward")(prompt, turns, answer), path)


def as_reward(value: object, path: str) -> float:
    """A number as a float, NaN too (which is no reward). Raises TypeError for anything else."""
    if not isinstance(value, numbers.Real):
        raise TypeError(f"reward {path!r} gave {str(value)[:60]!r}: must be a number")
    return float(value)
