"""What the report shows of a run that was trained on pictures: how many answers are right, and the pictures themselves."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from perilune.explain.chart import LineChart, Series
from perilune.report.collect import Run, dig
from perilune.report.html import Card, Meter, Picture, Section, Table
from perilune.rundir import RunDir

_PARTS = {"held_out": "new pictures", "unseen": "pairs never shown"}
_MAX_BYTES = 200_000


def pictures(run: Run) -> Section | None:
    """The section about pictures; None if the run was neither scored on pictures nor asked about any."""
    curve = answers(run)
    charts = [] if curve is None else [curve]
    vision = run.summary.get("vision")
    if not isinstance(vision, dict):
        text = "The model was trained on text and on pictures together from the first step."
        return Section(anchor="pictures", title="What it sees", text=text, charts=charts) if charts else None
    rows = [
        [f"{words}: {exam.get('question', about)}", *(_share(exam.get(key)) for key in _COLUMNS), _chance(exam)]
        for part, words in _PARTS.items()
        for about, exam in sorted(dig(vision, part, {}).items())
        if isinstance(exam, dict)
    ]
    head = ["asked", "generated", "with another picture", "best of the possible", "with another picture", "chance"]
    samples = [sample for sample in dig(vision, "samples", []) if isinstance(sample, dict)]
    shown = [picture for sample in samples if (picture := _picture(run.path, sample)) is not None]
    missing = len(samples) - len(shown)
    notes = [f"{missing} picture files are missing or unreadable and were left out."] if missing else []
    count = dig(vision, "pictures")
    return Section(
        anchor="pictures", title="What it sees",
        text="The model was trained on text and on pictures together from the first step. These pictures were never trained on: "
             "new ones of combinations that training shows, and pairs of shape and colour that it never shows.",
        points=["The answer below each picture is the model's own, its most likely text; the first pictures of each part, none left out.",
                "With another picture: the same questions, but the model sees the picture of another question.",
                f"In brackets: Wilson's 95 % interval over {count} pictures."],
        pictures=shown, charts=charts, tables=[Table(rows=rows, head=head)] if rows else [], notes=notes,
    )  # fmt: skip


def answers(run: Run) -> LineChart | None:
    """What the answers about held-out pictures cost over training."""
    records = [
        record
        for record in RunDir(run.path).read_metrics("eval_pictures")
        if all(isinstance(record.get(key), (int, float)) for key in ("step", "nats_per_token"))
    ]
    if not records:
        return None
    curve = Series(
        name="answers",
        x=[record["step"] for record in records],
        y=[record["nats_per_token"] for record in records],
        color=0,
    )
    return LineChart(
        title="Answers about pictures that were never trained on", x_label="step", y_label="nats per token", series=[curve],
        caption="Colours are learnt first; the later fall is that of shapes.",
    )  # fmt: skip


_COLUMNS = ("generated", "blind_generated", "scored", "blind_scored")


def picture_cards(run: Run) -> list[Card]:
    """The headline: shape and colour of new pictures, beside what is right without looking."""
    cards = []
    for about, label in (("shape", "shapes named right"), ("colour", "colours named right")):
        exam = dig(run.summary, f"vision.held_out.{about}")
        seen, blind, chance = (dig(exam, key) for key in ("generated.accuracy", "blind_generated.accuracy", "chance"))
        if not all(isinstance(value, (int, float)) for value in (seen, blind, chance)):
            continue
        meters = [
            Meter(name="model", share=seen, text=f"{seen:.0%}", own=True),
            Meter(name="other picture", share=blind, text=f"{blind:.0%}"),
            Meter(name="chance", share=chance, text=f"{chance:.0%}"),
        ]
        low, high = dig(exam, "generated.low", 0.0), dig(exam, "generated.high", 1.0)
        cards.append(Card(label=label, value=f"{seen:.0%}", unit="of new pictures", meters=meters,
                          detail=f"95 % interval {low:.0%} to {high:.0%}."))  # fmt: skip
    return cards


def _share(value: Any) -> str:
    accuracy, low, high = (dig(value, key) for key in ("accuracy", "low", "high"))
    if not all(isinstance(number, (int, float)) for number in (accuracy, low, high)):
        return "–"
    return f"{accuracy:.0%} ({low:.0%}–{high:.0%})"


def _chance(exam: dict[str, Any]) -> str:
    chance = exam.get("chance")
    return f"{chance:.1%}" if isinstance(chance, (int, float)) else "–"


def _picture(folder: Path, sample: dict[str, Any]) -> Picture | None:
    """A picture of the run's own folder as a `data:` address; None if the file is missing, too large or elsewhere."""
    path = folder / str(sample.get("file", ""))
    try:
        if folder.resolve() not in path.resolve().parents or path.stat().st_size > _MAX_BYTES:
            return None
        content = path.read_bytes()
    except OSError:
        return None
    answer, right = str(sample.get("answer", "")), str(sample.get("right", ""))
    part = _PARTS.get(str(sample.get("part")), "")
    remark = part if answer == right else f"{part}; right: {right}"
    source = f"data:image/png;base64,{base64.b64encode(content).decode()}"
    return Picture(source=source, caption=answer or "(nothing)", remark=remark, right=answer == right)
