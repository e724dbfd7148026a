"""`suzuri.LLM`: a model in this process, for prompts that are all there, as vLLM users know it.

session.py is the loop under it, outputs.py what comes out, prompts.py what may go in, load.py how
the model gets here.
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Generator, Iterable, Mapping
from collections.abc import Sequence as Many
from typing import Any, Literal, TypeVar, cast

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from suzuri.engine.config import EngineConfig
from suzuri.engine.load import load_engine
from suzuri.engine.outputs import RequestOutput
from suzuri.engine.prompts import Prepared, Prompt, is_one_prompt, prepare, prepare_chat
from suzuri.engine.sampling_params import SamplingParams
from suzuri.engine.session import Session
from suzuri.model.presets import DEFAULT_MODEL
from suzuri.processing.chat import DEFAULT_EFFORT, ChatRenderer, effort_level
from suzuri.processing.media import MediaReader
from suzuri.processing.tokenizer import Tokenizer

Item = TypeVar("Item")
OnError = Literal["raise", "return"]
DEFAULT = SamplingParams()
MOST_NAMED = 10
"""Faulty prompts that an error describes."""
MOST_WAITING = 10**9
"""The prompts are there anyway: refusing some would only lose them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One request of `LLM.stream`: a prompt, or the messages of a conversation, and how to answer.

    `error` in place of both is passed through, in its turn. `tools` and `reasoning_effort` go with
    messages; a lower `priority` runs earlier.
    """

    prompt: Prompt | None = None
    messages: object = None
    params: SamplingParams = DEFAULT
    tools: object = None
    reasoning_effort: str | float | None = None
    add_generation_prompt: bool = True
    priority: int = 0
    error: str | None = None


VLLM_NAMES = {
    "max_model_len": "max_context",
    "max_num_seqs": "max_running",
    "max_num_batched_tokens": "token_budget",
    "enable_prefix_caching": "prefix_cache",
    "block_size": "page_size",
}


class LLM:
    """One model and its engine; used from one thread.

    `model`: a folder, a hub id or "inkling-nano" (the default), the small model that comes with the
    package; or with `random_weights` (drawn from `seed`) any preset or config.json. `text_only`
    leaves the towers out, whether or not the files hold them, and refuses pictures and clips;
    `language_model_only` is its name in vLLM. Every field of EngineConfig may be given by keyword.
    Raises ValueError for what cannot run, before weights are read.
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        random_weights: bool = False,
        seed: int = 0,
        device: str = "cpu",
        text_only: bool = False,
        language_model_only: bool | None = None,
        **engine: Any,
    ) -> None:
        fields = [field.name for field in dataclasses.fields(EngineConfig)]
        unknown = sorted(set(engine) - set(fields))
        if unknown:
            known = [f"{name} is {VLLM_NAMES[name]} here" for name in unknown if name in VLLM_NAMES]
            raise ValueError(
                f"LLM has no {', '.join(unknown)}; there are model, random_weights, seed, device, "
                f"text_only, {', '.join([*fields, *known])}"
            )
        for name, value in {"model": model, "device": device}.items():
            if type(value) is not str:
                raise ValueError(f"{name} = {value!r}: must be a string")
        for name, value in {"random_weights": random_weights, "text_only": text_only}.items():
            if type(value) is not bool:
                raise ValueError(f"{name} = {value!r}: must be True or False")
        # "auto" is what the checkpoints are stored in; torch's own dtypes print as torch.bfloat16.
        dtype = str(engine.pop("dtype", "auto")).removeprefix("torch.")
        engine["dtype"] = "bfloat16" if dtype == "auto" else dtype
        engine.setdefault("max_waiting", MOST_WAITING)
        config = EngineConfig(**engine)
        self._console = Console(stderr=True)
        self._tokenizer = Tokenizer()
        self.engine = load_engine(
            model,
            config,
            self._tokenizer,
            random_weights=random_weights,
            seed=seed,
            device=device,
            text_only=text_only if language_model_only is None else language_model_only,
            console=self._console,
        )
        held = self.engine.model
        shape = dataclasses.replace(
            held.config,
            vision=None if held.vision is None else held.config.vision,
            audio=None if held.audio is None else held.config.audio,
        )
        self._reader = MediaReader(shape, local_files=True)
        self._renderer = ChatRenderer(self._tokenizer, shape, local_files=True)
        self._ids = itertools.count()

    def get_tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def generate(
        self,
        prompts: Prompt | Many[Prompt],
        sampling_params: SamplingParams | Many[SamplingParams] | None = None,
        *,
        show_progress: bool = True,
        use_tqdm: bool | None = None,
        priority: int | Many[int] | None = None,
        on_error: OnError = "raise",
    ) -> list[RequestOutput]:
        """Completions of prompts, in their order.

        A prompt is text, a list of ids, or a mapping (engine/prompts.py). One SamplingParams for
        all, or one each; likewise `priority`, where lower runs earlier. Every prompt is checked
        before one runs: the ValueError names all that are at fault by their index. With `on_error`
        "return", those get an output with `error` and the others run. `show_progress` shows a bar
        on a terminal; `use_tqdm` is its name in vLLM.
        """
        given: list[Any] = [prompts] if is_one_prompt(prompts) else list(prompts)
        jobs = [
            Job(prompt=prompt, params=params, priority=level)
            for prompt, params, level in zip(
                given,
                _each(sampling_params, SamplingParams, DEFAULT, len(given), "sampling_params"),
                _each(priority, int, 0, len(given), "priority"),
                strict=True,
            )
        ]
        return self._run(jobs, "prompt", show_progress if use_tqdm is None else use_tqdm, on_error)

    def chat(
        self,
        messages: Many[Mapping[str, Any]] | Many[Many[Mapping[str, Any]]],
        sampling_params: SamplingParams | Many[SamplingParams] | None = None,
        *,
        tools: Many[Mapping[str, Any]] | None = None,
        reasoning_effort: str | float | None = None,
        add_generation_prompt: bool = True,
        show_progress: bool = True,
        use_tqdm: bool | None = None,
        priority: int | Many[int] | None = None,
        on_error: OnError = "raise",
    ) -> list[RequestOutput]:
        """The model's turn in one conversation, or in each of several, in OpenAI's form.

        `reasoning_effort`: none, minimal, low, medium, high (the default), xhigh, max, or a number
        from 0 to 0.99. The rest is as in `generate`; processing/chat.py says how it is rendered.
        The text has all blocks of the turn, thoughts first.
        """
        effort = DEFAULT_EFFORT if reasoning_effort is None else effort_level(reasoning_effort)
        several = len(messages) > 0 and all(isinstance(item, list | tuple) for item in messages)
        given: list[Any] = list(messages) if several else [messages]
        jobs = [
            Job(
                messages=conversation,
                params=params,
                tools=tools,
                reasoning_effort=effort,
                add_generation_prompt=add_generation_prompt,
                priority=level,
            )
            for conversation, params, level in zip(
                given,
                _each(sampling_params, SamplingParams, DEFAULT, len(given), "sampling_params"),
                _each(priority, int, 0, len(given), "priority"),
                strict=True,
            )
        ]
        progress = show_progress if use_tqdm is None else use_tqdm
        return self._run(jobs, "conversation", progress, on_error)

    def stream(
        self, jobs: Iterable[Job | None], *, window: int | None = None
    ) -> Generator[RequestOutput]:
        """Outputs in the order of `jobs`, each as soon as those before it are out.

        At most `window` jobs are taken ahead of the oldest unfinished one (default: 4 for each
        sequence that can run). None among the jobs means that none has come yet and the engine
        should go on; with nothing to do in the engine, the source should wait instead. A job that
        cannot run gives an output with `error`. What still runs when the generator is closed or
        interrupted is aborted.
        """
        window = window or 4 * self.engine.config.max_running
        session = Session(self.engine, self._tokenizer.decode)
        source = iter(jobs)
        more = True
        try:
            while more or session.num_held:
                while (output := session.take()) is not None:
                    yield output
                while more and session.num_held < window and not session.is_ready:
                    job = next(source, _END)
                    if job is None:
                        break
                    if isinstance(job, Job):
                        self._add(session, job)
                    else:
                        more = False
                session.step()
        finally:
            session.abort()

    def _run(
        self, jobs: list[Job], what: str, show_progress: bool, on_error: OnError
    ) -> list[RequestOutput]:
        if on_error not in ("raise", "return"):
            raise ValueError(f"on_error = {on_error!r}: must be 'raise' or 'return'")
        session = Session(self.engine, self._tokenizer.decode)
        faults: list[str] = []
        try:
            for index, job in enumerate(jobs):
                error = self._add(session, job)
                if error is not None:
                    faults.append(f"{what} {index}: {error}")
            if faults and on_error == "raise":
                more = f"; and {len(faults) - MOST_NAMED} more" if len(faults) > MOST_NAMED else ""
                raise ValueError("; ".join(faults[:MOST_NAMED]) + more)
            with self._progress(show_progress, len(jobs)) as show:
                while session.is_running:
                    session.step()
                    show(session)
        finally:
            session.abort()
        outputs = [session.take() for _ in jobs]
        return [output for output in outputs if output is not None]

    def _add(self, session: Session, job: Job) -> str | None:
        """Queue a job, or its error, which is returned too."""
        id = str(next(self._ids))
        try:
            if job.error is not None:
                raise ValueError(job.error)
            session.add(id, self._prepare(job), job.params, priority=job.priority)
        except ValueError as error:
            text = job.prompt if isinstance(job.prompt, str) else None
            session.add_failed(id, text, str(error))
            return str(error)
        return None

    def _prepare(self, job: Job) -> Prepared:
        if job.messages is None:
            return prepare(job.prompt, self._tokenizer, self.engine.vocabulary, self._reader)
        rendered = self._renderer.render(
            job.messages,
            job.tools,
            job.reasoning_effort,
            job.add_generation_prompt,
            max_tokens=self.engine.capacity.max_context - 1,
        )
        return prepare_chat(rendered, self.engine.vocabulary, self._reader)

    @contextlib.contextmanager
    def _progress(self, wanted: bool, total: int) -> Generator[Callable[[Session], None]]:
        """A function to call after each step; a bar where stderr is a terminal."""
        if not (wanted and self._console.is_terminal):
            yield lambda session: None
            return
        columns = (
            TextColumn("generating"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}"),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self._console, transient=True) as progress:
            task = progress.add_task("", total=total, speed="")

            def show(session: Session) -> None:
                elapsed = progress.tasks[0].elapsed or 0.0
                speed = f"{session.num_tokens / elapsed:.0f} tokens/s" if elapsed else ""
                progress.update(task, completed=session.num_finished, speed=speed)

            yield show


class _End:
    pass


_END = _End()


def _each(value: Any, kind: type[Item], default: Item, count: int, name: str) -> list[Item]:
    """One value for each prompt, of one for all or of a list. Raises ValueError."""
    if value is None:
        return [default] * count
    if isinstance(value, kind):
        return [value] * count
    wrong = f"{name}: must be one {kind.__name__}, or a list with one for each prompt"
    if not isinstance(value, list | tuple):
        raise ValueError(wrong)
    items = cast("Many[Any]", value)
    if not all(isinstance(item, kind) for item in items):
        raise ValueError(wrong)
    if len(items) != count:
        raise ValueError(f"{name}: {len(items)} given for {count} prompts")
    return list(items)
