"""Multi-head latent attention: expanded for training and prefill, absorbed for decode, and the logits' maximum."""

from perilune.ops.mla.attend import attend
from perilune.ops.mla.decode import attend_cached
from perilune.ops.mla.latent import attend_latent
from perilune.ops.mla.max_logit import max_logit

__all__ = ["attend", "attend_cached", "attend_latent", "max_logit"]
