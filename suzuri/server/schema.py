"""What may be asked of the server: OpenAI's parameters and some more, none of them ignored.

A field that is not here is refused by name, as is one of REFUSED with another value than the ones
listed there. Ranges are checked by SamplingParams, content by the renderer.
"""

from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, TypeVar, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
)

from suzuri.server.errors import ApiError, invalid

MAX_CHOICES = 128
"""Most samples of one request, as OpenAI's."""
MAX_PRIORITY = 10**6
"""As the engine's."""
LONGEST_NAME = 64
MAX_PAIRS = 1024
"""Most pairs of logit_bias and metadata."""
MAX_TOOLS = 4096
MAX_STOPS, MAX_STOP_CHARACTERS, MAX_STOP_IDS = 256, 4096, 4096
"""Of one request: every sample has its own search for them."""


class _FirstFault(FailFast):
    """FailFast that can be part of a union: those are kept by hash."""

    def __hash__(self) -> int:
        return hash(_FirstFault)


Item = TypeVar("Item")
Listed = Annotated[list[Item], _FirstFault()]
"""A list that is refused at its first wrong item, however many there are."""


def _few(value: object) -> object:
    if isinstance(value, dict) and len(cast("dict[object, object]", value)) > MAX_PAIRS:
        raise ValueError(f"has more than {MAX_PAIRS} pairs")
    return cast("object", value)


FEW = BeforeValidator(_few)
"""Of a map: at most MAX_PAIRS."""

REFUSED: dict[str, tuple[tuple[object, ...], str]] = {
    "audio": ((), "this model writes text only"),
    "functions": ((), "it was replaced by tools; send tools"),
    "function_call": ((), "it was replaced by tool_choice; send tool_choice"),
    "modalities": ((["text"],), "this model writes text only"),
    "prediction": ((), "predicted outputs are not supported"),
    "service_tier": (("auto", "default"), "there is one tier"),
    "store": ((False,), "nothing is stored here"),
    "suffix": (("",), "this model completes at the end only"),
    "verbosity": (("medium",), "ask for a shorter or longer answer in the conversation"),
    "web_search_options": ((), "this server reaches no web"),
    "prompt_cache_retention": (("in_memory", "in-memory"), "prefixes are kept in memory only"),
    "prompt_cache_options": (
        ({}, {"mode": "implicit"}),
        "prefixes are cached by themselves, for a time that is not promised",
    ),
    "moderation": ((), "there is no moderation here"),
}
"""Documented parameters that cannot be honoured: (values that change nothing, why not)."""


_FORMS = "response_format (JSON, with or without a schema), regex, choice or grammar"
_SCHEMA = 'response_format = {"type": "json_schema", "json_schema": {"name": ..., "schema": ...}}'
_EFFORT = "reasoning_effort (none to max, or 0 to 0.99), the one switch for thoughts"
OTHER_NAMES = {
    "structured_outputs": f"send its content as {_FORMS}, each a field of its own",
    "guided_json": f"send {_SCHEMA}",
    "guided_regex": "send regex",
    "guided_choice": "send choice",
    "guided_grammar": "send grammar",
    "guided_decoding_backend": "there is one; leave it out",
    "json_schema": f"send {_SCHEMA}",
    "ebnf": "send grammar",
    "chat_template_kwargs": f"there is no template; in a chat, send {_EFFORT}",
    "enable_thinking": f"in a chat, send {_EFFORT}",
    "thinking": f"in a chat, send {_EFFORT}",
    "reasoning": f"in a chat, send {_EFFORT}",
    "thinking_token_budget": f"in a chat, send {_EFFORT}; max_tokens counts thoughts too",
    "allowed_token_ids": f"what is allowed is said in text: send {_FORMS}",
    "bad_words": "send logit_bias with -100 for the ids that are not to come (POST /tokenize)",
    "max_new_tokens": "send max_tokens",
    "no_stop_trim": "send include_stop_str_in_output",
    "return_tokens_as_token_ids": "send return_token_ids",
    "request_id": "send it as the header x-request-id",
    "extra_body": "it is the openai package's argument; send what is in it as fields of the body",
}
"""What users of vLLM, SGLang and other servers know under another name: what to send here."""


