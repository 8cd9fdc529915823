"""Memory pages in the store: what comes back is what was stored, equal pages and zeros cost nothing, damage is named, garbage is bounded."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.sandbox import page_names
from perilune.sandbox.page_names import PAGE
from perilune.sandbox.page_writer import LEAST_USE, Writer, still_good
from perilune.sandbox.pages import EMPTY, PACK_PAGES, ZERO, Packs, Table, overlaid, pack_name
from perilune.sandbox.protocol import StoreDamaged
from perilune.sandbox.store import Store, is_named


def nothing(where, pieces):
    """Sees all and objects to nothing."""


def content(*values: int) -> np.ndarray:
    """One page for each value, all of its bytes alike: 0 is a page of zeros."""
    return np.repeat(np.array(values, np.uint8)[:, None], PAGE, axis=1)


def numbers(*values: int) -> np.ndarray:
    return np.array(values, np.uint32)


def read(packs: Packs, table: Table) -> dict[int, bytes]:
    return {int(page): bytes(data) for number, pages in packs.pieces(table) for page, data in zip(number, pages)}


def written(
    store: Store, number, pages, last: Table = EMPTY, packs: Packs | None = None, permanent=frozenset()
) -> tuple[Table, int]:
    with store.writing() as batch:
        table = Writer(packs or store.packs, batch, last, permanent).write(number, pages, nothing, "memory")
        return table, batch.new_bytes


@settings(max_examples=30, deadline=None)
@given(
    rounds=st.lists(st.dictionaries(st.integers(0, 40), st.integers(0, 5), min_size=1), min_size=1, max_size=5),
    fresh=st.booleans(),
)
def test_what_is_stored_comes_back(tmp_path_factory, rounds, fresh):
    """A memory is stored again and again as it changes; each table gives it back, from this process's notes or from another's."""
    store = Store(tmp_path_factory.mktemp("store"), sync="none")
    memory: dict[int, int] = {}
    last = EMPTY
    for change in rounds:
        memory |= change
        number = numbers(*sorted(memory))
        pages = content(*(memory[int(page)] for page in number))
        packs = Packs(store.root / "blobs") if fresh else store.packs
        last, _ = written(store, number, pages, last, packs)
        again = Table.decode(last.encode(), last.packs)
        assert read(Packs(store.root / "blobs"), again) == {int(page): bytes(data) for page, data in zip(number, pages)}


def test_names_are_the_first_half_of_sha256_however_they_are_computed(monkeypatch):
    pages = np.frombuffer(os.urandom(7 * PAGE), np.uint8).reshape(-1, PAGE)
    wanted = [hashlib.sha256(page.tobytes()).digest()[:16] for page in pages]
    assert page_names.page_names(pages) == wanted
    for rows in ([], [3], [6, 0], [1, 1, 5]):
        assert page_names.page_names(pages, np.array(rows, np.int64)) == [wanted[row] for row in rows]
    if page_names._library() is None:
        pytest.skip("no compiler, or a processor without instructions for SHA-256: there is one way only")
    monkeypatch.setattr(page_names, "_library", lambda: None)
    assert page_names.page_names(pages) == wanted and page_names.page_names(pages, np.array([6, 0])) == [
        wanted[6],
        wanted[0],
    ]


def test_what_a_checkpoint_takes_over_and_what_it_stores_again(tmp_path):
    """Pages that changed, lie in a pack that is gone, or in one that is mostly garbage, are not taken over."""
    store, pages = Store(tmp_path, sync="none"), np.frombuffer(os.urandom(12 * PAGE), np.uint8).reshape(-1, PAGE)
    first, _ = written(store, np.arange(8, dtype=np.uint32), pages[:8])
    second, _ = written(store, np.arange(8, 12, dtype=np.uint32), pages[8:])
    table = overlaid(first, second)
    assert still_good(table, numbers(0, 9), store.packs, frozenset()).tolist() == [
        row not in (0, 9) for row in range(12)
    ]
    few = numbers(0, 1, 2, 3, 4)
    assert still_good(table, few, store.packs, frozenset()).tolist() == [row >= 8 for row in range(12)], (
        "3 of 8 are used"
    )
    assert still_good(table, few, store.packs, frozenset(first.packs)).sum() == 7, "it is needed anyway"
    store.blob_path(second.packs[0]).unlink()
    good = still_good(table, numbers(), store.packs, frozenset())
    assert good.tolist() == [row < 8 for row in range(12)] and table.of(good).packs == first.packs


def test_equal_pages_and_zeros_are_stored_once_and_not_at_all(tmp_path):
    store = Store(tmp_path, sync="none")
    table, size = written(store, numbers(1, 2, 3, 9), content(7, 0, 7, 8))
    assert 2 * PAGE < size < 3 * PAGE and list(table.pack) == [0, ZERO, 0, 0] and table.place[0] == table.place[2]
    _, again = written(store, numbers(4, 5), content(8, 7))
    assert again == 0, "another memory with the same pages"
    _, elsewhere = written(store, numbers(4, 5), content(8, 7), packs=Packs(store.root / "blobs"))
    assert elsewhere > 0, "what this process does not know of is written once more, under the same rules"


def test_unchanged_pages_are_found_by_comparison_without_notes(tmp_path):
    store = Store(tmp_path, sync="none")
    pages = np.frombuffer(os.urandom(300 * PAGE), np.uint8).reshape(-1, PAGE).copy()
    number = np.arange(300, dtype=np.uint32)
    table, first = written(store, number, pages)
    assert first > 300 * PAGE and len(table.packs) == -(-300 // PACK_PAGES)
    pages[17] ^= 255
    changed, second = written(store, number, pages, table, Packs(store.root / "blobs"))
    assert second < 2 * PAGE + 100 and set(table.packs) <= set(changed.packs)


def test_a_pack_that_is_mostly_garbage_is_not_held_on_to(tmp_path):
    store = Store(tmp_path, sync="none")
    pages = np.frombuffer(os.urandom(100 * PAGE), np.uint8).reshape(-1, PAGE).copy()
    number = np.arange(100, dtype=np.uint32)
    table, _ = written(store, number, pages)
    kept = int(100 * LEAST_USE) - 10
    pages[kept:] ^= 255
    later, size = written(store, number, pages, table)
    assert not set(later.packs) & set(table.packs) and size > 100 * PAGE
    assert read(store.packs, later) == {page: bytes(data) for page, data in enumerate(pages)}
    pages[0] ^= 255
    spared, _ = written(store, number[:10], pages[:10], later, permanent=frozenset(later.packs))
    assert set(later.packs) & set(spared.packs), "packs that are needed anyway are used however little"


def test_pages_whose_pack_was_removed_are_stored_again(tmp_path):
    store = Store(tmp_path, sync="none")
    table, size = written(store, numbers(1, 2), content(3, 4))
    store.blob_path(table.packs[0]).unlink()
    again, later = written(store, numbers(1, 2), content(3, 4), table)
    assert later == size and read(store.packs, again) == {1: bytes([3]) * PAGE, 2: bytes([4]) * PAGE}


@pytest.mark.parametrize("damage, said", [
    (lambda data: data[:-1], "truncated"), (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "corrupt"),
    (lambda data: data[:30] + bytes([data[30] ^ 1]) + data[31:], "corrupt"), (None, "missing"),
])  # fmt: skip
def test_a_damaged_pack_is_named(tmp_path, damage, said):
    store = Store(tmp_path, sync="none")
    table, _ = written(store, numbers(1, 2), content(3, 4))
    path = store.blob_path(table.packs[0])
    whole = path.read_bytes()
    assert is_named(path.parent.name + path.name, whole) and pack_name(whole[:-1]) is None
    path.unlink() if damage is None else path.write_bytes(damage(whole))
    with pytest.raises(StoreDamaged, match=f"{table.packs[0]}.*{said}"):
        read(store.packs, table)


def test_damage_to_a_pack_that_was_checked_before_is_seen(tmp_path):
    store = Store(tmp_path, sync="none")
    table, _ = written(store, numbers(1, 2), content(3, 4))
    assert Store(tmp_path, sync="none").packs is store.packs and len(read(store.packs, table)) == 2
    path = store.blob_path(table.packs[0])
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + b"x")
    with pytest.raises(StoreDamaged, match="corrupt"):
        read(store.packs, table)


def test_a_table_that_names_what_it_has_not_is_refused():
    good = Table(numbers(1, 2), numbers(0, ZERO), numbers(0, 0), ("a" * 64,))
    assert Table.decode(good.encode(), good.packs).number.tolist() == [1, 2]
    for data, packs in ((good.encode()[:-1], good.packs), (good.encode(), ())):
        with pytest.raises(ValueError, match="table"):
            Table.decode(data, packs)
    with pytest.raises(ValueError, match="not in order"):
        Table.decode(Table(numbers(2, 1), numbers(0, 0), numbers(0, 0), good.packs).encode(), good.packs)


@given(
    under=st.dictionaries(st.integers(0, 20), st.integers(0, 3)),
    over=st.dictionaries(st.integers(0, 20), st.integers(0, 3)),
)
@settings(max_examples=40, deadline=None)
def test_a_table_over_another(tmp_path_factory, under, over):
    store, tables = Store(tmp_path_factory.mktemp("store"), sync="none"), []
    for memory in (under, over):
        pages = content(*(memory[page] for page in sorted(memory))) if memory else np.zeros((0, PAGE), np.uint8)
        tables.append(written(store, numbers(*sorted(memory)), pages, packs=Packs(store.root / "blobs"))[0])
    both = overlaid(*tables)
    assert read(store.packs, both) == {page: bytes([value]) * PAGE for page, value in {**under, **over}.items()}
    assert (np.diff(both.number.astype(np.int64)) > 0).all()


def test_a_file_that_only_looks_like_a_pack_keeps_its_own_name(tmp_path: Path):
    store = Store(tmp_path, sync="none")
    with store.writing() as batch:
        name = batch.put(b"PERILUNE PAGES 1 but then something else")
    assert store.read(name).startswith(b"PERILUNE PAGES 1")
