"""Whatever a client sends, no answer is a fault of the server (status 500): every route.

scripts/reproduce/server_schemathesis.py does the same for longer, with a real engine.
"""

from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error

from suzuri.server.app import create_app
from suzuri.server.schema import REFUSED, ChatRequest, CompletionRequest
from tests.server.asking import CHAT, COMPLETIONS
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
