"""What the entry points refuse, and what the message says; limits of the gate."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from kda_cases import IN_KERNEL, raw_inputs

from perilune.errors import ConfigError
from perilune.ops.kda import chunk_kda, fused_kda_gate, fused_recurrent_kda, recurrent_kda_reference


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cu_seqlens": torch.tensor([0, 20, 40])}, "B = 2"),
        ({"initial_state": torch.zeros(3, 2, 8, 6)}, r"\(3, 2, 8, 6\).*\(2, 2, 8, 6\)"),
        ({"initial_state": torch.zeros(2, 2, 8, 6), "state_v_first": True}, r"\[N, HV, V, K\]"),
        ({"initial_state": torch.zeros(2, 2, 8, 6, dtype=torch.bfloat16)}, "float32"),
        ({"lower_bound": -6.0}, r"-6.*\[-5, 0\)"),
        ({"lower_bound": 0.0}, "lower_bound=0"),
        ({"lower_bound": None, "A_log": None}, "A_log"),
        ({"lower_bound": None, "safe_gate": True}, "lower_bound"),
        ({"A_log": torch.zeros(3)}, r"\(3,\).*\(2,\)"),
        ({"dt_bias": torch.zeros(3)}, "16 numbers"),
        ({"k": torch.zeros(2, 40, 2, 9)}, r"k has shape.*\(2, 40, 2, 8\)"),
        ({"g": torch.zeros(2, 40, 16)}, "4 dimensions"),
        ({"beta": torch.zeros(2, 40, 3)}, "beta"),
        ({"v": torch.zeros(2, 40, 2, 6, dtype=torch.bfloat16)}, "one dtype"),
        ({"dt_bias": torch.zeros(16, device="meta")}, "dt_bias is on meta and q on cpu"),
        ({"initial_state": torch.zeros(2, 2, 8, 6, device="meta")}, "initial_state is on meta"),
        ({"use_beta_sigmoid_in_kernel": False, "allow_neg_eigval": True}, "sigmoid"),
    ],
)
def test_misuse_is_refused_with_the_values(change: dict[str, object], message: str) -> None:
    good = {n: x.float() for n, x in raw_inputs(2, 40, 2, 2, 8, 6).items()}
    options = IN_KERNEL | {"lower_bound": -5.0}
    chunk_kda(**good, **options)
    for op in (chunk_kda, fused_recurrent_kda, recurrent_kda_reference):
        with pytest.raises(ConfigError, match=message) as caught:
            op(**(good | options | change))
        assert isinstance(caught.value, ValueError), "callers of other libraries catch ValueError"


@pytest.mark.parametrize("offsets", [[0, 20], [1, 40], [0, 30, 20, 40], [40]])
def test_boundaries_must_rise_from_zero_to_the_end(offsets: list[int]) -> None:
    inputs = {n: x.float() for n, x in raw_inputs(1, 40, 1, 1, 8, 6).items() if n != "initial_state"}
    with pytest.raises(ConfigError, match="from 0 to T = 40"):
        chunk_kda(**inputs, lower_bound=-5.0, cu_seqlens=torch.tensor(offsets), **IN_KERNEL)


def test_chunk_size_and_key_width() -> None:
    inputs = {n: x.float() for n, x in raw_inputs(1, 4, 1, 1, 8, 6).items()}
    with pytest.raises(ConfigError, match="chunk_size=48.*16, 32, 64"):
        chunk_kda(**inputs, lower_bound=-5.0, chunk_size=48, **IN_KERNEL)
    with pytest.raises(ConfigError, match="257 channels"):
        chunk_kda(*(torch.zeros(1, 2, 1, n) for n in (257, 257, 4, 257)), torch.zeros(1, 2, 1))
    with pytest.raises(ConfigError, match="3 heads.*2 heads"):
        chunk_kda(*(torch.zeros(1, 2, h, 4) for h in (2, 2, 3, 3)), torch.zeros(1, 2, 3))


def test_argument_order_is_that_of_flash_linear_attention() -> None:
    order = (
        "q k v g beta scale initial_state output_final_state "
        "use_qk_l2norm_in_kernel use_gate_in_kernel use_beta_sigmoid_in_kernel"
    ).split()
    for op in (chunk_kda, fused_recurrent_kda):
        parameters = inspect.signature(op).parameters.values()
        assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == order


def test_gate_limits_and_values() -> None:
    z = torch.tensor([-math.inf, -1e4, -40.0, 0.0, 40.0, 1e4, math.inf], dtype=torch.float64).view(-1, 1, 1)
    bounded = fused_kda_gate(z, torch.zeros(1), lower_bound=-5.0).flatten()
    assert bounded.tolist() == [0.0, 0.0, bounded[2].item(), -2.5, bounded[4].item(), -5.0, -5.0]
    assert bounded[2].item() == pytest.approx(-5 * math.exp(-40)) and bounded[4].item() == pytest.approx(-5.0)
    softplus = fused_kda_gate(z, torch.tensor([math.log(2.0)])).flatten()
    assert softplus[[0, 1]].tolist() == [0.0, 0.0] and softplus[6] == -math.inf
    assert softplus[2].item() == pytest.approx(-2 * math.exp(-40), rel=1e-6)
    assert softplus[3].item() == pytest.approx(-2 * math.log(2)) and softplus[5].item() == pytest.approx(-2e4)
    assert torch.isnan(fused_kda_gate(torch.full((1, 1), math.nan), torch.zeros(1), lower_bound=-5.0)).all()


def test_gate_bias_is_inside_the_rate_and_each_head_has_its_own() -> None:
    z = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)).double()  # [T, HV, K]
    a_log, bias = torch.tensor([0.1, -0.2, 0.3]).double(), torch.arange(12.0).double() / 7
    for shape in (bias, bias.view(3, 4)):
        g = fused_kda_gate(z, a_log, shape, lower_bound=-3.0)
        for h in range(3):
            expected = -3.0 * torch.sigmoid(a_log[h].exp() * (z[:, h] + bias[4 * h : 4 * h + 4]))
            assert torch.allclose(g[:, h], expected, rtol=1e-14)
    assert torch.equal(fused_kda_gate(z, None, lower_bound=-3.0), fused_kda_gate(z, torch.zeros(3), lower_bound=-3.0))
    assert fused_kda_gate(z.bfloat16(), a_log, lower_bound=-3.0).dtype == torch.float32
