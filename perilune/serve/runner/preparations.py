"""What a runner uses for the first time, used once before anybody waits for it: compilers, loaders, recordings."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial

import torch

from perilune.serve.cache import Chunk
from perilune.serve.cache.plans import CopyPage, ZeroState
from perilune.serve.runner.graphs import SIZES, DecodeGraphs, rows_of_room, widths_up_to
from perilune.serve.runner.pages import PagePool
from perilune.serve.runner.passes import Passes
from perilune.serve.runner.rows import DecodeRows
from perilune.serve.runner.runner import ModelRunner

# Tokens of chunks in whose passes kernels differ that no recording has, and with some before them; a CPU takes two.
WAYS = (1, 2, 3, 5, 8, 9, 17, 25, 33, 96, 129, 501, 1001, 2001)
BEHIND = ((64, 33), (64, 500))

Piece = tuple[str, Callable[[], object]]


def preparations(runner: ModelRunner, *, rare: bool = True) -> list[Piece]:
    """What makes sure that no request waits for a compiler or a recording: pieces of work, each of below a second once
    kernels are in their cache, with what they are for. They may run at any time between two steps, over spare pages.

    Args:
        runner: whose passes.
        rare: also passes that are not recorded though others are, those of scored prompts for one.
    """
    pieces: list[Piece] = [("copies of pages", partial(_copy, runner.pool))]
    graphs, prefills = runner.decode_recordings, runner.prefill_graphs
    if rare or prefills is None:
        for before, tokens in _chunks(runner):
            pieces.append((f"{tokens} tokens as they are", partial(_pass, runner.passes, before, tokens)))
        if runner.packs:
            pieces.append(("prompts together as they are", partial(_pass_together, runner.passes)))
    if prefills is not None:
        for room in reversed(prefills.rooms):  # the largest first: the others find its memory
            pieces.append((f"prefill of {room.tokens}", partial(prefills.ready, room)))
    if isinstance(graphs, DecodeGraphs):
        most = rows_of_room(min(runner.most_rows, runner.group))
        for count in reversed([size for size in SIZES if size <= most]):
            for width in widths_up_to(runner.pool.geometry.pages_for(runner.longest)):
                pieces.append((f"decoding of {count}", partial(_record_decoding, graphs, count, width)))
    return pieces


def _chunks(runner: ModelRunner) -> list[tuple[int, int]]:
    """Chunks whose passes differ in their kernels: tokens before each, and its own."""
    if not runner.launches:
        return [(0, tokens) for tokens in WAYS[:2]]
    # Of few tokens, attention has a step for each power of two before them.
    doubled = itertools.takewhile(lambda n: n < runner.longest, (64 << n for n in itertools.count()))
    return [*((0, tokens) for tokens in WAYS), *BEHIND, *((before, 3) for before in doubled)]


def _chunk(pool: PagePool, before: int, tokens: int) -> Chunk:
    """A chunk behind others, all of it in spare pages."""
    spare, shape = pool.spare, pool.geometry
    pages = (spare.tokens,) * shape.pages_for(before + tokens)
    return Chunk("", 0, before, before + tokens, pages, (spare.states,) * shape.groups, (), ())


@torch.inference_mode()
def _copy(pool: PagePool) -> None:
    spare, groups = pool.spare, pool.geometry.groups
    pool.operate([CopyPage(spare.tokens, spare.tokens, 1), ZeroState((spare.unread,) * groups)])
    pool.copy((spare.unread,) * groups, (spare.states,) * groups)


@torch.inference_mode()
def _pass(passes: Passes, before: int, tokens: int) -> None:
    passes.alone(_chunk(passes.pool, before, tokens), [0] * tokens, "all")


@torch.inference_mode()
def _pass_together(passes: Passes) -> None:
    passes.together([_chunk(passes.pool, 0, 2)] * 2, [0] * 4, [1, 3])


@torch.inference_mode()
def _record_decoding(graphs: DecodeGraphs, count: int, width: int) -> None:
    rows = DecodeRows(graphs.pool.geometry.page_tokens, graphs.inputs, graphs.pool.spare.tokens)
    graphs.ready(rows.filling(count, width))
