"""`suzuri rl`: everything that a run needs, put together. Read `run_rl`, then `_Run.stepped`."""

import asyncio
import dataclasses
import sys
from collections.abc import Sequence

import torch
from rich.console import Console

import suzuri
from suzuri.engine.config import EngineConfig
from suzuri.engine.engine import Engine
from suzuri.engine.load import memory_for
from suzuri.envs.chat_prompts import ChatPrompts
from suzuri.envs.env import Problems
from suzuri.envs.rollout import Limits
from suzuri.interrupts import STOPPED, Interrupt, asked_to_stop
from suzuri.model.config import ModelConfig, MtpConfig
from suzuri.model.inkling import Inkling
from suzuri.processing.tokenizer import Tokenizer
from suzuri.processing.vocabulary import Vocabulary, vocabulary_of
from suzuri.rl.config import RlConfig
from suzuri.rl.evaluate import evaluate
from suzuri.rl.local_sampler import LocalSampler, PublicationError
from suzuri.rl.loop import Line, Loop, Played
from suzuri.rl.transcripts import write_transcripts
from suzuri.training.initial import find_model
from suzuri.training.keeping import Keeper, start_trainer
from suzuri.training.run_dir import RunDir
from suzuri.training.trainer import LocalTrainer
from suzuri.training.viewers import Display, Viewers, check_viewers

STOPPING = "finishing the step and saving"


def run_rl(config: RlConfig) -> int:
    """Learns to the end or an interrupt, from the start or the newest state. Returns the exit code.

    Raises ValueError or OSError, before a weight is read, for what cannot be used.
    """
    check_viewers(config)
    display = Display(Console(stderr=True))
    shape, checkpoint = find_model(config.model, random_weights=config.random_weights)
    tokenizer = Tokenizer()
    vocabulary = vocabulary_of(shape.kept_vocabulary, tokenizer.token_bytes)
    prompts = ChatPrompts(tokenizer, shape, vocabulary)
    most = shape.text.model_max_length
    limits = dataclasses.replace(config.limits, max_context=min(config.limits.max_context, most))
    problems = config.problems(prompts)
    held_out = None if config.eval_problems is None else config.eval_problems(prompts)
    document = {"suzuri": suzuri.__version__, "config": config.document(), "data": {}}
    with RunDir(config.run_dir) as folder:
        folder.compare(document)
        first = folder.start(document)
        trainer = start_trainer(
            shape,
            checkpoint,
            vocabulary,
            config.trainer,
            folder,
            first,
            dtype=config.dtype,
            device=config.device,
            seed=config.seed,
        )
        if first:
            display.say(f"going on after step {first} of {folder.path}")
        sampler = sampler_for(shape, vocabulary, config, limits)
        sampler.engine.weight_version = first - 1  # so that it is the number of steps behind it
        viewers = Viewers(config, folder.path, first)
        run = _Run(config, trainer, sampler, folder, viewers, display, tokenizer, limits, held_out)
        try:
            return run.run(problems, first)
        finally:
            viewers.close()


def sampler_for(
    shape: ModelConfig, vocabulary: Vocabulary, config: RlConfig, limits: Limits
) -> LocalSampler:
    """An engine for the trainer's model, without weights until they are published. ValueError
    where it does not fit."""
    device = torch.device(config.device)
    engine_config = EngineConfig(
        dtype=config.dtype,
        max_context=limits.max_context,
        max_running=config.max_running,
        token_budget=max(2048, config.max_running),
        memory_gb=config.memory_gb,
    )
    shape = dataclasses.replace(shape, mtp=MtpConfig())
    model = Inkling(
        shape,
        dtype=getattr(torch, config.dtype),
        device=device,
        parts=frozenset({"vision", "audio"}),
        dequantized=True,
    ).requires_grad_(False)
    memory = memory_for(engine_config, device)
    engine = Engine(model, engine_config, memory_bytes=memory, vocabulary=vocabulary)
    return LocalSampler(engine, on_publish=config.on_publish)


class _Run:
    """Watches a loop: writes, evaluates, saves."""

    def __init__(
        self,
        config: RlConfig,
        trainer: LocalTrainer,
        sampler: LocalSampler,
        folder: RunDir,
        viewers: Viewers,
        display: Display,
        tokenizer: Tokenizer,
        limits: Limits,
        held_out: Problems | None,
    ) -> None:
        self._config, self._trainer, self._sampler = config, trainer, sampler
        self._folder, self._viewers, self._display = folder, viewers, display
        self._tokenizer, self._limits, self._held_out = tokenizer, limits, held_out
        self._keeper = Keeper(trainer, folder, config.keep)

    def run(self, problems: Problems, first: int) -> int:
        """Steps after `first` up to the last. Returns the exit code."""
        config = self._config
        if first > config.steps:
            raise ValueError(
                f"steps = {config.steps}: {self._folder.path} has come to step {first} already; "
                "give more steps, or another run_dir"
            )
        loop = Loop(
            config.schedule,
            self._limits,
            problems,
            config.algorithm,
            self._sampler,
            self._trainer,
            self._publish,
            lambda step: config.optimizer.params(step, config.steps),
            correction=config.correction,
        )
        step = first
        try:
            with asked_to_stop(STOPPING) as interrupt:
                with self._display.bar("learning", config.steps, first):
                    step = asyncio.run(self._steps(loop, first, interrupt))
                self._keeper.save(step)
                self._keeper.finish()
            if step < config.steps:
                print(
                    f"stopped after step {step} of {config.steps}; the same command again "
                    f"{self._keeper.next()}"
                )
                return STOPPED
            self._keeper.end(step)
        except (FloatingPointError, PublicationError, OSError) as error:
            print(f"suzuri rl: {self._keeper.after(str(error))}", file=sys.stderr)
            return 1
        print(f"{step} steps done; weights in {self._folder.weights}")
        return 0

    async def stepped(self, step: int, line: Line, played: Sequence[Played]) -> None:
        config = self._config
        if config.transcripts:
            shown = played[: config.transcripts]
            write_transcripts(self._folder.path, step, shown, self._tokenizer.decode)
        is_last = step == config.steps
        if self._held_out is not None and (is_last or step % config.evaluation.every == 0):
            line |= await self._evaluate(self._held_out)
        self._write(line)
        reward, kl = line["sample/reward"], line.get("kl/sampler_trainer_max")
        text = f"reward {'-' if reward is None else format(reward, '.3f')}"
        text += "" if kl is None else f" kl max {kl:.3g}"
        if (score := line.get("eval/reward")) is not None:
            text += f" held out {score:.3f}"
        self._display.show(step, text, always=is_last or score is not None)
        if step % config.save_every == 0:
            self._keeper.save(step)

    async def _steps(self, loop: Loop, first: int, interrupt: Interrupt) -> int:
        await self._publish()
        if not first and self._held_out is not None:
            self._write({"step": 0} | await self._evaluate(self._held_out))
        return await loop.run(first, self, lambda: interrupt.asked)

    async def _publish(self) -> int:
        return await self._sampler.publish(self._trainer.model)

    async def _evaluate(self, problems: Problems) -> Line:
        return await evaluate(problems, self._sampler, self._limits, self._config.evaluation)

    def _write(self, line: Line) -> None:
        self._folder.write(line)
        self._viewers.write({name: x for name, x in line.items() if x is not None})
