"""docs/performance.md and its picture, from the files of benchmarks/results: no figure by hand.

    python scripts/reproduce/performance.py

A file that is not there leaves its part out. Which files: serving-*.json and agents-*.json (`suzuri
bench serving`), http-serving.json (http_serving.py), step-profile*.json (step_profile.py),
kernels-matmul.json and attention-h200.json (benchmarks/kernels), ablations.json (ablations.py).
"""

import argparse
import importlib
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS, SHAPES = ROOT / "benchmarks" / "results", ROOT / "benchmarks" / "shapes"
VLLM = "vllm"
SHAPE_ORDER = ("L6E64", "L4E256")
Document = dict[str, Any]


def read(folder: Path, pattern: str) -> dict[str, Document]:
    """Result files by name."""
    found = sorted(folder.glob(pattern))
    return {path.name: json.loads(path.read_text("utf-8")) for path in found}


def newest(found: dict[str, Document]) -> dict[str, Document]:
    """The files with only those cells that no later file measured again."""
    left: dict[str, Document] = {}
    seen: set[tuple[str, str]] = set()
    for name, document in sorted(found.items(), key=lambda item: item[1]["date"], reverse=True):
        rows = [row for row in document["cells"] if (row["model"], row["cell"]) not in seen]
        seen |= {(row["model"], row["cell"]) for row in rows}
        if rows:
            left[name] = document | {"cells": rows}
    return left


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]


def number(value: float | None) -> str:
    """Three digits."""
    if value is None:
        return ""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"


def spoken(cell: str) -> str:
    """decode:64x1024:skewed as decode 64 x 1024, skewed."""
    kind, size, *more = cell.split(":")
    size = f"{size}/s" if kind == "trace" else size.replace("x", " x ")
    return ", ".join([f"{kind} {size}", *more]).replace("inf/s", "all at once")


def vllm_of(row: Document) -> Document | None:
    return next((one for one in row["recorded"] if one["system"].startswith(VLLM)), None)


# Parts of the page


def heading(serving: dict[str, Document]) -> list[str]:
    lines = ["# How fast", ""]
    for name, document in serving.items():
        machine, card = document["hardware"], document["limits"]
        prints = document["fingerprint"]
        lines.append(
            f"{machine['gpu'] or 'CPU'}, torch {prints.get('torch', '?')}, {document['date'][:10]}"
            f", commit {document['commit']}: `{name}` (floors: "
            f"{card['bytes_per_second'] / 1e12:.1f} TB/s, {card['flops_per_second'] / 1e12:.0f} "
            "TFLOP/s).  "
        )
    lines += [
        "",
        "Made by `scripts/reproduce/performance.py` from the files that it names; how each figure "
        "is measured: [bench.md](bench.md). bf16, random weights, random routing; times in ms.",
        "",
    ]
    return lines


def cells_part(serving: dict[str, Document], picture: str | None) -> list[str]:
    """Every decode and prefill cell beside its floor and vLLM's figure."""
    rows: dict[str, dict[str, Document]] = {}
    for document in serving.values():
        for row in document["cells"]:
            if row["kind"] in ("decode", "prefill"):
                rows.setdefault(row["cell"], {})[row["model"]] = row
    models = _ordered({model for found in rows.values() for model in found})
    if not rows:
        return []
    heads, lines = ["cell"], ["## Beside the floor and vLLM", ""]
    for model in models:
        heads += [f"{model}: floor", "ours", "of the floor", "vLLM", "times ours"]
    body: list[list[str]] = []
    for cell, found in rows.items():
        line = [spoken(cell)]
        for model in models:
            line += _cell_words(found.get(model))
        body.append(line)
    kept = [i for i in range(len(heads)) if any(line[i] for line in body)]
    lines += table([heads[i] for i in kept], [[line[i] for i in kept] for line in body])
    times = [
        other["ms"] / row["ms"]
        for found in rows.values()
        for row in found.values()
        if (other := vllm_of(row))
    ]
    if times:
        lines += [
            f"vLLM takes {min(times):.2f} to {max(times):.2f} times as long "
            f"({statistics.median(times):.2f} in the median of {len(times)} cells).",
            "",
            *_peers(serving),
        ]
    lines += [
        "A floor counts the different experts that random routing is expected to use, read at the "
        "rate that was measured for the card: a step that meets fewer, or reads quicker, is above "
        "100 %.",
        "",
    ]
    if picture is not None:
        lines += [f"![share of the floor, and tokens per second]({picture})", ""]
    return lines


def _peers(serving: dict[str, Document]) -> list[str]:
    """Which vLLM it was, and how it ran."""
    found = {
        (other["system"], other["source"], other["date"])
        for document in serving.values()
        for row in document["cells"]
        if row["kind"] in ("decode", "prefill") and (other := vllm_of(row))
    }
    lines: list[str] = []
    for system, source, date in sorted(found):
        note = json.loads((SHAPES / source).read_text("utf-8"))["note"]
        lines += [f"Recorded: {system}, {date} (`{source}`: {note}).", ""]
    return lines


