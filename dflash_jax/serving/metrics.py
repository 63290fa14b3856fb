"""Figures of a server in Prometheus's form, under vLLM's names: what reads those shows acceptance without a line of its own."""
# pyright: reportMissingImports=false

import collections
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Metric, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from dflash_jax.model import Model
from dflash_jax.serving.answers import reason_of
from dflash_jax.text.completion import Completion

LABELS = ("model_name", "engine")
_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000)


class Drafting(Collector):
    """Figures of drafting, made of the cycles' gains where somebody asks: a request has dozens of cycles.

    Args:
      places: proposals of a cycle; without any there are no figures but zeros.

    Attributes:
      cycles: how many gained so many tokens.
    """

    def __init__(self, places: int, labels: Sequence[str]):
        self.places, self._labels = places, labels
        self.cycles = collections.Counter[int]()

    def collect(self) -> Iterator[Metric]:
        """The figures, for Prometheus's registry."""
        cycles = self.cycles.total()
        gained = sum(length * count for length, count in self.cycles.items())
        for name, about, value in (
            ("num_drafts", "Cycles that drafted", cycles),
            ("num_draft_tokens", "Tokens proposed", cycles * self.places),
            ("num_accepted_tokens", "Proposals that stood", gained - cycles),
        ):
            made = CounterMetricFamily(f"vllm:spec_decode_{name}", about, labels=LABELS)
            made.add_metric(self._labels, value)
            yield made
        at_most = [
            sum(count for length, count in self.cycles.items() if length <= place)
            for place in range(1, self.places + 2)
        ]
        made = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos", "Proposals that stood, by place in the block",
            labels=(*LABELS, "position"),
        )  # fmt: skip
        for place in range(self.places):
            made.add_metric((*self._labels, str(place)), cycles - at_most[place])
        yield made
        made = HistogramMetricFamily("dflash_jax:acceptance_length", "Tokens that a cycle gained", labels=LABELS)
        buckets = [(f"{place}.0", float(count)) for place, count in enumerate(at_most, 1)]
        made.add_metric(self._labels, [*buckets, ("+Inf", float(cycles))], float(gained))
        yield made


class Metrics:
    """Counts what is answered. Gauges are read from the scheduler when somebody asks.

    Args:
      name: of the model, a label.
    """

    def __init__(self, model: Model, name: str):
        self.model, self._labels = model, (name, "0")
        self.registry = CollectorRegistry()  # its own: a process may hold two servers
        engine = model.engine
        self._gauge("num_requests_running", "Requests with a slot", lambda: engine.scheduler.stats.running)
        self._gauge("num_requests_waiting", "Requests without a slot", lambda: engine.scheduler.stats.waiting)
        self._gauge(
            "kv_cache_usage_perc", "Pages in use, 0 to 1", lambda: 1 - engine.allocator.num_free / engine.num_pages
        )
        self.preemptions = self._counter("num_preemptions", "Times a request lost its slot for want of pages")
        self.preemptions_seen = 0
        self.prompt = self._counter("prompt_tokens", "Tokens of prompts")
        self.generated = self._counter("generation_tokens", "Tokens produced")
        self.queries = self._counter("prefix_cache_queries", "Tokens of prompts that were looked for in pages")
        self.hits = self._counter("prefix_cache_hits", "Tokens of prompts that were found in pages")
        self._drafting = Drafting(0 if model.draft is None else model.draft.num_drafts, self._labels)
        self.registry.register(self._drafting)
        self._success = Counter(
            "vllm:request_success", "Requests answered", (*LABELS, "finished_reason"), registry=self.registry
        )
        self._rejected = Counter(
            "vllm:admission_rejections", "Requests refused", (*LABELS, "reason"), registry=self.registry
        )
        self.first = self._histogram("time_to_first_token_seconds", "From the request to its first token", _SECONDS)
        self.between = self._histogram("inter_token_latency_seconds", "Between two pieces of a text", _SECONDS)
        self.each = self._histogram(
            "request_time_per_output_token_seconds", "Mean for each token after the first", _SECONDS
        )
        self.whole = self._histogram("e2e_request_latency_seconds", "From the request to its end", _SECONDS)
        self.prefill = self._histogram("request_prefill_time_seconds", "Of prompts", _SECONDS)
        self.decode = self._histogram("request_decode_time_seconds", "From the first token to the last", _SECONDS)
        self.waited = self._histogram("request_queue_time_seconds", "From the request to its slot", _SECONDS)
        self.prompts = self._histogram("request_prompt_tokens", "Tokens of a prompt", _TOKENS)
        self.texts = self._histogram("request_generation_tokens", "Tokens of an answer", _TOKENS)

    def answered(self, row: Completion, seconds: float) -> None:
        """Counts a request that came to its end after so many seconds."""
        prompt, produced, stats = len(row.prompt_token_ids), len(row.token_ids), row.stats
        for counter, value in (
            (self.prompt, prompt), (self.generated, produced), (self.queries, prompt), (self.hits, stats.cached_tokens),
        ):  # fmt: skip
            counter.inc(value)
        self._success.labels(*self._labels, reason_of(row.finish_reason) or "abort").inc()
        self.first.observe(stats.time_to_first_token_s)
        self.whole.observe(seconds)
        self.prefill.observe(stats.prefill_s)
        self.decode.observe(stats.decode_s)
        self.waited.observe(max(0.0, stats.time_to_first_token_s - stats.prefill_s))
        if produced > 1:
            self.each.observe(stats.decode_s / (produced - 1))
        self.prompts.observe(prompt)
        self.texts.observe(produced)
        if self._drafting.places:
            self._drafting.cycles.update(row.acceptance_lengths)

    def rejected(self, reason: str) -> None:
        """Counts a request that was refused for want of room."""
        self._rejected.labels(*self._labels, reason).inc()

    def text(self) -> bytes:
        """All figures, as `/metrics` gives them."""
        preempted = self.model.engine.scheduler.stats.preemptions
        self.preemptions.inc(preempted - self.preemptions_seen)
        self.preemptions_seen = preempted
        return generate_latest(self.registry)

    def _gauge(self, name: str, about: str, read: Callable[[], float | int]) -> None:
        Gauge(f"vllm:{name}", about, LABELS, registry=self.registry).labels(*self._labels).set_function(read)

    def _counter(self, name: str, about: str) -> Counter:
        return Counter(f"vllm:{name}", about, LABELS, registry=self.registry).labels(*self._labels)

    def _histogram(self, name: str, about: str, buckets: Sequence[float | int]) -> Histogram:
        made = Histogram(f"vllm:{name}", about, LABELS, registry=self.registry, buckets=buckets)
        return made.labels(*self._labels)
