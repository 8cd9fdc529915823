"""MX blocks in rational arithmetic, written without the package: exponents by comparing with powers of two, codes by search."""

from __future__ import annotations

from fractions import Fraction

FP4 = [Fraction(v) for v in ("0", "1/2", "1", "3/2", "2", "3", "4", "6")]
FP8 = [Fraction(m, 8) * Fraction(2) ** -6 for m in range(8)]
FP8 += [(1 + Fraction(m, 8)) * Fraction(2) ** (e - 7) for e in range(1, 16) for m in range(8)][:-1]
GRIDS = {"mxfp4": FP4, "mxfp8": FP8}
MOST = {"mxfp4": 2, "mxfp8": 8}
EVEN_LIMIT = {"mxfp4": Fraction(7, 4), "mxfp8": Fraction(31, 16)}  # half-way from the last mantissa to 2
HIGHEST = {"mxfp4": {"float32": 125, "float64": 127}, "mxfp8": {"float32": 119, "float64": 127}}


def exponent_of(largest: Fraction, block_format: str, rule: str, dtype: str) -> int:
    """Exponent of a block's scale."""
    if largest == 0:
        return -127
    power = 0
    while Fraction(2) ** power > largest:
        power -= 1
    while Fraction(2) ** (power + 1) <= largest:
        power += 1
    exponent = power - MOST[block_format]
    if rule == "even" and largest / Fraction(2) ** power >= EVEN_LIMIT[block_format]:
        exponent += 1
    if rule == "ceil" and largest > GRIDS[block_format][-1] * Fraction(2) ** exponent:
        exponent += 1
    return max(-127, min(exponent, HIGHEST[block_format][dtype]))


def encode(values: list[float], block_format: str, rule: str, dtype: str = "float32") -> tuple[int, list[int]]:
    """Scale byte and signed codes of one block of finite values."""
    exact = [Fraction(v) for v in values]
    exponent = exponent_of(max(abs(v) for v in exact), block_format, rule, dtype)
    grid = GRIDS[block_format]
    sign_bit = 8 if block_format == "mxfp4" else 128
    codes = []
    for value, given in zip(exact, values):
        scaled = min(abs(value) / Fraction(2) ** exponent, grid[-1])
        code = min(range(len(grid)), key=lambda c: (abs(grid[c] - scaled), c % 2))
        codes.append(code + (sign_bit if str(given).startswith("-") else 0))
    return exponent + 127, codes


def decode(byte: int, code: int, block_format: str) -> Fraction:
    """Value of one code under a scale other than NaN."""
    sign_bit = 8 if block_format == "mxfp4" else 128
    value = GRIDS[block_format][code % sign_bit] * Fraction(2) ** (byte - 127)
    return -value if code >= sign_bit else value
