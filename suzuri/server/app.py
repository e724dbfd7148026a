"""The routes: each reads its request, and hands it to the file that answers it."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from suzuri import __version__
from suzuri.engine.sampling_params import MAX_LOGPROBS
from suzuri.log import get_logger
from suzuri.model.config import NUM_IDS
from suzuri.processing.chat import DEFAULT_EFFORT, EFFORTS
from suzuri.server.bodies import read_object, uncollected
from suzuri.server.chat import chat_chunks, start_chat, whole_chat
from suzuri.server.completions import completion_chunks, start_completion, whole_completion
from suzuri.server.errors import ApiError, invalid
from suzuri.server.limits import Limits, release_body
from suzuri.server.logprobs import token_name
from suzuri.server.native import start_generate, whole_generate
from suzuri.server.native_schema import GenerateRequest, GenerateSampling, UpdateWeightsRequest
from suzuri.server.openapi import request_body
from suzuri.server.request_ids import HEADER, RequestIds, request_id
from suzuri.server.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    first_fault,
)
from suzuri.server.service import Service, Work
from suzuri.server.streaming import ClientGone, EventStream, watched
from suzuri.server.text_messages import Encode, Render, render
from suzuri.server.weights import check_allowed, update_weights, weight_version

log = get_logger(__name__)
Body = TypeVar("Body", bound=BaseModel)
CLIENT_GONE = 499
"""What nobody reads."""
BODIES = 8
"""All bodies together may be so many times as large as one."""


def create_app(
    service: Service,
    *,
    keys: tuple[str, ...] = (),
    max_body: int = 64_000_000,
    body_seconds: float = 60.0,
) -> FastAPI:
    """The ASGI application of one service; the limits are those of limits.py."""
    app = FastAPI(title="Suzuri", version=__version__, docs_url=None, redoc_url=None)
    app.state.service = service
    app.add_middleware(
        Limits,
        keys=keys,
        max_body=max_body,
        max_bodies=BODIES * max_body,
        body_seconds=body_seconds,
    )
    app.add_middleware(RequestIds)  # around the limits: what they refuse has an id too
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientGone, _client_gone)
    app.add_exception_handler(ClientDisconnect, _client_gone)
    app.add_exception_handler(500, _fault)
    for path, method, answer, body in _ROUTES:
        extra = None if body is None else {"requestBody": request_body(body, service.names)}
        app.add_api_route(path, answer, methods=[method], openapi_extra=extra)
        if method == "GET":
            app.add_api_route(path, answer, methods=["HEAD"], include_in_schema=False)
    return app


def _service(request: Request) -> Service:
    return request.app.state.service


def _json(content: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")


async def _read(request: Request, kind: type[Body]) -> Body:
    """The body as a `kind`. Raises ApiError."""
    value = await read_object(request)
    try:
        with uncollected():
            return kind.model_validate(value)
    except ValidationError as error:
        nested = GenerateSampling.model_fields if kind is GenerateRequest else ()
        raise first_fault(error, {*kind.model_fields, *nested}) from error
    except RecursionError as error:
        raise invalid("the body is nested too deep") from error


# Routes


async def _chat(request: Request) -> Response:
    body = await _read(request, ChatRequest)
    work = await watched(request, start_chat(_service(request), body))
    release_body(request)
    if body.stream:
        return EventStream(work, chat_chunks(work, body))
    return await _whole(request, work, lambda: whole_chat(work, body))


async def _completion(request: Request) -> Response:
    body = await _read(request, CompletionRequest)
    work = await watched(request, start_completion(_service(request), body))
    release_body(request)
    if body.stream:
        return EventStream(work, completion_chunks(work, body))
    return await _whole(request, work, lambda: whole_completion(work, body))


async def _generate(request: Request) -> Response:
    body = await _read(request, GenerateRequest)
    work = await watched(request, start_generate(_service(request), body))
    release_body(request)
    return await _whole(request, work, lambda: whole_generate(work, body))


async def _whole(request: Request, work: Work, answer: Callable[[], Any]) -> Response:
    try:
        return _json(await watched(request, answer()))
    finally:
        work.close()


async def _models(request: Request) -> Response:
    service = _service(request)
    return _json({"object": "list", "data": [_model(service, name) for name in service.names]})


async def _one_model(request: Request, name: str) -> Response:
    service = _service(request)
    service.check_model(name)
    return _json(_model(service, name))


def _model(service: Service, name: str) -> dict[str, Any]:
    ready = service.engine.ready
    return {
        "id": name,
        "object": "model",
        "created": service.created,
        "owned_by": "suzuri",
        "root": service.names[0],
        "max_model_len": None if ready is None else ready.max_context,
    }


async def _tokenize(request: Request) -> Response:
    body = await _read(request, TokenizeRequest)
    service = _service(request)
    service.check_model(body.model)
    ready = service.ready()
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt: give either prompt or messages", "prompt")
    if body.prompt is not None:
        question: Encode | Render = Encode([body.prompt])
    else:
        question = render(
            body.messages,
            body.tools,
            DEFAULT_EFFORT if body.reasoning_effort is None else body.reasoning_effort,
            body.add_generation_prompt,
        )
    ids = (await watched(request, service.ask(question))).ids[0]
    answer: dict[str, Any] = {"count": len(ids), "max_model_len": ready.max_context, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = [token_name(service, id) for id in ids]
    return _json(answer)


async def _detokenize(request: Request) -> Response:
    body = await _read(request, DetokenizeRequest)
    service = _service(request)
    service.check_model(body.model)
    service.ready()
    wrong = [id for id in body.tokens if not 0 <= id < NUM_IDS]
    if wrong:
        raise invalid(f"tokens: {wrong[0]} is no token id (0 to {NUM_IDS - 1})", "tokens")
    spelled = b"".join(service.texts.token_bytes[id] for id in body.tokens)
    return _json({"prompt": spelled.decode("utf-8", errors="replace")})


async def _update_weights(request: Request) -> Response:
    check_allowed(_service(request))  # whatever the body may be
    body = await _read(request, UpdateWeightsRequest)
    return _json(await watched(request, update_weights(_service(request), body)))


async def _weight_version(request: Request) -> Response:
    return _json(weight_version(_service(request)))


async def _live(request: Request) -> Response:
    return _json({"status": "ok"})


async def _ready(request: Request) -> Response:
    why = _service(request).why_not_ready()
    if why is None:
        return _json({"status": "ok"})
    return _json({"status": "unavailable", "reason": why}, 503)


async def _version(request: Request) -> Response:
    return _json({"version": __version__})


async def _metrics(request: Request) -> Response:
    service = _service(request)
    engine = service.engine
    ready = service.why_not_ready() is None
    text = service.metrics.text(engine.stats, ready=ready, restarts=engine.num_restarts)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


async def _model_info(request: Request) -> Response:
    service = _service(request)
    ready = service.ready()
    config: Mapping[str, Any] = msgspec.to_builtins(ready.config)
    return _json(
        {
            "model_path": ready.model,
            "served_model_names": service.names,
            "version": __version__,
            "is_generation": True,
            "has_image_understanding": ready.config.vision is not None,
            "has_audio_understanding": ready.config.audio is not None,
            "max_context": ready.max_context,
            "max_running": ready.max_running,
            "max_logprobs": MAX_LOGPROBS,
            "reasoning_efforts": EFFORTS,
            "default_reasoning_effort": DEFAULT_EFFORT,
            "weight_version": ready.weight_version,
            "content_hash": ready.content_hash,
            "device": ready.device,
            "dtype": ready.dtype,
            "fingerprint": ready.fingerprint,
            "text_config": config["text"],
        }
    )


_ROUTES: tuple[tuple[str, str, Callable[..., Any], type[BaseModel] | None], ...] = (
    ("/v1/chat/completions", "POST", _chat, ChatRequest),
    ("/v1/completions", "POST", _completion, CompletionRequest),
    ("/v1/models", "GET", _models, None),
    ("/v1/models/{name:path}", "GET", _one_model, None),
    ("/tokenize", "POST", _tokenize, TokenizeRequest),
    ("/detokenize", "POST", _detokenize, DetokenizeRequest),
    ("/generate", "POST", _generate, GenerateRequest),
    ("/update_weights_from_disk", "POST", _update_weights, UpdateWeightsRequest),
    ("/get_weight_version", "GET", _weight_version, None),
    ("/health", "GET", _ready, None),
    ("/health/live", "GET", _live, None),
    ("/health/ready", "GET", _ready, None),
    ("/metrics", "GET", _metrics, None),
    ("/version", "GET", _version, None),
    ("/get_model_info", "GET", _model_info, None),
)


# Errors


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    _service(request).metrics.refused(error.status)
    return error.response()


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    response = ApiError(error.status_code, message).response()
    response.headers.update(error.headers or {})
    return response


async def _client_gone(request: Request, error: Exception) -> Response:
    _service(request).metrics.disconnects.inc()
    return Response(status_code=CLIENT_GONE)


async def _fault(request: Request, error: Exception) -> Response:
    """Outside of all middleware, so that the id is put into the answer here."""
    id = request_id(request)
    log.error("request %s failed, %s %s:", id, request.method, request.url.path)
    response = ApiError(500, "the server failed on this request; its log says how").response()
    response.headers[HEADER] = id
    return response
