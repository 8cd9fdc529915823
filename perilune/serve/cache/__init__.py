"""Prefix cache for models that mix recurrent and attention layers: pure bookkeeping, no tensors."""

from perilune.serve.cache.geometry import CacheGeometry, cache_geometry
from perilune.serve.cache.hashing import ImageKey, RootKey, TokenChain
from perilune.serve.cache.known import KnownPrompts
from perilune.serve.cache.plans import Admission, Chunk, CopyPage, ExportState, RestoreState, ZeroState
from perilune.serve.cache.prefix_cache import HybridCache
from perilune.serve.cache.retention import Retention

__all__ = [
    "Admission",
    "CacheGeometry",
    "Chunk",
    "CopyPage",
    "ExportState",
    "HybridCache",
    "ImageKey",
    "KnownPrompts",
    "RestoreState",
    "Retention",
    "RootKey",
    "TokenChain",
    "ZeroState",
    "cache_geometry",
]
