"""Whatever the schema lets a client send, no answer is a fault of the server (status 500)."""

import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error

from suzuri.server.app import create_app
from tests.server.fakes import FakeEngine, service

app = create_app(service(FakeEngine([200004, 104, 105, 200010, 200006])))
schema = schemathesis.openapi.from_asgi("/openapi.json", app)


@schema.parametrize()
@settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
def test_nothing_that_the_schema_allows_is_a_500(case: schemathesis.Case) -> None:
    case.call_and_validate(checks=[not_a_server_error])
