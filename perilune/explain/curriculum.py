"""Context curriculum and packing: longer windows in stages, documents end to end, nothing crossing their borders."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from perilune.data.curriculum import Curriculum
from perilune.data.packing import IGNORE, count_windows, window
from perilune.explain.chart import Bars, Heatmap
from perilune.explain.explanation import Explanation
from perilune.explain.subject import Subject
from perilune.ops.segments import Segments

STAGES = ((64, 0.5), (128, 0.25), (256, 0.25))
TOKENS_PER_STEP, STEPS, DOCUMENTS = 512, 100, 24


class Documents:
    """Documents of random ids and lengths, end to end in memory.

    Attributes:
        offsets: int64 `[documents + 1]`, where each one begins.
        fingerprint: names the content.
    """

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        lengths = np.clip(rng.lognormal(3.8, 0.9, DOCUMENTS), 8, 400).astype(np.int64)
        self.offsets: NDArray[np.int64] = np.concatenate([[0], np.cumsum(lengths)])
        self.ids = rng.integers(0, vocab_size, int(lengths.sum()))
        self.fingerprint = f"explain-{seed}"

    @property
    def num_tokens(self) -> int:
        """Length of the stream."""
        return len(self.ids)

    def read(self, start: int, stop: int) -> NDArray[np.int64]:
        """A copy of the tokens at positions start to stop - 1."""
        return self.ids[start:stop].astype(np.int64)


def explain(subject: Subject) -> Explanation:
    """How windows cut a stream of documents, and that a packed document is computed as if it were alone."""
    stream = Documents(min(256, subject.cfg.vocab_size))
    length = STAGES[1][0]
    owner = owners(stream, length)
    packed, mixed = isolation(subject, stream, length)
    curriculum = Curriculum(STAGES, steps=STEPS, tokens_per_step=TOKENS_PER_STEP)
    places = [curriculum.locate(step) for step in range(STEPS)]
    shares = {size: sum(place.seq_len == size for place in places) for size, _ in STAGES}
    whole = {size: whole_documents(stream, size) for size, _ in STAGES}
    borders = int(np.diff(owner, axis=1).astype(bool).sum())
    return Explanation(
        name="curriculum",
        title="Context curriculum and packing",
        source="K3 report §3.4",
        formula=(
            "stages:  (window T₁, fraction f₁), (T₂, f₂), …      tokens a step stay the same: rows = tokens / T",
            "stream:  document · [EOS] · document · [EOS] · …    cut every T tokens; nothing padded, nothing dropped",
            "at a document's first token:  KDA state ← 0,  convolution window ← 0,  attention sees nothing before it",
            "target of a document's last token: none             no context could tell the next document",
        ),
        unusual=(
            "Packing is contiguous: a document may begin and end anywhere, and continue in the next window.",
            "A fixed-size state makes resets explicit: the decay alone would leave traces of the document before.",
            "Without positions (NoPE) a longer stage changes no parameter: there is no base frequency to retune.",
        ),
        reference=window,
        findings=[
            f"{stream.num_tokens} tokens of {DOCUMENTS} documents fill {owner.shape[0]} windows of {length} with {borders} borders inside.",
            f"A packed document's hidden states differ from the document alone by {packed:.1e}; without the borders by {mixed:.2g}.",
            *(
                f"Windows of {size}: {shares[size]} of {STEPS} steps, {whole[size]} of {DOCUMENTS} documents lie whole in one window."
                for size, _ in STAGES
            ),
        ],
        numbers={
            "windows": owner.shape[0],
            "borders": borders,
            "difference_with_borders": packed,
            "difference_without_borders": mixed,
            "steps_by_window": {str(size): count for size, count in shares.items()},
            "whole_documents_by_window": {str(size): count for size, count in whole.items()},
        },
        charts=[
            Heatmap(
                title=f"Windows of {length} tokens and the documents in them",
                frames=[("", (owner % 5).astype(float))],
                rows=[f"window {i}" for i in range(owner.shape[0])],
                columns=[str(i) for i in range(length)],
                x_label="position",
                y_label="window",
                value_label="document mod 5",
                limits=(0.0, 4.0),
                caption="A change of shade is a border: state, convolution and attention start again there.",
            ),
            Bars(
                title="Documents that lie whole in one window",
                categories=[f"window {size}" for size, _ in STAGES],
                groups=[
                    ("documents", [whole[size] for size, _ in STAGES]),
                    (f"steps of {STEPS}", [shares[size] for size, _ in STAGES]),
                ],
                y_label="count",
                caption="Longer windows cut fewer documents; they come last, when the model can use them.",
            ),
        ],
        next=("perilune train --preset nano --help-all", "perilune explain kda"),
    )


def owners(stream: Documents, length: int) -> NDArray[np.int64]:
    """Index of the document that owns each position, `[windows, length]`."""
    positions = np.arange(count_windows(stream, length) * length)
    return (np.searchsorted(stream.offsets, positions, side="right") - 1).reshape(-1, length)


def whole_documents(stream: Documents, length: int) -> int:
    """Documents whose first and last token are in the same window of `length`."""
    last = count_windows(stream, length) * length
    return int(
        sum(
            begin // length == (end - 1) // length and end <= last
            for begin, end in zip(stream.offsets[:-1], stream.offsets[1:], strict=True)
        )
    )


@torch.no_grad()
def isolation(subject: Subject, stream: Documents, length: int) -> tuple[float, float]:
    """Largest relative change of a packed document's hidden states against the document alone: with borders, and without."""
    index = next(
        i for i in range(count_windows(stream, length))
        if window(stream, i * length, length).starts[8 : length - 16].any()
    )  # fmt: skip
    cut = window(stream, index * length, length)
    begin = 8 + int(cut.starts[8 : length - 16].argmax())
    rest = np.flatnonzero(cut.starts[begin + 1 :])
    end = begin + 1 + int(rest[0]) if len(rest) else length
    assert (cut.targets[cut.starts.nonzero()[0][1:] - 1] == IGNORE).all(), "the token before a border has a target"
    ids_BT = torch.from_numpy(cut.ids)[None]
    alone = subject.model(ids_BT[:, begin:end], logits="none").hidden_BTD[0]
    segments = Segments.from_starts(torch.from_numpy(cut.starts)[None])
    scale = alone.abs().max()

    def change(segments: Segments | None) -> float:
        hidden = subject.model(ids_BT, segments=segments, logits="none").hidden_BTD[0, begin:end]
        return float((hidden - alone).abs().max() / scale)

    return change(segments), change(None)
