"""What HTTP costs: a server under load beside the engine alone, in the same run.

    python scripts/reproduce/http_serving.py benchmarks/shapes/L6E64 --out http.json

Starts `suzuri serve MODEL --random-weights` in its own process and drives it with streamed
completions: batches that come all at once, then Poisson arrivals at several rates; where guidellm
is installed, it drives the same rates at constant intervals. Then the server ends, and the same
batches run on an engine in this process. A request is good when its first token takes at most a
second and every further one at most 50 ms on average. What would not end within --seconds is left
out and named; the file is written after each part.
"""

import argparse
import contextlib
import importlib.util
import json
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import http_streams as streams

ROOT = Path(__file__).parents[2]
ROUNDS = 3
START_SECONDS = 300.0
REQUEST_SECONDS = 120.0
ENGINE_SECONDS = 15.0
"""Until an engine in this process is there."""
GUIDELLM_SECONDS = 25.0
"""Beyond its rates: starting, and making a report."""


@contextlib.contextmanager
def serving(options: argparse.Namespace) -> Generator[int]:
    """The port of a server that is ready; it is drained at the end."""
    words = ["serve", options.model, "--random-weights", "--text-only", "--port", "0"]
    words += ["--device", options.device, "--dtype", options.dtype, "--seed", str(options.seed)]
    words += ["--max-running", str(options.batch), "--drain-seconds", "2"]
    if options.max_context:
        words += ["--max-context", str(options.max_context)]
    process = subprocess.Popen(
        [sys.executable, "-m", "suzuri", *words], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()  # "serving NAME on http://127.0.0.1:PORT/v1 ..."
        if not line.startswith("serving"):
            raise SystemExit(f"http_serving: the server did not start (exit {process.wait()})")
        yield int(line.split("://")[1].split("/")[0].rsplit(":", 1)[1])
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def token_ids(options: argparse.Namespace) -> list[int]:
    """Of text, that the model has rows for."""
    from suzuri.model.config import FIRST_SPECIAL
    from suzuri.model.locate import locate

    config = locate(options.model).config
    kept = config.kept_vocabulary or range(config.text.unpadded_vocab_size)
    return [id for id in kept if id < FIRST_SPECIAL]


def batch(options: argparse.Namespace, ids: list[int], turn: int) -> list[streams.Asked]:
    """The requests of one round, the same over HTTP and on the engine."""
    given = streams.prompts(ids, options.batch, options.input, options.seed, "batch", turn)
    return [streams.Asked(at=0.0, prompt=prompt, tokens=options.output) for prompt in given]


def closed_over_http(options: argparse.Namespace, port: int, ids: list[int]) -> dict[str, Any]:
    """After a round that warms up: kernels are compiled and steps recorded on first use."""
    rounds: list[list[streams.Seen]] = []
    for turn in range(options.rounds + 1):
        seen = streams.run(port, batch(options, ids, turn), REQUEST_SECONDS)
        if errors := {one.error for one in seen if one.error}:
            raise SystemExit(f"http_serving: a batch over HTTP failed: {sorted(errors)}")
        rounds.append(seen)
    return streams.closed(rounds[1:])


def at_rate(
    options: argparse.Namespace, port: int, ids: list[int], rate: float, seconds: float
) -> dict[str, Any]:
    times = streams.arrivals(rate, seconds, options.seed)
    given = streams.prompts(ids, len(times), options.input, options.seed, "rate", rate)
    asked = [
        streams.Asked(at=at, prompt=prompt, tokens=options.output)
        for at, prompt in zip(times, given, strict=True)
    ]
    return {"rate": rate, **streams.summary(streams.run(port, asked, seconds + REQUEST_SECONDS))}


def closed_on_the_engine(options: argparse.Namespace, ids: list[int]) -> dict[str, Any]:
    """The same rounds without HTTP, without texts, in an engine with the server's settings."""
    import torch

    from suzuri.engine.devices import device_named
    from suzuri.engine.engine import Engine
    from suzuri.engine.load import memory_for
    from suzuri.model.locate import locate
    from suzuri.processing.tokenizer import Tokenizer
    from suzuri.processing.vocabulary import vocabulary_of
    from suzuri.server.config import ServeConfig
    from suzuri.tools.bench.measure import params
    from suzuri.tools.bench.shapes import decoder_only
    from suzuri.tools.bench.watch import synchronise
    from suzuri.tools.bench.weights import draw_model

    device = device_named(options.device, f"--device {options.device}")
    config = ServeConfig(
        model=options.model,
        random_weights=True,
        dtype=options.dtype,
        max_running=options.batch,
        max_context=options.max_context or None,
    ).engine()
    memory = memory_for(config, device)
    shape = decoder_only(locate(options.model).config)
    model = draw_model(shape, dtype=getattr(torch, options.dtype), device=device, seed=options.seed)
    vocabulary = vocabulary_of(shape.kept_vocabulary, Tokenizer().token_bytes)
    engine = Engine(model, config, memory_bytes=memory, vocabulary=vocabulary)
    rounds: list[list[streams.Seen]] = []
    for turn in range(options.rounds + 1):
        asked = batch(options, ids, turn)
        seen = [streams.Seen(at=0.0) for _ in asked]
        synchronise(device)
        start = time.perf_counter()
        for i, one in enumerate(asked):
            engine.add(str(i), one.prompt, params(one.tokens))
        while engine.has_work:
            events = engine.step()
            now = time.perf_counter() - start
            for event in events:
                if event.token is not None:
                    one = seen[int(event.sequence.request.id)]
                    one.times.append(now)
                    one.num_tokens += 1
        rounds.append(seen)
    return streams.closed(rounds[1:])


# guidellm


def guidellm(options: argparse.Namespace, port: int, seconds: float) -> list[dict[str, Any]]:
    """The same rates as guidellm sees them: at constant intervals, and with texts of about as many
    tokens as prompts."""
    with tempfile.TemporaryDirectory() as folder:
        data, found = Path(folder) / "prompts.jsonl", Path(folder) / "report.json"
        number = math.ceil(2 * max(options.rates) * seconds) + 8
        with data.open("w") as lines:
            for text in _texts(options, port, number):
                row = {"prompt": text, "output_tokens_count": options.output}
                lines.write(json.dumps(row) + "\n")
        target = {"kind": "openai_http", "target": f"http://127.0.0.1:{port}"}
        target |= {"request_format": "/v1/completions", "extras": {"body": {"temperature": 0}}}
        objectives = {"ttft_ms": streams.FIRST_TOKEN_MS, "tpot_ms": streams.BETWEEN_MS}
        words = {
            "--backend": target,
            "--profile": {"kind": "constant", "rate": options.rates},
            "--constraint": {"kind": "max_duration", "seconds": seconds},
            "--data": {"kind": "json_file", "path": str(data)},
            "--output": {"kind": "json", "path": str(found)},
            "--metrics": {"kind": "generative", "slo": objectives, "sample_size": 0},
        }
        flags = [word for name, value in words.items() for word in (name, json.dumps(value))]
        done = subprocess.run(
            [sys.executable, "-m", "guidellm", "run", *flags, "--disable-console"],
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
            capture_output=True,
            text=True,
            timeout=2 * (GUIDELLM_SECONDS + seconds * len(options.rates)),
            check=False,
        )
        if done.returncode or not found.is_file():
            raise RuntimeError((done.stderr or done.stdout)[-400:])
        return [_row(one) for one in json.loads(found.read_text())["benchmarks"]]


def _row(report: dict[str, Any]) -> dict[str, Any]:
    metrics = report["metrics"]

    def of(name: str) -> dict[str, float]:
        found = metrics[name]["successful"]
        kept = {place: found["percentiles"][place] for place in ("p50", "p90", "p99")}
        return kept | {"max": found["max"]}

    return {
        "rate": report["config"]["strategy"]["rate"],
        "requests": metrics["request_totals"]["successful"],
        "failed": metrics["request_totals"]["errored"],
        "prompt_tokens": metrics["prompt_token_count"]["successful"]["mean"],
        "output_tokens_per_s": metrics["output_tokens_per_second"]["successful"]["mean"],
        "ttft_ms": of("time_to_first_token_ms"),
        "itl_ms": of("inter_token_latency_ms"),
        "goodput": metrics["slo_attainment"],
    }


def _texts(options: argparse.Namespace, port: int, number: int) -> list[str]:
    """Random words; how many make a prompt is asked of the server once."""
    draw = random.Random(options.seed)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(draw.choices(letters, k=draw.randint(2, 6))) for _ in range(4096)]

    def text(length: int) -> str:
        return " ".join(draw.choices(words, k=max(length, 1)))

    import httpx

    probe = httpx.post(f"http://127.0.0.1:{port}/tokenize", json={"prompt": text(256)}, timeout=60)
    length = int(256 * options.input / probe.json()["count"])
    return [text(length) for _ in range(number)]


