"""The text model: embedding, decoder layers joined by a depth stream, output read, final norm, untied head.

    P0 = E[ids];  for each layer: read → norm → mixer → write, read → norm → feed-forward → write
    h = RMSNorm(read_out(stream));  logits = h W_headᵀ

`model(ids)` trains, `model(ids, state)` prefills (any split into chunks) or decodes: the same code serves all three.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from perilune.config import ModelConfig
from perilune.errors import RequestError
from perilune.model.block import Block
from perilune.model.latent_moe import LatentMoE
from perilune.model.linear import Linear
from perilune.model.norm import RMSNorm
from perilune.model.residual import STREAMS, DepthRead
from perilune.model.state import ModelState
from perilune.ops.cross_entropy import linear_cross_entropy
from perilune.ops.segments import Segments


class ModelOutput(NamedTuple):
    """What a forward pass returns.

    Attributes:
        hidden_BTD: after the final norm; with logits="last" only the last position, `[B, 1, D]`.
        logits_BTZ: scores over the vocabulary for the same positions, or None.
        state: the state that was given, advanced by T tokens.
    """

    hidden_BTD: Tensor
    logits_BTZ: Tensor | None
    state: ModelState | None


class LossOutput(NamedTuple):
    """Summed cross-entropy in nats over the counted targets, and how many there were."""

    nats: Tensor
    tokens: int


class Transformer(nn.Module):
    """A K3-class text model.

    Attributes:
        compute_dtype: dtype in which activations flow; parameters stay fp32. Set from outside.
    """

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.compute_dtype: torch.dtype = torch.float32
        self.embed = nn.Embedding(cfg.vocab_size, cfg.hidden_size)
        self.layers = nn.ModuleList(Block(cfg, index) for index in range(cfg.num_layers))
        if cfg.residual != "plain":
            self.output_read = DepthRead(cfg.hidden_size, cfg.norm_eps)
        self.norm = RMSNorm(cfg.hidden_size, cfg.norm_eps)
        self.lm_head = Linear(cfg.hidden_size, cfg.vocab_size)

    @property
    def device(self) -> torch.device:
        """Where the parameters live."""
        return self.embed.weight.device

    def new_state(self, batch: int = 1, capacity: int = 64) -> ModelState:
        """Return the state before the first token for `batch` sequences; caches grow past `capacity` tokens by themselves."""
        return ModelState.zeros(self.cfg, batch, capacity, self.device, self.compute_dtype)

    def moe_layers(self) -> list[LatentMoE]:
        """The layers' expert modules, in order."""
        return [block.ffn for block in self.layers if isinstance(block.ffn, LatentMoE)]

    def hidden(self, ids_BT: Tensor, state: ModelState | None = None, segments: Segments | None = None) -> Tensor:
        """Run the layers and the output read; returns `[B, T, D]` before the final norm.

        Args:
            ids_BT: int64 token ids.
            state: continues each row after `state.lengths` tokens; updated in place.
            segments: document boundaries inside the rows; not together with a state.

        Raises:
            RequestError: the batch of the state differs from that of the ids, or both state and segments are given.
        """
        batch, tokens = ids_BT.shape
        past = None
        if state is not None:
            if segments is not None:
                raise RequestError("packed documents cannot continue a state: give segments or state, not both")
            if state.batch != batch:
                raise RequestError(
                    f"the state holds {state.batch} sequences but {batch} rows of ids were given; use state.select(rows)"
                )
            past = state.lengths
            state.reserve(max(past) + tokens)
        stream = STREAMS[self.cfg.residual](self.embed(ids_BT).to(self.compute_dtype), self.cfg)
        for index, block in enumerate(self.layers):
            block(stream, None if state is None else state.layers[index], segments, past)
        if state is not None:
            state.advance(tokens)
        return stream.sources()[0] if self.cfg.residual == "plain" else self.output_read(stream.sources())

    def forward(
        self, ids_BT: Tensor, state: ModelState | None = None, segments: Segments | None = None, *, logits: str = "all"
    ) -> ModelOutput:
        """Run the model.

        Args:
            ids_BT: int64 `[B, T]`.
            state: see `hidden`.
            segments: see `hidden`.
            logits: "all" positions, only the "last" one, or "none".
        """
        h = self.hidden(ids_BT, state, segments)
        h = self.norm(h[:, -1:] if logits == "last" else h)
        return ModelOutput(h, None if logits == "none" else self.lm_head(h), state)

    def loss(
        self, ids_BT: Tensor, targets_BT: Tensor, segments: Segments | None = None, state: ModelState | None = None
    ) -> LossOutput:
        """Summed cross-entropy of `targets_BT` (−100 = not counted); the logits are never held for all tokens at once."""
        h = self.norm(self.hidden(ids_BT, state, segments))
        nats = linear_cross_entropy(h.flatten(0, 1), self.lm_head.weight, targets_BT.flatten(), reduction="sum")
        return LossOutput(nats, int((targets_BT != -100).sum()))

    def token_nats(
        self, ids_BT: Tensor, targets_BT: Tensor, state: ModelState | None = None, segments: Segments | None = None
    ) -> Tensor:
        """Cross-entropy of each target in nats, `[B, T]`, 0 where the target is −100."""
        h = self.norm(self.hidden(ids_BT, state, segments))
        nats = linear_cross_entropy(h.flatten(0, 1), self.lm_head.weight, targets_BT.flatten(), reduction="none")
        return nats.view_as(targets_BT)
