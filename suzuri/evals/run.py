"""`suzuri eval`: draws held-out tasks, lets the engine answer them together, grades, reports."""

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from suzuri.engine.llm import LLM, Job
from suzuri.engine.sampling_params import SamplingParams
from suzuri.envs.generators.kinds import KINDS
from suzuri.envs.mixture import Mixture
from suzuri.evals.config import EvalConfig
from suzuri.evals.draft_length import accepted_lengths
from suzuri.evals.exchange import Exchange, open_ones
from suzuri.evals.report import Line, Report, show, summary
from suzuri.model.inkling import Inkling
from suzuri.model.locate import locate
from suzuri.model.presets import DEFAULT_MODEL
from suzuri.model.reconcile import reconcile
from suzuri.model.weights import load_weights

TOWERS = {"pictures": "vision", "sounds": "audio"}


def run_eval(config: EvalConfig) -> int:
    """Runs and prints; returns the exit code. Raises ValueError or OSError for what cannot be
    run."""
    console = Console(stderr=True)
    for name in config.tasks:
        try:
            mixture_of(name, config)
        except ValueError as error:
            raise ValueError(f"--tasks {name}: {error}") from error
    llm = LLM(
        config.model or DEFAULT_MODEL,
        random_weights=config.random_weights,
        seed=config.seed,
        device=config.device,
        dtype=config.dtype,
        max_running=config.max_running,
        token_budget=max(2048, config.max_running),
    )
    names = config.tasks or default_tasks(llm)
    drafter = load_drafter(config) if config.drafts else None
    report = evaluate(llm, names, config, console, drafter)
    show(report, Console(), config.show)
    if config.out is not None:
        Path(config.out).write_text(
            json.dumps(dataclasses.asdict(report), indent=1, ensure_ascii=False) + "\n", "utf-8"
        )
    low = [line.name for line in report.lines if line.score < (config.at_least or 0.0)]
    print(summary(report) + (f"; below {config.at_least}: {', '.join(low)}" if low else ""))
    return 1 if low else 0


def mixture_of(name: str, config: EvalConfig) -> Mixture:
    """The tasks of one name. ValueError for one that there is not."""
    return Mixture.of(name, config.difficulty, seed=config.seed, split=config.split)


def default_tasks(llm: LLM) -> tuple[str, ...]:
    """Every kind whose tower the model has."""
    model = llm.engine.model
    return tuple(
        name for name in KINDS if name not in TOWERS or getattr(model, TOWERS[name]) is not None
    )


def load_drafter(config: EvalConfig) -> Inkling:
    """The model with its draft depths, which the engine leaves out. ValueError without any."""
    located = locate(config.model or DEFAULT_MODEL, weights=True)
    if not located.config.mtp.num_nextn_predict_layers:
        raise ValueError(f"--drafts: {located.name} has no draft depths")
    checkpoint = located.checkpoint()
    parts = frozenset({"mtp"})
    shape = reconcile(located.config, checkpoint, parts).config
    model = Inkling(shape, dtype=getattr(torch, config.dtype), device=config.device, parts=parts)
    load_weights(model, checkpoint, want=parts)
    return model.requires_grad_(False)


def evaluate(
    llm: LLM,
    names: Sequence[str],
    config: EvalConfig,
    console: Console,
    drafter: Inkling | None = None,
) -> Report:
    """All tasks of all names, answered together."""
    exchanges: dict[str, list[Exchange]] = {}
    for name in names:
        mixture = mixture_of(name, config)
        exchanges[name] = [
            Exchange(mixture.task(place), config.seed + 1_000_003 * place + sample)
            for place in range(config.count)
            for sample in range(config.samples)
        ]
    everyone = [one for group in exchanges.values() for one in group]
    start = time.monotonic()
    lengths: list[int] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeElapsedColumn(), console=console, disable=not console.is_terminal
    ) as bar:
        shown = bar.add_task("answering", total=len(everyone))
        while waiting := open_ones(everyone):
            _turn(llm, waiting, config, drafter, lengths)
            bar.update(shown, completed=len(everyone) - len(open_ones(everyone)))
    seconds = time.monotonic() - start
    return Report(
        model=config.model or DEFAULT_MODEL,
        settings=dataclasses.asdict(config),
        lines=[Line.of(name, group, config.samples) for name, group in exchanges.items()],
        seconds=seconds,
        tokens=sum(one.num_tokens for one in everyone),
        accepted_length=sum(lengths) / len(lengths) if lengths else None,
    )


def _turn(
    llm: LLM,
    waiting: Sequence[Exchange],
    config: EvalConfig,
    drafter: Inkling | None,
    lengths: list[int],
) -> None:
    """One turn of the model in each exchange; with a `drafter`, accepted lengths of text turns."""
    jobs = [
        Job(
            messages=one.messages,
            params=SamplingParams(
                temperature=config.temperature,
                max_tokens=config.max_tokens,
                seed=one.seed + len(one.turns),
            ),
            tools=list(one.task.tools) or None,
            reasoning_effort=one.task.effort,
        )
        for one in waiting
    ]
    token_bytes = llm.get_tokenizer().token_bytes
    for one, output in zip(waiting, llm.stream(jobs), strict=True):
        if output.error is not None:
            if not one.turns:
                raise ValueError(f"a task of kind {one.task.kind} cannot be asked: {output.error}")
            one.fail()
            continue
        (answer,) = output.outputs
        one.take(answer.token_ids, answer.finish_reason, token_bytes)
        has_media = any(isinstance(m.get("content"), list) for m in one.task.messages)
        if drafter is not None and not has_media:
            rows = llm.engine.vocabulary.to_rows([*output.prompt_token_ids, *answer.token_ids])
            lengths += accepted_lengths(drafter, rows, len(output.prompt_token_ids))
