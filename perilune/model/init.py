"""Initial weights (architecture §3.3, §5.6).

Matrices N(0, init_range²); norms 1; A_log 0 for every head (report Eq. 5); the decay bias is the inverse softplus of
dt ~ exp U(log 1e-3, log 1e-1), at least 1e-4, as in Kimi Linear; short convolutions uniform in ±W^-1/2; AttnRes queries 0,
so that every read starts as the mean of its sources (the report does not say; zero is the AttnRes paper's choice).

The vision tower starts by the same rule, its table of positions as a matrix. The scale of the projector's last norm starts
at init_range: an image's rows then enter the text model as large as embedding rows, not 1/init_range times larger (ours).
"""

from __future__ import annotations

import math

import torch

from perilune.model.transformer import Transformer


def _decay_bias(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    low, high = math.log(1e-3), math.log(1e-1)
    uniform = torch.rand(shape, generator=generator, device=generator.device)
    dt = torch.exp(low + (high - low) * uniform).clamp(min=1e-4)
    return dt + torch.log(-torch.expm1(-dt))


@torch.no_grad()
def init_weights(model: Transformer, seed: int = 0, *, device: torch.device | str = "cpu") -> Transformer:
    """Fill the parameters in order of their names from one generator, so a weight depends on the seed and the config only.

    Args:
        model: a model on the CPU or a GPU.
        seed: of the generator.
        device: where values are drawn. A GPU draws other values than a CPU, and much faster.

    Returns:
        The same model.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def empty(shape: torch.Size) -> torch.Tensor:
        return torch.empty(shape, device=generator.device)

    for name, parameter in sorted(model.named_parameters()):
        leaf = name.rsplit(".", 1)[-1]
        if leaf == "dt_bias":
            value = _decay_bias(parameter.shape, generator)
        elif leaf in ("A_log", "query"):
            value = empty(parameter.shape).zero_()
        elif leaf == "qkv_conv":
            bound = parameter.shape[-1] ** -0.5
            value = empty(parameter.shape).uniform_(-bound, bound, generator=generator)
        elif name == "mm_projector.post_norm.weight":
            value = empty(parameter.shape).fill_(model.cfg.init_range)
        elif parameter.dim() == 1:
            value = empty(parameter.shape).fill_(1.0)
        else:
            value = empty(parameter.shape).normal_(0.0, model.cfg.init_range, generator=generator)
        parameter.copy_(value)
    return model
