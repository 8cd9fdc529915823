"""From whatever holds an image to a pillow image in L, RGB or RGBA, or to an error that says what is wrong with it.

Files are recognised by content among a short list of formats without external programs. The size in the header is checked
before any pixel is decoded. Transparency of every kind (alpha, palette entries, one transparent colour) becomes RGBA.
A photo is turned upright by its EXIF orientation, as every viewer shows it, and its size is the turned one; what the
published processor does with the tag is not known to us. EXIF data that cannot be read leave it as stored.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from perilune.errors import RequestError

if TYPE_CHECKING:
    from PIL.Image import Image

ImageInput: TypeAlias = "Image | bytes | Path | np.ndarray"

FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "MPO", "PNG", "PPM", "TIFF", "WEBP")
DEFAULT_FRAME_MS = 100.0
"""Time of a frame without a usable duration: what browsers give it."""


def _pillow() -> Any:
    try:
        from PIL import Image
    except ImportError:
        raise RequestError("image input needs pillow, which is not installed: pip install perilune[vision]") from None
    return Image


def check_size(width: int, height: int, max_pixels: int, name: str) -> None:
    """Refuse an image that is empty or too large to decode.

    Raises:
        RequestError: with the size, the limit and what to do.
    """
    if width < 1 or height < 1:
        raise RequestError(f"{name} is {width} x {height} pixels; both sides must be at least 1")
    if width * height > max_pixels:
        raise RequestError(
            f"{name} is {width} x {height} = {width * height:,} pixels; at most {max_pixels:,} are decoded: "
            "make it smaller, or raise max_pixels"
        )


def _open(source: bytes | Path, max_pixels: int) -> tuple[Any, str]:
    """Open a file without decoding it; returns the image and its name for messages."""
    Image = _pillow()
    Image.init()
    name = f"the image of {len(source):,} bytes" if isinstance(source, bytes) else str(source)
    try:
        data = source if isinstance(source, bytes) else source.read_bytes()
    except OSError as error:
        raise RequestError(f"{name} cannot be read: {error.strerror or error}; check the path") from None
    if not data:
        raise RequestError(f"{name} is empty (0 bytes); send a whole image file")
    known = [form for form in FORMATS if form in Image.OPEN]
    try:
        image = Image.open(io.BytesIO(data), formats=known)
    except Image.DecompressionBombError:
        raise RequestError(
            f"{name} claims more pixels than the {max_pixels:,} that are decoded: make it smaller"
        ) from None
    except Exception as error:  # a decoder fed with hostile bytes raises anything
        raise RequestError(
            f"{name} is no image that can be read ({type(error).__name__}); allowed formats: {', '.join(known)}"
        ) from None
    check_size(*image.size, max_pixels, name)
    return image, name


def _decoded(image: Any, name: str) -> Any:
    """Decode the pixels of the current frame."""
    try:
        image.load()
    except Exception as error:
        raise RequestError(
            f"{name} is damaged or cut off ({type(error).__name__}: {error}); send the whole file"
        ) from None
    return image


def _upright(image: Any) -> Any:
    """Turn by the EXIF orientation; only that tag is read, for the rest may hold anything."""
    turns = _pillow().Transpose
    try:
        orientation = image.getexif().get(0x0112)
    except Exception:
        return image
    for number, turn in ((2, turns.FLIP_LEFT_RIGHT), (3, turns.ROTATE_180), (4, turns.FLIP_TOP_BOTTOM), (5, turns.TRANSPOSE),
                         (6, turns.ROTATE_270), (7, turns.TRANSVERSE), (8, turns.ROTATE_90)):  # fmt: skip
        if orientation == number:
            return image.transpose(turn)
    return image


def _plain(image: Any, name: str) -> Any:
    """A decoded image as L, RGB or RGBA."""
    Image = _pillow()
    mode = image.mode
    if mode in ("RGB", "L") and "transparency" not in image.info:
        return image
    if mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8))
    if mode in ("I", "F"):
        raise RequestError(
            f"{name} has {'32-bit integer' if mode == 'I' else 'floating point'} pixels (mode {mode}), whose range is not "
            "known; convert it to 8 bits a channel"
        )
    see_through = mode in ("RGBA", "LA", "La", "RGBa", "PA") or "transparency" in image.info
    try:
        if mode in ("La", "RGBa"):
            image = image.convert({"La": "LA", "RGBa": "RGBA"}[mode])
        return image.convert("RGBA" if see_through else "L" if mode == "1" else "RGB")
    except Exception as error:
        raise RequestError(
            f"{name} has mode {mode}, which cannot be converted to RGB ({error}); save it as RGB"
        ) from None


def _from_array(array: np.ndarray) -> Any:
    Image = _pillow()
    grey = array.ndim == 2 or (array.ndim == 3 and array.shape[2] == 1)
    if array.dtype != np.uint8 or not (grey or (array.ndim == 3 and array.shape[2] in (3, 4))):
        raise RequestError(
            f"an array of shape {list(array.shape)} and type {array.dtype} is no image; allowed: uint8 of shape [H, W], "
            "[H, W, 1], [H, W, 3] (RGB) or [H, W, 4] (RGBA), values 0 to 255"
        )
    if 0 in array.shape:
        raise RequestError(f"the image is {array.shape[1]} x {array.shape[0]} pixels; both sides must be at least 1")
    return Image.fromarray(np.ascontiguousarray(array[..., 0] if grey and array.ndim == 3 else array))


def load_image(source: ImageInput, max_pixels: int) -> Image:
    """Decode one image; of an animated file its first frame.

    Args:
        source: a pillow image (taken as it is, at its current frame), the bytes of a file, its path, or a uint8 array.
        max_pixels: largest size to decode.

    Raises:
        RequestError: it is no image, damaged, empty, too large, or of an unusable type.
    """
    Image = _pillow()
    if isinstance(source, np.ndarray):
        image, name = _from_array(source), "the array"
    elif isinstance(source, (bytes, Path)):
        image, name = _open(source, max_pixels)
    elif isinstance(source, Image.Image):
        image, name = source, "the image"
    else:
        hint = "; wrap a path in pathlib.Path" if isinstance(source, str) else ""
        raise RequestError(
            f"a {type(source).__name__} is no image; give a PIL image, bytes of a file, a pathlib.Path, or a uint8 array{hint}"
        )
    check_size(*image.size, max_pixels, name)
    return _plain(_upright(_decoded(image, name)), name)


def animation_frames(source: bytes | Path, max_pixels: int, max_video_pixels: int) -> Iterator[tuple[float, Image]]:
    """Frames of an animated GIF, WebP, PNG, AVIF or TIFF file as (seconds from the start, image), decoded one at a time.

    Raises:
        RequestError: as `load_image`; or all frames together have more than `max_video_pixels`.
    """
    image, name = _open(source, max_pixels)
    try:
        count = getattr(image, "n_frames", 1)  # looks through the whole file
    except Exception as error:
        raise RequestError(
            f"{name} is damaged or cut off ({type(error).__name__}: {error}); send the whole file"
        ) from None
    milliseconds, pixels = 0.0, 0
    for index in range(count):
        try:
            image.seek(index)
        except Exception as error:
            raise RequestError(f"{name} is damaged at frame {index} ({type(error).__name__}: {error})") from None
        check_size(*image.size, max_pixels, f"frame {index} of {name}")
        pixels += image.size[0] * image.size[1]
        if pixels > max_video_pixels:
            raise RequestError(
                f"{name} has {count} frames, of which {index + 1} have {pixels:,} pixels; at most {max_video_pixels:,} "
                "are decoded from one file: cut or shrink it, or raise max_video_pixels"
            )
        frame = _decoded(image, f"frame {index} of {name}").copy()
        yield milliseconds / 1000.0, _plain(frame, f"frame {index} of {name}")
        duration = image.info.get("duration")
        milliseconds += float(duration) if isinstance(duration, (int, float)) and duration > 0 else DEFAULT_FRAME_MS
