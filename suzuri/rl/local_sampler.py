"""An engine in this process as a `Sampler`, and how it gets new weights.

Read `LocalSampler.sample`, then `publish`. The engine runs on the event loop's own thread, a step
at a time, whenever somebody waits for an answer.
"""

# torch leaves these without types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import asyncio
import dataclasses
import hashlib
import itertools
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from suzuri.engine.engine import Engine, TokenEvent
from suzuri.engine.messages import OnPublish
from suzuri.engine.request import Media, Sequence
from suzuri.engine.sampling_params import SamplingParams
from suzuri.kernels.exact import has_loops
from suzuri.model.content_hash import content_hash
from suzuri.rl.publication import PublicationError
from suzuri.types import Answer, MediaInput, Prompt, SampleParams, SamplerLost

PIECE = 1 << 20
"""Bytes; a thread copies four times as many before it looks for more."""


class LocalSampler:
    """Raises ValueError for an engine that leaves out what sampling needs."""

    def __init__(self, engine: Engine, *, on_publish: OnPublish = "finish") -> None:
        self.engine, self.on_publish = engine, on_publish
        self._ids = map(str, itertools.count())
        self._running: dict[str, _Running] = {}
        self._stepping: asyncio.Task[None] | None = None
        self._open = asyncio.Event()
        self._open.set()
        self._is_broken = False
        self.publication: dict[str, float] = {}
        """Of the last publication: bytes, and seconds of hashing, of waiting and of the pause."""

    @property
    def version(self) -> int:
        return self.engine.weight_version

    async def sample(self, prompt: Prompt, params: SampleParams) -> Answer:
        """Raises ValueError for a prompt that cannot be run, PublicationError after a failed
        publication. A caller that is cancelled frees what it held."""
        await self._open.wait()
        self._refuse_broken()
        running = _Running(prompt, params, asyncio.get_running_loop().create_future())
        id = next(self._ids)
        self._add(id, running)
        try:
            return await running.future
        finally:
            for held in [name for name, one in self._running.items() if one is running]:
                del self._running[held]
                self.engine.abort(held)

    async def publish(self, model: nn.Module) -> int:
        """Takes over the parameters of `model` that the engine's model has, and returns the new
        version. PublicationError where they are not there bit for bit afterwards."""
        clock = asyncio.get_running_loop().time
        began = clock()
        sent = self._sent(model)
        # Meanwhile answers go on: only what writes and looks again holds them up.
        expected = await asyncio.to_thread(content_hash, sent.items())
        hashed = clock()
        self._open.clear()
        try:
            if self.on_publish == "finish":
                while self._running:
                    await asyncio.wait([one.future for one in self._running.values()])
                    await asyncio.sleep(0)  # for those who wait for these, and let go
            again: list[_Running] = []
            if self.on_publish == "restart":
                again = list(self._running.values())
                for id in self._running:
                    self.engine.abort(id)
                self._running = {}
            waited = clock()
            try:
                self.engine.update_weights(lambda: self._take_over(sent, expected))
            except PublicationError as error:
                _end([*self._running.values(), *again], error)
                raise
            for running in again:
                running.restart()
                self._add(next(self._ids), running)
        finally:
            self._open.set()
        self.publication = {
            "bytes": sum(tensor.numel() * tensor.element_size() for tensor in sent.values()),
            "hash_seconds": hashed - began,
            "wait_seconds": waited - hashed,
            "pause_seconds": clock() - waited,
        }
        return self.version

    def _sent(self, model: nn.Module) -> dict[str, Tensor]:
        """What the engine's model needs of `model`."""
        self._is_broken = True
        theirs = dict(model.named_parameters())
        ours = dict(self.engine.model.named_parameters())
        if missing := sorted(set(ours) - set(theirs)):
            raise PublicationError(f"the trainer has no {missing[0]}; both must be of one model")
        sent = {name: theirs[name].detach() for name in ours}
        for name, tensor in ours.items():
            if sent[name].shape != tensor.shape or sent[name].dtype != tensor.dtype:
                raise PublicationError(
                    f"{name}: {sent[name].dtype} {list(sent[name].shape)} was sent, the sampler "
                    f"has {tensor.dtype} {list(tensor.shape)}"
                )
        self._is_broken = False
        return sent

    def _take_over(self, sent: dict[str, Tensor], expected: str) -> None:
        self._is_broken = True
        ours = dict(self.engine.model.named_parameters())
        copy_weights(ours, sent)
        if (found := content_hash(ours.items())) != expected:
            raise PublicationError(
                f"the sampler has weights {found}, {expected} were sent; nothing is sampled from "
                "them"
            )
        self._is_broken = False

    def _refuse_broken(self) -> None:
        if self._is_broken:
            raise PublicationError("the last publication of weights failed; start again")

    def _add(self, id: str, running: "_Running") -> None:
        params = running.params
        self.engine.add(
            id,
            running.prompt.tokens,
            SamplingParams(
                max_tokens=params.max_tokens,
                temperature=params.temperature,
                seed=params.seed,
                sampled_logprobs=True,
                detokenize=False,
                routing=params.routing,
            ),
            media=[media_of(item) for item in running.prompt.media],
        )
        self._running[id] = running
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.get_running_loop().create_task(self._steps())
            self._stepping.add_done_callback(self._stepped)

    async def _steps(self) -> None:
        while self._running and self.engine.has_work:
            for event in self.engine.step():
                self._take(event)
            await asyncio.sleep(0)

    def _stepped(self, task: asyncio.Task[None]) -> None:
        """What ended the steps ends the answers that waited for them, and the run: no prompt's
        fault ends a step, and who goes on would get nothing any more."""
        error = None if task.cancelled() else task.exception()
        if error is not None:
            lost = SamplerLost(f"a step of the engine failed ({type(error).__name__}: {error})")
            lost.__cause__ = error
            _end(self._running.values(), lost)

    def _take(self, event: TokenEvent) -> None:
        running = self._running.get(event.sequence.request.id)
        if running is None:
            return  # aborted
        if event.token is not None:
            assert event.logprobs is not None and event.logprobs.sampled is not None
            running.tokens.append(event.token)
            running.logprobs.append(event.logprobs.sampled)
            running.versions.append(event.version)
        if event.finish is not None and not running.future.done():
            running.future.set_result(running.answer(event.finish, event.sequence))


