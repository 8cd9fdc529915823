"""`perilune explain MECHANISM`: formula, defining code, and numbers and pictures computed now from a model."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from perilune.config.parse import parse_flags
from perilune.config.train import MAX_SEED
from perilune.errors import ConfigError
from perilune.explain.catalogue import MECHANISMS, explain
from perilune.explain.explanation import Explanation, excerpt
from perilune.report.build import write_page
from perilune.report.html import Block, Page, Section
from perilune.report.image import write_png
from perilune.report.terminal import text as drawn


@dataclass(frozen=True, kw_only=True)
class ExplainFlags:
    """What `perilune explain` explains, on which model, and where the pictures go.

    Attributes:
        mechanism: one of the names that `perilune explain` lists without it.
        run: a run whose model is used; without it a tiny model with seeded weights.
        text: the text to look at, where a mechanism looks at text.
        seed: of the tiny model's weights.
        png: write the pictures as PNG: this file, then the same name with -2, -3.
        html: write a page with pictures to hover over to this file.
        json: one JSON object on stdout.
    """

    mechanism: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MECHANISM")] = ""
    run: str | None = None
    text: str | None = None
    seed: int = 0
    png: Path | None = None
    html: Path | None = None
    json: bool = False


def run(args: list[str]) -> int:
    """Entry point of the verb; returns the exit code."""
    flags = parse_flags(ExplainFlags, args, ExplainFlags(), prog="perilune explain", description=__doc__ or "")
    if not flags.mechanism:
        if flags.json:
            print(json.dumps({"mechanisms": MECHANISMS}))
        else:
            print("\n".join(f"{name:<20} {line}" for name, line in MECHANISMS.items()))
            print("\nperilune explain NAME explains one; --run RUN computes it from a trained run.")
        return 0
    if not 0 <= flags.seed <= MAX_SEED:
        raise ConfigError(f"--seed {flags.seed} must lie in 0 to {MAX_SEED}")
    found = explain(flags.mechanism, run=flags.run, text=flags.text, seed=flags.seed)
    model = f"the run {flags.run}" if flags.run else f"a tiny model with seed {flags.seed}"
    written = []
    if flags.png is not None:
        for number, chart in enumerate(found.charts, start=1):
            path = flags.png if number == 1 else flags.png.with_name(f"{flags.png.stem}-{number}{flags.png.suffix}")
            written.append(write_png(chart, path))
    if flags.html is not None:
        written.append(write_page(page(found, model), flags.html))
    if flags.json:
        code = excerpt(found.reference)
        print(json.dumps({
            "mechanism": found.name, "title": found.title, "source": found.source, "computed_from": model, "formula": list(found.formula),
            "unusual": list(found.unusual), "findings": list(found.findings), "numbers": found.numbers,
            "reference": {"file": code.file, "line": code.line, "code": code.code}, "written": [str(path) for path in written],
        }, allow_nan=False))  # fmt: skip
        return 0
    _print(found, model)
    for path in written:
        print(f"written: {path}", file=sys.stderr)
    return 0


def page(found: Explanation, model: str) -> Page:
    """The explanation as a page."""
    code = excerpt(found.reference)
    words = Section(
        anchor="formula",
        title="Formula",
        text=found.source,
        blocks=[
            Block(title="formula", text="\n".join(found.formula), folded=False),
            Block(title=f"Defining code: {code.file}, line {code.line}", text=code.code),
        ],
    )
    pictures = Section(
        anchor="pictures", title="Computed", text=f"From {model}, when this page was written.", charts=found.charts
    )
    facts = Section(anchor="findings", title="What the numbers say", points=found.findings)
    unusual = Section(anchor="unusual", title="What is unusual", points=found.unusual)
    return Page(
        title=found.title,
        lead=MECHANISMS[found.name],
        sections=[words, unusual, pictures, facts],
        footer="Written by `perilune explain`; every number was computed for this page.",
    )


def _item(mark: str, sentence: str, width: int) -> str:
    return textwrap.fill(sentence, width, initial_indent=f"  {mark} ", subsequent_indent="    ")


def _print(found: Explanation, model: str) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.syntax import Syntax

    width = min(110, shutil.get_terminal_size((100, 24)).columns)
    console = Console(width=width, highlight=False)
    console.print(f"[bold]{escape(found.title)}[/bold]  [dim]{escape(found.source)}[/dim]\n")
    for line in found.formula:
        print(textwrap.fill(line, width, initial_indent=" " * 4, subsequent_indent=" " * 8))
    console.print("\n[bold]What is unusual[/bold]")
    print("\n".join(_item("•", line, width) for line in found.unusual))
    code = excerpt(found.reference)
    console.print(f"\n[bold]The defining code[/bold]  {escape(code.file)}:{code.line}")
    console.print(Syntax(code.code, "python", theme="ansi_dark", background_color="default", word_wrap=True))
    console.print(f"\n[bold]Computed now[/bold]  from {escape(model)}\n")
    for chart in found.charts:
        print(drawn(chart, width=width), end="\n\n")
    print("\n".join(_item("→", line, width) for line in found.findings))
    if found.next:
        console.print("\n[dim]next: " + escape(" · ".join(found.next)) + "[/dim]")
