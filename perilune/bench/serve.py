"""`perilune bench serve`: a server under load, beside the same server without the part that is measured.

| trace  | ours                    | peer                        | what is compared |
| ------ | ----------------------- | --------------------------- | ---------------- |
| chat, agent, shared, mix | prefix cache on | prefix cache off | time to first token, and the time of a token |
| burst  | budgets for each class  | one queue for all           | time to first token of short requests; its 99th percentile beside an idle server's |
| abort  | a tenth of clients leave | none leaves                | time of a drawn token over everything, always a closed loop |

All of these are our own engine with a part of it switched off: they say what the part is worth, not how other engines do.
Every request counts from the moment at which the trace wanted it sent. All servers are started together and have warmed up
before anything is timed; then one load runs after the other, on one server at a time, whose cache is emptied before. `extra`
counts what a server compiled or recorded while it was timed, which should be nothing.
"""

from __future__ import annotations

import asyncio
import json
import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from perilune.bench.harness import Row, append, commit, device_name, read, versions
from perilune.bench.serve_load import Load, Record
from perilune.bench.serve_process import ServerPlan, Servers
from perilune.bench.serve_traces import make_trace
from perilune.errors import ConfigError, RequestError

SCENARIOS = ("chat", "agent", "shared", "mix", "burst", "abort")
PERCENTILES = (50, 90, 99)
COMPILATIONS = "perilune:engine_compilations_total{"
FIRST_SECONDS = {"short": 1.0, "medium": 4.0, "long": 30.0}
"""Service levels of time to first token; tests of a level are about the share of requests that keep it."""
EACH_SECONDS = 0.1
BURST_REQUESTS, BURST_FASTER = 128, 2.5
ABORT_REQUESTS = 96
WARM_UP = 24  # requests before a server's first load: sizes of decode passes are recorded on a CPU as they come
AIMS = {"burst_p99_short": 1 / 2, "abort_token_all": 1 / 1.12}  # ratios that rows aim at


@dataclass(frozen=True, kw_only=True)
class LoadPlan:
    """How much is asked.

    Attributes:
        requests: of a trace.
        rate: arrivals a second.
        concurrency: clients of a closed loop; 0 = open loop.
        seed: of the trace.
    """

    requests: int = 32
    rate: float = 2.0
    concurrency: int = 0
    seed: int = 0


@dataclass
class Outcome:
    """One run of a trace against one server.

    Attributes:
        records: what happened to each request.
        seconds: from the first request to the last answer.
        pages: (second, page counts by what they hold) while it ran.
        events: the cache's own account of hits and misses.
        compiled: kernels and recordings that the server made meanwhile.
        warmed: seconds for which the server had warmed up before.
    """

    records: list[Record]
    seconds: float
    pages: list[tuple[float, list[dict[str, Any]]]] = field(default_factory=list)
    events: list[dict[str, Any]] = field(default_factory=list)
    compiled: float = 0.0
    warmed: float = 0.0

    def of(self, kind: str) -> list[Record]:
        """Answered requests of a class; "all" = of every class."""
        return [one for one in self.records if one.status == 200 and kind in ("all", one.kind)]

    def kinds(self) -> list[str]:
        """Classes that have answers."""
        return [kind for kind in ("short", "medium", "long") if self.of(kind)]

    @property
    def hit_ratio(self) -> float:
        """Share of prompt tokens that were not run."""
        answered = self.of("all")
        return sum(one.cached_tokens for one in answered) / max(1, sum(one.prompt_tokens for one in answered))

    @property
    def drawn(self) -> int:
        """Tokens of all answers, cut ones included."""
        return sum(one.drawn for one in self.records)

    def goodput(self) -> float:
        """Requests a second that kept their service level."""
        kept = [
            one
            for one in self.of("all")
            if (one.first or 0.0) <= FIRST_SECONDS[one.kind] and (one.each or 0.0) <= EACH_SECONDS
        ]
        return len(kept) / self.seconds


