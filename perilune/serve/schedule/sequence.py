"""One answer that is being computed: its tokens, and how far they have got."""

from __future__ import annotations

from collections.abc import Sequence as Items
from sys import maxsize
from typing import Any

from perilune.serve.cache import TokenChain

NEW, WAITING, RUNNING, ENDED = "new", "waiting", "running", "ended"


class Sequence:
    """A prompt and what was drawn behind it.

    Args:
        name: unique among all sequences of an engine.
        ids: the prompt.
        chain: digests of the prompt; drawn tokens are added unit by unit.
        turn_ends: tokens before the end of each message, as the renderer gives them.
        priority: lower goes first, and is preempted last.
        longest: tokens at which it ends for certain, whatever is drawn; None = nobody knows.
        content: what an engine hangs on it; not looked at here.

    Attributes:
        ids: all known tokens; those behind `prompt` were drawn.
        prompt: tokens of the prompt.
        scheduled: tokens in chunks of steps, finished or under way, since it was last admitted.
        computed: the same for finished steps.
        pending: tokens that steps under way draw for it, 0 or 1; their ids are not known yet.
        resume: tokens that its first admission skipped; None before it.
        known: tokens of the prompt whose pages were cached then.
        order: number of its arrival.
        importance: sorts what goes first to the front: by priority, then by arrival.
        kind: index of its class.
        state: NEW until it is queued, WAITING, RUNNING or ENDED.
        preemptions: times that it had to start again.
        followers: sequences with the same prompt that wait until it is computed.
        extends_chain: whether drawn tokens are entered into the prefix cache.
    """

    __slots__ = (
        "chain", "computed", "content", "extends_chain", "followers", "ids", "importance", "kind", "known", "longest", "name", "order",
        "pending", "preemptions", "priority", "prompt", "resume", "scheduled", "state", "turn_ends",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        ids: Items[int],
        chain: TokenChain,
        *,
        turn_ends: Items[int] = (),
        priority: int = 0,
        extends_chain: bool = True,
        longest: int | None = None,
        content: Any = None,
    ) -> None:
        self.name, self.ids, self.chain = name, list(ids), chain
        self.prompt = len(self.ids)
        self.turn_ends, self.priority, self.content = list(turn_ends), priority, content
        self.extends_chain = extends_chain
        self.longest = maxsize if longest is None else longest
        self.scheduled = self.computed = self.pending = self.order = self.kind = self.preemptions = 0
        self.importance: tuple[int, int] = priority, 0
        self.resume: int | None = None
        self.known = 0
        self.state = NEW
        self.followers: list[Sequence] = []

    @property
    def drawn(self) -> int:
        """Tokens drawn so far."""
        return len(self.ids) - self.prompt

    @property
    def left(self) -> int:
        """Known tokens that no step has computed or is computing."""
        return len(self.ids) - self.scheduled

    def append(self, token_id: int) -> None:
        """Add a drawn token; the chain gets it with the others of its unit, as only whole units have a digest."""
        self.ids.append(token_id)
        if len(self.ids) % self.chain.unit == 0 and self.extends_chain:
            self.chain.extend(self.ids[len(self.chain) :])

    def __repr__(self) -> str:
        """For messages of invariants."""
        return f"<sequence {self.name} {self.state} {self.computed}/{len(self.ids)}>"
