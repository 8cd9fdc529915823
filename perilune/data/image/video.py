"""Which frames of a video are taken, and how they are cut into chunks.

At the ticks start, start + 1/sample_fps, … the frame on show is taken, once. Up to `frames_per_chunk` taken frames in a row
make one item of the vision tower: its frames attend to each other and become the tokens of a single image. Chunk size,
frame limit and rate are published settings; no published engine takes video for K3, so the choice of frames is ours, as is
the prompt's form (`perilune.tokenizer.xtml.media`): every chunk is framed behind the time of its first frame.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

from perilune.errors import RequestError

T = TypeVar("T")
TICK_SLACK = 1e-6
"""Seconds by which a frame may come late for its tick: times are given in milliseconds or computed from a rate."""


def frame_times(count: int, *, fps: float | None, timestamps: Sequence[float] | None) -> list[float]:
    """Seconds of each of `count` frames, from exactly one of a rate and explicit times.

    Raises:
        RequestError: none or both are given, or the rate or the times make no sense.
    """
    if (fps is None) == (timestamps is None):
        raise RequestError("a video needs exactly one of fps (frames a second) and timestamps (seconds of each frame)")
    if timestamps is None:
        assert fps is not None, "one of the two is given"
        if not (fps > 0 and math.isfinite(fps)):
            raise RequestError(f"fps={fps} must be a finite number above 0")
        return [index / fps for index in range(count)]
    times = [float(time) for time in timestamps]
    if len(times) != count:
        raise RequestError(f"{len(times)} timestamps were given for {count} frames; give one for each")
    for index, time in enumerate(times):
        if not (math.isfinite(time) and time >= 0 and (index == 0 or time > times[index - 1])):
            raise RequestError(
                f"timestamps[{index}]={time} must be finite, at least 0 and after the one before; give seconds in order"
            )
    return times


def sampled(frames: Iterable[tuple[float, T]], sample_fps: float) -> Iterator[tuple[float, T]]:
    """Take the frame on show at each tick, once.

    A frame is on show until the next one, the last one as long as the one before it. Frames come in order of their seconds;
    only one is held at a time.
    """
    shown: tuple[float, T] | None = None
    start = span = 0.0
    tick = 0  # the first tick that is not before the frame on show
    for frame in frames:
        if shown is None:
            start = frame[0]
        else:
            if start + tick / sample_fps < frame[0] - TICK_SLACK:
                yield shown
            span = frame[0] - shown[0]
            tick = math.ceil((frame[0] - TICK_SLACK - start) * sample_fps)
        shown = frame
    if shown is not None and (tick == 0 or start + tick / sample_fps < shown[0] + span - TICK_SLACK):
        yield shown
