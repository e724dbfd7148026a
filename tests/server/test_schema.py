"""Whatever a client sends, no answer is a fault of the server (status 500): every route.

scripts/reproduce/server_schemathesis.py does the same for longer, with a real engine.
"""

import re
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error

from suzuri.server.app import create_app
from suzuri.server.schema import OTHER_NAMES, REFUSED, ChatRequest, CompletionRequest
from tests.server.asking import CHAT, COMPLETIONS, chat, post
from tests.server.fakes import FakeEngine, service

app = create_app(service(FakeEngine([200004, 104, 105, 200010, 200006])))
schema = schemathesis.openapi.from_asgi("/openapi.json", app)
schema.config.generation.update(modes=[GenerationMode.POSITIVE, GenerationMode.NEGATIVE])


@schema.parametrize()
@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
def test_nothing_is_a_500(case: schemathesis.Case) -> None:
    case.call_and_validate(checks=[not_a_server_error])


@pytest.mark.parametrize(("path", "body"), [(CHAT, ChatRequest), (COMPLETIONS, CompletionRequest)])
def test_the_schema_has_the_parameters_and_their_values(path: str, body: Any) -> None:
    found = app.openapi()["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    fields = found["schema"]["properties"]
    assert set(fields) == set(body.model_fields)
    assert fields["model"] == {"enum": [None, "fake"]}
    assert fields["n"] == {"type": ["integer", "null"], "minimum": 1, "maximum": 128}
    for name in body.unsupported:
        assert fields[name]["enum"] == [None, *REFUSED[name][0]]
    assert "$defs" not in found["schema"]
    assert "$ref" not in str(found)


@pytest.mark.parametrize("name", OTHER_NAMES)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_names_of_other_servers_are_refused_with_ours(name: str, path: str) -> None:
    body = chat() if path == CHAT else {"prompt": "x"}
    answer = post(service(FakeEngine()), path, {**body, name: {"json": {}}})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, name)
    assert error["message"] == f"{name}: is not known here; {OTHER_NAMES[name]}"


def test_what_is_advised_is_there() -> None:
    fields = set(ChatRequest.model_fields)
    assert not fields & set(OTHER_NAMES)
    advised: set[str] = set()
    for advice in OTHER_NAMES.values():
        advised |= set(re.findall(r"send ([a-z_]+)", advice)) - {"its", "it", "what"}
    assert advised == advised & fields
    assert {"response_format", "regex", "choice", "grammar", "reasoning_effort"} <= advised | {
        name for name in fields if name in OTHER_NAMES["structured_outputs"]
    }


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (
            {"type": "json_object", "schema": {"type": "object"}},
            "response_format.schema: there is no such field; for a schema, send response_format",
        ),
        (
            {"type": "text", "json_schema": {"name": "x", "schema": {}}},
            "response_format.json_schema: there is no such field; for a schema, send",
        ),
        (
            {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "stict": True}},
            "response_format.json_schema.stict: there is no such field; leave it out",
        ),
    ],
)
def test_nothing_in_a_form_is_ignored(form: dict[str, Any], message: str) -> None:
    for path, body in ((CHAT, chat()), (COMPLETIONS, {"prompt": "x"})):
        answer = post(service(FakeEngine()), path, {**body, "response_format": form})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "response_format")
        assert error["message"].startswith(message)


def test_what_changes_nothing_in_a_form_may_be_there() -> None:
    for form in ({"type": "text", "json_schema": None}, {"type": "text"}):
        made = service(FakeEngine([200004, 104, 200006]))
        assert post(made, CHAT, chat(response_format=form)).status_code == 200
