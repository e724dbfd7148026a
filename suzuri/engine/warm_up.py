"""The first request of an engine, which nobody waits for."""

from suzuri.engine.engine import Engine
from suzuri.engine.sampling_params import SamplingParams


def warm_up(engine: Engine) -> None:
    """One short request, so that what is loaded on first use is there before anybody waits."""
    params = SamplingParams(max_tokens=2, seed=0, ignore_eos=True, detokenize=False)
    request = engine.add("warm-up", [0, 1], params, salt=object())
    engine.run()
    engine.cache.clear(request.root)
