"""Attention residuals: softmax attention over depth (report §2.2, Eq. 8-10)."""

from perilune.ops.attnres.mixing import mix, mix_weights, select
from perilune.ops.attnres.stream_read import read
from perilune.ops.attnres.two_phase import PartialMix, merge, phase_one, read_rest, sites_at_once

__all__ = ["PartialMix", "merge", "mix", "mix_weights", "phase_one", "read", "read_rest", "select", "sites_at_once"]
