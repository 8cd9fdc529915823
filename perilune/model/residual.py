"""How the outputs of earlier layers reach the next one: attention over depth, or a plain sum (report §2.2).

A stream is made fresh for each forward pass. Before each mixer and each feed-forward a *read* forms the input from the
stream's sources; afterwards the output is written back.

    plain          one running sum; a read returns it
    block          bank of finished block sums + the running sum of the open block; the sum RESTARTS at a block's start
    full           the same with blocks of one decoder layer
    full_sublayer  every mixer and feed-forward output is a source of its own (report Eq. 8)

A read is softmax over sources of RMSNorm(source)·query, applied to the unnormalised sources (report Eq. 9-10); with a
single source it is the identity.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from perilune.config import ModelConfig
from perilune.model.norm import RMSNorm
from perilune.ops.attnres import PartialMix, phase_one, read, read_rest, sites_at_once


class DepthRead(nn.Module):
    """One site's pseudo-query and key norm: `norm` `[D]` and `query` `[D]`, used only as their product."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones(size))
        self.query = nn.Parameter(torch.zeros(size))
        self.eps = eps

    @property
    def score_weight(self) -> Tensor:
        """norm · query, `[D]`: scores are linear in it, so the two parameters act as one vector."""
        return self.norm * self.query

    def forward(
        self,
        sources: Sequence[Tensor],
        pending: Tensor | None = None,
        norm: RMSNorm | None = None,
        summed: tuple[PartialMix, int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Mix `[B, T, D]` sources; one call, so that a GPU needs one pass over them.

        Args:
            sources: oldest first, the running sum last.
            pending: an output that the running sum still lacks.
            norm: applied to the mix.
            summed: what a first phase has made of all sources but the last, and this site's number there.

        Returns:
            The mix, and the running sum with `pending` in it.
        """
        *bank, live = sources
        if bank:
            weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.eps)
            if summed is not None:
                return read_rest(*summed, live, pending, weight, eps)
            return read(bank, live, pending, self.norm, self.eps, weight, eps, self.query)
        live = _add(live, pending)
        return live if norm is None else norm(live), live


def _add(live: Tensor, pending: Tensor | None) -> Tensor:
    return live if pending is None else live + pending


def scored_sources(sources: Sequence[Tensor], pending: Tensor | None = None) -> list[Tensor]:
    """What a `DepthRead` called with these arguments mixes: for probes."""
    return [*sources[:-1], _add(sources[-1], pending)]


class PlainStream:
    """The ordinary residual stream."""

    def __init__(self, embedded_BTD: Tensor) -> None:
        self.sum = embedded_BTD

    def read(self, site: DepthRead | None, norm: RMSNorm | None) -> Tensor:
        """The running sum, normalised; there are no sites."""
        return self.sum if norm is None else norm(self.sum)

    def add_mixer(self, layer: int, out_BTD: Tensor) -> None:
        """Add a mixer's output."""
        self.sum = self.sum + out_BTD

    def add_ffn(self, out_BTD: Tensor) -> None:
        """Add a feed-forward output."""
        self.sum = self.sum + out_BTD


class BlockStream:
    """Block AttnRes: finished blocks in a bank, the open block as a running sum (architecture §5.2).

    A bank row is never written again once it is pushed; the running sum is replaced, not changed in place. The latest
    output stays apart until the next read adds it. Where it pays, the reads of a block share one pass over the bank
    (`ops.attnres.phase_one`): they all see the same bank, and their queries are known before they are reached.

    Args:
        embedded_BTD: the stream's first value.
        block_layers: decoder layers of a block.
        sites: every read of a forward pass, in order; without them each read passes over the bank itself.
    """

    def __init__(self, embedded_BTD: Tensor, block_layers: int, sites: Sequence[DepthRead] = ()) -> None:
        self.bank: list[Tensor] = []
        self.live = embedded_BTD
        self.pending: Tensor | None = None
        self.block_layers = block_layers
        self.sites = sites
        self.reads = 0  # so far
        self.shared_until = 0  # the read before which the bank grows
        self.phase: tuple[PartialMix, int] | None = None  # and the number of its first read

    def read(self, site: DepthRead | None, norm: RMSNorm | None) -> Tensor:
        """Complete the running sum, mix it with the bank, normalise."""
        assert site is not None, "attention over depth needs the site's query"
        out, self.live = site([*self.bank, self.live], self.pending, norm, self._summed())
        self.pending = None
        self.reads += 1
        return out

    def _summed(self) -> tuple[PartialMix, int] | None:
        """The first phase of this read, made for as many of the coming reads as pays."""
        if self.phase is not None and self.reads - self.phase[1] == len(self.phase[0].score_weights_SD):
            self.phase = None
        if self.phase is None and self.reads < self.shared_until:
            coming = self.sites[self.reads : self.shared_until]
            count = sites_at_once(self.bank, [site.query for site in coming])
            if count == 0:
                self.shared_until = 0
                return None
            weights = torch.stack([site.score_weight for site in coming[:count]])
            self.phase = phase_one(self.bank, weights, coming[0].eps), self.reads
        return None if self.phase is None else (self.phase[0], self.reads - self.phase[1])

    def add_mixer(self, layer: int, out_BTD: Tensor) -> None:
        """At a block's first layer push the running sum and restart it from this output; else add."""
        assert self.pending is None, "a mixer's input is read before its output is written"
        if layer % self.block_layers == 0:
            self.bank.append(self.live)
            self.live = out_BTD
            self.phase, self.shared_until = None, min(self.reads + 2 * self.block_layers, len(self.sites))
        else:
            self.pending = out_BTD

    def add_ffn(self, out_BTD: Tensor) -> None:
        """Add a feed-forward output to the running sum."""
        self.pending = out_BTD


class SublayerStream:
    """Full AttnRes whose sources are the embedding and every sub-layer output (report Eq. 8)."""

    def __init__(self, embedded_BTD: Tensor) -> None:
        self.outputs = [embedded_BTD]

    def read(self, site: DepthRead | None, norm: RMSNorm | None) -> Tensor:
        """Mix all outputs so far, normalise."""
        assert site is not None, "attention over depth needs the site's query"
        return site(self.outputs, None, norm)[0]

    def add_mixer(self, layer: int, out_BTD: Tensor) -> None:
        """Append a mixer's output."""
        self.outputs.append(out_BTD)

    def add_ffn(self, out_BTD: Tensor) -> None:
        """Append a feed-forward output."""
        self.outputs.append(out_BTD)


Stream = PlainStream | BlockStream | SublayerStream

STREAMS: dict[str, Callable[[Tensor, ModelConfig, Sequence[DepthRead]], Stream]] = {
    "plain": lambda x, cfg, sites: PlainStream(x),
    "block": lambda x, cfg, sites: BlockStream(x, cfg.attn_res_block_layers, sites),
    "full": lambda x, cfg, sites: BlockStream(x, 1, sites),
    "full_sublayer": lambda x, cfg, sites: SublayerStream(x),
}
