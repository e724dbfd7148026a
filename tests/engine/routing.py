"""Engines that record which experts tokens went to, and what one forward over the tokens says."""

import dataclasses
from collections.abc import Sequence as Many
from typing import Any

import numpy as np
import torch

from suzuri.engine.config import EngineConfig
from suzuri.engine.engine import Engine, TokenEvent
from suzuri.engine.request import Sequence
from suzuri.engine.routing import Routing
from suzuri.engine.sampling_params import SamplingParams
from suzuri.model.batch import Routes, pack
from suzuri.model.inkling import Inkling
from suzuri.processing.vocabulary import FullVocabulary


def engine_of(model: Inkling, dtype: str = "float32", **fields: Any) -> Engine:
    """A float32 or bf16 engine with small pages."""
    options: dict[str, Any] = {"max_context": 200, "max_running": 8, "page_size": 4}
    pools: dict[str, Any] = {"global_pages": 400, "local_pages": 300, "snapshots": 40}
    config = EngineConfig(dtype=dtype, **(options | pools | fields))  # pyright: ignore[reportArgumentType]
    return Engine(model, config, memory_bytes=2**62, vocabulary=FullVocabulary())


def asking(max_tokens: int = 6, **fields: Any) -> SamplingParams:
    """Parameters of a request that ends by its limit alone and wants its routing."""
    wanted: dict[str, Any] = {"seed": 0, "routing": True, "ignore_eos": True, "detokenize": False}
    return SamplingParams(max_tokens=max_tokens, **(wanted | fields))


def run(engine: Engine) -> list[TokenEvent]:
    """Steps until nothing is left to do, checking all invariants after each."""
    events: list[TokenEvent] = []
    while engine.has_work:
        events += engine.step()
        engine.check()
    return events


def whole(model: Inkling, tokens: Many[int]) -> Routing:
    """What one forward over all tokens chooses."""
    routes = Routes(model.config.text.num_moe_layers)
    with torch.no_grad():
        device = model.decoder.norm.weight.device
        model.decoder(dataclasses.replace(pack([tokens], device=device), routes=routes))
    experts_TLK, weights_TLJ = routes.stacked()
    return Routing(experts_TLK.cpu().numpy(), weights_TLJ.cpu().numpy())


def assert_same_routing(found: Routing | None, expected: Routing) -> None:
    """Bit for bit."""
    assert found is not None
    assert found.experts_TLK.dtype == np.uint8
    assert found.weights_TLJ.dtype == expected.weights_TLJ.dtype
    assert np.array_equal(found.experts_TLK, expected.experts_TLK)
    assert found.weights_TLJ.tobytes() == expected.weights_TLJ.tobytes()


def check_record(model: Inkling, sequence: Sequence) -> None:
    """All tokens but the last one."""
    assert_same_routing(sequence.routed, whole(model, sequence.tokens[:-1]))
