"""The model: embedding, decoder layers joined by a depth stream, output read, final norm, untied head; vision on request.

    P0 = E[ids], the rows of image tokens replaced by the projected rows of the vision tower
    for each layer: read → norm → mixer → write, read → norm → feed-forward → write
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
from perilune.model.vision import ImageBatch, ImageRows, Projector, VisionTower
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
    """Summed cross-entropy in nats over the counted targets.

    Attributes:
        nats: the sum.
        targets_BT: what was predicted, −100 = not counted.
    """

    nats: Tensor
    targets_BT: Tensor

    @property
    def tokens(self) -> int:
        """How many targets were counted; waits for a device that they lie on."""
        return int((self.targets_BT != -100).sum())


class Transformer(nn.Module):
    """A K3-class model; with `cfg.vision` it has the modules `vision_tower` and `mm_projector` and takes images.

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
        if cfg.vision is not None:
            self.vision_tower = VisionTower(cfg.vision)
            self.mm_projector = Projector(cfg.vision, cfg.hidden_size)

    def depth_reads(self) -> list[DepthRead]:
        """Every read of the depth stream in a forward pass, in order; none of a plain residual."""
        return [module for module in self.modules() if isinstance(module, DepthRead)]

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

    def image_rows(self, images: ImageBatch) -> Tensor:
        """Run the tower and the projector: one row for each image token, `[N, D]` in the compute dtype.

        Raises:
            RequestError: the model has no vision tower, or it cannot take these images.
        """
        self._require_vision()
        features_PD = self.vision_tower(images.patches.to(self.compute_dtype), images.grids)
        return self.mm_projector(features_PD, images.grids)

    def _require_vision(self) -> None:
        if self.cfg.vision is None:
            raise RequestError(
                "images were given to a model without a vision tower (model.vision is not set); "
                "use a model that has one, or send text only"
            )

    def embeddings(self, ids_BT: Tensor, images: ImageBatch | ImageRows | None = None) -> Tensor:
        """What enters the first layer, `[B, T, D]`: embedding rows, replaced at the images' positions by projected rows.

        The ids under an image (media pads) do not matter, and their embedding gets no gradient from these positions.

        Raises:
            RequestError: see `image_rows`; or the positions are not as many as the images' tokens, repeat, or lie outside.
        """
        x_BTD = self.embed(ids_BT).to(self.compute_dtype)
        if images is None or not (len(images[0]) or len(images.positions)):
            return x_BTD
        self._require_vision()
        rows_ND = self.image_rows(images) if isinstance(images, ImageBatch) else images.rows_ND.to(x_BTD.dtype)
        where, tokens = images.positions, ids_BT.numel()
        if len(where) != len(rows_ND):
            raise RequestError(
                f"the images give {len(rows_ND)} rows, but {len(where)} positions were given: each row needs the position "
                "of one media pad token; an image that lies in two chunks goes in as ImageRows, each chunk with its part"
            )
        if where.min() < 0 or where.max() >= tokens or len(where.unique()) != len(where):
            raise RequestError(
                f"image positions run from {int(where.min())} to {int(where.max())}, {len(where.unique())} different ones of "
                f"{len(where)}; they must differ and lie in 0..{tokens - 1}, the {tokens} tokens of this call"
            )
        return x_BTD.flatten(0, 1).index_copy(0, where, rows_ND).view_as(x_BTD)

    def hidden(
        self,
        ids_BT: Tensor,
        state: ModelState | None = None,
        segments: Segments | None = None,
        *,
        images: ImageBatch | ImageRows | None = None,
    ) -> Tensor:
        """Run the layers and the output read; returns `[B, T, D]` before the final norm.

        Args:
            ids_BT: int64 token ids.
            state: continues each row after `state.lengths` tokens; updated in place.
            segments: document boundaries inside the rows; not together with a state.
            images: images whose tokens all lie in these ids. For a prefill in chunks that cut an image, or to keep what
                the tower gave, call `image_rows` once and pass each chunk its part as `ImageRows`.

        Raises:
            RequestError: the batch of the state differs from that of the ids, both state and segments are given, or the
                images do not fit (`embeddings`). The state is then as it was.
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
        stream = STREAMS[self.cfg.residual](self.embeddings(ids_BT, images), self.cfg, self.depth_reads())
        for index, block in enumerate(self.layers):
            block(stream, None if state is None else state.layers[index], segments, past)
        if state is not None:
            state.advance(tokens)
        return stream.read(None if self.cfg.residual == "plain" else self.output_read, None)

    def forward(
        self,
        ids_BT: Tensor,
        state: ModelState | None = None,
        segments: Segments | None = None,
        *,
        logits: str = "all",
        images: ImageBatch | ImageRows | None = None,
    ) -> ModelOutput:
        """Run the model.

        Args:
            ids_BT: int64 `[B, T]`.
            state: see `hidden`.
            segments: see `hidden`.
            logits: "all" positions, only the "last" one, or "none".
            images: see `hidden`.
        """
        h = self.hidden(ids_BT, state, segments, images=images)
        h = self.norm(h[:, -1:] if logits == "last" else h)
        return ModelOutput(h, None if logits == "none" else self.lm_head(h), state)

    def loss(
        self,
        ids_BT: Tensor,
        targets_BT: Tensor,
        segments: Segments | None = None,
        state: ModelState | None = None,
        *,
        images: ImageBatch | ImageRows | None = None,
    ) -> LossOutput:
        """Summed cross-entropy of `targets_BT` (−100 = not counted); the logits are never held for all tokens at once."""
        h = self.norm(self.hidden(ids_BT, state, segments, images=images))
        nats = linear_cross_entropy(h.flatten(0, 1), self.lm_head.weight, targets_BT.flatten(), reduction="sum")
        return LossOutput(nats, targets_BT)

    def token_nats(
        self,
        ids_BT: Tensor,
        targets_BT: Tensor,
        state: ModelState | None = None,
        segments: Segments | None = None,
        *,
        images: ImageBatch | ImageRows | None = None,
    ) -> Tensor:
        """Cross-entropy of each target in nats, `[B, T]`, 0 where the target is −100."""
        h = self.norm(self.hidden(ids_BT, state, segments, images=images))
        nats = linear_cross_entropy(h.flatten(0, 1), self.lm_head.weight, targets_BT.flatten(), reduction="none")
        return nats.view_as(targets_BT)
