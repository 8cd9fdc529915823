"""Why a prompt hits as deep as it does: which boundary failed, on which component, and what became of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from perilune.serve.cache.hashing import TokenChain
from perilune.serve.cache.trie import Match, PrefixTrie

REMEMBERED = 65_536  # losses; about 10 MB when full


class Losses:
    """What became of prefixes that are not cached any more; the oldest are forgotten first."""

    def __init__(self, limit: int = REMEMBERED) -> None:
        self._limit = limit
        self._reasons: OrderedDict[bytes, str] = OrderedDict()

    def note(self, digest: bytes, reason: str) -> None:
        """The prefix lost something."""
        self._reasons[digest] = reason
        self._reasons.move_to_end(digest)
        if len(self._reasons) > self._limit:
            self._reasons.popitem(last=False)

    def forget(self, digest: bytes) -> None:
        """The prefix is cached again."""
        self._reasons.pop(digest, None)

    def get(self, digest: bytes) -> str | None:
        """What became of it, or None if nothing is remembered."""
        return self._reasons.get(digest)

    def clear(self) -> None:
        """Forget all."""
        self._reasons.clear()


@dataclass(frozen=True, slots=True)
class HitReport:
    """An explanation; `str()` gives it in words.

    Attributes:
        tokens: of the prompt.
        limit: the deepest hit that a prompt of this length can have.
        known: tokens whose pages are cached.
        resume: tokens that can be skipped.
        checkpoints: boundaries up to `known` that have a checkpoint.
        tokens_failed: first boundary without pages, or None if they reach the limit.
        tokens_why: what became of it.
        state_failed: deepest boundary with pages that has no checkpoint, deeper than `resume`; None = there is none.
        state_why: what became of its checkpoint.
    """

    tokens: int
    limit: int
    known: int
    resume: int
    checkpoints: tuple[int, ...]
    tokens_failed: int | None
    tokens_why: str
    state_failed: int | None
    state_why: str

    def __str__(self) -> str:
        """The report in a few lines."""
        lines = [f"{self.resume} of {self.tokens} prompt tokens are skipped"]
        if self.tokens_failed is None:
            lines.append(f"pages: cached up to {self.limit}, the deepest a hit can be, as one token must be computed")
        else:
            lines.append(f"pages: cached up to {self.known}; boundary {self.tokens_failed} fails: {self.tokens_why}")
        if self.state_failed is None:
            lines.append("states: a checkpoint is where the pages end" if self.resume else "states: none is needed")
        else:
            have = ", ".join(map(str, self.checkpoints)) or "none"
            lines.append(f"states: boundary {self.state_failed} fails: {self.state_why}; checkpoints at: {have}")
        return "\n".join(lines)


def report(
    chain: TokenChain, match: Match, trie: PrefixTrie, losses: Losses, under_way: Mapping[bytes, int]
) -> HitReport:
    """Explain a match.

    Args:
        chain: the prompt.
        match: what was found.
        trie: where.
        losses: what was lost before.
        under_way: steps that are computing a prefix right now, by digest.
    """
    unit = trie.unit
    depths = range(unit, match.known + 1, unit)
    nodes = [trie.nodes[digest] for digest in chain.digests[: match.known // unit]]
    tokens_failed = match.known + unit if match.known < match.limit else None
    tokens_why = state_why = ""
    if tokens_failed is not None:
        digest = chain.digests[tokens_failed // unit - 1]
        if digest in under_way:
            tokens_why = f"step {under_way[digest]}, which writes it, has not finished"
        else:
            tokens_why = losses.get(digest) or "not seen, or forgotten: other tokens, images, weights, adapter or salt"
    state_failed = match.known if match.known > match.resume else None
    if state_failed is not None:
        digest = chain.digests[state_failed // unit - 1]
        state_why = losses.get(digest) or "no checkpoint was taken there"
    return HitReport(
        tokens=len(chain), limit=match.limit, known=match.known, resume=match.resume,
        checkpoints=tuple(depth for depth, node in zip(depths, nodes) if node.checkpoint is not None),
        tokens_failed=tokens_failed, tokens_why=tokens_why, state_failed=state_failed, state_why=state_why,
    )  # fmt: skip
