"""Metrics under the names that operators know from vLLM, with the prefix `suzuri:`."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from suzuri.engine.messages import Stats

SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.0, 2.5, 5.0, 10.0, 30.0, 80.0)
LONG = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 30.0, 60.0, 120.0, 480.0, 1920.0)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6)


class Histogram(Collector):
    """Counts per bucket. Cheaper to add to than the library's, as one is added to per token, and
    without its lock: all is done in one thread."""

    def __init__(self, name: str, text: str, model: str, bounds: Sequence[float]) -> None:
        self._name, self._text, self._model = name, text, model
        self._bounds = list(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterable[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=["model_name"])
        buckets: list[tuple[str, float]] = []
        below = 0
        for bound, count in zip([*self._bounds, float("inf")], self._counts, strict=True):
            below += count
            buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), below))
        family.add_metric([self._model], buckets, self._sum)
        return [family]


class Metrics:
    """One server's metrics, in a registry of their own; `model` labels them all."""

    def __init__(self, model: str) -> None:
        self._registry = CollectorRegistry()
        self._model = model
        self._running = self._gauge("num_requests_running", "Answers that are being written.")
        self._waiting = self._gauge("num_requests_waiting", "Answers that wait.")
        self._pages = self._gauge("kv_cache_usage_perc", "Share of pages in use; 1 is all.")
        self._ready = self._gauge("engine_ready", "1 while the engine takes requests.")
        self._preemptions = self._gauge("num_preemptions_total", "Preemptions of this engine.")
        self._restarts = self._gauge("engine_restarts", "Starts of the engine beyond the first.")
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.")
        self.generation_tokens = self._counter("generation_tokens", "Tokens of answers.")
        self.prefix_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up.")
        self.prefix_hits = self._counter("prefix_cache_hits", "Prompt tokens found in the cache.")
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "From request to first token.", SECONDS
        )
        self.between_tokens = self._histogram(
            "inter_token_latency_seconds", "From one token to the next.", SECONDS
        )
        self.whole = self._histogram("e2e_request_latency_seconds", "Whole requests.", LONG)
        self.prompt_sizes = self._histogram("request_prompt_tokens", "Per request.", TOKENS)
        self.answer_sizes = self._histogram("request_generation_tokens", "Per answer.", TOKENS)
        self.choices = self._histogram("request_params_n", "Samples asked for.", (1, 2, 5, 10, 20))
        labels = ["model_name", "finished_reason"]
        self._finished = Counter(
            "suzuri:request_success", "Answers by how they ended.", labels, registry=self._registry
        )
        self._refused = Counter(
            "suzuri:requests_refused",
            "Requests by the HTTP status that refused them.",
            ["model_name", "status"],
            registry=self._registry,
        )
        self.disconnects = self._counter("requests_disconnected", "Clients that went away.")

    def _gauge(self, name: str, text: str) -> Gauge:
        made = Gauge(f"suzuri:{name}", text, ["model_name"], registry=self._registry)
        return made.labels(self._model)

    def _counter(self, name: str, text: str) -> Counter:
        made = Counter(f"suzuri:{name}", text, ["model_name"], registry=self._registry)
        return made.labels(self._model)

    def _histogram(self, name: str, text: str, bounds: Sequence[float]) -> Histogram:
        made = Histogram(f"suzuri:{name}", text, self._model, bounds)
        self._registry.register(made)
        return made

    def finished(self, reason: str) -> None:
        self._finished.labels(self._model, reason).inc()

    def refused(self, status: int) -> None:
        self._refused.labels(self._model, str(status)).inc()

    def text(self, stats: Stats, *, ready: bool, restarts: int) -> bytes:
        """All metrics in Prometheus' text format."""
        self._running.set(stats.running)
        self._waiting.set(stats.waiting)
        self._pages.set(stats.pages_used / stats.pages if stats.pages else 0.0)
        self._preemptions.set(stats.preemptions)
        self._ready.set(float(ready))
        self._restarts.set(restarts)
        return generate_latest(self._registry)
