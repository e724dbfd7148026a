"""benchmarks/server_overhead.py asks a server that answers: its engine and texts are what a server
needs, and a token is a chunk."""

import httpx

from benchmarks.server_overhead import InstantEngine, InstantTexts
from suzuri.server.service import Service
from tests.server.asking import CHAT, chat, events, run


def test_the_instant_engine_streams_one_chunk_per_token() -> None:
    made = Service(engine=InstantEngine(), texts=InstantTexts(), names=("fake",))

    async def scenario(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post(CHAT, json=chat(max_tokens=6, stream=True))

    answer = run(made, scenario)
    assert answer.status_code == 200, answer.text
    choices = [chunk["choices"][0] for chunk in events(answer.text)]
    # The first token opens the block of text.
    assert [c["delta"].get("content") for c in choices if c["delta"].get("content")] == [
        " word"
    ] * 5
    assert choices[-1]["finish_reason"] == "length"
