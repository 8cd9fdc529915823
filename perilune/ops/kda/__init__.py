"""Kimi Delta Attention and, with one decay a head, Gated DeltaNet: reference, chunked, native."""

from perilune.ops.kda.api import chunk_kda, fused_recurrent_kda, select
from perilune.ops.kda.decode import kda_decode_step
from perilune.ops.kda.gate import fused_kda_gate
from perilune.ops.kda.reference import recurrent_kda_reference
from perilune.ops.kda.states import Planned, chunk_kda_states, packed_kda_states, planned_kda_states

__all__ = [
    "Planned",
    "chunk_kda",
    "chunk_kda_states",
    "fused_kda_gate",
    "fused_recurrent_kda",
    "kda_decode_step",
    "packed_kda_states",
    "planned_kda_states",
    "recurrent_kda_reference",
    "select",
]
