"""Frames taken from a video and their chunks."""

from __future__ import annotations

import io
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from perilune.data.image import ImageProcessor, ImageProcessorConfig, ProcessedImage
from perilune.data.image.video import sampled
from perilune.errors import RequestError

Image = pytest.importorskip("PIL.Image", reason="the extra `vision` is not installed")

PROCESSOR = ImageProcessor()


def frames(count, width=20, height=12):
    return [np.full((height, width, 3), index, np.uint8) for index in range(count)]


def shown(chunks):
    """Index of every taken frame, from its colour."""
    return [int(round((float(f[0, 0, 0, 0]) * 0.5 + 0.5) * 255)) for c in chunks for f in c.patches.chunk(c.grid[0])]


def test_a_chunk_is_its_frames_one_after_the_other():
    given_frames = [np.random.randint(0, 256, (12, 20, 3), dtype=np.uint8) for _ in range(6)]
    chunks = PROCESSOR.process_video(given_frames, fps=8)
    assert [chunk.grid for chunk in chunks] == [(4, 2, 2), (2, 2, 2)]
    assert [chunk.tokens for chunk in chunks] == [1, 1]
    assert all(isinstance(chunk, ProcessedImage) and chunk.original_size == (20, 12) for chunk in chunks)
    alone = [PROCESSOR.process(frame).patches for frame in given_frames]
    assert torch.equal(chunks[0].patches, torch.cat(alone[:4])) and torch.equal(chunks[1].patches, torch.cat(alone[4:]))
    assert chunks[1].seconds == (0.5, 0.625)
    assert [chunk.timestamp for chunk in chunks] == ["00:00:00.000", "00:00:00.500"]


@pytest.mark.parametrize(
    "count, fps, taken",
    [
        (48, 24, list(range(0, 48, 3))),
        (30, 30, [0, 3, 7, 11, 15, 18, 22, 26]),
        (5, 1, [0, 1, 2, 3, 4]),
        (9, 8, list(range(9))),
        (1, 30, [0]),
        (20, 16, list(range(0, 20, 2))),
    ],
)
def test_at_most_eight_frames_a_second(count, fps, taken):
    assert shown(PROCESSOR.process_video(frames(count), fps=fps)) == taken


@given(
    gaps=st.lists(st.integers(1, 400), max_size=40), start=st.integers(0, 2000), rate=st.sampled_from([1.0, 5.0, 8.0])
)
def test_taken_frames_are_those_on_show_at_the_ticks(gaps, start, rate):
    times = [start]
    for gap in gaps:
        times.append(times[-1] + gap)
    end = times[-1] + (gaps[-1] if gaps else 1)
    period = round(1000 / rate)
    ticks = range(start, end, period)
    truth = sorted({max(i for i, time in enumerate(times) if time <= tick) for tick in ticks})
    found = [index for _, index in sampled([(time / 1000, i) for i, time in enumerate(times)], rate)]
    assert found == truth


def test_timestamps_instead_of_a_rate():
    chunks = PROCESSOR.process_video(frames(3), timestamps=[3599.5, 3601.0, 7322.0042])
    assert chunks[0].seconds == (3599.5, 3601.0, 7322.0042)
    assert chunks[0].timestamp == "00:59:59.500"
    assert PROCESSOR.process_video(frames(1), timestamps=[7322.0042])[0].timestamp == "02:02:02.004"


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_animated_files_bring_their_own_times(form, tmp_path):
    pictures = [Image.fromarray(frame) for frame in frames(8)]
    data = io.BytesIO()
    lossless = {"lossless": True} if form == "WEBP" else {}
    pictures[0].save(
        data, form, save_all=True, append_images=pictures[1:], duration=[500, 50, 50, 50, 50, 500, 500, 500], **lossless
    )
    path = tmp_path / "clip"
    path.write_bytes(data.getvalue())
    for source in (data.getvalue(), path):
        chunks = PROCESSOR.process_video(source)
        assert shown(chunks) == [0, 1, 3, 5, 6, 7]
        assert [round(s, 6) for c in chunks for s in c.seconds] == [0, 0.5, 0.6, 0.7, 1.2, 1.7]


def test_a_still_file_is_a_video_of_one_frame_and_missing_durations_are_a_tenth():
    data = io.BytesIO()
    Image.new("RGB", (20, 12)).save(data, "PNG")
    assert [chunk.grid for chunk in PROCESSOR.process_video(data.getvalue())] == [(1, 2, 2)]
    pictures = [Image.fromarray(frame * 20) for frame in frames(3)]
    data = io.BytesIO()
    pictures[0].save(data, "GIF", save_all=True, append_images=pictures[1:], duration=0)
    chunks = ImageProcessor(ImageProcessorConfig(sample_fps=1000.0)).process_video(data.getvalue())
    assert chunks[0].seconds == (0.0, 0.1, 0.2)