class StreamOptions(BaseModel):
    """What a stream tells of usage. `include_obfuscation` may only be false."""

    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class Common(BaseModel):
    """What both endpoints know."""

    model_config = ConfigDict(extra="forbid", strict=True)
    unsupported: ClassVar[tuple[str, ...]] = ()

    model: str | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    stop: str | Listed[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], FEW] | None = None
    user: str | None = None

    # Beyond OpenAI, as vLLM names them
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: Listed[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    priority: int | None = None
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    response_format: dict[str, Any] | None = None
    regex: str | None = None
    grammar: str | None = None
    choice: Listed[str] | None = None

    def check(self) -> None:
        """Raises ApiError for what only several fields together, or their values, tell."""
        for name in self.unsupported:
            allowed, why = REFUSED[name]
            value = getattr(self, name)
            if value is not None and value not in allowed:
                raise invalid(f"{name}: {why}; leave it out", name)
        if self.n is not None and not 1 <= self.n <= MAX_CHOICES:
            raise invalid(f"n = {self.n}: must be from 1 to {MAX_CHOICES}", "n")
        check_priority(self.priority)
        check_stops(self.stop, self.stop_token_ids)
        self._check_format()
        if self.stream_options is not None:
            if not self.stream:
                raise invalid("stream_options: only with stream = true", "stream_options")
            if self.stream_options.continuous_usage_stats and not self.includes_usage:
                raise invalid(
                    "stream_options.continuous_usage_stats: only with include_usage = true",
                    "stream_options",
                )
            if self.stream_options.include_obfuscation:
                raise invalid(
                    "stream_options.include_obfuscation: not supported; leave it out",
                    "stream_options",
                )

    def _check_format(self) -> None:
        """What stands in response_format beside what is read there."""
        given = self.response_format or {}
        has_schema = given.get("type") == "json_schema"
        inner = given.get("json_schema") if has_schema else None
        parts: list[tuple[str, Any, set[str]]] = [
            ("response_format", given, {"type", "json_schema"} if has_schema else {"type"}),
            ("response_format.json_schema", inner, {"name", "description", "schema", "strict"}),
        ]
        for where, fields, known in parts:
            for name in cast("dict[str, Any]", fields) if isinstance(fields, dict) else ():
                if name not in known and fields[name] is not None:
                    is_schema = name in ("schema", "json_schema")
                    advice = f"for a schema, send {_SCHEMA}" if is_schema else "leave it out"
                    raise invalid(
                        f"{where}.{name}: there is no such field; {advice}", "response_format"
                    )

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def counts_in_chunks(self) -> bool:
        """Whether every chunk tells the tokens so far."""
        options = self.stream_options
        return options is not None and bool(options.continuous_usage_stats)

    @property
    def choices(self) -> int:
        return self.n or 1

    def sampling_fields(self) -> dict[str, Any]:
        """The fields that SamplingParams has under the same name, where given."""
        names = (
            *("n", "temperature", "top_p", "stop", "seed", "presence_penalty"),
            *("frequency_penalty", "top_k", "min_p", "repetition_penalty", "min_tokens"),
            *("stop_token_ids", "ignore_eos", "include_stop_str_in_output"),
            *("skip_special_tokens", "prompt_logprobs"),
        )
        fields = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.logit_bias is not None:
            fields["logit_bias"] = bias_of(self.logit_bias)
        return fields


class CompletionRequest(Common):
    """POST /v1/completions."""

    unsupported = ("suffix", "service_tier", "store")

    prompt: str | Listed[str] | Listed[int] | Listed[Listed[int]]
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None
    service_tier: str | None = None
    store: bool | None = None

    def check(self) -> None:
        super().check()
        if self.best_of is not None and self.best_of != self.choices:
            raise invalid(f"best_of = {self.best_of}: must be n, or be left out", "best_of")


class ChatRequest(Common):
    """POST /v1/chat/completions."""

    unsupported = (
        *("audio", "functions", "function_call", "modalities", "prediction", "service_tier"),
        *("store", "verbosity", "web_search_options", "prompt_cache_retention"),
        *("prompt_cache_options", "moderation"),
    )

    messages: Annotated[list[dict[str, Any]], _FirstFault(), Field(min_length=1)]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Listed[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | float | None = None
    metadata: Annotated[dict[str, str], FEW] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    add_generation_prompt: bool | None = None

    audio: Any = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    prediction: Any = None
    service_tier: Any = None
    store: Any = None
    verbosity: Any = None
    web_search_options: Any = None
    prompt_cache_retention: Any = None
    prompt_cache_options: Any = None
    moderation: Any = None

    def check(self) -> None:
        super().check()
        if self.top_logprobs is not None and not self.logprobs:
            raise invalid("top_logprobs: only with logprobs = true", "top_logprobs")
        if self.tools is not None and len(self.tools) > MAX_TOOLS:
            raise invalid(f"tools: has {len(self.tools)} tools; at most {MAX_TOOLS}", "tools")
        both = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(both) > 1:
            raise invalid(
                f"max_tokens = {self.max_tokens} and max_completion_tokens = "
                f"{self.max_completion_tokens}: give one",
                "max_tokens",
            )

    @property
    def may_call(self) -> bool:
        """Whether what looks like a call is one."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def most_tokens(self) -> int | None:
        if self.max_completion_tokens is not None:
            return self.max_completion_tokens
        return self.max_tokens


class TokenizeRequest(BaseModel):
    """POST /tokenize: `prompt`, or `messages` with what goes with them."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str | None = None
    prompt: str | None = None
    messages: Listed[dict[str, Any]] | None = None
    tools: Listed[dict[str, Any]] | None = None
    reasoning_effort: str | float | None = None
    add_generation_prompt: bool = True
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(BaseModel):
    """POST /detokenize."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str | None = None
    tokens: Listed[int]


_UNIONS = ("prompt", "stop", "tool_choice", "reasoning_effort")
"""Fields of several forms: pydantic puts the name of the form after that of the field."""


def first_fault(error: ValidationError, fields: set[str]) -> ApiError:
    """The first thing that is wrong, in words. `fields`: those that the endpoint has."""
    faults = error.errors(include_url=False)
    fault = faults[0]
    path = [str(step) for step in fault["loc"]]
    name = path[0] if path else None
    if name in _UNIONS:
        # One fault for each form that the field may have: of the form that fits furthest.
        forms = [one for one in faults if one["loc"][0] == name]
        fault = max(forms, key=lambda one: [step for step in one["loc"][2:] if step != "str"])
        path = [name, *(str(step) for step in fault["loc"][2:])]
    if fault["type"] == "extra_forbidden":
        if len(path) == 1 and path[0] in OTHER_NAMES:
            return invalid(f"{path[0]}: is not known here; {OTHER_NAMES[path[0]]}", name)
        is_short = len(path[-1]) <= LONGEST_NAME
        near = get_close_matches(path[-1], fields) if is_short else []
        meant = f"; did you mean {' or '.join(near)}?" if near else "; leave it out"
        return invalid(f"{'.'.join(path)}: there is no such parameter{meant}", name)
    where = ".".join(step for step in path if not step.startswith(("list[", "dict[")))
    if fault["type"] == "missing":
        return ApiError(400, f"{where}: is missing", param=name, code="missing_required_parameter")
    return invalid(f"{where or 'a key'}: {fault['msg'][:1].lower()}{fault['msg'][1:]}", name)


def check_priority(priority: int | None) -> None:
    """Raises ApiError."""
    if priority is not None and abs(priority) > MAX_PRIORITY:
        raise invalid(
            f"priority = {priority}: must be from -{MAX_PRIORITY} to {MAX_PRIORITY}", "priority"
        )


def check_stops(stop: str | list[str] | None, ids: list[int] | None) -> None:
    """Raises ApiError for more than a request may have."""
    stops = [stop] if isinstance(stop, str) else stop or []
    if len(stops) > MAX_STOPS or sum(map(len, stops)) > MAX_STOP_CHARACTERS:
        raise invalid(
            f"stop: at most {MAX_STOPS} strings with {MAX_STOP_CHARACTERS} characters in all",
            "stop",
        )
    if ids is not None and len(ids) > MAX_STOP_IDS:
        raise invalid(f"stop_token_ids: at most {MAX_STOP_IDS}", "stop_token_ids")


def bias_of(given: dict[str, float]) -> dict[int, float]:
    """logit_bias by id. Raises ApiError."""
    return {_id(key): value for key, value in given.items()}


def _id(key: str) -> int:
    if not (key.isascii() and key.isdigit() and len(key) < 10):
        raise invalid(f"logit_bias key {key!r}: must be a token id", "logit_bias")
    return int(key)