# The run


def measure(options: argparse.Namespace, say: Callable[[str], None]) -> dict[str, Any]:
    """All parts that time is left for; --out after each."""
    begin = time.perf_counter()
    document: dict[str, Any] = {"left_out": [], "config": vars(options) | {"out": None}}
    ids = token_ids(options)

    def left() -> float:
        return options.seconds - (time.perf_counter() - begin)

    def keep(**found: Any) -> None:
        document.update(found)
        if options.out is not None:
            options.out.write_text(json.dumps(document, indent=1) + "\n")

    with serving(options) as port:
        started = time.perf_counter() - begin
        say(f"{'server':<10} ready after {started:.1f} s")
        keep(start_seconds=started, http=closed_over_http(options, port, ids))
        say(f"{'over HTTP':<10} {_closed(document['http'])}")
        took = time.perf_counter() - begin - started
        reserve = ENGINE_SECONDS + 1.2 * took  # the engine alone comes after this
        rows: list[dict[str, Any]] = []
        for rate in options.rates:
            if left() < reserve + 2 * options.rate_seconds:
                document["left_out"].append(f"rate {rate:g}")
                continue
            rows.append(at_rate(options, port, ids, rate, options.rate_seconds))
            keep(rates=rows)
            say(f"{'streams':<10} {_rate(rows[-1])}")
        needed = GUIDELLM_SECONDS + 1.2 * options.rate_seconds * len(options.rates)
        why = "" if importlib.util.find_spec("guidellm") else "guidellm: not installed"
        why = why or ("guidellm: no time" if left() < reserve + needed else "")
        if not why:
            try:
                keep(guidellm=guidellm(options, port, options.rate_seconds))
                for row in document["guidellm"]:
                    say(f"{'guidellm':<10} {_rate(row)}")
            except (RuntimeError, subprocess.TimeoutExpired, KeyError) as error:
                why = f"guidellm: {str(error)[-400:]}"
        if why:
            document["left_out"].append(why)
    keep(engine=closed_on_the_engine(options, ids))
    say(f"{'engine':<10} {_closed(document['engine'])}")
    over = {
        name: document["http"][name] / document["engine"][name] - 1
        for name in ("step_ms", "seconds")
        if document["engine"][name]
    }
    keep(overhead=over)
    return document


