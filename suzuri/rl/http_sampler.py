"""A running `suzuri serve` as a `Sampler`, and how it gets new weights.

Read `HttpSampler.sample`, then `publish`. The server is started with --allow-weight-updates and
sees the folder in which weights are handed over (publication.py). A step's answers and weights are
those that `LocalSampler` would give, bit for bit, or there is an error.
"""

# torch leaves these without types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import asyncio
import base64
import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import torch
from torch import Tensor, nn

from suzuri.engine.messages import OnPublish
from suzuri.model.content_hash import content_hash
from suzuri.model.fingerprint import numerics_fingerprint
from suzuri.rl import publication
from suzuri.rl.config import RlConfig
from suzuri.rl.http_calls import Calls, Lost, Refused
from suzuri.rl.publication import Handover, PublicationError
from suzuri.types import Answer, Array, MediaInput, Prompt, SampleParams

TRIES = 6
"""Connections that may fail one after the other: 3 s in all."""
MOST_AT_ONCE = 512
MEETING_SECONDS = 60.0
LONGEST_SECONDS = 3600.0
"""Of an answer, as of the server's; and of a publication."""
PARTS = {"vision": "has_image_understanding", "audio": "has_audio_understanding"}
"""Parts of a model that a server may have left out, and what it calls them."""


@dataclasses.dataclass(frozen=True)
class _Server:
    """What it is and has. `version`: its own number of the weights that draw next."""

    version: int
    parts: frozenset[str]
    fingerprint: dict[str, str]


