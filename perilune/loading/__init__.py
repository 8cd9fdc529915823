"""From folders to objects: trained runs, published checkpoints, and converting one into the other."""

from perilune.loading.conversion import Converted, convert
from perilune.loading.published import load_published
from perilune.loading.run import LoadedRun, load_run

__all__ = ["Converted", "LoadedRun", "convert", "load_published", "load_run"]