def _closed(row: dict[str, Any]) -> str:
    return (
        f"batch: {row['step_ms']:.3f} ms a step, {row['tokens_per_s']:,.0f} tokens/s, "
        f"{row['seconds']:.3f} s, all first tokens after {row['all_first_s']:.3f} s"
    )


def _rate(row: dict[str, Any]) -> str:
    if row["ttft_ms"] is None:
        return f"{row['rate']:g}/s: no request was answered: {row['errors']}"
    ttft, itl = row["ttft_ms"], row["itl_ms"] or {"p50": math.nan, "p99": math.nan}
    return (
        f"{row['rate']:g}/s: {row['requests']} requests, TTFT {ttft['p50']:.1f} p99 "
        f"{ttft['p99']:.1f} ms, ITL {itl['p50']:.2f} p99 {itl['p99']:.2f} ms, "
        f"{row['output_tokens_per_s']:,.0f} tokens/s, good {100 * row['goodput']:.0f} %"
    )


def parse(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("model")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--input", type=int, default=1024, help="tokens of a prompt")
    parser.add_argument("--output", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--rates", type=float, nargs="*", default=[1.0, 4.0, 16.0])
    parser.add_argument("--rate-seconds", type=float, default=8.0)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--max-context", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(words)
    if any(not 0 < rate < math.inf for rate in options.rates):
        parser.error(f"--rates {options.rates}: each must be a positive number per second")
    return options


def main() -> int:
    options = parse()
    document = measure(options, lambda line: print(line, flush=True))
    from suzuri.engine.devices import device_named
    from suzuri.tools.bench.record import header, write

    config = document.pop("config")
    config["out"] = None
    head = header("http serving", device_named(options.device, options.device), config)
    write(None if options.out is None else str(options.out), head | document)
    for what in document["left_out"]:
        print(f"left out: {what}")
    over = ", ".join(f"{name} {100 * value:+.1f} %" for name, value in document["overhead"].items())
    print(f"HTTP over the engine alone: {over}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
