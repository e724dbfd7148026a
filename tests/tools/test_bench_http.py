"""scripts/reproduce/http_serving.py on `tiny`: a server, its load, and the engine beside it."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from suzuri.tools.bench.shapes import ROOT

FOLDER = ROOT / "scripts" / "reproduce"


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("http_streams")


def chunk(text: str) -> bytes:
    item = {"id": "x", "choices": [{"text": text}], "usage": None}
    return b"data: " + json.dumps(item, separators=(",", ":")).encode() + b"\n\n"


def test_chunks_have_the_time_of_the_piece_they_begin_in(streams: ModuleType) -> None:
    usage = {"completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 7}}
    end = json.dumps({"id": "x", "choices": [], "usage": usage}, separators=(",", ":"))
    head, last = b"HTTP/1.1 200 OK\r\n\r\n", b"data: " + end.encode() + b"\n\ndata: [DONE]\n\n"
    cut = chunk("c")
    pieces = [
        (1.0, head),
        (2.0, chunk("a") + chunk("b")),
        (3.0, cut[:9]),
        (4.0, cut[9:20]),
        (5.0, cut[20:] + chunk("d") + last),
    ]
    seen = streams.Seen(at=0.25)
    streams.read(pieces, 1.0, seen)
    # One that is cut within its first bytes is found where those begin.
    assert seen.times == [1.0, 1.0, 2.0, 4.0]
    assert (seen.num_tokens, seen.cached, seen.error) == (4, 7, "")
    found = streams.summary([seen])
    assert found["ttft_ms"]["p50"] == pytest.approx(750)
    assert found["tpot_ms"]["p50"] == pytest.approx(1000)
    assert found["goodput"] == 0.0
    refused = streams.Seen(at=0.0)
    streams.read([(1.0, b"HTTP/1.1 429 Too Many\r\n\r\n{}")], 0.0, refused)
    assert refused.error.startswith("HTTP/1.1 429")
    assert streams.summary([refused])["goodput"] == 0.0


def test_a_step_is_timed_while_all_decode(streams: ModuleType) -> None:
    """From the last first token, at 3, to the first last one, at 7: four steps of a second, also
    where a stream lacks a chunk."""
    times = [[1.0, 2, 3, 4, 5, 6, 7], [3.0, 4, 5, 6, 7, 8], [2.0, 3, 5, 6, 7]]
    seen = [streams.Seen(at=0.0, times=one, num_tokens=len(one)) for one in times]
    assert streams.steady_ms(seen) == pytest.approx(1000)
    late = [[at + 0.1 * i for at in one] for i, one in enumerate(times)]
    shifted = [streams.Seen(at=0.0, times=one, num_tokens=len(one)) for one in late]
    assert streams.steady_ms(shifted) == pytest.approx(1000, rel=0.1)
    assert streams.closed([seen])["tokens_per_s"] == pytest.approx(18 / 8)


def test_a_server_under_load_beside_the_engine(tmp_path: Path) -> None:
    out = tmp_path / "http.json"
    words = ["tiny", "--device", "cpu", "--batch", "3", "--input", "20", "--output", "9"]
    words += ["--rates", "6", "--rate-seconds", "1", "--rounds", "1", "--max-context", "200"]
    done = subprocess.run(
        # No time is left for guidellm, wherever it may be installed.
        [sys.executable, str(FOLDER / "http_serving.py"), *words, "--seconds", "55", "--out", out],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert found["what"] == "http serving"
    for way in ("http", "engine"):
        assert found[way]["step_ms"] > 0
        assert found[way]["tokens_per_s"] == pytest.approx(27 / found[way]["seconds"])
    assert set(found["overhead"]) == {"step_ms", "seconds"}
    assert any("guidellm" in what for what in found["left_out"])
    for row in found.get("rates", []):  # a slow machine may have had no time for it
        assert row["errors"] == []
        assert row["output_tokens"] == 9 * row["requests"]
        assert 0 <= row["goodput"] <= 1
    assert "HTTP over the engine alone" in done.stdout
