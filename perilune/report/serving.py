"""Pictures of a server under load and of its cache, from the files of `perilune bench serve` and `perilune bench cache`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from perilune.errors import RequestError
from perilune.explain.chart import Bars, Chart, Heatmap, LineChart, Series
from perilune.report.image import write_png

KINDS = ("short", "medium", "long")
_PERCENTILES = (50, 90, 99)
_PAGE_KINDS = ("free", "tokens, cached", "tokens, in use", "state, cached", "state, in use")
_ROWS = 48
_COLUMNS = 60


def draw(folder: Path, *, cache_rows: Path | None = None) -> list[Path]:
    """Draw everything that the folder has data for, into the folder.

    Args:
        folder: with the `serve-*.json` and `cache-*.json` files of a benchmark.
        cache_rows: results of `perilune bench cache`; the comparison of retention policies is made from them.

    Raises:
        RequestError: matplotlib is missing, or a file is none of the benchmark's.
    """
    pictures: dict[str, Chart | None] = {}
    for path in sorted((*folder.glob("serve-*.json"), *folder.glob("cache-*.json"))):
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            name, outcomes = value["scenario"], value["outcomes"]
            pictures |= {
                f"{path.stem}-first.png": percentiles(name, outcomes, "first"),
                f"{path.stem}-each.png": percentiles(name, outcomes, "each"),
                f"{path.stem}-hits.png": hits(name, outcomes),
                f"{path.stem}-pages.png": page_map(name, outcomes),
            }
        except (ValueError, KeyError, TypeError) as error:
            raise RequestError(f"{path} is no result of perilune bench: {error!r}; remove it") from None
    if cache_rows is not None and cache_rows.exists():
        pictures["retention.png"] = retention(cache_rows)
    return [write_png(chart, folder / name) for name, chart in pictures.items() if chart is not None]


def _seconds(request: Mapping[str, Any], what: str) -> float | None:
    """Time to the first token, or the time of each later one."""
    tokens = request["tokens"]
    if request["status"] != 200 or not tokens:
        return None
    if what == "first":
        return tokens[0][0] - request["due"]
    later = sum(count for _, count in tokens[1:])
    return (tokens[-1][0] - tokens[0][0]) / later if later else None


def percentiles(name: str, outcomes: Mapping[str, Any], what: str) -> Bars | None:
    """Percentiles of the time to the first token, or of the time of each later one, by class of prompt."""
    scale, unit = (1.0, "seconds") if what == "first" else (1e3, "ms")
    found: dict[str, dict[str, list[float]]] = {}
    for label, outcome in outcomes.items():
        for request in outcome["requests"]:
            seconds = _seconds(request, what)
            if seconds is not None:
                found.setdefault(request["kind"], {}).setdefault(label, []).append(scale * seconds)
    kinds = [kind for kind in KINDS if kind in found]
    if not kinds:
        return None
    labels = [label for label in outcomes if any(label in found[kind] for kind in kinds)]
    words = "Time to the first token" if what == "first" else "Time of each further token"

    def values(label: str) -> list[float]:
        times = [found[kind].get(label) for kind in kinds]
        return [float(np.percentile(one, p)) if one else float("nan") for one in times for p in _PERCENTILES]

    return Bars(
        title=f"{words}, trace {name}",
        caption="Percentiles over the requests of a class; a request counts from the moment at which it was due.",
        categories=[f"{kind} p{p}" for kind in kinds for p in _PERCENTILES],
        groups=[(label, values(label)) for label in labels], y_label=unit, y_log=True, show_values=len(labels) < 3,
    )  # fmt: skip


def hits(name: str, outcomes: Mapping[str, Any]) -> LineChart | None:
    """How far into its prompt each request of the first outcome hit: pages that were there, and states to go on from."""
    outcome = next(iter(outcomes.values()))
    events = outcome["events"]
    if not events:
        return None
    start = min(event["time"] for event in events)
    at = [event["time"] - start for event in events]

    def curve(label: str, key: str, style: str) -> Series:
        return Series(name=label, x=at, y=[event[key] for event in events], style=style)

    return LineChart(
        title=f"Prompts and their cached part, trace {name}",
        caption="A hit ends where a state was kept; attention pages behind it are of no use without one.",
        series=[
            curve("prompt", "prompt_tokens", "dots"), curve("pages in the cache", "kv_tokens", "dots"),
            curve("hit: pages and state", "hit_tokens", "dots"),
        ],
        x_label=outcome.get("unit", "seconds"), y_label="tokens",
    )  # fmt: skip


def page_map(name: str, outcomes: Mapping[str, Any]) -> Heatmap | None:
    """What the pages of the pool held over time; every n-th page where there are many."""
    outcome = next(iter(outcomes.values()))
    seen = outcome["pages"]
    if not seen:
        return None
    seen = seen[:: -(-len(seen) // _COLUMNS)]
    pages = len(seen[0]["pages"])
    used = max((i for one in seen for i, page in enumerate(one["pages"]) if page["kind"] != "free"), default=0) + 1
    chosen = range(0, used, -(-used // _ROWS))
    matrix = np.array([[_value(one["pages"][page]) for one in seen] for page in chosen], dtype=float)
    return Heatmap(
        title=f"Page map, trace {name}", caption=f"Pages 0..{used - 1} of {pages}; those behind were never used.",
        frames=[("", matrix)], rows=[str(page) for page in chosen], columns=[f"{one['at']:.0f}" for one in seen],
        x_label=outcome.get("unit", "seconds"), y_label="page", value_label="", names=_PAGE_KINDS,
    )  # fmt: skip


def _value(page: Mapping[str, Any]) -> int:
    if page["kind"] == "free":
        return 0
    return (1 if page["kind"] == "tokens" else 3) + bool(page["held"])


def retention(path: Path) -> Bars | None:
    """Prompt tokens that each retention policy saves, at equal memory: the newest row of each policy and trace."""
    newest: dict[str, dict[str, float]] = {}
    traces: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        saved = row.get("extra", {}).get("saved_share")
        if saved is None:
            continue
        trace, policy = _split(row["name"])
        newest.setdefault(policy, {})[trace] = 100 * saved
        if trace not in traces:
            traces.append(trace)
    if not newest:
        return None

    def values(policy: str) -> Sequence[float]:
        return [newest[policy].get(trace, float("nan")) for trace in traces]

    return Bars(
        title="Prompt tokens saved by retention policy, equal memory",
        caption="The rest is run again. Which states are kept is all that differs.",
        categories=traces, groups=[(policy, values(policy)) for policy in newest], y_label="% of prompt tokens",
        show_values=False,
    )  # fmt: skip


def _split(name: str) -> tuple[str, str]:
    """Trace with the size of its pool, and policy, of a row `cache_TRACE_POLICY_PAGES`."""
    trace, _, rest = name.removeprefix("cache_").partition("_")
    policy, _, pages = rest.rpartition("_")
    return f"{trace}<br>{pages} pages", policy