def run(
    device: str,
    budget: float | None,
    scenarios: Sequence[str],
    load: LoadPlan,
    plan: ServerPlan,
    *,
    url: str = "",
    key: str = "",
    results: Path,
    details: Path | None = None,
    on_row: Callable[[Row], None] = lambda row: None,
) -> list[Row]:
    """Measure scenarios that the results do not have yet.

    Args:
        device: cpu | cuda, of a server that is started here.
        budget: seconds after which no further scenario is begun.
        scenarios: of `SCENARIOS`.
        load: how much is asked.
        plan: the server that is started; not used with `url`.
        url: of a server that runs already; it is measured alone, without a peer.
        key: its API key.
        results: .jsonl file of rows.
        details: folder for one JSON file a scenario, from which pictures are made.
        on_row: called with every new row.

    Raises:
        ConfigError: no such scenario.
        CapacityError: no server answers.
    """
    for name in scenarios:
        if name not in SCENARIOS:
            raise ConfigError(f"there is no scenario {name!r}; there are: {', '.join(SCENARIOS)}")
    began, rows = time.monotonic(), []
    place = url or f"{plan.preset} {plan.dtype}, context {plan.context}"
    known = read(results) if results.exists() else []
    left: list[tuple[str, LoadPlan, str]] = []
    for name in scenarios:
        given = _load(name, load)
        pace = f"{given.concurrency} clients" if given.concurrency else f"{given.rate:g}/s"
        shape = f"{given.requests} requests, {pace}, {place}, seed {given.seed}"
        had = [
            row for row in known if row.name.startswith(f"serve_{name}_") and row.shape == shape and _same(row, device)
        ]  # fmt: skip
        if had and not url:
            rows += had
        else:
            left.append((name, given, shape))
    plan = replace(plan, device=device)
    with Servers() as servers:
        if not url:
            _start(servers, [name for name, *_ in left], load, plan)
        for name, given, shape in left:
            if budget is not None and time.monotonic() - began > budget:
                break
            outcomes = _foreign(name, given, url, key) if url else _own(servers, name, given, plan)
            if details is not None:
                write_details(details / f"serve-{name}.json", name, shape, outcomes)
            for row in rows_of(name, shape, device, outcomes):
                append(results, row)
                on_row(row)
                rows.append(row)
    return rows


def _load(name: str, load: LoadPlan) -> LoadPlan:
    """How much is asked in a scenario."""
    if name == "abort" and not load.concurrency:  # what is lost shows only where somebody waits
        return replace(load, requests=max(load.requests, ABORT_REQUESTS), concurrency=8)
    if name == "burst" and not load.concurrency:  # a 99th percentile of a few requests says nothing
        return replace(load, requests=max(load.requests, BURST_REQUESTS), rate=BURST_FASTER * load.rate)
    return load


def _same(row: Row, device: str) -> bool:
    return row.commit == commit() and not row.commit.endswith("+") and row.device == device_name(device)


def _runs(name: str, plan: ServerPlan) -> dict[str, tuple[ServerPlan, str]]:
    """What is compared in a scenario: ours, its peer, and what else is needed, each a server and a trace."""

    def settings(**more: Any) -> ServerPlan:
        return replace(plan, settings=(*plan.settings, *more.items()))

    if name == "burst":
        return {
            "budgets for each class": (plan, "burst"),
            "one queue": (settings(classes=()), "burst"),
            "idle": (plan, "idle"),
        }
    if name == "abort":
        return {"a tenth leaves": (plan, "chat"), "nobody leaves": (plan, "chat")}
    return {"prefix cache": (plan, name), "no prefix cache": (settings(prefix_cache=False), name)}


def _start(servers: Servers, names: Sequence[str], load: LoadPlan, plan: ServerPlan) -> None:
    """Start the servers of these scenarios, and let each answer a few requests."""
    warm = LoadPlan(requests=WARM_UP, rate=load.rate, concurrency=8, seed=load.seed + 1)
    started = servers.start(one for name in names for one, _ in _runs(name, plan).values())

    async def ask() -> None:
        await asyncio.gather(*(drive(one.url, "mix", warm, admin_url=one.admin_url) for one in started))

    asyncio.run(ask())


