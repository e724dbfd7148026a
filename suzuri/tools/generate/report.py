"""What a line of output holds, and the summary."""

import json
import math
from typing import Any

from suzuri.engine.outputs import CompletionOutput, Logprob, RequestOutput


def output_line(id: str | int, output: RequestOutput) -> str:
    """One JSON object: outputs and usage, or the error."""
    if output.error is not None:
        return _dump({"id": id, "error": output.error})
    found: dict[str, Any] = {"id": id, "outputs": [_sample(one) for one in output.outputs]}
    if output.prompt_logprobs is not None:
        found["prompt_logprobs"] = [
            None if entry is None else _entry(entry) for entry in output.prompt_logprobs
        ]
    found["usage"] = {
        "prompt_tokens": len(output.prompt_token_ids),
        "completion_tokens": num_generated(output),
        "cached_tokens": output.num_cached_tokens,
    }
    return _dump(found)


def num_generated(output: RequestOutput) -> int:
    return sum(len(one.token_ids) for one in output.outputs)


def _sample(one: CompletionOutput) -> dict[str, Any]:
    found: dict[str, Any] = {
        "index": one.index,
        "text": one.text,
        "token_ids": one.token_ids,
        "finish_reason": one.finish_reason,
        "stop_reason": one.stop_reason,
    }
    if one.logprobs is not None:
        found["cumulative_logprob"] = _number(one.cumulative_logprob)
        found["logprobs"] = [_entry(entry) for entry in one.logprobs]
    if one.sampled_logprobs is not None:
        found["sampled_logprobs"] = [_entry(entry) for entry in one.sampled_logprobs]
    return found


def _entry(entry: dict[int, Logprob]) -> list[dict[str, Any]]:
    """The token itself, then the most likely ones."""
    return [
        {"id": id, "token": value.decoded_token, "logprob": _number(value.logprob)}
        for id, value in entry.items()
    ]


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _dump(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)
