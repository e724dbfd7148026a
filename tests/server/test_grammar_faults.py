"""A form that turns out too much work while it is followed is the request's own fault (a11)."""

import json
from typing import Any

import pytest

from suzuri.engine.messages import Event
from suzuri.engine.stream import Stream
from tests.server.asking import CHAT, COMPLETIONS, chat, post
from tests.server.fakes import FakeEngine, service

WORDS = "it takes too much work for one token; make it simpler"


class Stuck(FakeEngine):
    """Writes a token, then ends by an error."""

    def __init__(self, error: str, *, at_fault: bool) -> None:
        super().__init__()
        self.error, self.at_fault = error, at_fault

    async def _write(self, stream: Stream, *_: Any) -> None:
        stream.push(Event(stream.id, 0, 65, "A"))
        end = Event(stream.id, 0, None, "", "error", error=self.error, at_fault=self.at_fault)
        stream.push(end)


@pytest.mark.parametrize(
    ("where", "param"),
    [
        ("grammar", "grammar"),
        ("regex", "regex"),
        ("response_format.json_schema.schema", "response_format"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("stream", [False, True])
def test_the_field_is_named(where: str, param: str, path: str, stream: bool) -> None:
    engine = Stuck(f"{where}: the output cannot go on: {WORDS}", at_fault=True)
    body = chat(stream=stream) if path == CHAT else {"prompt": "x", "stream": stream}
    answer = post(service(engine), path, body)
    assert answer.status_code in ((200, 400) if stream else (400,))
    text = answer.text
    if answer.status_code == 200:
        *_, error, done = text.strip().split("\n\n")
        assert done == "data: [DONE]"
        text = error.removeprefix("data: ")
    found = json.loads(text)["error"]
    assert (found["type"], found["param"]) == ("invalid_request_error", param)
    assert WORDS in found["message"]


def test_a_row_that_is_not_allowed_is_a_fault_of_the_server() -> None:
    engine = Stuck("row 7 is not allowed here", at_fault=False)
    assert post(service(engine), COMPLETIONS, {"prompt": "x"}).status_code == 500
