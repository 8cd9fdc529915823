"""Images and videos to patches; needs the extra `vision` (pillow) once a picture is processed, not to import or plan."""

from perilune.data.image.processor import ImageProcessor, ProcessedImage, VideoChunk
from perilune.data.image.resize import ImageProcessorConfig, ResizePlan, resize_plan

__all__ = ["ImageProcessor", "ImageProcessorConfig", "ProcessedImage", "ResizePlan", "VideoChunk", "resize_plan"]
