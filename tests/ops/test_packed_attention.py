"""Packed two-way attention against its definition, one item at a time."""

from __future__ import annotations

import pytest
import torch

from perilune.errors import RequestError
from perilune.ops.choice import force
from perilune.ops.packed_attention import packed_attention, packed_attention_reference, select

PACKS = [[5], [4, 4, 4], [3, 7, 3, 1, 7, 12], [1]]


def operands(rows, dtype=torch.float64):
    return [torch.randn(rows, 2, 8, dtype=dtype) for _ in range(3)]


@pytest.mark.parametrize("lengths", PACKS, ids=str)
def test_equals_the_definition_with_gradients(lengths, poisoned_memory):
    given = [x.requires_grad_() for x in operands(sum(lengths))]
    weight = torch.randn(sum(lengths), 2, 8, dtype=torch.float64)
    ours, truth = packed_attention(*given, lengths, 0.3), packed_attention_reference(*given, lengths, 0.3)
    torch.testing.assert_close(ours, truth, rtol=1e-12, atol=1e-12)
    for a, b in zip(
        torch.autograd.grad((ours * weight).sum(), given), torch.autograd.grad((truth * weight).sum(), given)
    ):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lower_precision_is_as_good_as_rounding_allows(dtype):
    lengths = [30, 17, 30]
    given = operands(sum(lengths), dtype)
    truth = packed_attention_reference(*(x.double() for x in given), lengths, 0.35)
    ours = packed_attention(*given, lengths, 0.35)
    assert ours.dtype == dtype
    assert (ours.double() - truth).abs().max() < 4 * torch.finfo(dtype).eps * truth.abs().max()


def test_items_do_not_see_each_other():
    lengths = [3, 5, 3]
    q, k, v = operands(11)
    before = packed_attention(q, k, v, lengths, 0.3)
    k[3:8], v[3:8] = float("nan"), float("nan")
    after = packed_attention(q, k, v, lengths, 0.3)
    assert after[3:8].isnan().all()
    assert torch.equal(before[:3], after[:3]) and torch.equal(before[8:], after[8:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_grows_with_the_pack_and_not_with_its_square(dtype):
    """40 items of 512 rows, forward and backward: scores of the pack would take 3.4 GB, those of the items alone 84 MB."""
    lengths = [512] * 39 + [256, 256]
    given = [x.requires_grad_() for x in operands(sum(lengths), dtype)]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        packed_attention(*given, lengths, 0.3).sum().backward()
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert 0 < largest < 5 * sum(x.nbytes for x in given)


def test_selection_says_why_and_lengths_are_checked():
    q, k, v = operands(4)
    assert select(q).implementation == "torch" and "one call for each" in select(q).reason
    with force("reference"):
        assert select(q).implementation == "reference"
        torch.testing.assert_close(
            packed_attention(q, k, v, [1, 3], 0.3), packed_attention_reference(q, k, v, [1, 3], 0.3), rtol=0, atol=0
        )
    for lengths in ([3], [4, 0], [5, -1]):
        with pytest.raises(RequestError, match="add up to the 4 packed rows"):
            packed_attention(q, k, v, lengths, 0.3)
