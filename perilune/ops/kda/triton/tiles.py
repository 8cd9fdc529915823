"""Pieces that the KDA kernels share: a dot product that the interpreter computes too, gates, factors of the decay.

Decays are natural logarithms; the factor of log2(e) appears only inside `exp`. (traps T09)
"""

from __future__ import annotations

import triton
import triton.language as tl

from perilune.ops.triton.available import interpreted

INTERPRET = tl.constexpr(interpreted())
CHUNK = tl.constexpr(64)  # rows of a chunk
HALF = tl.constexpr(32)  # rows of a tile: 32 steps of half the bound, e^(5 / 2), on either side of 1 stay in range
BLOCK = tl.constexpr(16)  # rows of the diagonal blocks that are inverted by substitution
LOG2E = tl.constexpr(1.4426950408889634)
CLOSED = tl.constexpr(-100.0)  # e^-100 is nothing beside any other term; keeps sums of log-decays exact enough
LEAST_BETA = tl.constexpr(1e-12)  # a write strength of 0 is computed as this: the gradient divides by it


@triton.jit
def trips(count):
    """A loaded number as the bound of a loop; the interpreter needs a plain number there."""
    if INTERPRET:
        return count.handle.data.item()
    return count


@triton.jit
def exp(x):
    """e^x."""
    return tl.exp2(x * LOG2E)


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x); both ends are finite."""
    return 1.0 / (1.0 + tl.exp2(-LOG2E * x))


@triton.jit
def dot(a, b):
    """a @ b with a float32 accumulator. The interpreter's product of bfloat16 is garbage (traps T51), so not there."""
    if INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    return tl.dot(a, b)


@triton.jit
def dot_add(a, b, accumulator):
    """accumulator + a @ b."""
    if INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), accumulator, input_precision="ieee")
    return tl.dot(a, b, accumulator)


@triton.jit
def log_decay(z, rate, bias, lower_bound, GATE: tl.constexpr):
    """Log-decays g of raw logits: GATE 0 takes them as they are, 1 is the bounded gate, 2 the softplus gate.

    z `[rows, K]`; rate = exp(A_log), a number; bias `[K]`.
    """
    if GATE == 0:
        return z
    x = z + bias[None, :]
    if GATE == 1:
        return lower_bound * sigmoid(rate * x)
    return -rate * (tl.maximum(x, 0.0) + tl.log(1.0 + exp(-tl.abs(x))))


@triton.jit
def level_factors(G, SIZE: tl.constexpr, K: tl.constexpr):
    """Decay factors for blocks of SIZE rows below another: both at most 1, whatever the gate.

    Rows of every second block count from the last row before their block, and rows of the other blocks up to it.
    Returns (of query rows, of key rows) `[64, K]`; only odd blocks of the first and even blocks of the second mean
    anything.
    """
    folded = tl.reshape(G, [CHUNK // (2 * SIZE), 2 * SIZE, K])
    row = tl.arange(0, 2 * SIZE)[None, :, None]
    anchor = tl.sum(tl.where(row == SIZE - 1, folded, 0.0), axis=1)[:, None, :]
    relative = tl.reshape(folded - anchor, [CHUNK, K])
    return exp(tl.minimum(relative, 0.0)), exp(tl.minimum(-relative, 0.0))


@triton.jit
def level_mask(r, c, SIZE: tl.constexpr):
    """True where row r lies in an odd block of SIZE rows and column c in the even block before it."""
    return (r // (2 * SIZE) == c // (2 * SIZE)) & (r // SIZE > c // SIZE)


@triton.jit
def unit_lower_inverse(L):
    """(I + L)^-1 for strictly lower L `[64, 64]`, float32: substitution in blocks of 16, then their products.

    With Z the inverted blocks, N what lies below them and X = Z N: (I + X)^-1 Z = (I - X + X^2 - X^3) Z. No Neumann
    series inside a block: on identical keys its terms grow like binomials before they cancel (traps T02). Over four
    blocks it has four terms, none of which grows.
    """
    N: tl.constexpr = CHUNK // BLOCK
    block_r = tl.arange(0, N)[:, None, None, None]
    block_c = tl.arange(0, N)[None, None, :, None]
    folded = tl.reshape(L, [N, BLOCK, N, BLOCK])
    tiles = tl.sum(tl.where(block_r == block_c, folded, 0.0), axis=2)  # [N, 16, 16]
    r = tl.arange(0, BLOCK)[None, :, None]
    c = tl.arange(0, BLOCK)[None, None, :]
    inverse = tl.where(r == c, 1.0, 0.0) + tl.zeros_like(tiles)
    for j in tl.static_range(BLOCK - 1):
        row = tl.sum(tl.where(r == j, inverse, 0.0), axis=1)
        column = tl.sum(tl.where(c == j, tiles, 0.0), axis=2)
        inverse -= column[:, :, None] * row[:, None, :]
    Z = tl.reshape(tl.where(block_r == block_c, inverse[:, :, None, :], 0.0), [CHUNK, CHUNK])
    below = tl.reshape(tl.where(block_r > block_c, folded, 0.0), [CHUNK, CHUNK])
    X = dot(Z, below)
    W = Z - dot(X, Z)
    return W + dot(dot(X, X), W)
