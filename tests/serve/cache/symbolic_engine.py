"""A model without floats, whose state is a hash of its tokens, on pages that begin as garbage; and a slow, plain cache.

`Driver` does random things to a `HybridCache` with both beside it. Whatever the cache decides, every token that the model
reads and every state that it resumes from must be what a run without a cache would have; and what the cache says it has must
be what a dictionary of whole prefixes says.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field

from perilune.serve.cache import CacheGeometry, Chunk, CopyPage, HybridCache, Retention, RootKey, TokenChain, ZeroState
from perilune.serve.cache.lease import Pin
from perilune.serve.cache.store import CacheEvent

SHAPE = CacheGeometry(
    unit=4, page_tokens=12, attention_layers=2, recurrent_layers=5, token_bytes=10, state_bytes=100, heads=5
)
LONGEST = 72


class Mismatch(AssertionError):
    """The oracle and the cache disagree."""


def truth(tokens) -> list[int]:
    """State after 0, 1, … tokens; the cached entry of token t is the state after it."""
    states = [0]
    for token in tokens:
        states.append(hash((states[-1], token)))
    return states


class SymbolicEngine:
    """Executes plans. A page is `page_tokens` cells; the state of group i is a pair (i, hash) in the first cell."""

    def __init__(self, pages: int) -> None:
        self.memory = [[("garbage", page)] * SHAPE.page_tokens for page in range(pages)]

    def run(self, chunk: Chunk, states: list[int]) -> None:
        """One chunk: its operations, its forward pass with everything that it reads checked, its exports."""
        if chunk.end >= len(states):
            raise Mismatch(f"{chunk.request}: tokens {chunk.start} to {chunk.end} of {len(states) - 1}")
        for operation in chunk.operations:
            self._operate(operation)
        for group, page in enumerate(chunk.state):
            found = self.memory[page][0]
            if found != (group, states[chunk.start]):
                raise Mismatch(f"{chunk.request}: resumes at {chunk.start} from {found} in group {group}")
        for index, page in enumerate(chunk.pages):
            first = index * SHAPE.page_tokens
            if first >= chunk.start:
                break
            count = min(SHAPE.page_tokens, chunk.start - first)
            if self.memory[page][:count] != states[first + 1 : first + count + 1]:
                raise Mismatch(f"{chunk.request}: wrong tokens in page {page}, range {first} to {first + count}")
        for token in range(chunk.start, chunk.end):
            self.memory[chunk.pages[token // SHAPE.page_tokens]][token % SHAPE.page_tokens] = states[token + 1]
        for export in chunk.exports:
            for group, page in enumerate(export.targets):
                self.memory[page][0] = (group, states[export.position])
        for group, page in enumerate(chunk.state):
            self.memory[page][0] = (group, states[chunk.end])

    def _operate(self, operation) -> None:
        if isinstance(operation, CopyPage):
            self.memory[operation.target][: operation.tokens] = self.memory[operation.source][: operation.tokens]
        elif isinstance(operation, ZeroState):
            for group, page in enumerate(operation.targets):
                self.memory[page][0] = (group, 0)
        else:
            for source, target in zip(operation.sources, operation.targets, strict=True):
                self.memory[target][0] = self.memory[source][0]

    def spoil(self, chunk: Chunk) -> None:
        """A step that dies half-way: whatever it may write has been written wrongly."""
        for page in (*chunk.state, *(page for export in chunk.exports for page in export.targets)):
            self.memory[page][0] = "spoilt"
        for token in range(chunk.start, chunk.end):
            self.memory[chunk.pages[token // SHAPE.page_tokens]][token % SHAPE.page_tokens] = "spoilt"


class PrefixDictionary:
    """What is cached: whole prefixes, each with its tokens there and perhaps a checkpoint."""

    def __init__(self) -> None:
        self.tokens: set[tuple] = set()
        self.states: set[tuple] = set()
        self.name: dict[bytes, tuple] = {}

    def learn(self, root: RootKey, chain: TokenChain, tokens) -> None:
        """Digests of all whole prefixes; two prefixes with one digest would be a disaster."""
        for index, digest in enumerate(chain.digests):
            prefix = (root, tuple(tokens[: (index + 1) * SHAPE.unit]))
            if self.name.setdefault(digest, prefix) != prefix:
                raise Mismatch("one digest for two prefixes")

    def expect(self, root: RootKey, tokens) -> tuple[int, int]:
        """Tokens whose pages are there, and tokens that can be skipped."""
        known = resume = 0
        for depth in range(SHAPE.unit, len(tokens), SHAPE.unit):
            prefix = (root, tuple(tokens[:depth]))
            if prefix not in self.tokens:
                break
            known = depth
            if prefix in self.states:
                resume = depth
        return known, resume


@dataclass
class Running:
    """A request, as the engine sees it."""

    root: RootKey
    tokens: list[int]
    chain: TokenChain
    prompt: int
    scheduled: int
    states: list[int] = field(default_factory=list)
    publishing: bool = True
    broken: bool = False
    in_flight: int = 0


class Driver:
    """Random operations with everything checked. Each public method is one operation and draws from `self.random`."""

    def __init__(self, seed: int, retention: str = "turns+second-hit", pages: int = 48, eviction: str = "work") -> None:
        self.random = random.Random(seed)
        self.cache = HybridCache(SHAPE, pages, Retention.parse(retention), eviction)
        self.cache.store.on_event = self._hear
        self.engine = SymbolicEngine(pages)
        self.known = PrefixDictionary()
        self.version = 0
        self.running: dict[str, Running] = {}
        self.steps: deque[tuple[int, list[tuple[Chunk, Running, int]]]] = deque()
        self.pins: list[tuple[Pin, tuple]] = []
        self.transfers: dict[str, tuple[set[str], set[tuple], tuple]] = {}
        self.texts: list[list[int]] = [[]]  # sequences seen, from which prompts grow and fork
        self.requests = 0
        self.seen: Counter[str] = Counter()
        self._may_store: tuple[set, set] = (set(), set())

    def _hear(self, event: CacheEvent) -> None:
        prefix = self.known.name[event.digest]
        place = self.known.tokens if event.component == "tokens" else self.known.states
        if event.stored:
            if prefix not in self._may_store[event.component == "state"]:
                raise Mismatch(f"{event.component} of {event.depth} tokens entered before they were written")
            place.add(prefix)
            return
        place.remove(prefix)
        self.seen[f"lost {event.component}"] += 1
        for _, pinned in self.pins:
            root, tokens = pinned
            if prefix == pinned or (event.component == "tokens" and prefix == (root, tokens[: event.depth])):
                raise Mismatch(f"{event.component} of {event.depth} tokens lost although they are pinned")

    def _prompt(self) -> list[int]:
        old = self.random.choice(self.texts)
        kind = self.random.random()
        if kind < 0.45:  # the conversation goes on
            start = old
        elif kind < 0.9:  # it forks
            start = old[: self.random.randrange(len(old) + 1)]
        else:
            start = []
        suffix = [self.random.randrange(3) for _ in range(self.random.randrange(14))]
        return (start + suffix)[:LONGEST] or [0]

    def admit(self) -> None:
        """A new request, or one that goes on with a known text."""
        if len(self.running) >= 5:
            return
        prompt = self._prompt()
        root = RootKey(model="m", weights=self.version, salt=self.random.choice("aaaaab"))
        chain = TokenChain(root, SHAPE.unit, prompt)
        self.known.learn(root, chain, prompt)
        known, resume = self.known.expect(root, prompt)
        ends = sorted(self.random.sample(range(len(prompt) + 1), min(2, len(prompt))))
        before = self._footprint()
        name = f"r{self.requests}"
        self.requests += 1
        admission = self.cache.admit(name, chain, ends)
        if admission is None:
            self.seen["refused"] += 1
            if before != self._footprint():
                raise Mismatch("a refused admission changed something")
            if not (self.running or self.steps or self.pins or self.transfers):
                raise Mismatch(f"{len(prompt)} tokens wait for ever in an idle cache")
            return
        cold = admission.resume == 0 < resume
        if admission.known != known or (admission.resume != resume and not cold):
            raise Mismatch(f"hit {admission.known}/{admission.resume}, the dictionary says {known}/{resume}")
        if cold:
            needed = SHAPE.pages_for(len(prompt)) + 2 * SHAPE.groups
            if needed + 2 <= self.cache.store.pool.pages:
                raise Mismatch(f"ran cold although {resume} tokens are cached and there is room")
            self.seen["cold"] += 1
        self.seen["hit"] += admission.resume > 0
        self.seen["junction"] += admission.known > admission.resume
        self.seen["copy"] += admission.resume % SHAPE.page_tokens > 0
        self.running[name] = Running(
            root, list(prompt), chain, len(prompt), admission.resume, truth(prompt), publishing=not cold
        )

    def _footprint(self) -> tuple:
        pool = self.cache.store.pool
        return pool.free, pool.evictable, frozenset(self.known.tokens), frozenset(self.known.states)

    def plan(self) -> None:
        """A step: a chunk of the prompt, or a token and perhaps drafts, for some requests."""
        if len(self.steps) >= 3:
            return
        number, chunks = self.cache.begin_step(), []
        for name, run in self.running.items():
            if run.broken or self.random.random() < 0.2:
                continue
            kept = None
            if run.scheduled < run.prompt:
                count = self.random.randint(1, min(24, run.prompt - run.scheduled))
            else:
                if run.in_flight or len(run.tokens) >= LONGEST:
                    continue  # the next token is not known, or the text is long enough
                count = self.random.choice((1, 1, 2, 4))
                kept = self.random.randint(1, count)
                fresh = [self.random.randrange(3) for _ in range(count)]
                run.states = truth(run.tokens + fresh)
            before = self._footprint()
            chunk = self.cache.extend(number, name, count)
            if chunk is None:
                self.seen["no page"] += 1
                if before != self._footprint():
                    raise Mismatch("a chunk that found no page changed something")
                continue
            if kept is not None:
                accepted = fresh[:kept]
                run.tokens += accepted
                run.chain.extend(accepted)
                self.known.learn(run.root, run.chain, run.tokens)
            run.scheduled, run.in_flight = chunk.end, run.in_flight + 1
            self.seen["export"] += len(chunk.exports)
            chunks.append((chunk, run, count if kept is None else kept))
        self.steps.append((number, chunks))

    def finish(self) -> None:
        """The oldest step runs and is settled; requests released meanwhile are computed, or not."""
        if not self.steps:
            return
        number, chunks = self.steps.popleft()
        kept = {}
        may: tuple[set, set] = (set(), set())
        for chunk, run, count in chunks:
            live = self.running.get(chunk.request) is run and not run.broken
            if not live:
                self.seen["released under way"] += 1
                if run.broken or self.random.random() < 0.5:
                    self.engine.spoil(chunk)  # it still owns these pages
                    run.broken = True
                    continue
            self.engine.run(chunk, run.states)
            run.in_flight -= 1
            end = chunk.start + count
            if live:
                kept[chunk.request] = count
                if count < chunk.end - chunk.start:
                    self.seen["rejected"] += 1
                    run.scheduled = end
                    # Rolling the running state back is the engine's business; here it is recomputed.
                    for group, page in enumerate(chunk.state):
                        self.engine.memory[page][0] = (group, run.states[end])
            if live and run.publishing:
                cut = end // SHAPE.unit * SHAPE.unit
                prefixes = [(run.root, tuple(run.tokens[:depth])) for depth in range(SHAPE.unit, cut + 1, SHAPE.unit)]
                may[0].update(prefixes)
                may[1].update(prefixes[e.position // SHAPE.unit - 1] for e in chunk.exports if e.position <= cut)
        self._may_store = may
        had = set(self.known.states)
        self.cache.finish_step(number, kept)
        self._may_store = (set(), set())
        if not may[0] <= self.known.tokens:
            raise Mismatch("what a finished step computed was not entered")
        for chunk, run, count in chunks:
            points = [e.position for e in chunk.exports if e.position <= chunk.start + count]
            last = (run.root, tuple(run.tokens[: points[-1]])) if points else None
            if last in may[1] and last not in self.known.states:
                raise Mismatch("the last checkpoint of a finished chunk is not there")
        self.seen["recycled"] += len(had - self.known.states)

    def fail(self) -> None:
        """The oldest step dies; all it might have written is spoilt, and its requests are given up."""
        if not self.steps:
            return
        number, chunks = self.steps.popleft()
        for chunk, run, _ in chunks:
            self.engine.spoil(chunk)
            run.in_flight -= 1
            run.broken = True
        self.cache.fail_step(number)
        for chunk, run, _ in chunks:
            if self.running.get(chunk.request) is run:
                self._release(chunk.request)
        self.seen["failed"] += 1

    def release(self) -> None:
        """A request is done, aborted or preempted."""
        if self.running:
            self._release(self.random.choice(list(self.running)))

    def _release(self, name: str) -> None:
        run = self.running.pop(name)
        self.seen["aborted under way"] += bool(run.in_flight)
        self.texts.append(run.tokens)
        if len(self.texts) > 12:
            self.texts.pop(self.random.randrange(len(self.texts)))
        self.cache.release(name)

    def pin(self) -> None:
        """Pin what is cached of some text, or unpin."""
        if self.pins and (len(self.pins) > 1 or self.random.random() < 0.5):
            pin, _ = self.pins.pop(self.random.randrange(len(self.pins)))
            self.cache.unpin(pin)
            return
        tokens, root = self._prompt(), RootKey(model="m", weights=self.version, salt="a")
        chain = TokenChain(root, SHAPE.unit, tokens)
        _, resume = self.known.expect(root, tokens)
        pin = self.cache.pin(chain)
        if (pin.tokens if pin else 0) != resume:
            raise Mismatch(f"pinned {pin}, the dictionary says {resume}")
        if pin is not None:
            self.seen["pin"] += 1
            self.pins.append((pin, (root, tuple(tokens[:resume]))))

    def transfer(self) -> None:
        """A prefix begins to arrive from elsewhere, another part of one is there, or a transfer fails."""
        if self.transfers and (len(self.transfers) > 1 or self.random.random() < 0.8):
            name = self.random.choice(list(self.transfers))
            missing, tokens, state = self.transfers[name]
            if self.random.random() < 0.1:
                del self.transfers[name]
                self.cache.cancel_transfer(name)
                return
            part = self.random.choice(sorted(missing))
            missing.discard(part)
            before = self._footprint()[2:]
            self._may_store = (tokens, {state}) if not missing else (set(), set())
            complete = self.cache.arrived(name, part)
            self._may_store = (set(), set())
            if complete != (not missing) or (missing and before != self._footprint()[2:]):
                raise Mismatch(f"a transfer that lacks {missing or 'nothing'} was entered: {complete}")
            if not missing:
                del self.transfers[name]
                if not tokens <= self.known.tokens or (tokens and state not in self.known.states):
                    raise Mismatch("a transfer that is complete was not entered")
                self.seen["transfer"] += 1
            return
        tokens, root = self._prompt(), RootKey(model="m", weights=self.version, salt="a")
        length = len(tokens) // SHAPE.unit * SHAPE.unit
        known, resume = self.known.expect(root, tokens[:length] + [0])
        if not length or resume == length:
            return
        chain = TokenChain(root, SHAPE.unit, tokens)
        self.known.learn(root, chain, tokens)
        name, states = f"t{self.requests}", truth(tokens)
        self.requests += 1
        before = self._footprint()
        incoming = self.cache.receive(name, chain, length)
        if incoming is None:
            if before != self._footprint():
                raise Mismatch("a refused transfer changed something")
            return
        # The sender's stream does not wait for our steps: it writes now.
        for token in range(incoming.start, incoming.end):
            page, cell = divmod(token - incoming.start, SHAPE.page_tokens)
            self.engine.memory[incoming.pages[page]][cell] = states[token + 1]
        for group, page in enumerate(incoming.state):
            self.engine.memory[page][0] = (group, states[incoming.end])
        prefixes = {(root, tuple(tokens[:depth])) for depth in range(SHAPE.unit, length + 1, SHAPE.unit)}
        self.transfers[name] = set(incoming.parts), prefixes, (root, tuple(tokens[:length]))

    def new_weights(self) -> None:
        """The weights change; with or without forgetting what was computed with the old ones."""
        self.version += 1
        if self.random.random() < 0.5:
            self.pins = [(pin, (None, ())) for pin, _ in self.pins]  # nothing is left that they could protect
            self.cache.reset()
            self.transfers = {name: (missing, set(), ()) for name, (missing, _, _) in self.transfers.items()}
            for run in self.running.values():
                run.publishing = False
            if self.known.tokens or self.known.states:
                raise Mismatch("a reset left something in the cache")
        self.seen["new weights"] += 1

    def probe(self) -> None:
        """What the cache has of some text is what the dictionary has, and the explanation agrees."""
        tokens, root = self._prompt(), RootKey(model="m", weights=self.version, salt=self.random.choice("ab"))
        chain = TokenChain(root, SHAPE.unit, tokens)
        known, resume = self.known.expect(root, tokens)
        match, why = self.cache.match(chain), self.cache.explain(chain)
        if (match.known, match.resume) != (known, resume) or (why.known, why.resume) != (known, resume):
            raise Mismatch(f"match {match.known}/{match.resume}, the dictionary says {known}/{resume}")

    def check(self) -> None:
        """All invariants."""
        self.cache.check_invariants()

    OPERATIONS = (
        ("plan", 30),
        ("finish", 30),
        ("admit", 20),
        ("release", 6),
        ("probe", 6),
        ("pin", 3),
        ("transfer", 8),
        ("fail", 1),
    )

    def step(self) -> None:
        """One random operation."""
        names, weights = zip(*self.OPERATIONS)
        getattr(self, self.random.choices(names, weights)[0])()

    def drain(self) -> None:
        """Everything ends; only cached pages remain in use."""
        while self.steps:
            self.finish()
        for name in list(self.running):
            self._release(name)
        for name in self.transfers:
            self.cache.cancel_transfer(name)
        for pin, _ in self.pins:
            self.cache.unpin(pin)
        self.transfers.clear()
        self.pins.clear()
        self.check()
        pool = self.cache.store.pool
        if pool.free + pool.evictable != pool.pages:
            raise Mismatch(f"{pool.pages - pool.free - pool.evictable} pages leaked")
