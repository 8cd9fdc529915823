"""The held-out part: whole groups, chosen by name, nothing copied from training."""

from __future__ import annotations

import pytest

from perilune.data.document import Corpus, Document
from perilune.data.split import split
from perilune.errors import RequestError


def line(*words):
    return "a line that is long enough to count as a long line " + " ".join(map(str, words)) + "\n"


def corpus_of(groups, files=2):
    return Corpus.of(
        Document.of(f"r/{group}/{f}.py", f"r/{group}", "".join(line(group, f, i) for i in range(10)))
        for group in groups
        for f in range(files)
    )


GROUPS = [f"module{i}" for i in range(200)]


def test_whole_groups_on_one_side_and_about_the_asked_share():
    corpus = corpus_of(GROUPS)
    parts = split(corpus, holdout=0.2)
    train, held_out = ({d.group for d in side} for side in (parts.train, parts.held_out))
    assert not train & held_out and train | held_out == {f"r/{group}" for group in GROUPS}
    assert 25 <= len(held_out) <= 55
    assert list(parts.train) == sorted(parts.train, key=lambda d: d.name)
    assert parts.left_out == ()


def test_a_group_stays_on_its_side_when_the_corpus_grows():
    small = {d.group for d in split(corpus_of(GROUPS[:100]), holdout=0.2).held_out}
    large = {d.group for d in split(corpus_of(GROUPS), holdout=0.2).held_out}
    assert small == {group for group in large if group in {f"r/{g}" for g in GROUPS[:100]}}


@pytest.mark.parametrize(("shared", "kept"), [(4, True), (5, False)])
def test_copied_lines_put_a_document_out_of_both_parts(shared, kept):
    """10 long lines; more than 40 % of them in training is too many."""
    corpus = corpus_of(GROUPS[:50])
    first = split(corpus, holdout=0.2)
    victim, source = first.held_out[0], first.train[0]
    lines = source.text.splitlines(keepends=True)[:shared] + victim.text.splitlines(keepends=True)[shared:]
    copied = Document.of(victim.name, victim.group, "short\n" * 30 + "    ".join(lines))
    documents = [copied if d.name == victim.name else d for d in corpus.documents]
    parts = split(Corpus.of(documents), holdout=0.2)
    assert (victim.name in {d.name for d in parts.held_out}) == kept
    assert victim.name not in {d.name for d in parts.train}
    if not kept:
        (item,) = parts.left_out
        assert item.name == victim.name and item.num_bytes == copied.num_bytes and "50%" in item.reason


def test_one_group_is_split_by_document_and_one_document_by_position():
    parts = split(corpus_of(["only"], files=10), holdout=0.3)
    assert parts.train and parts.held_out and len(parts.train) + len(parts.held_out) == 10
    text = "".join(line(i) for i in range(100))
    parts = split(Corpus.of([Document.of("a", "a", text)]), holdout=0.1)
    (head,), (tail,) = parts.train, parts.held_out
    assert head.text + tail.text == text and head.text.endswith("\n")
    assert 0.05 < tail.num_bytes / len(text) < 0.11
    parts = split(Corpus.of([Document.of("a", "a", "x" * 100)]), holdout=0.1)
    assert [d.num_bytes for d in (*parts.train, *parts.held_out)] == [90, 10]


@pytest.mark.parametrize("holdout", [0.001, 0.999])
def test_both_sides_get_at_least_one_group(holdout):
    parts = split(corpus_of(["a", "b"], files=1), holdout=holdout)
    assert len(parts.train) == len(parts.held_out) == 1


def test_groups_are_added_until_enough_text_is_held_out():
    """The first group by hash is a copy of another: the next one is held out in its place."""
    corpus = corpus_of(GROUPS[:6], files=1)
    first = split(corpus, holdout=0.1).held_out[0]
    other = next(d for d in corpus.documents if d.name != first.name)
    copied = Document.of(first.name, first.group, other.text + "\n")
    parts = split(Corpus.of([d if d.name != first.name else copied for d in corpus.documents]), holdout=0.1)
    assert parts.held_out and first.name in {item.name for item in parts.left_out}


def test_nothing_left_is_explained():
    with pytest.raises(RequestError, match=r"1 documents \(1 bytes\) cannot be divided"):
        split(Corpus.of([Document.of("a", "a", "x")]), holdout=0.1)
    same = "".join(line(i) for i in range(10))
    twins = Corpus.of([Document.of("a", "a", same), Document.of("b", "b", same + "\n")])
    with pytest.raises(RequestError, match="100% of its long lines"):
        split(twins, holdout=0.5)


def test_a_package_larger_than_the_held_out_share_is_divided():
    """A package of 90 % of the text cannot be held out as a whole; its sub-packages can."""
    big = [
        Document.of(f"r/big/{part}/{f}.py", "r/big", "".join(line("big", part, f, i) for i in range(10)))
        for part in range(45)
        for f in range(2)
    ]
    corpus = Corpus.of([*big, *corpus_of(GROUPS[:5]).documents])
    parts = split(corpus, holdout=0.2)
    held_out, train = ({d.group for d in side} for side in (parts.held_out, parts.train))
    assert any(group.startswith("r/big/") for group in held_out) and any(group.startswith("r/big/") for group in train)
    assert not held_out & train and all(group.count("/") == (2 if "big" in group else 1) for group in held_out | train)
    share = sum(d.num_bytes for d in parts.held_out) / corpus.num_bytes
    assert 0.05 < share < 0.4
