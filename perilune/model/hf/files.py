"""Which tensors go into which file of a published checkpoint, and filling a model from one (architecture §2.1).

One file for each decoder layer, then one with embedding, final norm, head and output read, then the projector, then the
vision tower: the release's 96 files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from perilune.model.hf.names import own_shapes, places
from perilune.model.hf.shard_file import Planned, aligned
from perilune.model.hf.source import Source
from perilune.model.transformer import Transformer
from perilune.shapes.tensors import TensorSpec, checkpoint_tensors

_LAYER = re.compile(r"\blayers\.(\d+)\.")


@dataclass(frozen=True, slots=True)
class PlannedFile:
    """A file to be written."""

    name: str
    tensors: list[Planned]

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


def _group(spec: TensorSpec, layers: int) -> int:
    if spec.name.startswith("mm_projector."):
        return layers + 1
    if spec.name.startswith("vision_tower."):
        return layers + 2
    layer = _LAYER.search(spec.name)
    return int(layer[1]) if layer else layers


def _codes(source: Source, base: str, packed: TensorSpec, scale: TensorSpec) -> tuple[Planned, Planned]:
    """The two tensors of a packed expert matrix: computed once, when the codes are written; the scales follow at once."""
    kept: list[Tensor] = []
    shape = (packed.shape[0], packed.shape[1] * 2)

    def codes() -> Iterator[Tensor]:
        packed_codes, scales = source.codes(base, shape)
        kept[:] = [scales]
        yield packed_codes

    def scales() -> Iterator[Tensor]:
        yield kept.pop()

    return Planned(packed.name, packed.dtype, packed.shape, codes), Planned(
        scale.name, scale.dtype, scale.shape, scales
    )


def published_files(source: Source, experts: str) -> list[PlannedFile]:
    """The files of a published checkpoint of `source`, with experts as mxfp4 or bf16.

    Raises:
        ConfigError: an expert's width does not fit MXFP4's blocks.
    """
    cfg = source.published.model
    groups: dict[int, list[Planned]] = {}
    specs = checkpoint_tensors(cfg, packed_experts=experts == "mxfp4")
    for spec in specs:
        tensors = groups.setdefault(_group(spec, cfg.num_layers), [])
        if spec.name.endswith(".weight_packed"):
            tensors += _codes(source, spec.name.removesuffix(".weight_packed"), spec, next(specs))
        else:
            tensors.append(Planned(spec.name, spec.dtype, spec.shape, lambda name=spec.name: source.pieces(name)))
    return [
        PlannedFile(f"model-{number:05d}-of-{len(groups):05d}.safetensors", aligned(groups[group]))
        for number, group in enumerate(sorted(groups), start=1)
    ]


@torch.no_grad()
def fill(model: Transformer, source: Source) -> Transformer:
    """Copy a source's weights into `model`, a piece at a time; returns the model."""
    own = model.state_dict()
    for place in places(model.cfg, own_shapes(model.cfg)):
        flat, at = own[place.ours].view(-1), place.start
        for piece in source.pieces(place.name):
            flat[at : at + piece.numel()].copy_(piece.reshape(-1))
            at += piece.numel()
        assert at == place.start + place.count, f"{place.name}: {at - place.start} elements instead of {place.count}"
    return model
