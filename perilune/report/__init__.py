"""Reports about runs, made from their folders alone: one self-contained page, and images for documents."""

from perilune.report.build import build, expand, images

__all__ = ["build", "expand", "images"]
