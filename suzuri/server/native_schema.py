"""What may be asked of the routes that RL uses, in the names that SGLang's users know."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict

from suzuri.engine.messages import OnPublish
from suzuri.server.schema import FEW, Listed

DEFAULT_TOKENS = 128
"""Of an answer, as SGLang's."""


class GenerateSampling(BaseModel):
    """`sampling_params`. `max_new_tokens`: null is the rest of the context."""

    model_config = ConfigDict(extra="forbid", strict=True)
    max_new_tokens: int | None = DEFAULT_TOKENS
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], FEW] | None = None
    stop: str | Listed[str] | None = None
    stop_token_ids: Listed[int] | None = None
    ignore_eos: bool | None = None
    no_stop_trim: bool | None = None
    skip_special_tokens: bool | None = None
    seed: int | None = None


class GenerateMedia(BaseModel):
    """A picture or clip as a tower reads it: `data` is base64 of an array's bytes in C order,
    little-endian; it fills the tokens from `index` on."""

    model_config = ConfigDict(extra="forbid", strict=True)
    kind: Literal["image", "audio"]
    index: int
    dtype: str
    shape: Listed[int]
    data: str


class GenerateRequest(BaseModel):
    """POST /generate: `input_ids`, or a `text`."""

    model_config = ConfigDict(extra="forbid", strict=True)
    input_ids: Listed[int] | None = None
    text: str | None = None
    sampling_params: GenerateSampling | None = None
    return_logprob: bool | None = None
    return_routed_experts: bool | None = None
    media: Listed[GenerateMedia] | None = None
    stream: Literal[False] | None = None
    priority: int | None = None
    cache_salt: str | None = None


class UpdateWeightsRequest(BaseModel):
    """POST /update_weights_from_disk."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model_path: str
    weight_version: int | None = None
    content_hash: str | None = None
    replaces: int | None = None
    on_publish: OnPublish | None = None
