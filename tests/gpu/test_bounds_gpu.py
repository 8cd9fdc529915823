"""Every operation that has a kernel on a GPU, at sizes that fill no tile: nothing beside a tensor is written or matters.

Inputs and everything an operation allocates lie between bands of poison and start as poison (`guard_bands`). The results must
be finite and, bit for bit, those of a run in ordinary memory: a read beside a tensor, an element that nobody wrote or a sum
whose order changes would show. `sanitize.py` runs this file under NVIDIA's compute-sanitizer where that is installed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from guard_bands import GuardBands
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed; pip install perilune[kernels]")

from perilune.ops import norm, short_conv, situ_glu
from perilune.ops.attnres import merge, mix, phase_one, read
from perilune.ops.choice import force
from perilune.ops.kda import chunk_kda, chunk_kda_states
from perilune.ops.kda.decode import kda_decode_step
from perilune.ops.kda.verify import Projections, kda_verify_step
from perilune.ops.linear import gated_linear, linears, normed_linear
from perilune.ops.mla import attend, attend_cached
from perilune.ops.mla.append import append_latents
from perilune.ops.moe import (
    MixtureWeights,
    layer_decode,
    layer_obstacle,
    mlp_decode,
    moe_decode,
    routed_experts,
    router,
)
from perilune.ops.moe.quantile import QuantileHistogram
from perilune.ops.mx import PackedWeight, fake_quantize, pack, packed_experts, quantize_mxfp4, quantize_mxfp8
from perilune.ops.segments import Segments

pytestmark = pytest.mark.gpu

IN_KERNEL = {"use_qk_l2norm_in_kernel": True, "use_gate_in_kernel": True, "use_beta_sigmoid_in_kernel": True}
BOUNDED = IN_KERNEL | {"lower_bound": -5.0, "safe_gate": True}
LOW = torch.bfloat16

Inputs = dict[str, Tensor]
Function = Callable[[Inputs], Any]
CASES: dict[str, Callable[[], tuple[Inputs, Function]]] = {}


def case(make: Callable[[], tuple[Inputs, Function]]) -> Callable[[], tuple[Inputs, Function]]:
    """Add it to `CASES`: inputs by name, and the operation on them. Float inputs whose names end in `_` get gradients."""
    CASES[make.__name__] = make
    return make


def normal(*shape: int, dtype: torch.dtype = LOW, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(*shape, device="cuda")).to(dtype)


def kda_inputs(tokens: int, qk_heads: int, heads: int, key: int, value: int, sequences: int, mark: str = "_") -> Inputs:
    wide = torch.float32
    return {
        f"q{mark}": normal(1, tokens, qk_heads, key), f"k{mark}": normal(1, tokens, qk_heads, key),
        f"v{mark}": normal(1, tokens, heads, value), f"g{mark}": normal(1, tokens, heads, key) - 1,
        f"beta{mark}": normal(1, tokens, heads), f"A_log{mark}": normal(heads, dtype=wide, scale=0.3),
        f"dt_bias{mark}": normal(heads * key, dtype=wide),
        f"initial_state{mark}": normal(sequences, heads, key, value, dtype=wide),
    }  # fmt: skip


def unmarked(x: Inputs) -> Inputs:
    return {name.rstrip("_"): tensor for name, tensor in x.items()}


def kda(tokens: int, *sizes: int, options: dict, cuts: tuple[int, ...] = ()) -> tuple[Inputs, Function]:
    bounds = (0, *cuts, tokens)
    extra = options | ({"cu_seqlens": torch.tensor(bounds)} if cuts else {})
    return kda_inputs(tokens, *sizes, len(bounds) - 1), lambda x: chunk_kda(
        **unmarked(x), output_final_state=True, **extra
    )


@case
def chunk_kda_bounded():
    return kda(201, 1, 2, 128, 128, options=BOUNDED, cuts=(1, 90))


@case
def chunk_kda_small_heads():
    return kda(70, 1, 1, 64, 64, options=BOUNDED)


@case
def chunk_kda_in_segments():
    return kda(4500, 1, 1, 128, 128, options=BOUNDED)


@case
def chunk_kda_softplus():
    return kda(131, 1, 1, 64, 128, options=IN_KERNEL, cuts=(66,))


@case
def chunk_kda_softplus_wide():
    return kda(131, 1, 1, 128, 128, options=IN_KERNEL, cuts=(66,))


@case
def chunk_kda_states_inside():
    x = kda_inputs(200, 2, 2, 128, 128, 1, mark="")
    return x, lambda x: chunk_kda_states(*(x[n] for n in ("q", "k", "v", "g", "beta")), [64, 128], **BOUNDED, **{
        n: x[n] for n in ("A_log", "dt_bias", "initial_state")})  # fmt: skip


def decode_case(form: str) -> tuple[Inputs, Function]:
    batch, heads, size, taps, wide = 3, 5, 128, 4, torch.float32
    channels = 3 * heads * size
    x = {
        "qkv_BX": normal(batch, channels), "conv_weight_XW": normal(channels, taps, dtype=wide),
        "window_BXW1": normal(batch, channels, taps - 1), "decay_logit_BHK": normal(batch, heads, size),
        "A_log_H": normal(heads, dtype=wide, scale=0.3), "dt_bias": normal(heads * size, dtype=wide),
        "beta_logit_BH": normal(batch, heads), "gate_BHV": normal(batch, heads, size),
        "norm_weight_V": normal(size, dtype=wide), "state_BHVK": normal(batch, heads, size, size, dtype=wide),
    }  # fmt: skip

    def step(x: Inputs) -> list[Tensor]:
        with force(form):
            o = kda_decode_step(
                **x, num_heads=heads, key_dim=size, lower_bound=-5.0, scale=size**-0.5, norm_eps=1e-5
            )  # fmt: skip
        return [o, x["state_BHVK"], x["window_BXW1"]]

    return x, step


@case
def kda_decode_cuda():
    return decode_case("cuda")


@case
def kda_decode_triton():
    return decode_case("triton")


def verify_case(scored: int, pending_tokens: int, counts: list[int]) -> tuple[Inputs, Function]:
    batch, heads, size, wide = len(counts), 3, 128, torch.float32
    channels, shapes = 3 * heads * size, ((scored, "new"), (pending_tokens, "pending"))
    x = {f"{name} {part}": normal(batch, tokens, *rest) for tokens, name in shapes
         for part, rest in (("a", (channels,)), ("b", (heads, size)), ("c", (heads,)))}  # fmt: skip
    x |= {
        "gate": normal(batch, scored, heads, size), "conv_weight": normal(channels, 4, dtype=wide),
        "window": normal(batch, channels, 3), "A_log": normal(heads, dtype=wide, scale=0.3),
        "dt_bias": normal(heads * size, dtype=wide), "norm_weight": normal(size, dtype=wide),
        "state": normal(batch, heads, size, size, dtype=wide), "counts": torch.tensor(counts, device="cuda"),
    }  # fmt: skip

    def step(x: Inputs) -> list[Tensor]:
        new, pending = (Projections(*(x[f"{name} {part}"] for part in "abc")) for _, name in shapes)
        o = kda_verify_step(
            new, x["gate"], pending, x["counts"], x["conv_weight"], x["window"], x["A_log"], x["dt_bias"], x["norm_weight"],
            x["state"], num_heads=heads, key_dim=size, lower_bound=-5.0, scale=size**-0.5, norm_eps=1e-5,
        )  # fmt: skip
        return [o, x["state"], x["window"]]

    return x, step


@case
def kda_verify():
    return verify_case(4, 3, [0, 2, 3])


@case
def kda_verify_whole_windows():
    return verify_case(9, 9, [0, 5, 9])


def attend_case(key: int, value: int, form: str) -> tuple[Inputs, Function]:
    starts = torch.zeros(2, 150, dtype=torch.bool)
    starts[0, [3, 70]] = starts[1, 149] = True
    packed = Segments.from_starts(starts)
    segments = Segments(packed.cu_seqlens.cuda(), 2, 150)
    x = {f"{n}_": normal(2, 150, 2, d) for n, d in (("q", key), ("k", key), ("v", value))}

    def run(x: Inputs) -> list[Tensor]:
        largest = torch.zeros(2, device="cuda")
        with force(form):
            return [attend(*x.values(), key**-0.5, segments, largest_H=largest), largest]

    return x, run


@case
def mla_attend():
    return attend_case(192, 128, "cuda")


@case
def mla_attend_small():
    return attend_case(96, 64, "cuda")


@case
def mla_attend_triton():
    return attend_case(192, 128, "triton")


@case
def mla_attend_past():
    x = {"q_": normal(1, 77, 2, 192), "k_": normal(1, 210, 2, 192), "v_": normal(1, 210, 2, 128)}
    return x, lambda x: attend(x["q_"], x["k_"], x["v_"], 192**-0.5, None, 133)


def cached_case(heads: int, tokens: int) -> tuple[Inputs, Function]:
    lengths = torch.tensor([tokens, 333, 1000], dtype=torch.int32, device="cuda")
    cache = normal(3, 1024, 576)
    for row, length in enumerate(lengths.tolist()):
        cache[row, length:] = torch.nan
    x = {
        "q_nope_BTHn": normal(3, tokens, heads, 128), "q_rope_BTHr": normal(3, tokens, heads, 64), "cache_BSC": cache,
        "w_uk_HnL": normal(heads, 128, 512, scale=0.09), "w_uv_HvL": normal(heads, 128, 512, scale=0.04),
        "length_B": lengths,
    }  # fmt: skip
    return x, lambda x: attend_cached(**x, scale=192**-0.5)


@case
def mla_decode_few_heads():
    return cached_case(12, 1)


@case
def mla_decode_many_heads():
    return cached_case(96, 2)


def depth_inputs(count: int, width: int) -> Inputs:
    x = {f"source {i}_": normal(70, width) for i in range(count)}
    weights = {
        "score_": normal(width, dtype=torch.float32, scale=width**-0.5),
        "norm_": normal(width, dtype=torch.float32),
    }
    return x | weights


@case
def depth_read():
    def run(x: Inputs) -> Any:
        *bank, live, delta = (x[n] for n in x if n.startswith("source"))
        return read(bank, live, delta, x["score_"], 1e-5, x["norm_"], 1e-6)

    return depth_inputs(6, 1024), run


@case
def depth_mix_of_odd_width():
    x = {n: t for n, t in depth_inputs(4, 100).items() if n != "norm_"}
    return x, lambda x: mix([x[n] for n in x if n.startswith("source")], x["score_"], 1e-5)


@case
def depth_two_phases():
    x = {f"source {i}": normal(70, 1024) for i in range(4)} | {
        "scores": normal(5, 1024, dtype=torch.float32, scale=0.03)
    }

    def run(x: Inputs) -> list[Tensor]:
        *bank, live = (x[n] for n in x if n.startswith("source"))
        with force("triton"):
            partial = phase_one(bank, x["scores"], 1e-5)
            return [merge(partial, site, live) for site in range(5)]

    return x, run


@case
def norms():
    x = {"x_": normal(33, 5, 100), "gate_": normal(33, 5, 100), "weight_": normal(100, dtype=torch.float32)}
    return x, lambda x: [norm.rms_norm(x["x_"], x["weight_"], 1e-5), norm.l2_norm(x["x_"]),
                         norm.gated_rms_norm(x["x_"], x["gate_"], x["weight_"], 1e-5)]  # fmt: skip


@case
def gated_unit():
    return {"gate_": normal(7, 37), "up_": normal(7, 37)}, lambda x: situ_glu.situ_glu(x["gate_"], x["up_"])


@case
def short_convolution():
    x = {"x_": normal(2, 131, 100), "weight_": normal(100, 4, dtype=torch.float32), "window_": normal(2, 100, 3)}
    return x, lambda x: short_conv.short_conv(x["x_"], x["weight_"], x["window_"])


def chosen_experts(tokens: int, count: int, active: int) -> Tensor:
    return torch.rand(tokens, count, device="cuda").topk(active).indices


@case
def experts():
    x = {
        "z_": normal(130, 104), "index": chosen_experts(130, 3, 2), "mixing_": torch.rand(130, 2, device="cuda"),
        "w1_": normal(3, 72, 104, scale=0.1), "w3_": normal(3, 72, 104, scale=0.1), "w2_": normal(3, 104, 72, scale=0.1),
    }  # fmt: skip
    return x, lambda x: routed_experts(*x.values())


def packed_case(tokens: int, count: int) -> tuple[Inputs, Function]:
    shapes = {"w1": (count, 160, 96), "w3": (count, 160, 96), "w2": (count, 96, 160)}
    packed = {n: pack(*PackedWeight.of(normal(*s, dtype=torch.float32, scale=0.1))) for n, s in shapes.items()}
    x = {
        "z": normal(tokens, 96),
        "index": chosen_experts(tokens, count, 2),
        "mixing": torch.rand(tokens, 2, device="cuda"),
    }
    x |= {f"{n} {field}": t for n, w in packed.items() for field, t in w._asdict().items() if isinstance(t, Tensor)}

    def run(x: Inputs) -> Tensor:
        weights = [w._replace(**{f: x[f"{n} {f}"] for f in w._fields if f"{n} {f}" in x}) for n, w in packed.items()]
        return packed_experts(x["z"], x["index"], x["mixing"], *weights)

    return x, run


@case
def experts_on_packed_weights():
    return packed_case(37, 3)


@case
def experts_on_packed_weights_without_a_plan():
    return packed_case(1, 8)


@case
def experts_of_a_few_tokens():
    x = {"logits": normal(3, 5, dtype=torch.float32), "bias": normal(5, dtype=torch.float32), "z": normal(3, 100),
         "w1": normal(5, 36, 100, scale=0.1), "w3": normal(5, 36, 100, scale=0.1), "w2": normal(5, 100, 36, scale=0.1)}  # fmt: skip

    def run(x: Inputs) -> list[Tensor]:
        routed = moe_decode(*x.values(), 2)
        shared = mlp_decode(x["z"], x["w1"][0], x["w3"][0], x["w2"][0])
        assert shared is not None
        return [routed, shared]

    return x, run


@case
def projections_of_a_few_rows():
    x = {"x": normal(11, 160), "gate": normal(11, 160), "scale": normal(160, dtype=torch.float32), "w": normal(50, 160),
         "v": normal(2, 160), "pool": normal(4, 3, 48), "kv": normal(2, 48), "latent": normal(32, dtype=torch.float32)}  # fmt: skip

    def run(x: Inputs) -> list[Tensor]:
        place = torch.tensor([2, 0], device="cuda"), torch.tensor([1, 2], device="cuda")
        append_latents(x["kv"], x["latent"], 1e-5, x["pool"], *place)
        return [
            *linears(x["x"], x["w"], x["v"]), normed_linear(x["x"], x["scale"], 1e-5, x["w"]),
            gated_linear(x["x"], x["gate"], x["w"]), x["pool"],
        ]  # fmt: skip

    return x, torch.no_grad()(run)


def layer_case(tokens: int) -> tuple[Inputs, Function]:
    """A whole layer with experts, behind a read over depth."""
    wide = torch.float32
    x = {"a": normal(tokens, 64), "b": normal(tokens, 64), "c": normal(tokens, 64), "weight": normal(64, dtype=wide, scale=0.1),
         "query": normal(64, dtype=wide), "scale": normal(64, dtype=wide), "router": normal(20, 64, dtype=wide),
         "bias": normal(20, dtype=wide, scale=0.1), "down": normal(32, 64), "up": normal(64, 32), "norm": normal(32, dtype=wide),
         "w1": normal(20, 96, 32), "w3": normal(20, 96, 32), "w2": normal(20, 32, 96),
         "gate_proj": normal(96, 64), "up_proj": normal(96, 64), "down_proj": normal(64, 96)}  # fmt: skip

    def run(x: Inputs) -> list[Tensor]:
        out, live = read([x["a"]], x["b"], x["c"], x["weight"], 1e-5, x["scale"], 1e-5, x["query"])
        weights = MixtureWeights(
            x["router"], x["bias"], x["down"], x["up"], (x["norm"], 1e-5), (x["w1"], x["w3"], x["w2"]),
            (x["gate_proj"], x["up_proj"], x["down_proj"]),
        )  # fmt: skip
        assert layer_obstacle(out, weights, 3) is None
        return [out, live, layer_decode(out, weights, 3)]

    return x, torch.no_grad()(run)


@case
def layer_of_one_token():
    return layer_case(1)


@case
def layer_of_a_few_tokens():
    return layer_case(19)


@case
def routes_and_histogram():
    x = {"logits_": normal(301, 70, dtype=torch.float32), "bias": normal(70, dtype=torch.float32, scale=0.1)}

    def run(x: Inputs) -> list[Tensor]:
        found = router.route(x["logits_"], x["bias"], 3)
        counts = []
        for form in ("cuda", "triton"):
            balancer = QuantileHistogram(70, 3, bins=100)
            with force(form):
                balancer.observe(found.scores_NE.detach(), found.cutoff_N.detach(), None, found.counts(), x["bias"])
            counts.append(balancer.count_EB)
        return [found.weight_NA, found.index_NA, found.scores_NE.detach(), found.cutoff_N.detach(), *counts]

    return x, run


@case
def blocks_of_numbers():
    def run(x: Inputs) -> list[Tensor]:
        even = x["x"][:, :64]
        codes = [t.view(torch.uint8) for quantize in (quantize_mxfp4, quantize_mxfp8) for t in quantize(even, "even")]
        return [*codes, fake_quantize(x["x"], "mxfp4", "even"), fake_quantize(x["x"], "mxfp8", "even")]

    return {"x": normal(33, 70)}, run


def results(inputs: Inputs, function: Function) -> list[Tensor]:
    """Outputs, and gradients of the marked inputs under fixed cotangents."""
    leaves = {n: x.detach().requires_grad_(n.endswith("_")) for n, x in inputs.items()}
    outputs = function(leaves)
    outputs = [x for x in (outputs if isinstance(outputs, list | tuple) else [outputs]) if isinstance(x, Tensor)]
    wanted = [x for x in leaves.values() if x.requires_grad]
    gradients: tuple[Tensor, ...] = ()
    if wanted:
        roots = [x for x in outputs if x.requires_grad]
        generator = torch.Generator("cuda").manual_seed(3)
        cotangents = [torch.randn(x.shape, generator=generator, device="cuda").to(x.dtype) for x in roots]
        gradients = torch.autograd.grad(roots, wanted, cotangents)
    return [x.detach() for x in outputs] + list(gradients)


@pytest.mark.parametrize("name", CASES)
def test_nothing_beside_a_tensor_is_written_or_matters(name: str) -> None:
    inputs, function = CASES[name]()
    plain = results({n: x.clone() for n, x in inputs.items()}, function)
    with GuardBands() as bands:
        got = results({n: bands.of(x) for n, x in inputs.items()}, function)
        torch.cuda.synchronize()
    assert len(bands.held) > len(inputs), "the operation allocated nothing: it is not guarded"
    for number, (a, b) in enumerate(zip(got, plain, strict=True)):
        assert not a.is_floating_point() or a.isfinite().all(), f"result {number} has unwritten or poisoned elements"
        assert torch.equal(a, b), f"result {number} differs from that in ordinary memory"


@pytest.mark.parametrize("side", ["before", "after"])
def test_a_write_beside_a_tensor_shows(side: str) -> None:
    def beside() -> None:
        with GuardBands():
            x = torch.empty(5, 3, device="cuda", dtype=LOW)
            assert x.isnan().all()
            at = x.storage_offset() + (-1 if side == "before" else 15)
            torch.as_strided(x, (1,), (1,), at).zero_()

    with pytest.raises(AssertionError, match=f"2 bytes {side}"):
        beside()
