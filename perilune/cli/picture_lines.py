"""Answers about pictures, as lines of a terminal."""

from __future__ import annotations

from typing import Any


def exam_line(part: str, exam: dict[str, Any]) -> str:
    """One question's share of right answers, with its 95 % interval, beside what the picture cannot have taught.

    Args:
        part: which pictures, in words.
        exam: as `eval.vision.Exam.as_json` gives it.
    """
    right = exam["generated"]
    chance = f", chance {exam['chance']:.0%}" if "chance" in exam else ""
    return (
        f"{part:<13}{exam['question']:<22} {right['accuracy']:.0%} ({right['low']:.0%}–{right['high']:.0%}); "
        f"with another picture {exam['blind_generated']['accuracy']:.0%}{chance}"
    )
