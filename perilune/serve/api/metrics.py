"""Prometheus metrics: what requests took is measured here, what the engine did is asked of it at every scrape.

Own names begin with `perilune:`. The common ones are repeated as `vllm:`, so that dashboards and routers that were made
for other servers work; the table `ALIASES` says which.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from perilune.serve.engine import Engine
from perilune.serve.request import Timing, Usage

PREFIX = "perilune:"
ALIASES = {
    "requests_running": "vllm:num_requests_running",
    "requests_waiting": "vllm:num_requests_waiting",
    "kv_cache_usage": "vllm:kv_cache_usage_perc",
    "prompt_tokens": "vllm:prompt_tokens",
    "generation_tokens": "vllm:generation_tokens",
    "prefix_cache_queried_tokens": "vllm:prefix_cache_queries",
    "prefix_cache_hit_tokens": "vllm:prefix_cache_hits",
    "requests_finished": "vllm:request_success",
    "preempted": "vllm:num_preemptions",
    "time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "inter_token_seconds": "vllm:inter_token_latency_seconds",
    "request_seconds": "vllm:e2e_request_latency_seconds",
    "queue_seconds": "vllm:request_queue_time_seconds",
    "prefill_seconds": "vllm:request_prefill_time_seconds",
    "decode_seconds": "vllm:request_decode_time_seconds",
    "request_prompt_tokens": "vllm:request_prompt_tokens",
    "request_generation_tokens": "vllm:request_generation_tokens",
}
"""Own name -> the name that other servers use, both without the endings that the format adds."""

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKENS = tuple(4**power for power in range(11))


class Metrics:
    """Metrics of one server.

    Args:
        model: the label `model_name`.
        engine: its snapshot is read at every scrape.
    """

    def __init__(self, model: str, engine: Engine) -> None:
        self._registry = CollectorRegistry()
        self._model = model

        def histogram(name: str, about: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(PREFIX + name, about, ["model_name"], buckets=buckets, registry=self._registry)
            return made.labels(model)

        def counter(name: str, about: str, *labels: str) -> Counter:
            return Counter(PREFIX + name, about, ["model_name", *labels], registry=self._registry)

        self._first = histogram("time_to_first_token_seconds", "From a request's arrival to its first token.", _SECONDS)
        self._between = histogram("inter_token_seconds", "Between two texts of one answer.", _SECONDS)
        self._whole = histogram("request_seconds", "From a request's arrival to its last token.", _SECONDS)
        self._queue = histogram("queue_seconds", "Waiting for the engine.", _SECONDS)
        self._prefill = histogram("prefill_seconds", "Running the prompt.", _SECONDS)
        self._decode = histogram("decode_seconds", "Drawing the answer.", _SECONDS)
        self._prompt_size = histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._answer_size = histogram("request_generation_tokens", "Drawn tokens of a request.", _TOKENS)
        self._prompt = counter("prompt_tokens", "Prompt tokens of finished requests.")
        self._generation = counter("generation_tokens", "Drawn tokens.")
        self._reasoning = counter("reasoning_tokens", "Drawn tokens that were thinking.")
        self._hit = counter("prefix_cache_hit_tokens", "Prompt tokens that were not run, for a kept state had them.")
        self._asked = counter("prefix_cache_queried_tokens", "Prompt tokens that were looked up.")
        self._finished = counter("requests_finished", "Answers by the reason of their end.", "finished_reason")
        self._http = counter("http_responses", "Responses by path and status.", "path", "status")
        self._active = Gauge(
            PREFIX + "requests_active", "Requests that are being answered.", ["model_name"], registry=self._registry
        )
        self._active.labels(model).set(0)
        for each in (self._prompt, self._generation, self._reasoning, self._hit, self._asked):
            each.labels(model)  # there from the start, at 0
        self._registry.register(_EngineCollector(model, engine))

    def response(self, path: str, status: int) -> None:
        """A response has been sent."""
        self._http.labels(self._model, path, str(status)).inc()

    def began(self) -> None:
        """A request is being answered."""
        self._active.labels(self._model).inc()

    def first_token(self, seconds: float) -> None:
        """The first text has left, so long after the request came."""
        self._first.observe(seconds)

    def later_token(self, seconds: float) -> None:
        """Another text of the same answer, so long after the one before."""
        self._between.observe(seconds)

    def ended(self, seconds: float, usage: Usage, timing: Timing, reasons: list[str]) -> None:
        """The request is over.

        Args:
            seconds: since it came.
            usage, timing: of its job.
            reasons: why each of its answers ended; "abort" = it was cut.
        """
        self._active.labels(self._model).dec()
        self._whole.observe(seconds)
        self._queue.observe(timing.queue_seconds)
        self._prefill.observe(timing.prefill_seconds)
        self._decode.observe(timing.decode_seconds)
        self._prompt_size.observe(usage.prompt_tokens)
        self._answer_size.observe(usage.completion_tokens)
        for metric, amount in (
            (self._prompt, usage.prompt_tokens),
            (self._generation, usage.completion_tokens),
            (self._reasoning, usage.reasoning_tokens),
            (self._hit, usage.cached_tokens),
            (self._asked, usage.prompt_tokens),
        ):
            metric.labels(self._model).inc(amount)
        for reason in reasons:
            self._finished.labels(self._model, reason).inc()

    def text(self) -> tuple[bytes, str]:
        """(body, content type) of a scrape."""
        return generate_latest(_WithAliases(self._registry)), CONTENT_TYPE_LATEST


class _WithAliases(CollectorRegistry):
    """Every family, and those of `ALIASES` under both names."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__()
        self._of = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._of.collect():
            yield family
            alias = ALIASES.get(family.name.removeprefix(PREFIX))
            if alias is not None:
                copy = Metric(alias, family.documentation, family.type)
                copy.samples = [
                    sample._replace(name=alias + sample.name.removeprefix(family.name)) for sample in family.samples
                ]
                yield copy


class _EngineCollector(Collector):
    """The engine's snapshot: a field `x_total` is a counter, another number a gauge, a table has the label `kind`."""

    def __init__(self, model: str, engine: Engine) -> None:
        self._model = model
        self._engine = engine

    def describe(self) -> list[Metric]:
        """Nothing is known before the first scrape."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Families of the snapshot."""
        snapshot = self._engine.metrics()
        usage = snapshot.pages_used / max(1, snapshot.pages_total)
        yield self._family("kv_cache_usage", {None: usage}, GaugeMetricFamily)
        for field in fields(snapshot):
            value = getattr(snapshot, field.name)
            table = value if isinstance(value, dict) else {None: value}
            name = _NAMES.get(field.name, f"engine_{field.name.removesuffix('_total')}")
            counts = field.name.endswith("_total") and field.name != "pages_total"
            if table:
                yield self._family(name, table, CounterMetricFamily if counts else GaugeMetricFamily)

    def _family(self, name: str, table: dict[Any, Any], kind: Any) -> Metric:
        labels = ["model_name"] if None in table else ["model_name", "kind"]
        family = kind(PREFIX + name, f"Of the engine: {name.removeprefix('engine_').replace('_', ' ')}.", labels=labels)
        for key, value in table.items():
            family.add_metric([self._model] if key is None else [self._model, str(key)], value)
        return family


_NAMES = {
    "running": "requests_running",
    "waiting": "requests_waiting",
    "waiting_by_class": "requests_waiting_by_class",
    "preempted_total": "preempted",
}
"""Fields with a name of their own; all others are `engine_…`, which says where they were counted."""
