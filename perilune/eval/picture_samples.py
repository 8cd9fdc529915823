"""Pictures of an exam with what the model said about them, as files for a report."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from perilune.eval.vision import Exam
from perilune.rundir import write_atomic

FOLDER = "pictures"


def write_samples(exams: Sequence[Exam], run: Path, *, held_out: int = 12, unseen: int = 6) -> list[dict[str, Any]]:
    """Write the first pictures of every kind and part as PNG files; return what was asked and answered about each.

    Args:
        exams: of `examine`; of each kind and part the first one's question is shown.
        run: folder of the run; the files go to `pictures/` in it.
        held_out, unseen: how many of each part.
    """
    folder = run / FOLDER
    folder.mkdir(exist_ok=True)
    shown: dict[tuple[str, str], Exam] = {}
    for exam in exams:
        shown.setdefault((exam.kind, exam.part), exam)
    samples = []
    for exam in shown.values():
        count = held_out if exam.part == "held_out" else unseen
        for number, (drawing, right, reply) in enumerate(zip(exam.drawings, exam.right, exam.replies, strict=True)):
            if number == count:
                break
            content = io.BytesIO()
            drawing.image.save(content, "PNG")
            name = f"{FOLDER}/{exam.kind}-{exam.part}-{number:03d}.png"
            write_atomic(run / name, content.getvalue())
            samples.append({"file": name, "kind": exam.kind, "part": exam.part, "question": exam.question, "right": right,
                            "answer": reply.generated, "width": drawing.image.width, "height": drawing.image.height})  # fmt: skip
    return samples
