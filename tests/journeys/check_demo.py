"""Check what the demo claims: `python tests/journeys/check_demo.py runs/demo`.

Reads `summary.json` and the report that it names. Standard library only. Exit status 1, with one line a problem, if a
claim does not hold.
"""

from __future__ import annotations

import json
import math
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

KEYS = {
    "train": (
        "steps",
        "tokens",
        "token_budget_reached",
        "seconds",
        "tokens_per_second",
        "loss_first",
        "val_bits_per_byte",
    ),
    "baselines": ("gzip9", "xz9e", "trigram"),
    "routing": ("max_over_mean", "pooled_worst_layer"),
    "generate": ("tokens_per_second",),
    "serve": ("cached_tokens_second_turn",),
}
TRIGRAM_RATIO = 0.92
POOLED_ROUTING = 1.15
HARD_STOP_SECONDS = 240
# A step that was under way when the time ran out is finished, and the last evaluation is not part of the limit.
STEP_SECONDS = 15


class OutsideReferences(HTMLParser):
    """Collects every attribute and style that would fetch something from the network."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.in_style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.in_style = tag == "style"
        for name, value in attrs:
            outside = re.match(r"\s*(https?:)?//", value or "")
            if outside and name in ("src", "href", "srcset", "data", "action", "poster"):
                self.found.append(f"<{tag} {name}={value[:80]!r}>")
            elif name == "style":
                self.look_at_css(value or "")

    def handle_data(self, data: str) -> None:
        if self.in_style:
            self.look_at_css(data)

    def look_at_css(self, css: str) -> None:
        self.found += re.findall(r"(?:@import|url\()\s*['\"]?\s*(?:https?:)?//[^'\")\s]*", css)


def outside_references(html: str) -> list[str]:
    """What in the page points to another machine; [] for a self-contained page."""
    parser = OutsideReferences()
    parser.feed(html)
    return parser.found


def missing_keys(summary: dict) -> list[str]:
    """Keys of the summary's contract that are absent or not finite."""
    problems = []
    for section, names in KEYS.items():
        part = summary.get(section)
        for name in names:
            value = part.get(name) if isinstance(part, dict) else None
            if not isinstance(value, (int, float)) or not math.isfinite(value):
                problems.append(f"summary.json: {section}.{name} must be a finite number, is {value!r}")
    if not isinstance(summary.get("report"), str):
        problems.append(f"summary.json: report must be a path, is {summary.get('report')!r}")
    return problems


def broken_claims(summary: dict) -> list[str]:
    """Claims about numbers that do not hold."""
    train, baselines, routing = summary["train"], summary["baselines"], summary["routing"]
    bits = train["val_bits_per_byte"]
    problems = [
        f"{bits:.3f} bits per byte are not below {name} ({value:.3f}) of the same held-out bytes"
        for name, value in baselines.items()
        if not bits < value
    ]
    if bits > TRIGRAM_RATIO * baselines["trigram"]:
        ratio = bits / baselines["trigram"]
        problems.append(f"bits per byte are {ratio:.3f} of the trigram's; allowed: {TRIGRAM_RATIO}")
    if routing["pooled_worst_layer"] > POOLED_ROUTING:
        load = routing["pooled_worst_layer"]
        problems.append(f"the worst layer's pooled routing load is {load:.3f} of the mean; allowed: {POOLED_ROUTING}")
    if train["seconds"] > HARD_STOP_SECONDS + STEP_SECONDS:
        problems.append(f"training took {train['seconds']:.0f} s; it stops after {HARD_STOP_SECONDS} s")
    for section, name in (
        ("generate", "tokens_per_second"),
        ("serve", "cached_tokens_second_turn"),
        ("train", "tokens"),
    ):
        if summary[section][name] <= 0:
            problems.append(f"{section}.{name} is {summary[section][name]}; it must be above 0")
    return problems


def broken_report(summary: dict, folder: Path) -> list[str]:
    """The report must exist beside the run and need no network."""
    given = Path(summary["report"])
    places = [given] if given.is_absolute() else [given, folder / given]
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        return [f"the report {given} does not exist"]
    outside = outside_references(path.read_text(encoding="utf-8"))
    return [f"the report is not self-contained: {outside[:5]}"] if outside else []


def check(folder: Path) -> list[str]:
    """Every problem of one demo run."""
    try:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return [f"{folder}/summary.json cannot be read: {error}"]
    return missing_keys(summary) or broken_claims(summary) + broken_report(summary, folder)


def main(arguments: list[str]) -> int:
    folder = Path(arguments[0] if arguments else "runs/demo")
    problems = check(folder)
    for problem in problems:
        print(f"FAILED {problem}")
    if not problems:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        train, baselines = summary["train"], summary["baselines"]
        ended = "its token budget" if train["token_budget_reached"] else "its time limit"
        print(
            f"the demo's claims hold: {train['val_bits_per_byte']:.3f} bits per byte "
            f"({train['val_bits_per_byte'] / baselines['trigram']:.3f} of the trigram's {baselines['trigram']:.3f}), "
            f"pooled routing {summary['routing']['pooled_worst_layer']:.3f}, "
            f"{train['tokens']:,} tokens in {train['seconds']:.0f} s, ended by {ended}"
        )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