def _cell_words(row: Document | None) -> list[str]:
    if row is None:
        return [""] * 5
    floor, ms, other = row["floor_ms"], row["ms"], vllm_of(row)
    words = [number(floor), number(ms), percent(floor / ms)]
    times = ("", "") if other is None else (number(other["ms"]), number(other["ms"] / ms))
    return [*words, *times]


def _ordered(models: set[str]) -> list[str]:
    known = [model for model in SHAPE_ORDER if model in models]
    return [*known, *sorted(models - set(known))]


def load_part(serving: dict[str, Document]) -> list[str]:
    """Traces and agents."""
    found = [row for document in serving.values() for row in document["cells"]]
    traces = [row for row in found if row["kind"] == "trace"]
    agents = [row for row in found if row["kind"] == "agents"]
    if not traces and not agents:
        return []
    heads = ["load", "requests", "tokens/s", "TTFT p50", "p99", "between tokens p50", "p99"]
    rows = [[f"{row['model']}, {spoken(row['cell'])}", *_load_words(row)] for row in traces]
    rows += [
        [
            f"{row['model']}, {row['batch']} agents, {row['median_prompt']:,.0f} tokens in the "
            f"median, {percent(row['hit_of_prompt'])} cached "
            f"({100 * row['hit_rate']:.1f} % of what is shared)",
            *_load_words(row),
        ]
        for row in agents
    ]
    return ["## Requests over time", "", *table(heads, rows)]


def _load_words(row: Document) -> list[str]:
    first, between = row["first_token_ms"], row["between_tokens_ms"]
    return [
        str(row["requests"]),
        number(row["tokens_per_s"]),
        *(number(first[place]) for place in ("p50", "p99")),
        *(number(between[place]) for place in ("p50", "p99")),
    ]


def http_part(found: dict[str, Document]) -> list[str]:
    lines: list[str] = []
    for name, document in found.items():
        config, over = document["config"], document.get("overhead", {})
        http, engine = document.get("http"), document.get("engine")
        lines += ["## Over HTTP", ""]
        if http and engine:
            lines += [
                f"`{name}`: {config['batch']} requests of {config['input']} tokens in and "
                f"{config['output']} out, all at once: {http['step_ms']:.2f} ms a step over HTTP, "
                f"{engine['step_ms']:.2f} in the engine alone ({100 * over['step_ms']:+.1f} %); "
                f"the whole batch {http['seconds']:.2f} and {engine['seconds']:.2f} s "
                f"({100 * over['seconds']:+.1f} %).",
                "",
            ]
        heads = ["client", "requests/s", "TTFT p50", "p99", "between p50", "p99", "good"]
        rows = [
            [
                client,
                f"{row['rate']:g}",
                *(number(row["ttft_ms"][place]) for place in ("p50", "p99")),
                *(number(row["itl_ms"][place]) for place in ("p50", "p99")),
                percent(row["goodput"]),
            ]
            for client, part in (("streams", "rates"), ("guidellm", "guidellm"))
            for row in document.get(part, [])
            if row["ttft_ms"] and row["itl_ms"]
        ]
        if rows:
            lines += table(heads, rows)
    return lines


def launches_part(found: dict[str, Document]) -> list[str]:
    """What a layer of a decode step and of a prefill is made of."""
    lines: list[str] = []
    for name, document in found.items():
        model = str(document.get("model") or document["config"]["model"]).rsplit("/", 1)[-1]
        path = SHAPES / model / "config.json"
        if not path.is_file():
            continue
        layers = json.loads(path.read_text("utf-8"))["text_config"]["num_hidden_layers"]
        with_kernels = [cell for cell in document["cells"] if cell["largest"]]
        chosen = [
            next((cell for cell in with_kernels if cell["cell"].startswith(kind)), None)
            for kind in ("decode", "prefill")
        ]
        lines += [f"## A layer's launches ({model})", ""]
        for cell in filter(None, chosen):
            lines += [
                f"{spoken(cell['cell'])} (`{name}`): {cell['kernels_ms']:.2f} ms in "
                f"{cell['launches']:.0f} kernels.",
                "",
            ]
            rows = [
                [
                    f"`{one['kernel']}`",
                    f"{one['launches'] / layers:.1f}",
                    number(one["us"] / layers),
                    percent(one["us"] / 1e3 / cell["kernels_ms"]),
                ]
                for one in cell["largest"][:10]
            ]
            lines += table(["kernel", "launches a layer", "us a layer", "of all"], rows)
    return lines


