"""Metrics under the names that operators know from vLLM, with the prefix `suzuri:`."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from suzuri.engine.messages import Stats

FIRST = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
BETWEEN = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
LONG = (
    *(0.01, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5, 5e5, 1e6)
STEP_TOKENS = (1, *(8.0 * 2**power for power in range(12)))
REASONS = ("stop", "length", "abort", "deadline", "error")


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
    """One server's metrics, in a registry of their own; `model` labels them all.

    Times of requests are observed per answer, at its end; a request with n = 2 has two.
    """

    def __init__(self, model: str) -> None:
        self._registry = CollectorRegistry()
        self._model = model
        self._running = self._gauge("num_requests_running", "Answers that are being written.")
        self._waiting = self._gauge("num_requests_waiting", "Answers that wait.")
        self._pages = self._gauge("kv_cache_usage_perc", "Share of pages in use; 1 is all.")
        self._snapshots = self._gauge("snapshots_used", "Resume points of the prefix cache.")
        self._ready = self._gauge("engine_ready", "1 while the engine takes requests.")
        self._restarts = self._gauge("engine_restarts", "Starts of the engine beyond the first.")
        self._preemptions = self._counter(
            "num_preemptions", "Answers that had to give their state up for others, and ran again."
        )
        self._seen_preemptions = 0
        self.prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.")
        self.prompt_tokens_cached = self._counter(
            "prompt_tokens_cached", "Tokens of prompts that the prefix cache had."
        )
        self._generation = self._counter("generation_tokens", "Tokens of answers.")
        self.generated = self._seen_generated = 0
        """Tokens of answers: a number, as it is counted per token."""
        self.prefix_queries = self._counter(
            "prefix_cache_queries", "Prompt tokens looked up, those of each answer."
        )
        self.prefix_hits = self._counter(
            "prefix_cache_hits", "Prompt tokens found in the cache, those of each answer."
        )
        self.first_token = self._histogram(
            "time_to_first_token_seconds", "From request to first token.", FIRST
        )
        self.between_tokens = self._histogram(
            "inter_token_latency_seconds", "From one token to the next.", BETWEEN
        )
        self.per_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Per answer: mean time from one token to the next.",
            BETWEEN,
        )
        self.whole = self._histogram("e2e_request_latency_seconds", "From request to end.", LONG)
        self.queue = self._histogram("request_queue_time_seconds", "In the engine's queue.", LONG)
        self.prefill = self._histogram(
            "request_prefill_time_seconds", "From the first step to the first token.", LONG
        )
        self.decode = self._histogram(
            "request_decode_time_seconds", "From the first token to the last.", LONG
        )
        self.inference = self._histogram(
            "request_inference_time_seconds", "From the first step to the last token.", LONG
        )
        self.step_tokens = self._histogram(
            "iteration_tokens_total", "Tokens of one step, of prompts and answers.", STEP_TOKENS
        )
        self.prompt_sizes = self._histogram("request_prompt_tokens", "Per prompt.", TOKENS)
        self.answer_sizes = self._histogram("request_generation_tokens", "Per answer.", TOKENS)
        self.choices = self._histogram("request_params_n", "Samples asked for.", (1, 2, 5, 10, 20))
        self.most_tokens = self._histogram(
            "request_params_max_tokens", "Most tokens asked for, where it was asked.", TOKENS
        )
        labels = ["model_name", "finished_reason"]
        self._finished = Counter(
            "suzuri:request_success", "Answers by how they ended.", labels, registry=self._registry
        )
        for reason in REASONS:
            self._finished.labels(model, reason)
        self._refused = Counter(
            "suzuri:requests_refused",
            "Requests by the HTTP status that refused them.",
            ["model_name", "status"],
            registry=self._registry,
        )
        self.disconnects = self._counter("requests_disconnected", "Clients that went away.")
        self.slow_readers = self._counter("slow_readers", "Clients cut off as they took nothing.")

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

    def step(self, stats: Stats) -> None:
        """Take note of one step of the engine."""
        if stats.step_tokens:
            self.step_tokens.observe(stats.step_tokens)
        new = stats.preemptions - self._seen_preemptions
        if new < 0:
            new = stats.preemptions  # of an engine that was started anew
        self._preemptions.inc(new)
        self._seen_preemptions = stats.preemptions

    def refused(self, status: int) -> None:
        self._refused.labels(self._model, str(status)).inc()

    def text(self, stats: Stats, *, ready: bool, restarts: int) -> bytes:
        """All metrics in Prometheus' text format."""
        self._running.set(stats.running)
        self._waiting.set(stats.waiting)
        self._pages.set(stats.pages_used / stats.pages if stats.pages else 0.0)
        self._generation.inc(self.generated - self._seen_generated)
        self._seen_generated = self.generated
        self._snapshots.set(stats.snapshots_used)
        self._ready.set(float(ready))
        self._restarts.set(restarts)
        return generate_latest(self._registry)
