"""MXFP4 and MXFP8 against rational arithmetic, at the ends of the range, and on what a file may hold."""

from __future__ import annotations

import math
import struct
from fractions import Fraction

import mx_oracle as oracle
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from perilune.errors import CheckpointError, ConfigError
from perilune.ops.choice import force
from perilune.ops.mx import (
    RULES,
    dequantize_mxfp4,
    dequantize_mxfp8,
    fake_quantize,
    quantize_mxfp4,
    quantize_mxfp8,
)
from perilune.ops.mx import blocks as blocks_module
from perilune.ops.native import build

pytestmark = pytest.mark.usefixtures("poisoned_memory")

NATIVE = build.unavailable_reason("mx")
IMPLEMENTATIONS = [
    "reference",
    "torch",
    pytest.param("native", marks=pytest.mark.skipif(NATIVE is not None, reason=str(NATIVE))),
]
QUANTIZE = {"mxfp4": quantize_mxfp4, "mxfp8": quantize_mxfp8}
DEQUANTIZE = {"mxfp4": dequantize_mxfp4, "mxfp8": dequantize_mxfp8}
MAX32 = struct.unpack("<f", b"\xff\xff\x7f\x7f")[0]


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    with force(request.param):
        yield request.param


def unpacked(codes: Tensor) -> list[int]:
    """Codes of one row, one a column."""
    if codes.dtype == torch.float8_e4m3fn:
        return codes.view(torch.uint8).flatten().tolist()
    return [nibble for byte in codes.flatten().tolist() for nibble in (byte % 16, byte // 16)]


def bits(x: Tensor) -> Tensor:
    """Bit patterns, so that -0 differs from 0; every NaN counts as one."""
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return torch.where(x.isnan(), torch.full_like(x, torch.nan), x).view(integer)


def spread(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, decades: float = 3.0) -> Tensor:
    """Random values over many binades, with zeros of both signs among them."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator) * torch.exp(decades * torch.randn(*shape, generator=generator))
    x[torch.rand(*shape, generator=generator) < 0.05] = 0.0
    x[torch.rand(*shape, generator=generator) < 0.05] = -0.0
    return x.to(dtype)


def test_every_scale_byte_and_every_code(implementation):
    scale = torch.arange(256, dtype=torch.uint8)[:, None]
    codes = torch.arange(16, dtype=torch.uint8)
    packed = (codes[0::2] | codes[1::2] << 4).repeat(256, 2)  # columns 0..15 hold codes 0..15, and again
    decoded = dequantize_mxfp4(packed, scale, torch.float64)
    assert decoded.shape == (256, 32)
    for byte in range(255):
        exact = [float(oracle.decode(byte, code, "mxfp4")) for code in range(16)] * 2
        assert decoded[byte].tolist() == exact
    assert decoded[255].isnan().all()
    assert decoded[127, 8].signbit() and decoded[127, 8] == 0, "code 8 is minus zero"
    for dtype in (torch.float32, torch.bfloat16):  # exact but for what overflows
        found = dequantize_mxfp4(packed, scale, dtype)
        assert torch.equal(bits(found), bits(decoded.to(dtype)))
        assert torch.equal(found[:253].double(), decoded[:253]), "nothing is lost up to byte 252"
    assert torch.equal(bits(dequantize_mxfp4(packed, scale.view(torch.float8_e8m0fnu), torch.float64)), bits(decoded))


def test_e4m3_codes_are_torchs(implementation):
    codes = torch.arange(256, dtype=torch.uint8).view(8, 32)
    for byte in (0, 1, 60, 127, 200, 246):
        scale = torch.full((8, 1), byte, dtype=torch.uint8)
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            exact = codes.view(torch.float8_e4m3fn).double() * 2.0 ** (byte - 127)
            found = dequantize_mxfp8(codes.view(torch.float8_e4m3fn), scale, dtype)
            assert torch.equal(bits(found), bits(exact.to(dtype))), (byte, dtype)


def test_the_even_column_lies_in_the_low_nibble(implementation):
    w = torch.zeros(1, 32)
    w[0, 0], w[0, 1], w[0, 2] = 6.0, -0.5, 1.5
    packed, scale = quantize_mxfp4(w)
    assert packed[0, :3].tolist() == [0x97, 0x03, 0x00] and scale.tolist() == [[127]]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("block_format", ["mxfp4", "mxfp8"])
def test_codes_and_scales_equal_rational_arithmetic(implementation, block_format, rule):
    x = spread(24, 64, seed=3)
    codes, scale = QUANTIZE[block_format](x, rule)
    decoded = DEQUANTIZE[block_format](codes, scale, torch.float64)
    for row in range(24):
        for g in range(2):
            values = x[row, 32 * g : 32 * g + 32].tolist()
            byte, expected = oracle.encode(values, block_format, rule)
            assert int(scale[row, g]) == byte
            width = codes.shape[1] // 2
            assert unpacked(codes[row, width * g : width * (g + 1)]) == expected
            exact = [float(oracle.decode(byte, code, block_format)) for code in expected]
            assert decoded[row, 32 * g : 32 * g + 32].tolist() == exact
    assert torch.equal(bits(fake_quantize(x.double(), block_format, rule)), bits(decoded))
    assert torch.equal(bits(fake_quantize(x, block_format, rule)), bits(decoded.float()))


# Binades' edges and half-ways between grid points, where rounding and scale rules decide.
FRACTIONS = [Fraction(n, 64) for n in range(1, 512)]


@given(
    st.lists(st.sampled_from(FRACTIONS), min_size=1, max_size=32),
    st.integers(-120, 118),
    st.sampled_from(RULES),
    st.sampled_from(["mxfp4", "mxfp8"]),
    st.booleans(),
    st.integers(0, 2**32 - 1),
)
def test_ties_and_edges_equal_rational_arithmetic(fractions, power, rule, block_format, nudge, signs):
    values = [float(f) * 2.0**power * (-1 if signs >> i & 1 else 1) for i, f in enumerate(fractions)]
    values = (values + [0.0] * 32)[:32]
    x = torch.tensor([values])
    if nudge:  # the float after a tie rounds up, the one before it down
        x = torch.nextafter(x, torch.full_like(x, math.inf))
    byte, expected = oracle.encode(x[0].tolist(), block_format, rule)
    for name in ("reference", "torch", "native") if NATIVE is None else ("reference", "torch"):
        with force(name):
            codes, scale = QUANTIZE[block_format](x, rule)
        assert (int(scale), unpacked(codes)) == (byte, expected), name


LARGEST = [
    2.0**-149, 3 * 2.0**-149, 2.0**-130, 2.0**-127, 1.75 * 2.0**-126, 2.0**-126, 2.0**-125, 1.4 * 2.0**-124, 2.0**-119,
    2.0**-118 * 1.9, 2.0**127, 1.5 * 2.0**127, 1.75 * 2.0**127, 1.9 * 2.0**127, MAX32,
]  # fmt: skip


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("block_format", ["mxfp4", "mxfp8"])
def test_ends_of_float32(implementation, block_format, rule):
    """Subnormal blocks, and blocks whose scale would take the grid beyond float32."""
    factors = torch.linspace(-1, 1, 32, dtype=torch.float64)
    for largest in LARGEST:
        x = (largest * factors).float()[None]
        byte, expected = oracle.encode(x[0].tolist(), block_format, rule)
        codes, scale = QUANTIZE[block_format](x, rule)
        assert (int(scale), unpacked(codes)) == (byte, expected), largest
        decoded = fake_quantize(x, block_format, rule)
        assert decoded.isfinite().all()
        exact = torch.tensor([float(oracle.decode(byte, code, block_format)) for code in expected])
        assert torch.equal(decoded[0], exact), largest


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("block_format", ["mxfp4", "mxfp8"])
def test_ends_of_the_scales_in_float64(block_format, rule):
    """A byte ends at 2^-127 and 2^127: beyond, small values vanish and large ones saturate."""
    for power in (-1074, -1030, -200, -136, -128, 120, 127, 128, 129, 135, 136, 200, 1023):
        x = (torch.linspace(-1, 1, 32, dtype=torch.float64) * 2.0**power)[None]
        byte, expected = oracle.encode(x[0].tolist(), block_format, rule, "float64")
        exact = [float(oracle.decode(byte, code, block_format)) for code in expected]
        for name in ("reference", "torch"):
            with force(name):
                codes, scale = QUANTIZE[block_format](x, rule)
                assert (int(scale), unpacked(codes)) == (byte, expected), (name, power)
                assert fake_quantize(x, block_format, rule)[0].tolist() == exact


def test_saturation_by_rule(implementation):
    """7.9 is beyond the grid of scale 1: floor cuts it to 6, even takes the next scale at 7, ceil at anything above 6."""
    x = torch.zeros(3, 32)
    x[:, 0] = torch.tensor([6.5, 6.9375, 7.9])
    found = {rule: fake_quantize(x, "mxfp4", rule)[:, 0].tolist() for rule in RULES}
    assert found == {"floor": [6, 6, 6], "even": [6, 6, 8], "ceil": [6, 6, 8]}
    scales = {rule: (quantize_mxfp4(x, rule)[1].flatten() - 127).tolist() for rule in RULES}
    assert scales == {"floor": [0, 0, 0], "even": [0, 0, 1], "ceil": [1, 1, 1]}


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block_format", ["mxfp4", "mxfp8"])
def test_rounding_twice_changes_nothing(implementation, block_format, dtype, rule):
    x = spread(64, 96, seed=5, dtype=dtype)
    once = fake_quantize(x, block_format, rule)
    assert once.dtype == dtype and not torch.equal(once, x)
    assert torch.equal(bits(fake_quantize(once, block_format, rule)), bits(once))
    codes, scale = QUANTIZE[block_format](once, rule)
    assert torch.equal(bits(DEQUANTIZE[block_format](codes, scale, dtype)), bits(once))
    again = QUANTIZE[block_format](DEQUANTIZE[block_format](codes, scale, dtype), rule)
    settled = QUANTIZE[block_format](DEQUANTIZE[block_format](*again, dtype), rule)
    if rule != "ceil":  # ceil may move a block to half the scale and twice the codes, once: the values stay
        assert torch.equal(again[0].view(torch.uint8), codes.view(torch.uint8)) and torch.equal(again[1], scale)
    assert torch.equal(settled[0].view(torch.uint8), again[0].view(torch.uint8)) and torch.equal(settled[1], again[1])


@pytest.mark.parametrize("rule", RULES)
def test_weights_on_the_grid_are_stored_exactly_by_the_default_rule(implementation, rule):
    """Whatever rule they were trained with: an export need not know it."""
    once = fake_quantize(spread(64, 96, seed=6, dtype=torch.bfloat16), "mxfp4", rule)
    assert torch.equal(bits(dequantize_mxfp4(*quantize_mxfp4(once))), bits(once))


def test_zero_blocks(implementation):
    x = torch.zeros(2, 64)
    x[1] = -0.0
    packed, scale = quantize_mxfp4(x)
    assert scale.tolist() == [[0, 0], [0, 0]] and packed[0].eq(0).all() and packed[1].eq(0x88).all()
    assert torch.equal(bits(dequantize_mxfp4(packed, scale, torch.float32)), bits(x))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("block_format", ["mxfp4", "mxfp8"])
def test_a_block_that_is_not_finite_is_nan_and_its_neighbours_are_not(implementation, block_format, dtype, bad):
    x = spread(4, 96, dtype=dtype)
    x[2, 40] = bad
    codes, scale = QUANTIZE[block_format](x)
    assert (scale == 255).nonzero().tolist() == [[2, 1]]
    assert codes.view(torch.uint8).view(4, 3, -1)[2, 1].eq(0).all()
    for found in (fake_quantize(x, block_format), DEQUANTIZE[block_format](codes, scale, dtype)):
        wrong = found.isnan()
        assert wrong[2, 32:64].all() and int(wrong.sum()) == 32
    assert fake_quantize(x[:, :50], block_format).isnan().nonzero()[:, 1].tolist() == list(range(32, 50))


def test_t07_scales_in_a_padded_buffer(implementation):
    """A kernel read scales beyond the end of K=2880 (90 of them): NaN from the padding. Strides are honoured here."""
    w = spread(6, 2880, decades=1.0)
    packed, scale = quantize_mxfp4(w)
    assert scale.shape == (6, 90)
    wide_scale = torch.full((6, 96), 0xFF, dtype=torch.uint8)
    wide_codes = torch.full((6, 1536), 0xFF, dtype=torch.uint8)
    wide_scale[:, :90], wide_codes[:, :1440] = scale, packed
    found = dequantize_mxfp4(wide_codes[:, :1440], wide_scale[:, :90], torch.float32)
    assert found.isfinite().all() and torch.equal(found, dequantize_mxfp4(packed, scale, torch.float32))


def test_any_layout_of_memory(implementation):
    x = spread(5, 64, 3).transpose(1, 2)  # [5, 3, 64], columns not neighbours
    assert not x.is_contiguous()
    for view in (x, spread(4, 200)[:, 40:136], spread(1, 32), spread(32), spread(0, 64), spread(3, 0)):
        copy = view.contiguous().clone()
        assert torch.equal(bits(fake_quantize(view)), bits(fake_quantize(copy)))
        assert fake_quantize(view).shape == view.shape
        codes, scale = quantize_mxfp4(view)
        assert torch.equal(scale, quantize_mxfp4(copy)[1])
        assert torch.equal(bits(dequantize_mxfp4(codes, scale, torch.float32)), bits(fake_quantize(copy)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", [1, 31, 33, 50, 64, 4100])
def test_a_short_last_block_counts_as_padded_with_zeros(implementation, columns, dtype):
    x = spread(3, columns, dtype=dtype)
    padded = torch.nn.functional.pad(x, (0, -columns % 32))
    for block_format in ("mxfp4", "mxfp8"):
        assert torch.equal(
            bits(fake_quantize(x, block_format)), bits(fake_quantize(padded, block_format)[:, :columns].contiguous())
        )


def test_slices_of_the_torch_path_meet(monkeypatch):
    x = spread(7, 96)
    with force("torch"):
        whole = fake_quantize(x), *quantize_mxfp4(x)
        monkeypatch.setitem(blocks_module.SLICE_ELEMENTS, "cpu", 200)
        parts = fake_quantize(x), *quantize_mxfp4(x)
        assert torch.equal(dequantize_mxfp4(*parts[1:], torch.float32), whole[0])
    assert all(torch.equal(a, b) for a, b in zip(whole, parts))


@pytest.mark.skipif(NATIVE is not None, reason=str(NATIVE))
def test_threads_change_nothing():
    x = spread(300, 256)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 3):
            torch.set_num_threads(threads)
            codes, scale = quantize_mxfp4(x)
            found.append((codes, scale, dequantize_mxfp4(codes, scale, torch.float32), fake_quantize(x, "mxfp8")))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(*found))


def test_what_cannot_be_done_is_said():
    with pytest.raises(ConfigError, match=r"has 40; choose a width that is a multiple of 32 \(next: 64\)"):
        quantize_mxfp4(torch.zeros(2, 40))
    with pytest.raises(ConfigError, match="'round'.*floor, even, ceil"):
        fake_quantize(torch.zeros(2, 32), "mxfp4", "round")
    with pytest.raises(ConfigError, match="'nvfp4'.*mxfp4, mxfp8"):
        fake_quantize(torch.zeros(2, 32), "nvfp4")
    with pytest.raises(ConfigError, match="float16"):
        fake_quantize(torch.zeros(2, 32, dtype=torch.float16))
    codes, scale = quantize_mxfp4(torch.zeros(2, 64))
    with pytest.raises(ConfigError, match="float16"):
        dequantize_mxfp4(codes, scale, torch.float16)
    with pytest.raises(CheckpointError, match=r"\[2, 2\] belong to codes \[2, 32\].*these are \[2, 31\]"):
        dequantize_mxfp4(codes[:, :31], scale)
    with pytest.raises(CheckpointError, match=r"bytes \(U8\)"):
        dequantize_mxfp4(codes, scale.float())


def test_select_says_why():
    assert blocks_module.select(torch.zeros(2, 32, dtype=torch.float64)).implementation == "torch"
    assert "float64" in blocks_module.select(torch.zeros(2, 32, dtype=torch.float64)).reason
    with force("reference"):
        assert blocks_module.select(torch.zeros(2, 32)).implementation == "reference"


def test_errors_known_for_normal_weights():
    """Relative RMS error and saturated share of N(0, 1) per rule (training, "Scale rules")."""
    x = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))
    for rule, error, saturated in (("floor", 0.1149, 0.023), ("even", 0.1119, 0.006), ("ceil", 0.1155, 0.0)):
        y = fake_quantize(x, "mxfp4", rule)
        assert float((y - x).norm() / x.norm()) == pytest.approx(error, abs=4e-4)
        scale = quantize_mxfp4(x, rule)[1]
        top = torch.exp2(scale.float() - 127).repeat_interleave(32, -1) * 6
        assert float((x.abs() > top).float().mean()) == pytest.approx(saturated, abs=1.5e-3)
    y = fake_quantize(x, "mxfp8", "floor")
    assert float((y - x).norm() / x.norm()) == pytest.approx(0.0293, abs=4e-4)