def exactness_part(products: dict[str, Document], attention: dict[str, Document]) -> list[str]:
    """What exactness costs: products over all shapes, attention by cell."""
    rows: list[list[str]] = []
    for document in products.values():
        sizes = sorted({(_op(row), row.get("tokens", row["rows"])) for row in document["rows"]})
        for op, tokens in sizes:
            some = [
                row
                for row in document["rows"]
                if (_op(row), row.get("tokens", row["rows"])) == (op, tokens)
            ]
            prices = [row["price"] for row in some if row["price"] is not None]
            rows.append(
                [
                    f"{op}, {tokens} tokens ({len(some)} shapes)",
                    percent(statistics.median(row["share_of_limit"] for row in some)),
                    f"{round(100 * statistics.median(prices)):+d} %" if prices else "",
                ]
            )
    for document in attention.values():
        rows += [
            [row["cell"], "", f"{100 * row['price']:+.1f} %"]
            for row in document["cells"]
            if row.get("price") is not None
        ]
    if not rows:
        return []
    names = " and ".join(f"`{name}`" for name in (*products, *attention))
    lines = ["## What exactness costs", ""]
    lines += [f"Over the same work done freely (the vendor's product, no chunks); {names}.", ""]
    return lines + table(["kernel", "share of its limit, median", "price, median"], rows)


def _op(row: Document) -> str:
    return "grouped product" if "experts_used" in row else "product"


# The picture


def shares(serving: dict[str, Document]) -> Iterator[tuple[str, float, float | None]]:
    """(cell, floor / ours, floor / vLLM's) of the first shape that vLLM was measured on."""
    for document in serving.values():
        rows = [row for row in document["cells"] if row["kind"] in ("decode", "prefill")]
        if any(vllm_of(row) for row in rows):
            for row in rows:
                other = vllm_of(row)
                theirs = None if other is None else row["floor_ms"] / other["ms"]
                yield spoken(row["cell"]), row["floor_ms"] / row["ms"], theirs
            return


def draw(serving: dict[str, Document], target: Path) -> bool:
    """Left each cell's share of its floor, right tokens/s. False without matplotlib or cells."""
    try:
        figures: Any = importlib.import_module("matplotlib.figure")
        tickers: Any = importlib.import_module("matplotlib.ticker")
    except ImportError:
        return False
    from suzuri.tools.bench.plot import frontier, points_of

    found = list(shares(serving))
    points = [point for document in serving.values() for point in points_of(document)]
    if not found or not points:
        return False
    figure = figures.Figure(figsize=(12, 5), layout="constrained")
    left, right = figure.subplots(1, 2)
    places = range(len(found))
    left.barh([i - 0.2 for i in places], [100 * ours for _, ours, _ in found], 0.4, label="ours")
    left.barh(
        [i + 0.2 for i in places],
        [100 * (theirs or 0.0) for _, _, theirs in found],
        0.4,
        label="vLLM (recorded)",
    )
    left.set_yticks(list(places), [cell for cell, _, _ in found])
    left.invert_yaxis()
    left.set(
        xlabel="% of the floor's speed",
        xlim=(0, 1.02 * max(100, *(100 * ours for _, ours, _ in found))),
    )
    left.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False)
    groups = dict.fromkeys(
        (point.series, point.system)
        for point in points
        if point.batch and "skewed" not in point.series
        if point.system == "suzuri" or point.system.startswith(VLLM)
    )
    for series, system in groups:
        edge = frontier(p for p in points if (p.series, p.system) == (series, system))
        style = {"marker": "o" if system == "suzuri" else "x"}
        style["linestyle"] = "-" if system == "suzuri" else "--"
        if len(edge) > 1:
            per_user, per_gpu = [p.per_user for p in edge], [p.per_gpu for p in edge]
            right.plot(per_user, per_gpu, label=f"{series}: {system}", **style)
    right.set(xlabel="tokens/s per user", ylabel="tokens/s per GPU", xscale="log", yscale="log")
    right.legend(fontsize="small")
    for axis in (right.xaxis, right.yaxis):
        axis.set_major_locator(tickers.LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(tickers.NullFormatter())
    for axes in (left, right):
        axes.grid(visible=True, which="both", alpha=0.3)
    figure.savefig(target, dpi=110, format="png", metadata={"Software": None})
    return True


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "performance.md")
    options = parser.parse_args(words)
    results: Path = options.results
    found = read(results, "serving-*.json")
    serving = dict(sorted(newest(found).items(), key=lambda item: _rank(item[1])))
    if not serving:
        print(f"performance: {results} holds no serving-*.json", file=sys.stderr)
        return 1
    picture = options.page.with_suffix(".png")
    is_drawn = draw(serving, picture)
    lines = heading(serving)
    lines += cells_part(serving, picture.name if is_drawn else None)
    lines += load_part(serving | read(results, "agents-*.json"))
    lines += http_part(read(results, "http-serving.json"))
    lines += launches_part(read(results, "step-profile*.json"))
    lines += exactness_part(
        read(results, "kernels-matmul.json"), read(results, "attention-h200.json")
    )
    if (results / "ablations.json").is_file():
        lines += ["What each way of computing is worth: [ablations.md](ablations.md).", ""]
    options.page.write_text("\n".join(lines).rstrip() + "\n", "utf-8")
    print(f"{options.page}{' and ' + picture.name if is_drawn else ''} written")
    return 0


def _rank(document: Document) -> int:
    names = [name for name in SHAPE_ORDER if name in document["models"]]
    return SHAPE_ORDER.index(names[0]) if names else len(SHAPE_ORDER)


if __name__ == "__main__":
    sys.exit(main())
