"""The routed experts', router's and histogram's kernels compile for sm_90 at K3's sizes, as their launches ask for them."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable

import pytest
import torch

from perilune.ops.triton.available import missing

if reason := missing():
    pytest.skip(reason, allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from compiled_for_hopper import compiled

from perilune.ops.moe.triton import configs, experts, histogram, plan, router, rows

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("cc") is None, reason="Triton compiles on Linux with a C compiler"
)

L, F, E, N, A = 3584, 3072, 2, 64, 2
SHARED = 227 * 1024  # bytes that a program can have
SITU = (4.0, 25.0)


def calls(
    dtype: torch.dtype, tiles: configs.Config, L: int = L, F: int = F
) -> dict[str, tuple[Callable[[], object], int]]:
    """A call for each kernel, and the bytes that it may spill."""
    slots = N * A

    def integers(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.int32)

    count = slots // tiles.rows + E
    order = plan.RowPlan(
        tiles.rows, integers(E), integers(E + 1), integers(count), integers(count * tiles.rows), integers(slots), A
    )
    x, h = (torch.empty(order.rows, width, dtype=dtype) for width in (L, F))
    up, down, mixing = torch.empty(E, F, L, dtype=dtype), torch.empty(E, L, F, dtype=dtype), torch.empty(N, A)
    return {
        "hidden": (lambda: experts.hidden(x, up, up, order, tiles, SITU), 0),
        "before the unit": (lambda: experts.before_unit(x, up, up, order, tiles), 0),
        "down": (lambda: experts.down(h, down, mixing, order, tiles), 0),
        "back": (lambda: experts.back([(x, down)], order, tiles), 0),
        "back, two pairs": (lambda: experts.back([(h, up), (h, up)], order, tiles), 0),
        "the unit's gradient": (lambda: rows.unit_gradient_(h, h, h, mixing, order, SITU), 0),
        "weights": (lambda: experts.weight_gradient(h, x, up, order, tiles), 0),
        "rows": (lambda: rows.sum_rows(rows.gather(torch.empty(N, L, dtype=dtype), order), order), 0),
    }


def check(call: Callable[[], object], allowed: int) -> None:
    results = compiled(call)
    assert results
    for result in results:
        assert result.spilled <= allowed, result
        assert result.registers * 32 * result.warps <= 65536 and result.shared <= SHARED, result


@pytest.mark.parametrize("name", calls(torch.bfloat16, configs.HALF[128]))
def test_experts_of_many_rows(name: str) -> None:
    check(*calls(torch.bfloat16, configs.HALF[128])[name])


@pytest.mark.parametrize("tiles", [(torch.bfloat16, configs.HALF[64]), (torch.float32, configs.FULL)])
def test_experts_of_few_rows_and_float32(tiles: tuple[torch.dtype, configs.Config]) -> None:
    for name in ("hidden", "weights"):
        check(*calls(*tiles)[name])


def test_products_of_one_step() -> None:
    """Sizes of `nano`. The loop over a product's depth folds away; the loop over tiles must not take its pipeline."""
    narrow = calls(torch.bfloat16, configs.HALF[128], 64, 64)
    for name in ("hidden", "down", "back", "back, two pairs"):
        check(*narrow[name])


def test_plan() -> None:
    check(lambda: plan.row_plan(torch.zeros(N, A, dtype=torch.int64), 896, 128), 0)


@pytest.mark.parametrize(("count", "k"), [(896, 16), (64, 8)])
def test_router_and_histogram(count: int, k: int) -> None:
    logits, bias, routes = torch.zeros(8, count), torch.zeros(count), torch.zeros(8, k, dtype=torch.int64)
    check(lambda: router.route(logits, bias, k, True, 1.0, 1e-20), 0)
    check(lambda: router.route_backward(logits, routes, torch.zeros(8, k), True, 1.0, 1e-20), 0)
    counts, seen = torch.zeros(count, 1000, dtype=torch.int32), torch.zeros(8, dtype=torch.bool)
    check(lambda: histogram.histogram_add(counts, logits, torch.zeros(8), seen, bias), 0)