def _own(servers: Servers, name: str, load: LoadPlan, plan: ServerPlan) -> dict[str, Outcome]:
    """Outcomes of ours and of the peer, each on a server of its own."""
    outcomes = {}
    for label, (one, trace) in _runs(name, plan).items():
        server = servers.of(one)
        leave = 0.1 if label == "a tenth leaves" else 0.0
        outcomes[label] = asyncio.run(
            drive(server.url, trace, load, abort=leave, admin_url=server.admin_url, empty=True)
        )
        outcomes[label].warmed = server.warmed
    return outcomes


def _foreign(name: str, load: LoadPlan, url: str, key: str) -> dict[str, Outcome]:
    import httpx

    trace, abort = ("chat", 0.1) if name == "abort" else (name, 0.0)
    try:
        httpx.get(url + "/v1/models", headers={"Authorization": f"Bearer {key}"} if key else {}, timeout=60).json()[
            "data"
        ][0]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, IndexError, TypeError) as error:
        raise RequestError(
            f"--url {url}: no OpenAI-style server with a model answers there ({type(error).__name__}: {error}); check address and key"
        ) from error
    return {"server": asyncio.run(drive(url, trace, load, abort=abort, key=key))}


async def drive(
    url: str, trace: str, load: LoadPlan, *, abort: float = 0.0, key: str = "", admin_url: str | None = None,
    empty: bool = False,
) -> Outcome:  # fmt: skip
    """Run a trace against a server; with an admin port, watch its pages meanwhile, and with `empty` begin without any."""
    import httpx

    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for every request would bury the rows
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    async with httpx.AsyncClient(headers=headers, timeout=60) as client:
        card = (await client.get(url + "/v1/models")).json()["data"][0]
        context = card.get("max_model_len", 8192)
        warm = {"model": card["id"], "prompt": [1, 2, 3], "max_tokens": 4}
        await client.post(url + "/v1/completions", json=warm)
        if empty:
            await client.post(f"{admin_url}/admin/reset_prefix_cache", json={})
        asks = make_trace(trace, load.requests, load.rate, seed=load.seed, context=context, vocabulary=256, abort=abort)
        runner = Load(asks, url, model=card["id"], context=context, key=key, concurrency=load.concurrency)
        pages: list[tuple[float, list[dict[str, Any]]]] = []
        warmed = len(await _timeline(client, admin_url)) if admin_url else 0
        compiled = await _compiled(client, url) if admin_url else 0.0
        began = time.perf_counter()

        async def watch() -> None:
            while True:
                body = (await client.get(f"{admin_url}/admin/cache/pages")).json()
                pages.append((time.perf_counter() - began, body["pages"]))
                await asyncio.sleep(max(0.25, load.requests / load.rate / 40))

        watcher = asyncio.create_task(watch()) if admin_url else None
        records = await runner.run()
        seconds = time.perf_counter() - began
        if watcher is None:
            return Outcome(records, seconds)
        watcher.cancel()
        events, compiled = (await _timeline(client, admin_url))[warmed:], await _compiled(client, url) - compiled
        return Outcome(records, seconds, pages, events, compiled)


async def _timeline(client: Any, admin_url: str | None) -> list[dict[str, Any]]:
    return (await client.get(f"{admin_url}/admin/cache/timeline")).json()["events"]


async def _compiled(client: Any, url: str) -> float:
    """Kernels compiled or loaded and passes recorded since the server was ready."""
    text = (await client.get(url + "/metrics")).text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(COMPILATIONS))


