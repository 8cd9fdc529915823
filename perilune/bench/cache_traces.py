"""Synthetic traffic for a prefix cache: agents, a shared system prompt, conversations that branch.

Lengths follow what coding agents and chats look like: short messages, a long tail of tool results. Tokens are random, so
two prompts share exactly what the trace makes them share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

VOCABULARY = 160_000


@dataclass(frozen=True, slots=True)
class Turn:
    """One request.

    Attributes:
        prompt: its tokens.
        reply: what the model will say.
        message_ends: tokens before the end of each message of the prompt.
        after: index of the request that must have ended before; -1 = none.
        delay: steps of the engine between that end, or the beginning of the trace, and this request.
    """

    prompt: np.ndarray
    reply: np.ndarray
    message_ends: tuple[int, ...]
    after: int
    delay: int


@dataclass(slots=True)
class _Conversation:
    tokens: np.ndarray
    ends: list[int] = field(default_factory=list)

    def say(self, message: np.ndarray) -> None:
        self.tokens = np.concatenate([self.tokens, message])
        self.ends.append(len(self.tokens))

    def fork(self, messages: int) -> _Conversation:
        ends = self.ends[:messages]
        return _Conversation(self.tokens[: ends[-1]], ends)


def _ids(rng: np.random.Generator, count: float) -> np.ndarray:
    return rng.integers(0, VOCABULARY, max(1, int(count)), dtype=np.uint32)


def _length(rng: np.random.Generator, median: float, spread: float, most: float) -> float:
    return min(most, float(rng.lognormal(np.log(median), spread)))


def agents(rng: np.random.Generator, scale: float) -> list[Turn]:
    """24 agents with one system prompt; 10 to 18 turns each of a tool result and a call, and a person who is slower."""
    system, turns = _ids(rng, 6000 * scale), []
    for _ in range(24):
        talk, after = _Conversation(np.empty(0, np.uint32)), -1
        talk.say(system)
        for number in range(int(rng.integers(10, 19))):
            talk.say(_ids(rng, _length(rng, 1500, 1.0, 12_000) * scale))
            reply = _ids(rng, _length(rng, 120, 0.7, 600) * scale)
            slow = rng.random() < 0.15
            delay = int(rng.exponential(2000 if slow else 150) * scale) + (int(rng.integers(3000)) if not number else 0)
            turns.append(Turn(talk.tokens, reply, tuple(talk.ends), after, delay))
            after = len(turns) - 1
            talk.say(reply)
    return turns


def shared_prompt(rng: np.random.Generator, scale: float) -> list[Turn]:
    """300 single questions under four system prompts of 16,000 to 28,000 tokens, the first one asked most."""
    systems = [_ids(rng, length * scale) for length in (20_000, 28_000, 16_000, 24_000)]
    turns = []
    for number in range(300):
        talk = _Conversation(np.empty(0, np.uint32))
        talk.say(systems[min(3, int(rng.geometric(0.5)) - 1)])
        talk.say(_ids(rng, _length(rng, 600, 0.8, 4000) * scale))
        reply = _ids(rng, _length(rng, 120, 0.7, 600) * scale)
        turns.append(Turn(talk.tokens, reply, tuple(talk.ends), -1, int(number * 25 * scale)))
    return turns


def branches(rng: np.random.Generator, scale: float) -> list[Turn]:
    """12 conversations, whose messages are answered again, edited, or continued: 240 requests in all."""
    talks: list[tuple[_Conversation, int]] = []
    turns: list[Turn] = []
    while len(turns) < 240:
        if len(talks) < 12:
            talk, after = _Conversation(np.empty(0, np.uint32)), -1
            talk.say(_ids(rng, _length(rng, 6000, 0.8, 40_000) * scale))
        else:
            talk, after = talks[int(rng.integers(len(talks)))]
            # A whole number of exchanges stays; half of the time all of it, so the conversation goes on.
            keep = len(talk.ends) if rng.random() < 0.5 else 1 + 2 * int(rng.integers(0, (len(talk.ends) + 1) // 2))
            talk = talk.fork(keep)
        if len(talk.ends) > 1 or after < 0 or rng.random() < 0.7:  # otherwise the same prompt is answered again
            talk.say(_ids(rng, _length(rng, 900, 1.0, 8000) * scale))
        reply = _ids(rng, _length(rng, 150, 0.7, 600) * scale)
        turns.append(Turn(talk.tokens, reply, tuple(talk.ends), after, int(rng.exponential(200) * scale)))
        talk = _Conversation(talk.tokens, list(talk.ends))
        talk.say(reply)
        talks.append((talk, len(turns) - 1))
        talks = talks[-40:]
    return turns


TRACES: dict[str, Callable[[np.random.Generator, float], list[Turn]]] = {
    "agent": agents,
    "shared": shared_prompt,
    "branch": branches,
}
