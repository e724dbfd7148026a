"""What a line of input means: a job for the engine, or the reason why it cannot be one."""

import dataclasses
import json
from typing import Any, cast

from suzuri.engine.llm import Job
from suzuri.engine.sampling_params import SamplingParams
from suzuri.processing.chat import DEFAULT_EFFORT

Id = str | int
OF_JOB = ("prompt", "prompt_token_ids", "messages")
BESIDE = ("id", "tools", "reasoning_effort", "multi_modal_data", "cache_salt", "priority")
IN_PYTHON_ONLY = ("routing",)
"""Bring arrays, which a line of JSON does not hold."""
SAMPLING = tuple(
    field.name for field in dataclasses.fields(SamplingParams) if field.name not in IN_PYTHON_ONLY
)
MAX_ID = 1000


class LineParser:
    """Makes jobs of lines. `format`: auto is settled by the first line that is not empty."""

    def __init__(self, params: SamplingParams, *, format: str = "auto", chat: bool = False) -> None:
        self._params, self._format, self._chat = params, format, chat
        self._count = 0

    def from_text(self, text: str) -> tuple[Id, Job]:
        """The job of a plain prompt; its id is its number, from 0."""
        return self._next(), self._plain(text)

    def from_line(self, line: bytes) -> tuple[Id, Job] | None:
        """(id, job) of a line; None for an empty one."""
        text = line.decode("utf-8", errors="surrogateescape").removeprefix("\ufeff").strip("\r")
        if not text.strip():
            return None
        if self._format == "auto":
            self._format = "jsonl" if text.lstrip().startswith("{") else "text"
        number = self._next()
        try:
            text.encode()
        except UnicodeEncodeError:
            return number, Job(error="the line is not UTF-8; convert the file")
        if self._format == "text":
            return number, self._plain(text)
        try:
            return self._from_json(number, text)
        except ValueError as error:
            return number, Job(error=str(error))

    def _next(self) -> int:
        self._count += 1
        return self._count - 1

    def _plain(self, text: str) -> Job:
        if self._chat:
            messages = [{"role": "user", "content": text}]
            return Job(messages=messages, params=self._params, reasoning_effort=DEFAULT_EFFORT)
        return Job(prompt=text, params=self._params)

    def _from_json(self, number: int, text: str) -> tuple[Id, Job]:
        try:
            value: object = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"the line is no JSON ({error or 'too deep'})") from error
        if not isinstance(value, dict):
            raise ValueError("the line is no JSON object")
        line = cast("dict[str, Any]", value)
        id = line.pop("id", None)
        if id is None:
            id = number
        if isinstance(id, bool) or not isinstance(id, str | int) or len(str(id)) > MAX_ID:
            return number, Job(
                error=f"id must be a string or an integer, up to {MAX_ID} characters"
            )
        try:
            return id, self._job(line)
        except ValueError as error:
            return id, Job(error=str(error))

    def _job(self, line: dict[str, Any]) -> Job:
        known = (*OF_JOB, *BESIDE, *SAMPLING)
        unknown = sorted(set(line) - set(known))
        if unknown:
            raise ValueError(f"{', '.join(unknown)}: no such key; there are {', '.join(known)}")
        given = [key for key in OF_JOB if line.get(key) is not None]
        if ("messages" in given and len(given) > 1) or not given:
            raise ValueError(f"give one of {', '.join(OF_JOB)}")
        params = self._sampling({key: line[key] for key in SAMPLING if key in line})
        priority = line.get("priority") or 0
        if given == ["messages"]:
            for key in ("multi_modal_data", "cache_salt"):
                if line.get(key) is not None:
                    raise ValueError(f"{key} goes with a prompt, not with messages")
            effort = line.get("reasoning_effort")
            return Job(
                messages=line["messages"],
                params=params,
                tools=line.get("tools"),
                reasoning_effort=DEFAULT_EFFORT if effort is None else effort,
                priority=priority,
            )
        for key in ("tools", "reasoning_effort"):
            if line.get(key) is not None:
                raise ValueError(f"{key} goes with messages, not with a prompt")
        keys = ("prompt", "prompt_token_ids", "multi_modal_data", "cache_salt")
        prompt = {key: line[key] for key in keys if line.get(key) is not None}
        return Job(prompt=prompt, params=params, priority=priority)

    def _sampling(self, own: dict[str, Any]) -> SamplingParams:
        bias = own.get("logit_bias")
        if isinstance(bias, dict):  # JSON has no integer keys
            own["logit_bias"] = {_as_id(key): value for key, value in bias.items()}  # pyright: ignore
        # null is what it means for the field; for those that cannot be null, the command's value.
        kept = {key: value for key, value in own.items() if value is not None or key in _NULLABLE}
        return dataclasses.replace(self._params, **kept)


_NULLABLE = {
    *("max_tokens", "stop", "seed", "logprobs", "prompt_logprobs"),
    *("allowed_token_ids", "logit_bias"),
}


def _as_id(key: object) -> object:
    return int(key) if isinstance(key, str) and key.isascii() and key.isdigit() else key
