"""The published form of quantised experts: `….experts.{e}.w1.weight_packed` and `.weight_scale` (architecture §2.5, §9).

`packed_tensors` turns a model into the tensors of a K3 release; `unpacked` lets `model.hf.load_published` read one. Which
tensors are quantised is decided by the names that are there, not by the patterns of a config, which miss some.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from perilune.errors import CheckpointError, ConfigError
from perilune.model.hf import to_published
from perilune.model.transformer import Transformer
from perilune.ops.mx import dequantize_mxfp4, quantize_mxfp4

_PLAIN, _CODES, _SCALE = ".weight", ".weight_packed", ".weight_scale"


def packed_tensors(model: Transformer, rule: str = "floor") -> Iterator[tuple[str, Tensor]]:
    """Yield `(published name, tensor)` of every text tensor, routed experts as MXFP4 codes and scales, others as views.

    The order is that of `shapes.text_tensors(cfg, packed_experts=True)`. Decoded, the experts are what `apply_qat` with this
    rule computes with.

    Raises:
        ConfigError: the model is of no published family, or an expert cannot be packed or is not finite.
    """
    for name, tensor in to_published(model):
        if ".experts." not in name:
            yield name, tensor
            continue
        if not tensor.isfinite().all():
            raise ConfigError(f"{name} holds NaN or infinity, which MXFP4 cannot store; export an earlier checkpoint")
        codes, scale = quantize_mxfp4(tensor, rule)
        base = name.removesuffix(_PLAIN)
        yield base + _CODES, codes
        yield base + _SCALE, scale


def unpacked(
    tensors: Mapping[str, Tensor] | Callable[[str], Tensor], dtype: torch.dtype = torch.bfloat16
) -> Callable[[str], Tensor]:
    """Return a function that fetches a tensor by its plain published name, decoding it where the source has it packed.

    Args:
        tensors: a mapping, or a function that raises KeyError for a name it does not have.
        dtype: of decoded weights; bfloat16 holds every MXFP4 value.

    Raises (when called):
        KeyError: the source has the tensor in neither form.
        CheckpointError: codes and scales do not fit, a scale is missing, or a scale is NaN.
    """
    fetch = tensors if callable(tensors) else tensors.__getitem__

    def get(name: str) -> Tensor:
        if ".experts." not in name:
            return fetch(name)
        base = name.removesuffix(_PLAIN)
        try:
            codes = fetch(base + _CODES)
        except KeyError:
            return fetch(name)
        try:
            scale = fetch(base + _SCALE)
        except KeyError:
            raise CheckpointError(f"the checkpoint has {base + _CODES} but not {base + _SCALE}") from None
        if scale.dim() == 4:  # some derivatives keep the block's unit dimensions: [O, 1, I/32, 1]
            scale = scale[:, 0, :, 0]
        try:
            return dequantize_mxfp4(codes, scale, dtype, strict=True)
        except CheckpointError as error:
            raise CheckpointError(f"{base}: {error}") from None

    return get
