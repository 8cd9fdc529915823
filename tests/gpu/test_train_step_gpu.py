"""Training steps on a GPU: nothing waits inside a step, and a recorded step is the step itself, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from perilune.config import OptimConfig
from perilune.config.presets import small
from perilune.data.loader import Batch
from perilune.model import Transformer, init_weights
from perilune.ops import narrow, newton_schulz
from perilune.ops.choice import force
from perilune.ops.kda import chunk_kda
from perilune.ops.kda.gpu.padded_plan import Room
from perilune.ops.linear import linears
from perilune.ops.mla.keys import keys_and_values
from perilune.ops.moe.quantile import QuantileHistogram
from perilune.ops.sigmoid_gate import sigmoid_gate
from perilune.optim.build import Optimizer
from perilune.train.inputs import Form
from perilune.train.recorded import WARM_UP, Steps
from perilune.train.step import Step, batch_loss, split_rows, train_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LENGTH = 256
FACTORS = [0.2, 0.6, 1.0, 0.7, 0.4, 0.3]


def made(record: bool, optim: OptimConfig | None = None) -> Steps:
    cfg = replace(small(), num_layers=5, vocab_size=512)
    optim = optim or OptimConfig(qk_clip=0.05)  # low, so that heads are clipped
    model = init_weights(Transformer(cfg)).cuda().train()
    model.compute_dtype = torch.bfloat16
    optimizer = Optimizer(model.named_parameters(), cfg, optim, muon_dtype=torch.bfloat16)
    return Steps(Step(model, optimizer, grad_clip=optim.grad_clip, qk_clip=optim.qk_clip), record=record)


def batch(seed: int, rows: int = 5, documents: bool = True) -> Batch:
    """Random rows; with documents, two begin inside, at other places for each seed."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 512, (rows, LENGTH + 1), generator=draw)
    starts = torch.zeros(rows, LENGTH, dtype=torch.bool)
    starts[:, 0] = True
    starts[0, 100 + seed], starts[-1, 30 + 7 * seed] = documents, documents
    targets = ids[:, 1:].clone()
    targets[0, :7] = -100
    return Batch(ids[:, :-1].clone(), targets, starts)


def state(steps: Steps) -> dict[str, torch.Tensor]:
    return {n: t.clone() for n, t in (steps.model.state_dict() | steps.step.optimizer.state_tensors()).items()}


def assert_same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    wrong = [name for name, tensor in a.items() if not torch.equal(tensor, b[name])]
    assert a.keys() == b.keys() and not wrong, f"{len(wrong)} of {len(a)} tensors differ: {wrong[:8]}"


@pytest.mark.parametrize("optim", ["muon", "adamw"])
@pytest.mark.parametrize("documents", [False, True], ids=["rows", "documents"])
def test_recorded_steps_are_the_steps_themselves(documents: bool, optim: str) -> None:
    """Micro-batches of two shapes, changing rates, evaluation in between."""
    results, ends = [], []
    for record in (False, True):
        steps, seen = made(record, OptimConfig(name=optim, qk_clip=0.05)), []
        for number, factor in enumerate(FACTORS):
            micro = split_rows(batch(number, documents=documents), 2 * LENGTH)
            assert [len(m.ids_BT) for m in micro] == [2, 2, 1]
            result = steps.run(micro, factor)
            seen.append(
                (result.loss, result.grad_norm, result.counts_LE.tolist(), result.clipped_heads, result.max_logit)
            )
            if number == WARM_UP + 1:
                with torch.no_grad():
                    steps.model.eval()
                    seen.append(float(batch_loss(steps.model, micro[0]).nats))
                    steps.model.train()
        assert not any(hasattr(p, narrow.ATTRIBUTE) for p in steps.model.parameters()), (
            "weights moved under their copies"
        )
        assert steps.reason == (None if record else "switched off")
        assert bool(steps._recordings) is record
        results.append(seen)
        ends.append(state(steps))
    assert results[0] == results[1]
    assert results[0][0][3] > 0, "no head was clipped"
    assert_same(*ends)


def test_a_resumed_run_goes_on_as_the_recorded_one_would_have() -> None:
    whole, half = made(True), made(True)
    for number in range(4):
        for steps in (whole, half):
            steps.run([batch(number)], FACTORS[number])
    again, saved = made(True), state(half)
    again.model.load_state_dict({n: t for n, t in saved.items() if n in again.model.state_dict()})
    again.step.optimizer.load_state_tensors({n: saved[n] for n in half.step.optimizer.state_tensors()})
    for number in range(4, 6):
        a, b = (steps.run([batch(number)], FACTORS[number]) for steps in (whole, again))
        assert a.loss == b.loss
    assert whole._recordings and not again._recordings
    assert_same(state(whole), state(again))


