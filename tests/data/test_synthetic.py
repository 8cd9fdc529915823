"""Synthetic tasks: every answer is recomputed by a slow reader of the window."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perilune.data.synthetic import (
    TASKS,
    Arithmetic,
    Copy,
    Needle,
    Palindrome,
    Recall,
    StateTracking,
    WholeWindow,
    hide_in_text,
)
from perilune.errors import ConfigError
from perilune.tokenizer import ByteTokenizer


def make(task, length=128, seed=0):
    example = task.make(np.random.default_rng(seed), length)
    ids, targets = example.ids.tolist(), example.targets.tolist()
    assert len(ids) == len(targets) == length
    return ids, targets


def next_token_answers(ids, targets):
    """Positions of the answer tokens; a next-token task predicts what then stands there."""
    places = [t + 1 for t, target in enumerate(targets) if target != -100]
    assert all(ids[place] == targets[place - 1] for place in places)
    return places


@pytest.mark.parametrize("name", TASKS)
@settings(max_examples=25, deadline=None)
@given(length=st.integers(110, 300), seed=st.integers(0, 10**6))
def test_every_task_fills_its_window_within_its_alphabet(name, length, seed):
    task = TASKS[name]()
    ids, targets = make(task, length, seed)
    assert 0 <= min(ids) and max(ids) < task.symbols and max(targets) < task.symbols
    assert any(target != -100 for target in targets) and task.name == name
    assert make(TASKS[name](), length, seed) == (ids, targets), "not a function of the generator"


@pytest.mark.parametrize("name", sorted(set(TASKS) - {"state"}))
def test_a_window_too_short_is_refused(name):
    with pytest.raises(ConfigError, match=f"'{name}' needs windows of at least"):
        make(TASKS[name](), 2)


@pytest.mark.parametrize("length", [5, 6, 64, 129, 400])
def test_recall(length):
    task = Recall()
    ids, targets = make(task, length)
    places = next_token_answers(ids, targets)
    dot = ids.index(task.symbols - 1)
    memory = dict(zip(ids[:dot:2], ids[1:dot:2]))
    assert len(memory) == dot // 2 == min(32, (length - 1) // 4)
    assert places == list(range(dot + 2, length, 2))
    assert all(memory[ids[place - 1]] == ids[place] for place in places)


@pytest.mark.parametrize(("task", "order"), [(Copy(), 1), (Palindrome(), -1)])
@pytest.mark.parametrize("length", [3, 64, 65])
def test_copy_and_palindrome(task, order, length):
    ids, targets = make(task, length)
    places = next_token_answers(ids, targets)
    size = (length - 1) // 2
    assert ids[-size - 1] == task.symbols - 1 and places == list(range(length - size, length))
    assert ids[-size:] == ids[-2 * size - 1 : -size - 1][::order]


@pytest.mark.parametrize("n", [2, 3, 5])
def test_state_tracking_against_permuting_a_list(n):
    task = StateTracking(n)
    elements = list(itertools.permutations(range(n)))
    ids, targets = make(task)
    state = list(range(n))
    for move, target in zip(ids, targets):
        state = [elements[move][x] for x in state]
        assert elements[target] == tuple(state)


def test_state_of_two_objects_is_parity():
    ids, targets = make(StateTracking(2))
    assert targets == (np.cumsum(ids) % 2).tolist()


def test_arithmetic():
    task = Arithmetic(modulus=7, operations=3)
    ids, targets = make(task, 105)
    places = next_token_answers(ids, targets)
    assert len(places) == 10 and ids[100:] == [11] * 5
    for place in places:
        terms = ids[place - 8 : place - 1]
        value = terms[0]
        for sign, number in zip(terms[1::2], terms[2::2]):
            value = [value + number, value - number, value * number][sign - 7]
        assert ids[place] == value % 7 and ids[place - 1] == 10 and ids[place + 1] == 11


@pytest.mark.parametrize("length", [40, 41, 500])
def test_needle(length):
    task = Needle()
    ids, targets = make(task, length)
    places = next_token_answers(ids, targets)
    tell, ask = task.symbols - 2, task.symbols - 1
    told = {ids[t + 1]: ids[t + 2 : t + 5] for t, token in enumerate(ids) if token == tell}
    asked = [t for t, token in enumerate(ids) if token == ask]
    assert len(told) == len(asked) == 4 and asked == list(range(length - 20, length, 5))
    assert all(told[ids[t + 1]] == ids[t + 2 : t + 5] for t in asked)
    assert places == [t + i for t in asked for i in (2, 3, 4)]


@pytest.mark.parametrize("length", [93, 200, 1000])
def test_whole_window(length):
    task = WholeWindow()
    ids, targets = make(task, length)
    places = next_token_answers(ids, targets)
    fact, link, count, ask = (task.symbols - 4 + i for i in range(4))
    first_question = ids.index(ask)
    pieces = [(t, ids[t : t + 3]) for t in range(first_question) if ids[t] in (fact, link, count)]
    assert len(pieces) == 4 + 2 * 3 + 6 and len(places) == 7
    gaps = np.diff([t for t, _ in pieces] + [first_question])
    assert gaps.max() <= first_question / len(pieces) + 1, "a stretch of the window holds no evidence"
    for place in places:
        _, kind, subject, answer = ids[place - 3 : place + 1]
        found = [b for _, (k, a, b) in pieces if k == kind and a == subject]
        if kind == fact:
            assert found == [answer]
        elif kind == link:
            for _ in range(task.hops):
                (subject,) = [b for _, (k, a, b) in pieces if k == link and a == subject]
            assert subject == answer
        else:
            assert len(found) == task.addends
            assert answer - task.hay == sum(b - task.hay for b in found) % task.modulus


@pytest.mark.parametrize("depth", [0.0, 0.5, 1.0])
def test_needle_in_text_has_its_length_and_place(depth):
    tokenizer = ByteTokenizer()
    needle = hide_in_text(tokenizer, tokenizer.encode("hay " * 30), np.random.default_rng(0), length=400, depth=depth)
    text, number = tokenizer.decode(needle.prompt), tokenizer.decode(needle.answer)
    assert len(needle.prompt) == 400 and len(number) == 5
    assert text.count(number) == 1 and text.endswith("The access code of the lunar station is ")
    assert abs(text.index(number) / 310 - depth) < 0.2
    with pytest.raises(ConfigError, match="needle in text"):
        hide_in_text(tokenizer, [1], np.random.default_rng(0), length=10, depth=depth)
