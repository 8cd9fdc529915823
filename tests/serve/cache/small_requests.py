"""Requests on a small cache with the symbolic executor behind it, for tests that tell a short story."""

from __future__ import annotations

from symbolic_engine import SHAPE, SymbolicEngine, truth

from perilune.serve.cache import HybridCache, Retention, RootKey, TokenChain

H = SHAPE.unit


class Bench:
    """A cache, an executor, and requests that run from admission to release."""

    def __init__(self, pages: int = 60, policy: str = "turns+second-hit") -> None:
        self.cache, self.engine = HybridCache(SHAPE, pages, Retention.parse(policy)), SymbolicEngine(pages)

    def chain(self, tokens, **root) -> TokenChain:
        return TokenChain(RootKey(model="m", **root), H, tokens)

    def resume(self, tokens, **root) -> int:
        return self.cache.match(self.chain(tokens, **root)).resume

    def admit(self, name, tokens, turn_ends=(), **root):
        return self.cache.admit(name, self.chain(tokens, **root), turn_ends)

    def chunk(self, name, tokens, count):
        """A step with one chunk, planned and executed but not finished."""
        step = self.cache.begin_step()
        chunk = self.cache.extend(step, name, count)
        self.engine.run(chunk, truth(tokens))
        return step, chunk

    def serve(self, name, tokens, turn_ends=(), chunk=10**6, **root) -> int:
        """A whole request; returns how many tokens it skipped."""
        admission = self.admit(name, tokens, turn_ends, **root)
        done = admission.resume
        while done < len(tokens):
            count = min(chunk, len(tokens) - done)
            step, _ = self.chunk(name, tokens, count)
            self.cache.finish_step(step)
            done += count
        self.cache.release(name)
        self.cache.check_invariants()
        return admission.resume


def text(start: int, count: int) -> list[int]:
    return list(range(start, start + count))
