"""The loader: a pure function of the step, the same for any number of processes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.data.curriculum import Curriculum, Place
from perilune.data.loader import Loader
from perilune.data.mixture import Mixture
from perilune.data.order import permuted
from perilune.data.packing import IGNORE
from perilune.data.shards import write_store
from perilune.data.sources import SyntheticSource, TextSource
from perilune.data.synthetic import Recall, StateTracking
from perilune.errors import ConfigError, RequestError


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    rng = np.random.default_rng(0)
    documents = [(rng.integers(0, 400, size=n).tolist(), n) for n in rng.integers(1, 120, size=60)]
    return write_store(tmp_path_factory.mktemp("d") / "s", documents, eos=401, vocab_size=432, fingerprint="f")


def loader(store, *, seed=3, rank=0, world=1, steps=40, synthetic=0.0):
    sources = {"text": (TextSource(store), 1.0 - synthetic)}
    if synthetic:
        sources["synthetic"] = (SyntheticSource([Recall(), StateTracking(3)], 400), synthetic)
    curriculum = Curriculum([(16, 0.5), (32, 0.5)], steps=steps, tokens_per_step=128)
    return Loader(sources, curriculum, seed=seed, rank=rank, world=world)


@settings(max_examples=80)
@given(size=st.integers(1, 700), key=st.integers(0, 2**40))
def test_permuted_is_a_permutation(size, key):
    assert sorted(permuted(i, size, [key]) for i in range(size)) == list(range(size))


def test_permutations_of_different_keys_differ_and_look_random():
    first, second = ([permuted(i, 1000, [key]) for i in range(1000)] for key in (1, 2))
    assert sum(a == b for a, b in zip(first, second)) < 10
    assert abs(np.corrcoef(np.arange(1000), first)[0, 1]) < 0.15


@pytest.mark.parametrize("world", [2, 4])
def test_any_world_size_gives_the_same_global_batch(store, world):
    one = loader(store, synthetic=0.25)
    shared = [loader(store, synthetic=0.25, rank=rank, world=world) for rank in range(world)]
    for step in (0, 7, 19, 20, 33):
        whole, parts = one.batch(step), [each.batch(step) for each in shared]
        for name in ("ids_BT", "targets_BT", "starts_BT"):
            assert torch.equal(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name))
    assert len({each.fingerprint for each in [one, *shared]}) == 1


def test_resume_needs_only_the_step(store):
    straight = [loader(store).batch(step).ids_BT for step in range(30)]
    resumed = loader(store)
    assert all(torch.equal(resumed.batch(step).ids_BT, straight[step]) for step in range(25, 30))
    assert not torch.equal(loader(store, seed=4).batch(0).ids_BT, straight[0])


def test_stages_change_the_window_and_keep_the_tokens(store):
    shapes = [tuple(loader(store).batch(step).ids_BT.shape) for step in (0, 19, 20, 39, 50)]
    assert shapes == [(8, 16), (8, 16), (4, 32), (4, 32), (4, 32)]


def test_an_epoch_shows_every_window_once(store):
    source = TextSource(store)
    count = source.windows_per_epoch(16)
    stream = store.read(0, store.num_tokens).tolist()
    for epoch in range(2):
        windows = [source.window(epoch * count + i, 16, (1,)) for i in range(count)]
        seen = sorted(tuple(each.ids.tolist()) for each in windows)
        phases = [
            p for p in range(32) if sorted(tuple(stream[p + 16 * i : p + 16 * i + 16]) for i in range(count)) == seen
        ]
        assert phases, "the windows are not a partition of the stream"


def test_epochs_differ_in_order_and_in_phase(store):
    source = TextSource(store)
    count = source.windows_per_epoch(16)
    stream = store.read(0, store.num_tokens).tolist()
    place = {tuple(stream[i : i + 16]): i for i in range(len(stream) - 15)}
    starts = [
        [place[tuple(source.window(epoch * count + i, 16, (1,)).ids.tolist())] for i in range(count)]
        for epoch in range(4)
    ]
    assert len({min(each) for each in starts}) > 1, "every epoch cuts at the same places"
    assert len({tuple(np.argsort(each)) for each in starts}) == 4, "epochs share an order"


def test_a_stage_begins_with_its_own_first_windows(store):
    expected = [TextSource(store).window(i, 32, (3, 1, 0)).ids for i in range(8)]
    got = torch.cat([loader(store).batch(step).ids_BT for step in (20, 21)])
    assert got.tolist() == np.stack(expected).tolist()


def test_synthetic_windows_take_turns_and_differ():
    source = SyntheticSource([Recall(), StateTracking(3)], 400)
    windows = [source.window(i, 40, (1, 2)) for i in range(4)]
    dot = Recall().symbols - 1
    assert [dot in each.ids for each in windows] == [True, False, True, False]
    assert windows[0].ids.tolist() != windows[2].ids.tolist()
    assert source.window(0, 40, (1, 3)).ids.tolist() != windows[0].ids.tolist()
    assert all(each.starts.tolist() == [True] + [False] * 39 for each in windows)


def test_targets_are_next_tokens_and_never_cross_documents(store):
    for step in range(5):
        batch = loader(store).batch(step)
        inside = batch.targets_BT[:, :-1] != IGNORE
        assert torch.equal(batch.targets_BT[:, :-1][inside], batch.ids_BT[:, 1:][inside])
        assert torch.equal(batch.starts_BT[:, 1:], ~inside)
        assert torch.equal(batch.ids_BT[:, :-1][~inside], torch.full((int((~inside).sum()),), 401))


def test_fingerprint_changes_with_what_decides_the_batches(store):
    base = loader(store).fingerprint
    assert base == loader(store).fingerprint
    assert len({base, loader(store, seed=4).fingerprint, loader(store, steps=60).fingerprint,
                loader(store, synthetic=0.5).fingerprint}) == 4  # fmt: skip


def test_too_short_text_and_uneven_sharing_are_explained(store):
    with pytest.raises(RequestError, match="too few for one window of 100000"):
        TextSource(store).window(0, 100_000, (0,))
    with pytest.raises(ConfigError, match="4 windows of 32 tokens a step cannot be shared by 8"):
        loader(store, world=8)
    with pytest.raises(ConfigError, match="needs 129 symbols"):
        SyntheticSource([Recall()], 100)


@settings(max_examples=60, deadline=None)
@given(
    weights=st.lists(st.floats(0, 10), min_size=1, max_size=5).filter(lambda w: max(w) > 1e-3),
    start=st.integers(0, 10**9),
)
def test_mixture_is_exact_over_a_period_and_counts_each_source(weights, start):
    named = {f"s{i}": weight for i, weight in enumerate(weights)}
    mixture = Mixture(named, period=100)
    drawn = [mixture.assign(sample) for sample in range(start, start + 100)]
    for name, weight in named.items():
        indices = [index for source, index in drawn if source == name]
        share = 100 * weight / sum(weights)
        assert abs(len(indices) - share) <= 1 + len(weights)
        assert indices == list(range(indices[0], indices[0] + len(indices))) if indices else weight == 0
    assert mixture.assign(0)[1] == 0


def test_mixture_spreads_a_source_evenly():
    mixture = Mixture({"a": 0.75, "b": 0.25})
    drawn = [mixture.assign(sample)[0] for sample in range(400)]
    assert all(drawn[i : i + 8].count("b") == 2 for i in range(0, 400, 8))
    with pytest.raises(ConfigError, match="not all 0"):
        Mixture({"a": 0.0})
    with pytest.raises(ConfigError, match="not negative"):
        Mixture({"a": -1.0, "b": 2.0})


def test_curriculum_places():
    curriculum = Curriculum([(8, 0.75), (64, 0.0001), (16, 0.2499)], steps=100, tokens_per_step=64)
    assert [curriculum.locate(step) for step in (0, 74, 75, 1000)] == [
        Place(0, 8, 0),
        Place(0, 8, 74),
        Place(2, 16, 0),
        Place(2, 16, 925),
    ]
    assert curriculum.rows(curriculum.locate(0)) == 8
    with pytest.raises(ConfigError, match="tokens_per_step=64 is not a multiple of the window seq_len=24"):
        Curriculum([(24, 1.0)], steps=10, tokens_per_step=64)