def rows_of(name: str, shape: str, device: str, outcomes: Mapping[str, Outcome]) -> list[Row]:
    """Rows of one scenario: ours is the first outcome, the peer the second."""
    (_, ours), *others = outcomes.items()
    peer_name, peer = others[0] if others else ("", None)

    def row(metric: str, kind: str, take: Callable[[Outcome], list[float]], extra: dict[str, float]) -> Row | None:
        mine, theirs = take(ours), take(peer) if peer else []
        if not mine:
            return None
        ms, peer_ms = 1e3 * statistics.median(mine), 1e3 * statistics.median(theirs) if theirs else None
        return Row(
            name=f"serve_{name}_{metric}_{kind}", shape=shape, ours_ms=ms, peer=peer_name if theirs else "",
            peer_ms=peer_ms, ratio=None if peer_ms is None else peer_ms / ms, bound_ms=None, device=device_name(device),
            versions=versions(), commit=commit(), ours_spread_ms=(1e3 * min(mine), 1e3 * max(mine)),
            peer_spread_ms=(1e3 * min(theirs), 1e3 * max(theirs)) if theirs else None, samples=len(mine),
            extra=extra | _percentiles(mine, "") | _percentiles(theirs, "peer_") | _aim(name, f"{metric}_{kind}"),
        )  # fmt: skip

    rows: list[Row | None] = []
    for kind in ours.kinds():
        idle = outcomes.get("idle")
        extra = _percentiles(_firsts(idle, kind), "idle_") if idle else {}
        rows.append(row("ttft", kind, lambda one, kind=kind: _firsts(one, kind), extra))
        rows.append(row("tpot", kind, lambda one, kind=kind: [r.each for r in one.of(kind) if r.each is not None], {}))
    whole = {
        "requests_per_second": len(ours.of("all")) / ours.seconds, "tokens_per_second": ours.drawn / ours.seconds,
        "goodput_per_second": ours.goodput(), "hit_ratio": ours.hit_ratio,
        "refused": float(sum(bool(one.kind) and one.status not in (200, 499) for one in ours.records)),
        "left": float(sum(one.status == 499 for one in ours.records)), "compiled": ours.compiled,
        "warm_up_seconds": ours.warmed,
    }  # fmt: skip
    if peer:
        whole |= {"peer_hit_ratio": peer.hit_ratio, "peer_goodput_per_second": peer.goodput(),
                  "peer_tokens_per_second": peer.drawn / peer.seconds, "peer_compiled": peer.compiled}  # fmt: skip
    rows.append(row("token", "all", lambda one: [one.seconds / max(1, one.drawn)], whole))
    idle = outcomes.get("idle")
    if idle is not None and peer is not None:
        rows.append(_p99(name, shape, device, ours, peer, idle))
    return [one for one in rows if one is not None]


def _p99(name: str, shape: str, device: str, ours: Outcome, queue: Outcome, idle: Outcome) -> Row | None:
    """99th percentile of the short requests' time to first token, beside that without the burst."""
    waits, quiet = _firsts(ours, "short"), _firsts(idle, "short")
    if not waits or not quiet:
        return None
    p99, idle_p99 = (1e3 * float(np.percentile(one, 99)) for one in (waits, quiet))
    return Row(
        name=f"serve_{name}_p99_short", shape=shape, ours_ms=p99, peer="no burst", peer_ms=idle_p99, ratio=idle_p99 / p99,
        bound_ms=None, device=device_name(device), versions=versions(), commit=commit(),
        ours_spread_ms=(1e3 * min(waits), 1e3 * max(waits)), peer_spread_ms=(1e3 * min(quiet), 1e3 * max(quiet)),
        samples=len(waits), extra=_percentiles(_firsts(queue, "short"), "one_queue_") | _aim(name, "p99_short"),
    )  # fmt: skip


def _aim(name: str, row: str) -> dict[str, float]:
    aim = AIMS.get(f"{name}_{row}")
    return {} if aim is None else {"target_ratio": aim}


def _firsts(outcome: Outcome, kind: str) -> list[float]:
    return [one.first for one in outcome.of(kind) if one.first is not None]


def _percentiles(seconds: Sequence[float], prefix: str) -> dict[str, float]:
    if not seconds:
        return {}
    return {f"{prefix}p{p}_ms": 1e3 * float(np.percentile(seconds, p)) for p in PERCENTILES}


def write_details(path: Path, name: str, shape: str, outcomes: Mapping[str, Outcome]) -> None:
    """Everything that pictures need, as one JSON file."""
    value = {
        "scenario": name, "shape": shape,
        "outcomes": {
            label: {
                "seconds": one.seconds, "requests": [record.to_json() for record in one.records],
                "events": one.events, "pages": [{"at": at, "pages": pages} for at, pages in one.pages],
            }
            for label, one in outcomes.items()
        },
    }  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value), encoding="utf-8")
    partial.replace(path)