def test_transparent_frames_show_the_board():
    pictures = [Image.new("RGBA", (20, 12), (255, 0, 0, 0)), Image.new("RGBA", (20, 12), (0, 0, 255, 255))]
    chunk = PROCESSOR.process_video(pictures, fps=2)[0]
    assert chunk.patches[0, :, 0, 0].tolist() == [1.0, 1.0, 1.0]
    assert chunk.patches[4, :, 0, 0].tolist() == [-1.0, -1.0, 1.0]


def test_frames_are_limited_apart_from_images():
    cfg = ImageProcessorConfig(in_patch_limit=1000, in_patch_limit_each_frame=4)
    chunk = ImageProcessor(cfg).process_video(frames(4, 112, 112), fps=8)[0]
    assert math.prod(chunk.grid[1:]) == 4 and chunk.original_size == (112, 112)


def test_frames_of_an_animated_file_are_decoded_as_they_are_needed():
    """A file with more pixels in all than allowed is refused once they are reached, not after everything is decoded."""
    pictures = [Image.new("L", (30, 30), i) for i in range(50)]
    data = io.BytesIO()
    pictures[0].save(data, "GIF", save_all=True, append_images=pictures[1:], duration=200)
    small = ImageProcessor(replace(PROCESSOR.cfg, max_video_pixels=9 * 900))
    with pytest.raises(RequestError, match="50 frames, of which 10 have 9,000 pixels; at most 8,100"):
        small.process_video(data.getvalue())


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("form", ["GIF", "PNG", "WEBP", "TIFF"])
def test_damaged_animations_are_refused_and_never_crash(form, count):
    pictures = [Image.fromarray(np.random.randint(0, 256, (12, 20, 3), dtype=np.uint8)) for _ in range(5)]
    data = io.BytesIO()
    pictures[0].save(data, form, save_all=True, append_images=pictures[1:], duration=100)
    whole = data.getvalue()
    processor = ImageProcessor(replace(PROCESSOR.cfg, max_pixels=100_000))
    random = np.random.default_rng(0)
    refused = 0
    for attempt in range(count(full=3000, reduced=80)):
        damaged = bytearray(whole)
        if attempt % 2:
            damaged = damaged[: random.integers(0, len(damaged))]
        else:
            for at in random.integers(0, len(damaged) if attempt % 4 else 200, 8):
                damaged[at] = random.integers(0, 256)
        try:
            for chunk in processor.process_video(bytes(damaged)):
                assert len(chunk.patches) == math.prod(chunk.grid)
        except RequestError:
            refused += 1
    assert refused > 0


def test_what_is_no_video_is_refused():
    for arguments, words in (
        ({"fps": None}, "exactly one of fps"),
        ({"fps": 8, "timestamps": [0, 1]}, "exactly one of fps"),
        ({"fps": 0}, "fps=0 must be a finite number above 0"),
        ({"fps": float("nan")}, "fps=nan"),
        ({"timestamps": [0.0]}, "1 timestamps were given for 2 frames"),
        ({"timestamps": [1.0, 1.0]}, r"timestamps\[1\]=1.0"),
        ({"timestamps": [-1.0, 1.0]}, r"timestamps\[0\]=-1.0"),
        ({"timestamps": [0.0, float("inf")]}, r"timestamps\[1\]=inf"),
    ):
        with pytest.raises(RequestError, match=words):
            PROCESSOR.process_video(frames(2), **arguments)
    with pytest.raises(RequestError, match="no frames"):
        PROCESSOR.process_video([], fps=8)
    with pytest.raises(RequestError, match=r"frame at 00:00:00.500 is 21 x 12 pixels, the first one 20 x 12"):
        PROCESSOR.process_video([*frames(4), *frames(1, 21)], fps=8)
    with pytest.raises(RequestError, match="neither fps nor timestamps"):
        PROCESSOR.process_video(b"GIF89a", fps=8)
    few = ImageProcessor(replace(PROCESSOR.cfg, max_frames=5))
    assert len(few.process_video(frames(5), fps=8)) == 2
    with pytest.raises(RequestError, match=r"more than 5 frames at 8 a second \(00:00:00.625 is reached\)"):
        few.process_video(frames(6), fps=8)
