"""Small random models for the model tests: nothing at its initial value, so that every parameter matters."""

import torch

from perilune.model import Transformer, init_weights


def random_model(cfg, seed=0, dtype=torch.float64):
    model = init_weights(Transformer(cfg), seed)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith("query"):
                p.normal_(0, 0.3, generator=generator)
            elif p.dim() == 1 and not name.endswith(("dt_bias",)):
                p.add_(torch.empty(p.shape).normal_(0, 0.1, generator=generator))
            elif p.dim() > 1 and "conv" not in name:
                p.mul_(4.0)
        for layer in model.moe_layers():
            layer.router.bias.normal_(0, 0.1, generator=generator)
    model.compute_dtype = dtype
    return model.to(dtype).eval()


def random_ids(cfg, batch, tokens, seed=0):
    return torch.randint(0, cfg.vocab_size, (batch, tokens), generator=torch.Generator().manual_seed(seed))
