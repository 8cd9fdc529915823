"""Turn a page's contents into one HTML file that opens from disk and reaches for nothing outside itself.

The plotting script, styles and data are all inside the file, and a content policy in its head forbids any request.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

from perilune import __version__
from perilune.errors import RequestError
from perilune.explain.chart import Chart, Heatmap
from perilune.report.interactive import figure
from perilune.report.palette import DIVERGING, SEQUENTIAL, SERIES


@dataclass(frozen=True, kw_only=True)
class Meter:
    """A bar in a card: `share` of the full width, in 0..1; `own` marks the run's own value."""

    name: str
    share: float
    text: str
    own: bool = False


@dataclass(frozen=True, kw_only=True)
class Card:
    """A headline number with its unit and one line about what it means."""

    label: str
    value: str
    unit: str = ""
    detail: str = ""
    meters: Sequence[Meter] = ()


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of text; the first cell of a row is its heading."""

    rows: Sequence[Sequence[str]]
    head: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Text that the model wrote after `prompt`, with a heading and a remark."""

    label: str
    prompt: str
    text: str
    remark: str = ""


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A small picture inside the page: its `data:` address, a caption, a remark, and whether the caption is right."""

    source: str
    caption: str
    remark: str = ""
    right: bool = True


@dataclass(frozen=True, kw_only=True)
class Block:
    """Monospaced text, folded away under its title or shown as it is."""

    title: str
    text: str
    folded: bool = True


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the page: a text, sentences as a list, then pictures, charts, tables, samples and blocks."""

    anchor: str
    title: str
    text: str = ""
    points: Sequence[str] = ()
    pictures: Sequence[Picture] = ()
    charts: Sequence[Chart] = ()
    tables: Sequence[Table] = ()
    samples: Sequence[Sample] = ()
    blocks: Sequence[Block] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Page:
    """A whole page."""

    title: str
    lead: str
    chips: Sequence[str] = ()
    cards: Sequence[Card] = ()
    sections: Sequence[Section] = ()
    notes: Sequence[str] = ()
    footer: str = field(default=f"Written by perilune {__version__} from the files of the run alone.")


def render(page: Page) -> str:
    """Return the page as HTML.

    Raises:
        RequestError: the extra `report` (plotly, jinja2) is not installed.
    """
    try:
        import jinja2
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise RequestError(
            f"a page needs {error.name}, which is not installed; pip install 'perilune[report]'"
        ) from error
    figures: dict[str, Any] = {}
    sections = []
    for section in page.sections:
        shown = []
        for chart in section.charts:
            key = f"figure-{section.anchor}-{len(shown)}"
            figures[key] = figure(chart)
            full = isinstance(chart, Heatmap) and len(chart.columns) > 24
            height = figures[key]["layout"]["height"]
            shown.append({"key": key, "title": chart.title, "caption": chart.caption, "full": full, "height": height})
        if len(shown) % 2 and len(shown) > 1:
            shown[0]["full"] = True
        names = ("anchor", "title", "text", "points", "pictures", "tables", "samples", "blocks", "notes")
        sections.append({name: getattr(section, name) for name in names} | {"figures": shown})
    folder = files("perilune.report") / "templates"
    template = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    names = ("title", "lead", "chips", "cards", "notes", "footer")
    return template.from_string((folder / "page.html").read_text("utf-8")).render(
        page={name: getattr(page, name) for name in names} | {"sections": sections},
        version=__version__,
        css=(folder / "report.css").read_text("utf-8"),
        js=(folder / "report.js").read_text("utf-8"),
        plotly_js=get_plotlyjs() if figures else "",
        figures_json=_embedded(figures),
        palette_json=_embedded({"series": SERIES, "sequential": SEQUENTIAL, "diverging": DIVERGING}),
    )


def _embedded(value: Any) -> str:
    """JSON that is safe inside a script element: it can close neither the element nor open a comment."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"), ensure_ascii=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