def copy_weights(ours: dict[str, nn.Parameter], sent: dict[str, Tensor]) -> None:
    """Writes every tensor in place, so that what points at it stays valid."""
    with torch.no_grad():
        for name, tensor in ours.items():
            source = sent[name]
            if tensor.is_cpu and source.is_cpu and tensor.is_contiguous() and has_loops():
                _copy_on_threads(tensor, source.contiguous())
            else:
                tensor.copy_(source)


def _copy_on_threads(target: Tensor, source: Tensor) -> None:
    """As fast as memory is; torch's own copy is half of that where others want the cores too."""
    from suzuri.kernels.compiled import share

    to, given = (x.detach().flatten().view(torch.uint8).numpy() for x in (target, source))

    def copy(first: int, last: int) -> None:
        to[first * PIECE : last * PIECE] = given[first * PIECE : last * PIECE]

    share(-(-to.size // PIECE), copy, at_once=4)
    torch.autograd.graph.increment_version(target)  # by which kernels see that it is another


@dataclasses.dataclass
class _Running:
    """An answer that is being drawn."""

    prompt: Prompt
    params: SampleParams
    future: asyncio.Future[Answer]
    tokens: list[int] = dataclasses.field(default_factory=list[int])
    logprobs: list[float] = dataclasses.field(default_factory=list[float])
    versions: list[int] = dataclasses.field(default_factory=list[int])

    def restart(self) -> None:
        self.tokens, self.logprobs, self.versions = [], [], []

    def answer(self, finish: str, sequence: Sequence) -> Answer:
        known = finish if finish in ("stop", "length") else "error"
        routed = sequence.routed
        return Answer(
            tokens=self.tokens,
            logprobs=self.logprobs,
            versions=self.versions,
            finish=known,
            error=None if known == finish else (sequence.error or finish),
            routing=None if routed is None else routed.experts_TLK,
        )


def _end(answers: Iterable[_Running], error: BaseException) -> None:
    for running in answers:
        if not running.future.done():
            running.future.set_exception(error)


def media_of(item: MediaInput) -> Media:
    inputs = torch.as_tensor(item.inputs)
    digest = hashlib.blake2b(item.inputs.tobytes(), digest_size=16).digest()
    return Media(
        index=item.index,
        count=len(item.inputs),
        kind=item.kind,
        digest=digest,
        inputs=inputs,
        keeps_inputs=True,
    )
