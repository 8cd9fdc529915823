"""Pixels of processed images against values worked out by hand, for every kind of picture that a user may send."""

from __future__ import annotations

import io
import math
import struct
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from perilune.data.image import ImageProcessor, ImageProcessorConfig
from perilune.data.image.pixels import chessboard, composite
from perilune.errors import RequestError

Image = pytest.importorskip("PIL.Image", reason="the extra `vision` is not installed")

PROCESSOR = ImageProcessor()


def stored(image, form="PNG", **options) -> bytes:
    data = io.BytesIO()
    image.save(data, form, **options)
    return data.getvalue()


def colours(found) -> np.ndarray:
    """Undo patches and normalisation: uint8-valued `[H, W, 3]` of the padded image."""
    _, rows, columns = found.grid
    p = found.patches.shape[-1]
    x = found.patches.view(rows, columns, 3, p, p).permute(0, 3, 1, 4, 2).reshape(rows * p, columns * p, 3)
    return np.rint((x.double().numpy() * 0.5 + 0.5) * 255).astype(int)


def noise(width, height, channels=3):
    return np.random.randint(0, 256, (height, width, channels), dtype=np.uint8)


def test_patch_values_are_those_of_the_pixels():
    pixels = noise(40, 30)
    found = PROCESSOR.process(pixels)
    assert found.grid == (1, 4, 4) and found.tokens == 4 and found.original_size == (40, 30)
    assert found.patches.shape == (16, 3, 14, 14) and found.patches.dtype == torch.float32
    for row, column, channel, y, x in ((0, 0, 0, 0, 0), (1, 2, 1, 3, 9), (2, 2, 2, 1, 11), (0, 1, 2, 13, 13)):
        value = (pixels[row * 14 + y, column * 14 + x, channel] / 255 - 0.5) / 0.5
        assert float(found.patches[row * 4 + column, channel, y, x]) == pytest.approx(value, abs=1e-6)
    whole = colours(found)
    assert np.array_equal(whole[:30, :40], pixels)
    assert not whole[30:].any() and not whole[:, 40:].any(), "padding is black"
    assert float(found.patches[-1, 0, -1, -1]) == -1.0


def test_resize_is_bicubic_and_keeps_the_upload_size():
    processor = ImageProcessor(ImageProcessorConfig(in_patch_limit=16))
    picture = Image.fromarray(noise(150, 100))
    found = processor.process(picture)
    assert found.original_size == (150, 100)
    scale = math.sqrt(16 / (10 * 7))
    size = (int(150 * scale), int(100 * scale))
    truth = np.asarray(picture.resize(size, Image.Resampling.BICUBIC))
    assert np.array_equal(colours(found)[: size[1], : size[0]], truth)


