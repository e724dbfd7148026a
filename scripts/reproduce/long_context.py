"""A million tokens of context on one GPU: the same bits for every way of running them.

    python scripts/reproduce/long_context.py --state runs/long.json

One sequence of --tokens tokens runs four times through the engine: in chunks of the first size,
of the second, of the first again, and of the first beside neighbours that come and go. The last
--rows rows of the prompt and --decode decoded tokens are kept as digests of their hidden rows and
logits: all must be equal. On a GPU the peak of allocated memory must stay within the plan.

Each pass is stored in --state when it ends. When the next one would not end within --seconds the
script stops with exit code 3: run it again, on the same kind of machine, to go on. 0: all equal;
1: some bits differ or the plan was exceeded; 2: the input cannot be used.

Time on one H200, from the measurements of docs/measurements/kernels-h200.md: global attention of
1,048,576 tokens is 1.8e16 FLOP, 45 s at 400 TFLOP/s; the rest of 6 layers 10 to 18 s; so a pass
takes about a minute, the four of them 4 to 5, and drawing the weights 10 s. --layers 2 keeps the
last two layers (one local, one global).
"""

import argparse
import dataclasses
import hashlib
import json
import random
import sys
import time
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from torch import Tensor

from suzuri.engine.capacity import capacity
from suzuri.engine.config import EngineConfig
from suzuri.engine.devices import device_named
from suzuri.engine.engine import Engine
from suzuri.engine.plan import Plan, Work
from suzuri.engine.runner import Launched, Runner
from suzuri.model.config import ModelConfig
from suzuri.model.inkling import Inkling
from suzuri.model.locate import locate
from suzuri.model.random_weights import initialize
from suzuri.processing.vocabulary import FullVocabulary
from suzuri.tools.bench.measure import params
from suzuri.tools.bench.record import commit, fingerprint, hardware
from suzuri.tools.bench.shapes import SHAPES, decoder_only
from suzuri.tools.bench.state import planned_bytes

LONG = "long"
NEIGHBOUR_PROMPT, NEIGHBOUR_ANSWER = (16, 2048), (4, 64)
PAGE = 128
GB = 1e9
UNFINISHED = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pass:
    """One way of running the long sequence."""

    name: str
    chunk: int
    neighbours: int = 0


@dataclasses.dataclass(kw_only=True)
class Kept:
    """What a pass leaves: a digest per position, the decoded ids, seconds, bytes."""

    rows: dict[str, str]
    tokens: list[int]
    seconds: float
    steps: int
    peak_bytes: int | None
    planned_bytes: int


class Tail:
    """Stands where the engine's runner stands, and keeps digests of the long sequence's last
    rows: hidden row and logits, byte for byte."""

    def __init__(self, runner: Runner, first: int) -> None:
        self.runner, self.first = runner, first
        self.rows: dict[str, str] = {}
        self.steps = 0
        runner.observer = self._keep

    def execute(self, plan: Plan) -> Launched:
        self.steps += bool(plan.works)
        return self.runner.execute(plan)

    def _keep(self, works: Many[Work], _: Tensor, hidden_ND: Tensor) -> None:
        offset = 0
        for work in works:
            skip = max(self.first - work.start, 0)
            if work.sequence.request.id == LONG and skip < work.count:
                self._digest(work.start + skip, hidden_ND[offset + skip : offset + work.count])
            offset += work.count

    def _digest(self, start: int, hidden_TD: Tensor) -> None:
        logits_TV = self.runner.model.decoder.logits(hidden_TD)
        for i, pair in enumerate(zip(hidden_TD.cpu(), logits_TV.cpu(), strict=True)):
            digest = hashlib.sha256()
            for row in pair:
                digest.update(row.contiguous().view(torch.uint8).numpy().tobytes())
            self.rows[str(start + i)] = digest.hexdigest()[:32]


def shape_of(model: str, layers: int | None) -> ModelConfig:
    """The model's shape without towers and drafts; of its layers the last so many."""
    config = decoder_only(locate(model).config)
    text = config.text
    if layers is None:
        return config
    if not 1 <= layers <= text.num_hidden_layers:
        raise ValueError(f"--layers {layers}: the model has {text.num_hidden_layers}")
    cut = text.num_hidden_layers - layers
    text = dataclasses.replace(
        text,
        num_hidden_layers=layers,
        local_layer_ids=tuple(i - cut for i in text.local_layer_ids if i >= cut),
        dense_mlp_idx=max(text.dense_mlp_idx - cut, 0),
    )
    return dataclasses.replace(config, text=text, quantization=None)


