"""Synthetic traffic for a server: who asks when, how much, and after which answer.

Prompts are token ids, so that no tokenizer and no chat format stands between two engines; a later turn's prompt is the
earlier prompt, the ids that the server really answered, and what is new. Lengths are shares of a context: the same trace
fits a small model on a CPU and a large one on a GPU. Everything is decided by the seed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from perilune.errors import ConfigError

_FULL = 262_144
"""Context that the lengths below are written for."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request.

    Attributes:
        new: tokens that follow the prompt and the answer of `after`, or the whole prompt.
        reply: how many tokens are drawn.
        after: index of the request that this one continues; -1 = none.
        at: seconds: since the trace began, or since the end of `after`.
        cut: share of the answer after which the client goes away; 1 = never.
    """

    new: tuple[int, ...]
    reply: int
    after: int
    at: float
    cut: float = 1.0


class _Writer:
    """Makes tokens and lengths.

    Args:
        seed: decides everything.
        context: of the model.
        vocabulary: ids below it are used.
    """

    def __init__(self, seed: int, context: int, vocabulary: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.context = context
        self._vocabulary = vocabulary

    def tokens(self, count: float) -> tuple[int, ...]:
        return tuple(self.rng.integers(0, self._vocabulary, max(1, int(count))).tolist())

    def length(self, median: float, spread: float = 0.6) -> int:
        """A log-normal length, in tokens of this context; never more than six medians."""
        drawn = min(6 * median, float(self.rng.lognormal(np.log(median), spread)))
        return max(2, round(drawn * self.context / _FULL))

    def reply(self, median: float) -> int:
        """A log-normal number of tokens; answers do not grow with the context."""
        return max(2, int(min(4 * median, self.rng.lognormal(np.log(median), 0.5))))


Maker = Callable[[_Writer, int, float], list[Ask]]


def _chat(write: _Writer, requests: int, rate: float) -> list[Ask]:
    """Conversations of four turns: a question, an answer, a person who reads it."""
    asks: list[Ask] = []
    at = 0.0
    while len(asks) < requests:
        at += float(write.rng.exponential(4 / rate))
        after, start = -1, at
        for _ in range(4):
            asks.append(Ask(write.tokens(write.length(12_000)), write.reply(16), after, start))
            after, start = len(asks) - 1, float(write.rng.exponential(1 / rate))
    return asks[:requests]


def _agent(write: _Writer, requests: int, rate: float) -> list[Ask]:
    """Agents with one long system prompt; each turn adds a tool's result and waits for nobody."""
    system = write.tokens(write.context * 0.2)
    asks: list[Ask] = []
    at = 0.0
    while len(asks) < requests:
        at += float(write.rng.exponential(8 / rate))
        after, start, head = -1, at, system
        for _ in range(8):
            asks.append(Ask(head + write.tokens(write.length(10_000, 0.9)), write.reply(12), after, start))
            after, start, head = len(asks) - 1, float(write.rng.exponential(0.2 / rate)), ()
    return asks[:requests]


def _shared(write: _Writer, requests: int, rate: float) -> list[Ask]:
    """Single questions under three system prompts, the first one asked most."""
    systems = [write.tokens(write.context * share) for share in (0.25, 0.35, 0.15)]
    asks: list[Ask] = []
    at = 0.0
    for _ in range(requests):
        at += float(write.rng.exponential(1 / rate))
        head = systems[min(2, int(write.rng.geometric(0.55)) - 1)]
        asks.append(Ask(head + write.tokens(write.length(8_000)), write.reply(16), -1, at))
    return asks


def _burst(write: _Writer, requests: int, rate: float) -> list[Ask]:
    """Short questions all the time; after each quarter of them, a burst of prompts that nearly fill the context."""
    asks: list[Ask] = []
    at = 0.0
    for number in range(requests):
        at += float(write.rng.exponential(1 / rate))
        asks.append(Ask(write.tokens(write.context / 256), write.reply(8), -1, at))
        if number in (requests // 4, requests // 2, 3 * requests // 4):
            asks += [Ask(write.tokens(write.context * 0.6), 4, -1, at) for _ in range(3)]
    return asks


def _idle(write: _Writer, requests: int, rate: float) -> list[Ask]:
    """The short questions of `burst`, without the burst."""
    return [ask for ask in _burst(write, requests, rate) if len(ask.new) <= write.context // 64]


def _mix(write: _Writer, requests: int, rate: float) -> list[Ask]:
    """Independent requests: 90 % short, 9 % medium, 1 % long."""
    asks: list[Ask] = []
    at = 0.0
    for _ in range(requests):
        at += float(write.rng.exponential(1 / rate))
        share = write.rng.choice([1 / 256, 1 / 8, 0.7], p=[0.9, 0.09, 0.01])
        asks.append(Ask(write.tokens(write.context * share), write.reply(16), -1, at))
    return asks


TRACES: dict[str, Maker] = {
    "chat": _chat, "agent": _agent, "shared": _shared, "burst": _burst, "idle": _idle, "mix": _mix,
}  # fmt: skip


def make_trace(
    name: str, requests: int, rate: float, *, seed: int, context: int, vocabulary: int, abort: float = 0.0
) -> list[Ask]:
    """The requests of a trace.

    Args:
        name: one of `TRACES`.
        requests: how many there are, those of a burst come on top.
        rate: of arrivals, requests a second on average.
        seed: decides everything.
        context, vocabulary: of the model.
        abort: share of clients that go away in the middle of their answer; what would have continued it stays out.

    Raises:
        ConfigError: no such trace, or numbers that make no sense.
    """
    if name not in TRACES:
        raise ConfigError(f"there is no trace {name!r}; there are: {', '.join(TRACES)}")
    if requests < 1 or rate <= 0 or not 0 <= abort <= 1 or context < 256:
        raise ConfigError(f"requests={requests}, rate={rate:g}, abort={abort:g}, context={context}: too small or large")
    write = _Writer(seed, context, vocabulary)
    asks = TRACES[name](write, requests, rate)
    first = min(ask.at for ask in asks if ask.after < 0)  # nothing is learned before somebody asks
    cuts = np.where(write.rng.random(len(asks)) < abort, write.rng.uniform(0.1, 0.9, len(asks)), 1.0)
    return [
        Ask(ask.new, ask.reply, ask.after, ask.at - (first if ask.after < 0 else 0.0), float(cut))
        for ask, cut in zip(asks, cuts, strict=True)
    ]
