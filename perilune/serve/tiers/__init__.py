"""Memory behind the page pool: what it evicts goes to the host's memory, then to disk, and comes back for whoever asks."""

from perilune.serve.tiers.disk import DiskTier
from perilune.serve.tiers.host import HostTier
from perilune.serve.tiers.tiers import PageAccess, Tiers

__all__ = ["DiskTier", "HostTier", "PageAccess", "Tiers"]