def test_transparent_pixels_show_the_chessboard_at_the_size_the_model_sees():
    """Article trap 22: another background gives other logits. White at the top left, squares of 8 pixels, after the resize."""
    processor = ImageProcessor(ImageProcessorConfig(in_patch_limit=16))
    found = processor.process(Image.new("RGBA", (112, 112), (9, 9, 9, 0)))
    whole = colours(found)
    assert whole.shape == (56, 56, 3)
    for y in range(56):
        for x in range(56):
            assert whole[y, x, 0] == (255 if (y // 8 + x // 8) % 2 == 0 else 180)


def test_alpha_goes_through_the_resize_and_colours_under_it_do_not_leak():
    """A red square on transparent green: no green at the edge, and the edge blends with the board."""
    pixels = np.zeros((56, 56, 4), np.uint8)
    pixels[:, :, 1] = 255
    pixels[:, 28:] = (255, 0, 0, 255)
    processor = ImageProcessor(ImageProcessorConfig(in_patch_limit=4))
    whole = colours(processor.process(pixels))
    assert whole.shape == (28, 28, 3)
    assert np.all(whole[:, 18:] == (255, 0, 0))
    left = whole[:, :10]
    assert np.all(left[..., 0] == chessboard(10, 28)), "transparent green is the board"
    assert np.all(whole[..., 1] <= np.maximum(whole[..., 2], 0) + 1), "no pixel is greener than its share of the board"


@given(rgb=st.integers(0, 255), alpha=st.integers(0, 255))
def test_composite_is_the_exact_floor(rgb, alpha):
    pixels = np.full((8, 16, 4), rgb, np.uint8)
    pixels[..., 3] = alpha
    found = composite(pixels)
    for x, board in ((0, 255), (8, 180)):
        assert found[0, x, 0] == (rgb * alpha + board * (255 - alpha)) // 255
    pixels[0, 0, 3] = 0  # one clear pixel, so that the others go through the blend even where they are opaque
    found = composite(pixels)
    assert found[0, 0, 0] == 255 and found[1, 8, 0] == (rgb * alpha + 180 * (255 - alpha)) // 255


def test_every_pixel_mode_becomes_three_channels():
    grey = noise(20, 12, 1)[..., 0]
    truth = colours(PROCESSOR.process(np.repeat(grey[..., None], 3, axis=2)))
    for same in (grey, grey[..., None], Image.fromarray(grey), stored(Image.fromarray(grey)),
                 Image.fromarray(grey.astype(np.uint16) * 256 + 17), stored(Image.fromarray(grey.astype(np.uint16) * 256 + 17))):  # fmt: skip
        assert np.array_equal(colours(PROCESSOR.process(same)), truth)
    bits = Image.fromarray(grey).convert("1")
    assert set(np.unique(colours(PROCESSOR.process(bits))[:12, :20])) <= {0, 255}
    rgb = Image.fromarray(noise(20, 12))
    truth = colours(PROCESSOR.process(rgb))
    assert np.array_equal(colours(PROCESSOR.process(rgb.convert("RGBA"))), truth)
    assert np.abs(colours(PROCESSOR.process(rgb.convert("CMYK"))) - truth).max() <= 1
    for mode in ("YCbCr", "HSV"):
        assert np.abs(colours(PROCESSOR.process(rgb.convert(mode))) - truth).max() <= 12
    cmyk = stored(Image.new("CMYK", (20, 12), (0, 255, 255, 0)), "JPEG", quality=95)
    assert np.abs(colours(PROCESSOR.process(cmyk))[:12, :20] - (255, 0, 0)).max() <= 6


def test_transparency_of_every_kind_shows_the_board():
    board = chessboard(20, 12)[..., None]
    grey_alpha = Image.new("LA", (20, 12), (0, 0))
    palette = Image.new("P", (20, 12), 1)
    palette.putpalette([0, 0, 0, 255, 0, 0])
    pictures = {
        "LA": grey_alpha,
        "LA file": stored(grey_alpha),
        "PA": Image.new("PA", (20, 12), (1, 0)),
        "palette in PNG": stored(palette, transparency=1),
        "palette in GIF": stored(palette, "GIF", transparency=1),
        "alphas in a palette": stored(palette, transparency=bytes([255, 0])),
        "one colour in RGB": stored(Image.new("RGB", (20, 12), (1, 2, 3)), transparency=(1, 2, 3)),
        "one grey": stored(Image.new("L", (20, 12), 9), transparency=9),
        "WebP": stored(Image.new("RGBA", (20, 12), (0, 0, 0, 0)), "WEBP", lossless=True, exact=True),
    }
    for name, picture in pictures.items():
        assert np.all(colours(PROCESSOR.process(picture))[:12, :20] == board), name
    opaque = stored(palette, transparency=0)
    assert np.all(colours(PROCESSOR.process(opaque))[:12, :20] == (255, 0, 0))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_photos_are_turned_upright(orientation):
    upright = noise(20, 12)
    undo = {1: lambda a: a, 2: lambda a: a[:, ::-1], 3: lambda a: a[::-1, ::-1], 4: lambda a: a[::-1],
            5: lambda a: a.swapaxes(0, 1), 6: lambda a: np.rot90(a), 7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
            8: lambda a: np.rot90(a, -1)}[orientation]  # fmt: skip
    exif = Image.Exif()
    exif[0x0112] = orientation
    found = PROCESSOR.process(stored(Image.fromarray(np.ascontiguousarray(undo(upright))), exif=exif.tobytes()))
    assert found.original_size == (20, 12)
    assert np.array_equal(colours(found)[:12, :20], upright)


def test_files_bytes_paths_and_arrays_give_the_same(tmp_path):
    pixels = noise(33, 21)
    picture = Image.fromarray(pixels)
    path = tmp_path / "picture.dat"
    path.write_bytes(stored(picture, "BMP"))
    truth = PROCESSOR.process(picture).patches
    for same in (pixels, np.asfortranarray(pixels), stored(picture), stored(picture, "TIFF"), stored(picture, "PPM"), path,
                 stored(picture, "WEBP", lossless=True), picture):  # fmt: skip
        assert torch.equal(PROCESSOR.process(same).patches, truth)


def test_the_first_frame_of_an_animation_is_taken():
    frames = [Image.new("RGB", (20, 12), (40 * i, 0, 0)) for i in range(3)]
    for form in ("GIF", "WEBP", "PNG"):
        data = stored(
            frames[0], form, save_all=True, append_images=frames[1:], **({"lossless": True} if form == "WEBP" else {})
        )
        assert np.all(colours(PROCESSOR.process(data))[:12, :20] == 0), form


def test_one_pixel_and_thin_images():
    assert PROCESSOR.process(np.full((1, 1), 200, np.uint8)).tokens == 1
    found = PROCESSOR.process(np.full((3, 9000), 255, np.uint8))
    assert found.grid == (1, 2, 512) and found.original_size == (9000, 3)


def _png_claiming(width, height) -> bytes:
    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_bombs_are_refused_from_their_header():
    with pytest.raises(RequestError, match=r"10000 x 9000 = 90,000,000 pixels; at most 89,478,485.*raise max_pixels"):
        PROCESSOR.process(_png_claiming(10_000, 9_000))
    with pytest.raises(RequestError, match="claims more pixels than the 89,478,485"):
        PROCESSOR.process(_png_claiming(60_000, 60_000))
    small = ImageProcessor(ImageProcessorConfig(max_pixels=100))
    for picture in (np.zeros((11, 10), np.uint8), Image.new("L", (10, 11)), stored(Image.new("L", (10, 11)))):
        with pytest.raises(RequestError, match="= 110 pixels; at most 100"):
            small.process(picture)
    assert small.process(np.zeros((10, 10), np.uint8)).tokens == 1


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF"])
def test_damaged_files_are_refused_and_never_crash(form, count):
    """Cut at every length and with bytes changed at random: an error of ours, or a picture of the right size."""
    whole = stored(Image.fromarray(noise(40, 30)), form)
    random = np.random.default_rng(0)
    refused = 0
    for attempt in range(count(full=3000, reduced=60)):
        data = bytearray(whole)
        if attempt % 2:
            data = data[: random.integers(0, len(data))]
        else:
            for at in random.integers(0, len(data), 8):
                data[at] = random.integers(0, 256)
        try:
            found = ImageProcessor(ImageProcessorConfig(max_pixels=100_000)).process(bytes(data))
        except RequestError as error:
            refused += 1
            assert "image" in str(error)
        else:
            assert len(found.patches) == math.prod(found.grid)
    assert refused > 0


@pytest.mark.soak
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_damaged_exif_does_not_cost_the_picture(form, count):
    exif = Image.Exif()
    exif[0x0112], exif[0x010E], exif[0x011A] = 6, "words", 72.0
    whole = exif.tobytes()
    random = np.random.default_rng(0)
    sizes = set()
    for _ in range(count(full=2000, reduced=100)):
        damaged = bytearray(whole)
        for at in random.integers(6, len(damaged), random.integers(1, 6)):
            damaged[at] = random.integers(0, 256)
        found = PROCESSOR.process(stored(Image.new("RGB", (20, 12)), form, exif=bytes(damaged)))
        sizes.add(found.original_size)
    assert sizes == {(20, 12), (12, 20)}


def test_what_is_no_image_is_refused_with_what_to_give(tmp_path):
    with pytest.raises(RequestError, match="empty.*0 bytes"):
        PROCESSOR.process(b"")
    with pytest.raises(RequestError, match=r"no image that can be read.*allowed formats: .*JPEG.*PNG.*WEBP"):
        PROCESSOR.process(b"hello")
    with pytest.raises(RequestError, match=r"no image that can be read"):
        PROCESSOR.process(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n")  # would start an interpreter
    with pytest.raises(RequestError, match="absent.png cannot be read.*check the path"):
        PROCESSOR.process(tmp_path / "absent.png")
    with pytest.raises(RequestError, match="cannot be read"):
        PROCESSOR.process(tmp_path)
    with pytest.raises(RequestError, match=r"a str is no image.*wrap a path in pathlib.Path"):
        PROCESSOR.process("picture.png")
    with pytest.raises(RequestError, match="a NoneType is no image"):
        PROCESSOR.process(None)
    with pytest.raises(RequestError, match=r"\[4, 4, 3\] and type float64.*uint8"):
        PROCESSOR.process(np.zeros((4, 4, 3)))
    with pytest.raises(RequestError, match=r"\[3, 4, 5\]"):
        PROCESSOR.process(np.zeros((3, 4, 5), np.uint8))
    for empty in (np.zeros((0, 5), np.uint8), np.zeros((5, 0, 3), np.uint8), Image.new("RGB", (0, 5))):
        with pytest.raises(RequestError, match="both sides must be at least 1"):
            PROCESSOR.process(empty)
    for mode in ("I", "F"):
        with pytest.raises(RequestError, match=f"mode {mode}.*convert it to 8 bits"):
            PROCESSOR.process(Image.new(mode, (4, 4)))


def test_the_given_picture_is_left_as_it_was():
    picture = Image.new("P", (20, 12), 1)
    before = (picture.mode, picture.size, picture.tobytes())
    PROCESSOR.process(picture)
    assert (picture.mode, picture.size, picture.tobytes()) == before


def test_without_pillow_planning_works_and_processing_says_what_to_install():
    code = """
import sys
sys.modules["PIL"] = None
from perilune.data.image import ImageProcessor, ImageProcessorConfig, resize_plan
from perilune.errors import RequestError
assert resize_plan(100, 100, ImageProcessorConfig()).tokens == 16
try:
    ImageProcessor().process(b"x")
except RequestError as error:
    assert "pip install perilune[vision]" in str(error)
else:
    raise SystemExit("no error")
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2], timeout=120)


def test_other_sizes_of_patch_and_merge():
    cfg = replace(
        PROCESSOR.cfg,
        patch_size=4,
        merge=1,
        patch_limit_on_one_side=10,
        image_mean=(0.0, 0.5, 1.0),
        image_std=(1.0, 0.5, 0.25),
    )
    found = ImageProcessor(cfg).process(np.full((9, 6, 3), 255, np.uint8))
    assert found.grid == (1, 3, 2) and found.tokens == 6 and found.patches.shape == (6, 3, 4, 4)
    assert found.patches[0, :, 0, 0].tolist() == [1.0, 1.0, 0.0]
    assert found.patches[-1, :, -1, -1].tolist() == [0.0, -1.0, -4.0]