def test_a_step_waits_for_the_device_only_where_its_results_are_read() -> None:
    steps = made(False)
    for number in range(2):
        steps.run([batch(number)], 1.0)
    micro, forms = batch(3), Form.of([batch(3)])
    assert forms is not None
    torch.cuda.set_sync_debug_mode("error")
    try:
        steps._inputs[forms[0]].fill(micro)
        steps.step.begin()
        steps.step.accumulate(steps._inputs[forms[0]].loss(steps.model), steps._valid)
        steps.step.measure()
        steps.step.update(lambda *scale: steps.step.optimizer.step(0.5, *scale))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_what_cannot_be_recorded_runs_as_it_is_and_says_so() -> None:
    def asks(module: torch.nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        float(output.sum())

    seen = []
    for record in (False, True):
        steps = made(record)
        steps.model.layers[1].ffn.register_forward_hook(asks)
        seen.append([steps.run([batch(number)], 0.5).loss for number in range(5)])
        if record:
            assert steps.reason is not None and "recording a step failed" in steps.reason and not steps._recordings
    assert seen[0] == seen[1]


def test_a_nan_stops_a_recorded_step_before_the_weights() -> None:
    from perilune.train.nonfinite import DivergedError

    steps = made(True)
    for number in range(4):
        steps.run([batch(number)], 0.5)
    with torch.no_grad():
        steps.model.lm_head.weight[3, 5] = float("nan")
    before = state(steps)
    with pytest.raises(DivergedError, match="lm_head.weight"):
        steps.run([batch(4)], 0.5)
    after = state(steps)
    assert all(torch.equal(after[n].nan_to_num(), t.nan_to_num()) for n, t in before.items())


def test_plain_steps_agree_with_those_in_rooms() -> None:
    """The same documents by their own tables, and by tables with room for more."""
    a, b = made(False), made(False)
    one = a.run([batch(0)], 0.0)
    two = train_step(b.model, b.step.optimizer, [batch(0)], factor=0.0, qk_clip=0.05)
    assert one.loss == pytest.approx(two.loss, rel=1e-6)
    assert one.grad_norm == pytest.approx(two.grad_norm, rel=1e-4)


@pytest.mark.parametrize("bound", [-5.0, None], ids=["bounded", "softplus"])
@pytest.mark.parametrize("target", [1 << 30, 2], ids=["whole", "cut"])
def test_kda_in_tables_with_room(target: int, bound: float | None) -> None:
    torch.manual_seed(0)
    heads, dim, offsets = 2, 64, (0, 70, 64 * 9 + 1, 700, 1024)
    q, k, v, g = (torch.randn(1, 1024, heads, dim, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    beta = torch.randn(1, 1024, heads, device="cuda", dtype=torch.bfloat16)
    A_log, bias = torch.zeros(heads, device="cuda"), torch.randn(heads * dim, device="cuda")
    do = torch.randn(1, 1024, heads, dim, device="cuda", dtype=torch.bfloat16)
    room = Room(1024, 9, target, 64)
    found = []
    for plan in (None, room.plan(torch.from_numpy(room.filled(offsets)).cuda())):
        inputs = [x.clone().requires_grad_() for x in (q, k, v, g, beta, A_log, bias)]
        bounds = torch.tensor(room.boundaries(offsets) if plan else offsets, dtype=torch.int32, device="cuda")
        if plan is not None:  # what the allocator gives next is NaN
            junk = [
                torch.full((n,), float("nan"), device="cuda")
                for n in (1 << 20, 1 << 18, 1 << 16, 1 << 14, 1 << 10)
                for _ in range(8)
            ]
            del junk
        o, _ = chunk_kda(
            *inputs[:5], use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True, use_beta_sigmoid_in_kernel=True,
            lower_bound=bound, safe_gate=bound is not None, A_log=inputs[5], dt_bias=inputs[6], cu_seqlens=bounds, plan=plan,
        )  # fmt: skip
        o.backward(do)
        found.append([o.detach(), *(x.grad for x in inputs)])
    for name, a, b in zip(("o", "q", "k", "v", "g", "beta", "A_log", "dt_bias"), *found, strict=True):
        scale = float(a.float().abs().max())
        far = float((a.float() - b.float()).abs().max()) / scale
        assert far < (2e-2 if target == 2 else 1e-5), f"{name}: {far}"


def gradients(function, *inputs: torch.Tensor) -> list[torch.Tensor]:
    """Values and gradients under fixed cotangents."""
    inputs = tuple(x.detach().clone().requires_grad_() for x in inputs)
    out = function(*inputs)
    out = out if isinstance(out, tuple) else (out,)
    draw = torch.Generator("cuda").manual_seed(1)
    cotangents = [torch.randn(x.shape, device="cuda", generator=draw).to(x.dtype) for x in out]
    return [x.detach() for x in out] + list(torch.autograd.grad(out, inputs, cotangents))


@pytest.mark.parametrize("name", ["gate", "narrow_gate", "keys", "projections"])
def test_what_training_fuses_is_as_exact_as_torch(name: str) -> None:
    draw = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, device="cuda", generator=draw).to(dtype)

    wide = normal(3, 70, 48)
    function, inputs = {
        "gate": (sigmoid_gate, (normal(3, 70, 520, dtype=torch.float32), normal(3, 70, 520))),
        "narrow_gate": (sigmoid_gate, (normal(3, 70, 520), normal(3, 70, 520))),
        "keys": (lambda kv, r: keys_and_values(kv, r, 64), (normal(3, 70, 5, 144), wide[..., 16:])),
        "projections": (linears, (normal(3, 70, 128), *(normal(n, 128, dtype=torch.float32) for n in (256, 64, 8)))),
    }[name]
    ours, again = (gradients(function, *inputs) for _ in range(2))
    with force("torch"):
        exact = gradients(function, *(x.double() for x in inputs))
        plain = gradients(function, *inputs)
    for got, twice, truth, other in zip(ours, again, exact, plain, strict=True):
        assert torch.equal(got, twice)
        error, theirs = (float((x.double() - truth).norm() / truth.norm()) for x in (got, other))
        # dx of several projections is rounded after each product, by torch after each product and each sum: 1.09 was seen.
        assert error <= 1.15 * theirs + 1e-6, (name, got.shape, error, theirs)


@pytest.mark.parametrize("shape", [(40, 512, 512), (9, 320, 256), (7, 96, 384), (12, 64, 512)])
def test_newton_schulz_in_symmetric_products(shape: tuple[int, int, int]) -> None:
    x = torch.randn(shape, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    x = x / x.norm(dim=(1, 2), keepdim=True)
    assert newton_schulz._symmetric(x.bfloat16())
    exact, ours = newton_schulz.iterate(x.double()), newton_schulz.iterate(x.bfloat16())
    with force("torch"):
        plain = newton_schulz.iterate(x.bfloat16())
    error, other = (float((y.double() - exact).norm() / exact.norm()) for y in (ours, plain))
    assert error <= 1.1 * other, (error, other)
    assert torch.equal(ours, newton_schulz.iterate(x.bfloat16()))


def test_balancers_together_and_one_by_one() -> None:
    draw = torch.Generator("cuda").manual_seed(0)
    together, apart = ([QuantileHistogram(16, 2, ema=0.3) for _ in range(3)] for _ in range(2))
    biases = [torch.randn(16, device="cuda", generator=draw) * 0.1 for _ in range(3)]
    for layer in range(3):
        scores = torch.rand(500, 16, device="cuda", generator=draw)
        cutoff = (scores + biases[layer]).topk(3).values[:, 2].contiguous()
        for balancers in (together, apart):
            balancers[layer].observe(scores, cutoff, None, torch.zeros(16, device="cuda"), biases[layer])
    on_host = []
    for balancer, bias in zip(apart, biases, strict=True):
        balancer._move(torch.device("cpu"))
        on_host.append(balancer.update(bias.cpu()))
    found = QuantileHistogram.update_all(together, biases)
    for a, b in zip(found, on_host, strict=True):
        torch.testing.assert_close(a.cpu(), b, rtol=0, atol=1e-7)
    empty = [QuantileHistogram(16, 2) for _ in range(2)]
    for balancer, bias in zip(empty, biases, strict=False):
        balancer.observe(
            scores, cutoff, torch.zeros(500, dtype=torch.bool, device="cuda"), torch.zeros(16, device="cuda"), bias
        )
    for bias, new in zip(biases, QuantileHistogram.update_all(empty, biases[:2]), strict=False):
        assert torch.equal(bias, new)
