"""What /openapi.json says of bodies: their fields, with the values that are taken."""

from typing import Any, cast

from pydantic import BaseModel

from suzuri.engine.sampling_params import MAX_BIAS, MAX_LOGPROBS, MAX_PENALTY, MAX_TEMPERATURE
from suzuri.model.config import NUM_IDS
from suzuri.server.schema import MAX_CHOICES, MAX_PRIORITY, REFUSED, Common

RANGES: dict[str, tuple[float, float]] = {
    "n": (1, MAX_CHOICES),
    "temperature": (0, MAX_TEMPERATURE),
    "top_p": (0, 1),
    "min_p": (0, 1),
    "presence_penalty": (-MAX_PENALTY, MAX_PENALTY),
    "frequency_penalty": (-MAX_PENALTY, MAX_PENALTY),
    "top_logprobs": (0, MAX_LOGPROBS),
    "prompt_logprobs": (0, MAX_LOGPROBS),
    "priority": (-MAX_PRIORITY, MAX_PRIORITY),
}
"""Least and most of a number; the rest is checked by SamplingParams, which knows the model."""


def request_body(body: type[BaseModel], names: tuple[str, ...]) -> dict[str, Any]:
    """The OpenAPI object of a body. `names`: of the model."""
    schema = body.model_json_schema()
    schema = _inlined(schema, schema.pop("$defs", {}))
    fields: dict[str, Any] = schema["properties"]
    if "model" in fields:
        fields["model"] = {"enum": [None, *names]}
    if issubclass(body, Common):
        fields["stream_options"] = _stream_options()
        for name in body.unsupported:
            values, why = REFUSED[name]
            fields[name] = {"enum": [None, *values], "description": why}
        for name, (least, most) in RANGES.items():
            if name in fields:
                kinds = [part["type"] for part in fields[name]["anyOf"]]
                fields[name] = {"type": kinds, "minimum": least, "maximum": most}
        fields["logit_bias"] = {
            "type": ["object", "null"],
            "propertyNames": {"pattern": r"^[0-9]{1,6}$"},
            "additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
            "description": f"token ids from 0 to {NUM_IDS - 1}",
        }
    return {"required": True, "content": {"application/json": {"schema": schema}}}


def _stream_options() -> dict[str, Any]:
    return {
        "type": ["object", "null"],
        "properties": {
            "include_usage": {"type": ["boolean", "null"]},
            "continuous_usage_stats": {"type": ["boolean", "null"]},
            "include_obfuscation": {"enum": [None, False]},
        },
        "additionalProperties": False,
    }


def _inlined(schema: Any, definitions: dict[str, Any]) -> Any:
    """A JSON schema with what it refers to in the places that do."""
    if isinstance(schema, list):
        return [_inlined(one, definitions) for one in cast("list[Any]", schema)]
    if not isinstance(schema, dict):
        return schema
    fields = cast("dict[str, Any]", schema)
    if "$ref" in fields:
        return _inlined(definitions[fields["$ref"].rsplit("/", maxsplit=1)[-1]], definitions)
    return {name: _inlined(value, definitions) for name, value in fields.items()}