class HttpSampler:
    """`url`: the server's root. `handover`: where weights are put. `version`: what the weights that
    are there are called; the server's own numbers never repeat, whatever these are."""

    def __init__(
        self,
        url: str,
        handover: Handover,
        *,
        on_publish: OnPublish = "finish",
        key: str | None = None,
        version: int = 0,
        tries: int = TRIES,
    ) -> None:
        self.on_publish = on_publish
        self.publication: dict[str, float] = {}
        """Of the last publication: bytes, and seconds of writing, reading, waiting and pause."""
        self.calls = Calls(url.rstrip("/"), key, tries=tries, most_at_once=MOST_AT_ONCE)
        self._handover = handover
        self._version = version
        self._server: _Server | None = None
        self._meeting: asyncio.Task[_Server] | None = None
        self._of_trainer: dict[str, str] | None = None
        """Its fingerprint."""
        self._newest = 0
        """Version that the server has or may have by now."""
        self._broken: str | None = None

    @property
    def version(self) -> int:
        return self._version

    async def sample(self, prompt: Prompt, params: SampleParams) -> Answer:
        """Raises ValueError for a prompt that cannot be run; PublicationError for a server that is
        gone, or draws with other weights than it should, from then on. A caller that is cancelled
        frees what it held there."""
        self._refuse_broken()
        try:
            server = await self._met()
            reply = await self.calls.ask(
                "POST", "/generate", _body(prompt, params), seconds=LONGEST_SECONDS
            )
            return self._checked(reply, server)
        except Refused as refused:
            if refused.status in (400, 413):
                raise ValueError(str(refused)) from refused
            raise self._break(f"{self.calls.url} refuses to answer: {refused}") from refused
        except Lost as lost:
            raise self._break(str(lost)) from lost

    def _checked(self, reply: dict[str, Any], asked: _Server) -> Answer:
        """`asked`: the server when it was asked."""
        meta, ids = _part(reply, "meta_info"), _part(reply, "output_ids")
        runs = _part(meta, "weight_versions")
        versions = [int(version) for version, count in runs for _ in range(count)]
        found = [_number(one[0]) for one in _part(meta, "output_token_logprobs")]
        if not len(ids) == len(found) == len(versions):
            raise Lost(f"{self.calls.url}: an answer with log-probs or versions missing")
        wrong = [one for one in versions if not asked.version <= one <= self._newest]
        if wrong or versions != sorted(versions):
            raise Lost(
                f"{self.calls.url} drew with weights of version {(wrong or versions)[0]} where "
                f"version {asked.version} should have: it was started again, or somebody else "
                "publishes there"
            )
        self._check_fingerprint(
            _part(meta, "fingerprint"), asked.fingerprint, "when it was asked first"
        )
        assert self._server is not None
        finish = _part(_part(meta, "finish_reason"), "type")
        is_known = finish in ("stop", "length")
        return Answer(
            tokens=ids,
            logprobs=found,
            versions=[one - self._server.version + self._version for one in versions],
            finish=finish if is_known else "error",
            error=None if is_known else finish,
            routing=_routing(meta.get("routed_experts")),
        )

    # Weights

    async def publish(self, model: nn.Module) -> int:
        """Gives the server the parameters of `model`, which it has bit for bit afterwards, and
        returns the new version. Raises PublicationError, after which nothing is sampled."""
        self._refuse_broken()
        try:
            return await self._publish(model)
        except Refused as refused:
            why = f"{self.calls.url} refuses the weights: {refused}"
            raise self._break(why) from refused
        except (Lost, OSError, ValueError) as error:
            raise self._break(str(error)) from error

    async def _publish(self, model: nn.Module) -> int:
        loop = asyncio.get_running_loop()
        server = await self._met()
        weights = dict(model.named_parameters())
        of_trainer = self._of_trainer = self._of_trainer or _fingerprint_of(weights)
        self._check_fingerprint(server.fingerprint, of_trainer, "of the trainer")
        sent = _sent(weights, server.parts)
        size = sum(tensor.numel() * tensor.element_size() for tensor in sent.values())
        folder = self._handover.folder(self._version + 1, size)
        began = loop.time()
        try:
            digest = await asyncio.to_thread(_write, model, sent, folder)
            written = loop.time()
            self._newest = server.version + 1
            reply = await self.calls.ask(
                "POST",
                "/update_weights_from_disk",
                {
                    "model_path": str(folder),
                    "weight_version": server.version + 1,
                    "content_hash": digest,
                    "replaces": server.version,
                    "on_publish": self.on_publish,
                },
                seconds=LONGEST_SECONDS,
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        self._check_fingerprint(_part(reply, "fingerprint"), of_trainer, "of the trainer")
        got = (_part(reply, "weight_version"), _part(reply, "content_hash"))
        if got != (server.version + 1, digest):
            raise Lost(
                f"{self.calls.url} has weights {got[1]} as version {got[0]}; {digest} were sent as "
                f"version {server.version + 1}"
            )
        self.publication = {"bytes": size, "write_seconds": written - began} | {
            name: _part(reply, name) for name in ("read_seconds", "wait_seconds", "pause_seconds")
        }
        self._server = dataclasses.replace(server, version=server.version + 1)
        self._version += 1
        return self._version

    def _check_fingerprint(self, theirs: dict[str, str], other: dict[str, str], whose: str) -> None:
        for name in sorted({*theirs, *other}):
            if theirs.get(name) != other.get(name):
                raise Lost(
                    f"{self.calls.url} may compute other bits: its {name} is "
                    f"{theirs.get(name)!r}, that {whose} {other.get(name)!r}"
                )

    # The server

    async def _met(self) -> _Server:
        """Asked once what it is, and then remembered."""
        if self._server is not None:
            return self._server
        if self._meeting is None or self._meeting.done():
            self._meeting = asyncio.ensure_future(self._meet())
        return await asyncio.shield(self._meeting)

    async def _meet(self) -> _Server:
        info = await self.calls.ask("GET", "/get_model_info", seconds=MEETING_SECONDS)
        parts = frozenset(part for part, name in PARTS.items() if _part(info, name))
        self._server = _Server(_part(info, "weight_version"), parts, _part(info, "fingerprint"))
        self._newest = self._server.version
        return self._server

    def _refuse_broken(self) -> None:
        if self._broken is not None:
            raise PublicationError(self._broken)

    def _break(self, why: str) -> PublicationError:
        self._broken = self._broken or why
        return PublicationError(why)

    async def close(self) -> None:
        """Ends the connections, and removes what was handed over."""
        await self.calls.close()
        self._handover.clear()


def http_sampler(config: RlConfig, version: int, max_context: int) -> HttpSampler:
    """The sampler of a run whose `sampler` is a URL. Raises ValueError, before anything is read,
    for a server that cannot be asked or is too small for `max_context` tokens."""
    url = config.sampler.rstrip("/")
    key = None
    if config.sampler_key_file is not None:
        path = Path(config.sampler_key_file)
        if not path.is_file():
            raise ValueError(f"sampler_key_file {path}: there is no such file")
        key = path.read_text("utf-8").strip()
    handover = Handover(config.run_dir, urlsplit(url).hostname or "", config.sampler_folder)
    sampler = HttpSampler(url, handover, on_publish=config.on_publish, key=key, version=version)
    try:
        with httpx.Client(**sampler.calls.client_fields(), timeout=10) as client:
            response = client.get("/get_model_info")
    except httpx.TransportError as error:
        raise ValueError(
            f"sampler = {url!r}: no server answers there ({error}); start one with "
            "`suzuri serve MODEL --allow-weight-updates`"
        ) from error
    if response.status_code != 200:
        raise ValueError(f"sampler = {url!r}: HTTP {response.status_code}: {response.text[:500]}")
    if (most := response.json()["max_context"]) < max_context:
        raise ValueError(
            f"limits.max_context = {max_context}: the server takes {most} tokens; start it with "
            f"--max-context {max_context}, or lower the limit"
        )
    return sampler


def _body(prompt: Prompt, params: SampleParams) -> dict[str, Any]:
    sampling: dict[str, Any] = {
        "max_new_tokens": params.max_tokens,
        "temperature": params.temperature,
    }
    if params.seed is not None:
        sampling["seed"] = params.seed
    return {
        "input_ids": list(prompt.tokens),
        "sampling_params": sampling,
        "return_logprob": True,
        "return_routed_experts": params.routing,
        "media": [_media(item) for item in prompt.media],
    }


def _media(item: MediaInput) -> dict[str, Any]:
    inputs = np.ascontiguousarray(item.inputs)
    return {
        "kind": item.kind,
        "index": item.index,
        "dtype": str(inputs.dtype),
        "shape": list(inputs.shape),
        "data": base64.b64encode(inputs.data).decode(),
    }


def _part(found: dict[str, Any], name: str) -> Any:
    """Raises Lost where there is none."""
    if name not in found:
        raise Lost(f"the answer has no {name!r}; is it a Suzuri server of this version?")
    return found[name]


def _routing(found: dict[str, Any] | None) -> Array | None:
    if found is None:
        return None
    data = base64.b64decode(found["data"])
    return np.frombuffer(data, found["dtype"]).reshape(found["shape"])


def _number(value: float | None) -> float:
    """JSON has no NaN."""
    return float("nan") if value is None else value


def _fingerprint_of(weights: Mapping[str, Tensor]) -> dict[str, str]:
    like = weights["decoder.norm.weight"]
    return numerics_fingerprint(like.device, str(like.dtype).removeprefix("torch."))


def _sent(weights: Mapping[str, Tensor], parts: frozenset[str]) -> dict[str, Tensor]:
    """What the server has of them. Raises ValueError for what only it has."""
    for part in sorted(parts):
        if not any(name.startswith(f"{part}.") for name in weights):
            raise ValueError(f"the server has a {part} tower, the trainer has none")
    kept = tuple(f"{part}." for part in ("decoder", *parts))
    return {name: tensor.detach() for name, tensor in weights.items() if name.startswith(kept)}


def _write(model: nn.Module, sent: dict[str, Tensor], folder: Path) -> str:
    """Returns the hash of what was sent."""
    with torch.no_grad():
        publication.write_weights(model, folder)
        return content_hash(sent.items())
