"""POST /generate: ids in, ids out, with the log-prob and the version of the weights of each."""

import base64
import contextlib
import itertools
import re
from typing import Any

from suzuri.engine.messages import Event, Logprobs
from suzuri.engine.sampling_params import SamplingParams
from suzuri.server.errors import ApiError, invalid
from suzuri.server.native_media import media_inputs
from suzuri.server.native_schema import GenerateRequest, GenerateSampling
from suzuri.server.schema import bias_of, check_priority, check_stops
from suzuri.server.service import Service, Work, sampling
from suzuri.server.text_messages import Encode

NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "no_stop_trim": "include_stop_str_in_output",
}
"""Of SGLang, and what SamplingParams calls the same."""


async def start_generate(service: Service, body: GenerateRequest) -> Work:
    """Check, let in and send to the engine. Raises ApiError; nothing is held then."""
    if (body.input_ids is None) == (body.text is None):
        raise invalid("input_ids: give either input_ids or text", "input_ids")
    check_priority(body.priority)
    params = _params(body)
    media = body.media or []
    if media and body.input_ids is None:
        raise invalid("media: only with input_ids, which have tokens for it", "media")
    work = service.admit("gen", 1)
    with contextlib.ExitStack() as undo:
        undo.callback(work.close)
        ids = body.input_ids
        if ids is None:
            ids = (await work.ask(Encode([body.text or ""]))).ids[0]
        work.add(
            ids,
            params,
            media=media_inputs(media, ids, service.ready().config),
            priority=body.priority,
            salt=body.cache_salt,
            may_restart=True,
        )
        body.input_ids, body.media = [], None  # a long answer must not hold them
        await work.accepted()
        undo.pop_all()
    return work


def _params(request: GenerateRequest) -> SamplingParams:
    body = request.sampling_params or GenerateSampling()
    given = body.model_dump(exclude_none=True, exclude={"logit_bias"})
    fields = {NAMES.get(name, name): value for name, value in given.items()}
    fields |= {
        "max_tokens": body.max_new_tokens,
        "sampled_logprobs": bool(request.return_logprob),
        "routing": bool(request.return_routed_experts),
    }
    if body.logit_bias is not None:
        fields["logit_bias"] = bias_of(body.logit_bias)
    check_stops(body.stop, body.stop_token_ids)
    try:
        return sampling(fields)
    except ApiError as error:
        message = error.message
        for native, own in NAMES.items():
            message = re.sub(rf"\b{own}\b", native, message)
        raise invalid(message, "sampling_params") from error


class _Answer:
    """What has come so far, and counts."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.ids: list[int] = []
        self.logprobs: list[Logprobs | None] = []
        self.versions: list[int] = []
        self.cached = 0
        self.last: Event | None = None

    def push(self, event: Event) -> None:
        if event.restarted:
            self.__init__()
            return
        self.texts.append(event.text)
        self.cached += event.cached
        if event.token is not None:
            self.ids.append(event.token)
            self.logprobs.append(event.logprobs)
            self.versions.append(event.version)
        if event.finish is not None:
            self.last = event


async def whole_generate(work: Work, body: GenerateRequest) -> dict[str, Any]:
    """The response object. Raises ApiError."""
    answer, ready = _Answer(), work.service.engine.ready
    assert ready is not None
    while not work.is_done:
        for event in (await work.next())[1]:
            answer.push(event)
    assert answer.last is not None
    meta: dict[str, Any] = {
        "id": work.id,
        "finish_reason": {"type": answer.last.finish, "matched": answer.last.stop},
        "prompt_tokens": work.num_prompt,
        "completion_tokens": len(answer.ids),
        "cached_tokens": answer.cached,
        "weight_version": answer.versions[-1] if answer.versions else ready.weight_version,
        "weight_versions": [
            [version, len(list(run))] for version, run in itertools.groupby(answer.versions)
        ],
        "fingerprint": ready.fingerprint,
    }
    if body.return_logprob:
        # Shortest decimals of doubles, which fp32 numbers are here: nothing is rounded.
        meta["output_token_logprobs"] = [
            [None if found is None else found.sampled, id, None]
            for found, id in zip(answer.logprobs, answer.ids, strict=True)
        ]
    if answer.last.routed is not None:
        routed = answer.last.routed
        meta["routed_experts"] = {
            "dtype": "uint8",
            "shape": routed.shape,
            "data": base64.b64encode(routed.data).decode(),
        }
    return {"text": "".join(answer.texts), "output_ids": answer.ids, "meta_info": meta}
