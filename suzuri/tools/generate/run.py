"""`suzuri generate`: prompts in, JSON lines out. config.py says what can be asked."""

import collections
import contextlib
import dataclasses
import sys
import time
from collections.abc import Generator
from typing import TextIO

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from suzuri.engine.devices import device_named
from suzuri.engine.llm import LLM, Job
from suzuri.tools.generate.config import GenerateConfig
from suzuri.tools.generate.lines import Id, LineParser
from suzuri.tools.generate.report import num_generated, output_line
from suzuri.tools.generate.source import LineSource


def run_generate(config: GenerateConfig) -> int:
    """Complete everything. Returns the exit code: 0, or 1 when a line failed.

    Raises ValueError or OSError, before the model is loaded where that can be known, for input that
    cannot be used.
    """
    device_named(config.device, f"--device {config.device}")
    with contextlib.ExitStack() as open_files:
        source = None
        if config.input is not None:
            source = open_files.enter_context(contextlib.closing(LineSource(config.input)))
        engine = config.engine()
        llm = LLM(
            config.model,
            random_weights=config.random_weights,
            seed=config.seed or 0,
            device=config.device,
            text_only=config.text_only,
            **{field.name: getattr(engine, field.name) for field in dataclasses.fields(engine)},
        )
        out: TextIO = sys.stdout
        if config.output != "-":
            out = open_files.enter_context(open(config.output, "w", encoding="utf-8"))
        return _Run(llm, config, source, out).run()


class _Run:
    def __init__(
        self, llm: LLM, config: GenerateConfig, source: LineSource | None, out: TextIO
    ) -> None:
        self._llm, self._config, self._source, self._out = llm, config, source, out
        self._parser = LineParser(config.sampling(), format=config.format, chat=config.chat)
        self._ids: collections.deque[Id] = collections.deque()
        self._console = Console(stderr=True)
        self._prompts = self._failed = 0
        self._prompt_tokens = self._cached = self._generated = 0

    def run(self) -> int:
        start = time.monotonic()
        with self._progress() as progress:
            for output in self._llm.stream(self._jobs()):
                self._out.write(output_line(self._ids.popleft(), output) + "\n")
                self._out.flush()
                self._prompts += 1
                self._failed += output.error is not None
                self._prompt_tokens += len(output.prompt_token_ids)
                self._cached += output.num_cached_tokens
                self._generated += num_generated(output)
                progress.update(
                    progress.task_ids[0],
                    description=f"{self._prompts} prompts, {self._generated} tokens",
                )
        seconds = time.monotonic() - start
        print(
            f"{self._prompts} prompts, {self._failed} failed: {self._prompt_tokens} prompt tokens "
            f"({self._cached} cached), {self._generated} generated in {seconds:.1f} s, "
            f"{self._generated / max(seconds, 1e-9):.1f} tokens/s",
            file=sys.stderr,
        )
        return 1 if self._failed else 0

    def _jobs(self) -> Generator[Job | None]:
        for text in self._config.prompt:
            id, job = self._parser.from_text(text)
            self._ids.append(id)
            yield job
        if self._source is None:
            return
        for line in self._source.lines(lambda: not self._llm.engine.has_work):
            if line is None:
                yield None
                continue
            parsed = self._parser.from_line(line)
            if parsed is not None:
                self._ids.append(parsed[0])
                yield parsed[1]

    def _progress(self) -> Progress:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        shown = self._console.is_terminal
        progress = Progress(*columns, console=self._console, transient=True, disable=not shown)
        progress.add_task("generating")
        return progress