def engine_config(config: ModelConfig, one: Pass, options: argparse.Namespace) -> EngineConfig:
    """Pools for the long sequence and its neighbours, and little more."""
    text = config.text
    window = max(
        (text.attention(layer).window or 0 for layer in range(text.num_hidden_layers)), default=0
    )
    ring = (window + 1) // PAGE + 3
    running = 1 + one.neighbours
    beside = one.neighbours * (-(-sum(neighbour_most(options)) // PAGE) + 1)
    snapshots = 2 * running
    pages = -(-options.tokens // PAGE) + 2 + 2 * beside
    local = (running + snapshots) * ring + -(-one.chunk // PAGE) + running
    return EngineConfig(
        dtype=options.dtype,
        max_context=options.tokens,
        max_running=running,
        token_budget=max(one.chunk, running),
        page_size=PAGE,
        global_pages=pages + pages // 15 + running,
        local_pages=local + local // 15 + running,
        snapshots=snapshots,
    )


def neighbour_most(options: argparse.Namespace) -> tuple[int, int]:
    """Longest prompt and answer of a neighbour."""
    return min(NEIGHBOUR_PROMPT[1], options.tokens // 4), NEIGHBOUR_ANSWER[1]


def run_pass(model: Inkling, one: Pass, options: argparse.Namespace, console: Console) -> Kept:
    """Runs the long sequence once, and keeps its end."""
    device = model.decoder.norm.weight.device
    config = engine_config(model.config, one, options)
    on_gpu = device.type == "cuda"
    found = capacity(model.config, config, 0, on_gpu=on_gpu)
    planned = planned_bytes(model.config, config, found, config.token_budget, on_gpu=on_gpu)
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    prompt = ids(model, options.tokens - options.decode, options.seed)
    tail = Tail(Runner(model, config, found), len(prompt) - options.rows)
    engine = Engine(
        model, config, memory_bytes=0, vocabulary=FullVocabulary(), runner=cast(Any, tail)
    )
    start = time.perf_counter()
    request = engine.add(LONG, prompt, params(options.decode))
    sequence = request.sequences[0]
    draw, added = random.Random(options.seed), 0
    active: set[str] = set()
    tokens: list[int] = []
    with console.status(one.name) as status:
        while sequence.finish is None:
            while len(active) < one.neighbours:
                length, answer = (
                    draw.randint(low, max(low, most))
                    for low, most in zip(
                        (NEIGHBOUR_PROMPT[0], NEIGHBOUR_ANSWER[0]),
                        neighbour_most(options),
                        strict=True,
                    )
                )
                added += 1
                name = f"neighbour {added}"
                engine.add(name, ids(model, length, options.seed + added), params(answer))
                active.add(name)
            for event in engine.step():
                if event.finish is not None:
                    active.discard(event.sequence.request.id)
                if event.sequence is sequence and event.token is not None:
                    tokens.append(event.token)
            done, passed = sequence.computed, time.perf_counter() - start
            status.update(f"{one.name}: {done:,} of {options.tokens:,} tokens, {passed:.0f} s")
        for name in active:
            engine.abort(name)
        engine.run()
    engine.check()
    tail.runner.observer = None  # or the two would hold each other, and their memory
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    return Kept(
        rows=tail.rows,
        tokens=tokens,
        seconds=time.perf_counter() - start,
        steps=tail.steps,
        peak_bytes=peak,
        planned_bytes=planned,
    )


def ids(model: Inkling, count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    rows = model.config.text.unpadded_vocab_size
    return torch.randint(rows, (count,), generator=generator).tolist()


def passes(options: argparse.Namespace) -> list[Pass]:
    """The four ways, in order."""
    first, second = options.chunks
    return [
        Pass(name=f"chunks of {first}", chunk=first),
        Pass(name=f"chunks of {second}", chunk=second),
        Pass(name=f"chunks of {first}, again", chunk=first),
        Pass(
            name=f"chunks of {first} beside {options.neighbours} others",
            chunk=first,
            neighbours=options.neighbours,
        ),
    ]


def same_run(options: argparse.Namespace, config: ModelConfig) -> dict[str, Any]:
    """What has to be equal for stored passes to count."""
    device = torch.device(options.device)
    names = ("tokens", "rows", "decode", "chunks", "neighbours", "dtype", "seed")
    return {
        **{name: getattr(options, name) for name in names},
        "shape": hashlib.sha256(repr(config).encode()).hexdigest()[:16],
        "commit": commit(),
        "gpu": hardware(device)["gpu"],
        "fingerprint": fingerprint(device),
    }


def stored(path: Path, run: dict[str, Any]) -> dict[str, Kept]:
    """The passes of an earlier call. Raises ValueError when they are of another run."""
    if not path.exists():
        return {}
    document = json.loads(path.read_text("utf-8"))
    other = {name for name in run if document["run"].get(name) != json.loads(json.dumps(run[name]))}
    if other:
        raise ValueError(
            f"--state {path} is of another run ({', '.join(sorted(other))} differ); give a new file"
        )
    return {name: Kept(**fields) for name, fields in document["passes"].items()}


def store(path: Path, run: dict[str, Any], kept: dict[str, Kept]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    document = {"run": run, "passes": {n: dataclasses.asdict(k) for n, k in kept.items()}}
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(document, indent=1) + "\n", "utf-8")
    part.replace(path)


def problems(kept: dict[str, Kept], options: argparse.Namespace) -> list[str]:
    """In words, what is not as it must be."""
    found: list[str] = []
    (base_name, base), *others = kept.items()
    # The row of the last decoded token is never run: nothing comes after it.
    start = options.tokens - options.decode - options.rows
    wanted = [str(p) for p in range(start, options.tokens - 1)]
    for name, one in kept.items():
        missing = [p for p in wanted if p not in one.rows]
        if missing or len(one.tokens) != options.decode:
            found.append(f"{name}: {len(missing)} rows and some tokens were not seen")
        if one.peak_bytes is not None and one.peak_bytes > one.planned_bytes:
            peak, plan = one.peak_bytes / GB, one.planned_bytes / GB
            found.append(f"{name}: peak {peak:.2f} GB is more than the planned {plan:.2f}")
    for name, one in others:
        if differ := [p for p in wanted if one.rows.get(p) != base.rows.get(p)]:
            found.append(
                f"{name}: row {differ[0]} and {len(differ) - 1} more are not those of {base_name}"
            )
        if one.tokens != base.tokens:
            found.append(f"{name}: decoded {one.tokens}, not {base.tokens}")
    return found


def parse(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default=str(SHAPES / "L6E64"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--tokens", type=int, default=1_048_576, help="prompt and answer together")
    parser.add_argument("--chunks", type=int, nargs=2, default=[8192, 5120])
    parser.add_argument("--layers", type=int, help="the last so many layers only")
    parser.add_argument("--rows", type=int, default=64, help="last rows of the prompt to keep")
    parser.add_argument("--decode", type=int, default=8, help="tokens of the answer")
    parser.add_argument("--neighbours", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--state", required=True, help="JSON of the passes that ended")
    parser.add_argument("--seconds", type=float, default=480.0)
    options = parser.parse_args(words)
    if options.rows + options.decode >= options.tokens or min(options.rows, options.decode) < 1:
        parser.error("--rows and --decode must be positive, and less than --tokens together")
    if min(options.chunks) < 1 or options.chunks[0] == options.chunks[1]:
        parser.error("--chunks: two different positive sizes")
    return options


def run(options: argparse.Namespace) -> int:
    """Runs what is missing within --seconds; the exit code."""
    begun = time.perf_counter()
    console, path = Console(stderr=True), Path(options.state)
    device = device_named(options.device, f"--device {options.device}")
    config = shape_of(options.model, options.layers)
    if options.tokens > config.text.model_max_length:
        raise ValueError(f"--tokens {options.tokens}: the model's limit is below")
    run_of = same_run(options, config)
    kept = stored(path, run_of)
    todo = [one for one in passes(options) if one.name not in kept]
    if todo:
        with console.status("drawing weights"):
            dtype = getattr(torch, options.dtype)
            model = Inkling(config, dtype=dtype, device=device, parts=frozenset())
            initialize(model, options.seed)
            model.requires_grad_(False)
        for one in todo:
            longest = max((k.seconds for k in kept.values()), default=0.0)
            if time.perf_counter() - begun + 1.3 * longest > options.seconds:
                print(f"stopped before {one.name!r}; run again with --state {path} to go on")
                return UNFINISHED
            kept[one.name] = run_pass(model, one, options, console)
            store(path, run_of, kept)
            last = kept[one.name]
            memory = "" if last.peak_bytes is None else f", peak {last.peak_bytes / GB:.2f} GB"
            print(
                f"{one.name}: {last.seconds:.1f} s, {last.steps} steps{memory}, planned "
                f"{last.planned_bytes / GB:.2f} GB",
                flush=True,
            )
    wrong = problems(kept, options)
    for line in wrong:
        print(f"FAILED {line}")
    if not wrong:
        rows = options.rows + options.decode - 1
        print(f"OK: {len(kept)} passes of {options.tokens:,} tokens, {rows} rows, all equal bits")
    return 1 if wrong else 0


def main() -> None:
    try:
        sys.exit(run(parse(None)))
    except (ValueError, OSError) as error:
        print(f"long_context: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
