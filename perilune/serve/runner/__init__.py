"""The half of the engine that touches tensors: pages of the pool, and forward passes over what lies in them."""

from perilune.serve.runner.pages import PagePool, pool_geometry
from perilune.serve.runner.runner import ModelRunner

__all__ = ["ModelRunner", "PagePool", "pool_geometry"]
