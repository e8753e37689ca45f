"""`tts.py` as a module: cases by hand for each rule and tie, laws of classes and windows."""

from __future__ import annotations

import doctest
import itertools
import math
import random
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tts
from support.grader import Grader
from support.metrics import pass_at_k
from tts import (
    RULES,
    SIGNALS,
    Class,
    accuracy,
    answer_classes,
    best_of,
    bottom_windows,
    log_odds,
    lowest_window,
    mean_confidence,
    probabilities,
    rank_weights,
    representative,
    rules_for,
    self_certainty,
    tail_confidence,
    top_share,
    trace_signals,
    vote,
    winners,
)

quick = settings(max_examples=60, deadline=None, derandomize=True)
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def grader() -> Iterator[Grader]:
    with Grader(workers=2, timeout=20.0) as shared:
        yield shared


def never(pairs: list[tuple[str, str]]) -> list[bool]:
    return [False] * len(pairs)


def partition(classes: list[Class]) -> set[frozenset[int]]:
    return {frozenset(i for i, c in enumerate(classes) if c == one) for one in set(classes) - {None}}


# --- classes --------------------------------------------------------------------------------------


def test_equivalent_answers_vote_together(grader: Grader) -> None:
    """facebookresearch/deepconf#15: 0.5 and 1/2 were counted apart."""
    answers = ["0.5", r"\frac12", "2", "2", "1/2"]
    classes = answer_classes(answers, grader.equivalent)
    assert classes == [0, 0, 1, 1, 0] and vote(classes, [1.0] * 5) == 0


def test_no_answer_never_votes() -> None:
    """vllm#23201: only a trace with an answer votes. None wins only where there is no answer."""
    classes = answer_classes([None, None, None, "7"], never)
    assert classes == [None, None, None, 0] and vote(classes, [1.0] * 4) == 0 == best_of(classes, [9.0, 9.0, 9.0, -1.0])
    for answers in ([None, None], [None, "", "  "], []):
        classes = answer_classes(answers, never)
        assert classes == [None] * len(answers)
        signals = {name: [0.9] * len(answers) for name in SIGNALS}
        assert set(winners(classes, signals).values()) == {None}
        assert representative(answers, classes, None) is None


def test_one_question_with_all_pairs_of_spellings() -> None:
    """In both directions, white space aside; equal spellings are equal without a question."""
    asked: list[list[tuple[str, str]]] = []

    def equivalent(pairs: list[tuple[str, str]]) -> list[bool]:
        asked.append(pairs)
        return never(pairs)

    assert answer_classes(["7", "x", " x ", None, "a \n b", "x", "a b"], equivalent) == [0, 1, 1, None, 2, 1, 2]
    assert len(asked) == 1 and sorted(asked[0]) == sorted(itertools.permutations(["7", "x", "a b"], 2))
    assert answer_classes(["1", "1 ", None], equivalent) == [0, 0, None] and len(asked) == 1
    with pytest.raises(ValueError):
        answer_classes(["x", "y"], lambda pairs: [True])


relations = st.sets(st.tuples(st.integers(0, 5), st.integers(0, 5)))


@given(st.integers(1, 6), relations, st.randoms(use_true_random=False))
@quick
def test_laws_of_the_classes(n: int, related: set[tuple[int, int]], shuffler: random.Random) -> None:
    """Two of a class match; who match each other and nobody else are one; order is nothing."""

    def equivalent(pairs: list[tuple[str, str]]) -> list[bool]:
        return [(int(a[1:]), int(b[1:])) in related for a, b in pairs]

    matched = [[i == j or (i, j) in related or (j, i) in related for j in range(n)] for i in range(n)]
    order = [*range(n), *range(n)]
    shuffler.shuffle(order)
    classes = answer_classes([f"a{i}" for i in order], equivalent)
    assert list(dict.fromkeys(classes)) == list(range(len(set(classes))))
    of = dict(zip(order, classes))
    assert [of[i] for i in order] == classes
    for i, j in itertools.combinations(range(n), 2):
        assert matched[i][j] or of[i] != of[j]
    for size in range(1, n + 1):
        for group in itertools.combinations(range(n), size):
            if all(matched[i][j] == (j in group) for i in group for j in range(n)):
                assert len({of[i] for i in group}) == 1
    again = dict(zip(range(n), answer_classes([f"a{i}" for i in range(n)], equivalent)))
    assert all((of[i] == of[j]) == (again[i] == again[j]) for i in range(n) for j in range(n))


@pytest.mark.parametrize(
    ("matches", "expected"),
    [
        ("ab bc", "a b c"),
        ("ab bc ca cd de ef fd", "abc def"),
        ("ab bc cd", "ab cd"),
        ("ab bc cd de", "ab c de"),
        ("ac ad bc bd cd", "a b cd"),
        ("ab bc cd da", "a b c d"),
        ("ab ac bc cd ce", "ab c d e"),
    ],
)
def test_classes_of_what_is_not_transitive(matches: str, expected: str) -> None:
    """Paths of 3, 4 and 5; two triangles and a bridge; all pairs but one; a ring; three claims."""
    letters = sorted(set(matches) - {" "})
    classes = answer_classes(letters, lambda pairs: ["".join(pair) in matches.split() for pair in pairs])
    assert {frozenset(letters[i] for i in group) for group in partition(classes)} == set(
        map(frozenset, expected.split())
    )


# Answers, their classes as the real grader tells them apart.
AMBIGUOUS = [
    # 1,2 is taken for both pairs; with (1,2) and (2,1) it made a class that beat (3,5)
    ([["(1,2)", r"\left(1, 2\right)"], ["(2,1)"], ["1,2"], [r"\{1,2\}"], ["(3,5)"]]),
    ([["28", r"28^\circ"], ["0.28", r"\frac{7}{25}"], [r"28\%"], ["31"]]),
    ([["0.5", r"\frac12", "1/2"], [r"50\%"], ["50"]]),
    # 50% is taken for all of them: it stands alone, and 50 and 50.0 stay together
    ([["0.5"], [r"50\%"], ["50", "50.0"], ["7"]]),
    ([["12", r"12\text{ cm}", r"\{12\}"], ["x=12"], ["y=12"]]),
    # one direction is enough: x < 3 as gold takes the interval for right, and not the reverse
    ([["x<3", r"(-\infty, 3)"], ["7"]]),
]


@pytest.mark.parametrize("expected", AMBIGUOUS, ids=lambda expected: expected[0][0])
def test_an_ambiguous_spelling_joins_no_two_answers_in_any_order(grader: Grader, expected: list[list[str]]) -> None:
    answers = [answer for group in expected for answer in group]
    pairs = list(itertools.permutations(answers, 2))
    verdicts = dict(zip(pairs, grader.equivalent(pairs), strict=True))
    for order in itertools.permutations(answers):
        classes = answer_classes(order, lambda asked: [verdicts[pair] for pair in asked])
        assert {frozenset(order[i] for i in group) for group in partition(classes)} == set(map(frozenset, expected))


@pytest.mark.parametrize("expected", AMBIGUOUS, ids=lambda expected: expected[0][0])
def test_the_winner_does_not_depend_on_the_order(grader: Grader, expected: list[list[str]]) -> None:
    """Two votes beat one for each of the others, where an ambiguous one would have tipped it."""
    answers = [group[0] for group in expected] + expected[-1][:1]
    verdicts = dict(zip(pairs := list(itertools.permutations(set(answers), 2)), grader.equivalent(pairs), strict=True))
    signals = {name: np.random.default_rng(3).random(len(answers)).tolist() for name in SIGNALS}
    won = set()
    for order in itertools.permutations(range(len(answers))):
        shuffled = [answers[i] for i in order]
        classes = answer_classes(shuffled, lambda asked: [verdicts[pair] for pair in asked])
        result = winners(classes, {name: [values[i] for i in order] for name, values in signals.items()})
        won.add(tuple((rule, representative(shuffled, classes, c)) for rule, c in result.items()))
    assert len(won) == 1 and dict(next(iter(won)))["majority"] == answers[-1]


def test_the_spelling_that_stands_for_a_class() -> None:
    answers, classes = ["1/2", "0.5", "2", "0.5", r"\frac12", "1/2", None], [0, 0, 1, 0, 0, 0, None]
    for order in itertools.permutations(range(7)):
        shuffled = [answers[i] for i in order], [classes[i] for i in order]
        assert representative(*shuffled, 0) == "0.5" and representative(*shuffled, 1) == "2"
    assert representative(answers, classes, None) is None


# --- votes ----------------------------------------------------------------------------------------


def test_ties_go_by_weight_then_members_then_first() -> None:
    assert vote([0, 0, 1], [0.1, 0.1, 0.3]) == 1
    assert vote([0, 1, 1], [1.0, 0.5, 0.5]) == 1
    assert vote([None, 1, 0], [9.0, 1.0, 1.0]) == 1
    assert vote([0, 1, 1], [0.0, 0.0, 0.0]) == 1 and vote([3], [0.0]) == 3
    assert best_of([0, 0, 1], [-3.0, -2.0, -1.0]) == 1
    assert best_of([0, 1, 1], [2.0, 2.0, -7.0]) == 1
    assert best_of([None, 1, 0], [9.0, -1.0, -1.0]) == 1


def test_sums_do_not_depend_on_the_order() -> None:
    """From the left, 1e16 + 1 + 1 is 1e16: it would lose to 1e16 + 2, and not in another order."""
    for order in itertools.permutations([(0, 1e16), (0, 1.0), (0, 1.0), (1, 1e16 + 2)]):
        assert vote(*zip(*order)) == 0


@pytest.mark.parametrize("weight", [math.nan, math.inf, -math.inf])
def test_weights_are_numbers(weight: float) -> None:
    """NaN makes comparisons false. A candidate without an answer has no vote and may have it."""
    for rule in (vote, best_of):
        with pytest.raises(ValueError, match="finite"):
            rule([0, 1], [1.0, weight])
        assert rule([0, None], [1.0, weight]) == 0
        with pytest.raises(ValueError):
            rule([0, 1], [1.0])
    with pytest.raises(ValueError, match="negative"):
        vote([0, 1], [1.0, -0.5])


def test_log_odds() -> None:
    """The majority of 1 to 2 loses where its members are less likely right together than the one is."""
    assert log_odds([0.5, 0.25, 1e-12]) == [0.0] * 3 and log_odds([]) == []
    assert log_odds([0.8, 1 - 1e-9]) == pytest.approx([math.log(4), math.log(1e9)])
    for q in (0.0, 1.0, -0.1, math.nan):
        with pytest.raises(ValueError, match="posterior"):
            log_odds([0.5, q])
    # 0.95 : 0.05 is more than (0.8 : 0.2)^2, and 0.9 : 0.1 is less
    for likely, winner in ((0.95, 0), (0.9, 1)):
        assert winners([0, 1, 1], {"posterior": [likely, 0.8, 0.8]})["ARRoL, log-odds"] == winner
    # Two that are likely wrong have no vote. If this is so of all, members count, not posteriors.
    assert winners([0, 1, 1], {"posterior": [0.6, 0.4, 0.4]})["ARRoL, log-odds"] == 0
    assert winners([0, 1, 1], {"posterior": [0.49, 0.1, 0.2]})["ARRoL, log-odds"] == 1


def test_rank_weights() -> None:
    """Sec. 4.4; without ties 0, 1/(n-1) … 1. All equal must not be all zero."""
    assert rank_weights([5.0, -2.0, 0.0]) == [1.0, 0.0, 0.5]
    assert rank_weights([1.0, 1.0, 2.0]) == [0.25, 0.25, 1.0]
    assert rank_weights([0.3]) == [1.0] and rank_weights([0.3, 0.3, 0.3]) == [1.0] * 3 and rank_weights([]) == []
    with pytest.raises(ValueError, match="NaN"):
        rank_weights([1.0, math.nan])


def test_probabilities() -> None:
    assert probabilities([0.0, 800.0, -800.0]) == [0.5, 1.0, 0.0] and probabilities([]) == []
    with pytest.raises(ValueError, match="NaN"):
        probabilities([1.0, math.nan])
    # scores that are nearly alike leave the vote to the majority; ranks do not
    classes, logits = [0, 0, 0, 1, 1], [0.01, 0.02, 0.03, 0.04, 0.05]
    assert vote(classes, probabilities(logits)) == 0 and vote(classes, rank_weights(logits)) == 1


@given(st.lists(st.integers(-3, 3).map(float), min_size=2, max_size=12))
@quick
def test_rank_weights_keep_the_order_and_nothing_else(scores: list[float]) -> None:
    weights = rank_weights(scores)
    assert rank_weights([math.exp(score) for score in scores]) == weights
    assert rank_weights(scores[::-1]) == weights[::-1]
    for (a, x), (b, y) in itertools.product(zip(scores, weights), repeat=2):
        assert (a < b) == (x < y)
    if len(set(scores)) > 1:
        assert math.isclose(sum(weights), len(scores) / 2) and min(weights) >= 0 and max(weights) <= 1


def test_the_filter_counts_voters_and_keeps_ties() -> None:
    classes, weights = [0, None, 1, 1, 2], [4.0, 9.0, 3.0, 2.0, 2.0]
    assert top_share(classes, weights, 0.1) == [0, None, None, None, None]
    assert top_share(classes, weights, 0.5) == [0, None, 1, None, None]
    assert top_share(classes, weights, 0.51) == [0, None, 1, 1, 2] == top_share(classes, weights, 1.0)
    assert top_share(list(range(100)), [float(i) for i in range(100)], 0.07).count(None) == 93
    assert top_share([None], [1.0], 0.5) == [None] and top_share([], [], 0.5) == []
    for share in (0.0, -0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="share"):
            top_share(classes, weights, share)
    with pytest.raises(ValueError, match="NaN"):
        top_share([0, 1], [1.0, math.nan], 0.5)


# --- trace confidence -----------------------------------------------------------------------------

traces = st.lists(st.floats(1.0, 4e6), min_size=1, max_size=60).map(np.array)


@given(traces, st.integers(1, 70), st.sampled_from([0.1, 0.25, 1.0]))
@quick
def test_window_aggregates_are_those_of_a_loop(h: np.ndarray, window: int, share: float) -> None:
    width = min(window, len(h))
    means = sorted(math.fsum(h[i : i + width]) / width for i in range(len(h) - width + 1))
    lowest = means[: max(1, len(means) * round(100 * share) // 100)]
    assert lowest_window(h, window) == pytest.approx(means[0], rel=1e-9)
    assert bottom_windows(h, window, share) == pytest.approx(statistics.fmean(lowest), rel=1e-9)
    assert tail_confidence(h, window) == pytest.approx(math.fsum(h[len(h) - width :]) / width, rel=1e-9)
    assert mean_confidence(h) == pytest.approx(statistics.fmean(h), rel=1e-9) == lowest_window(h, len(h))
    assert bottom_windows(h, window) <= bottom_windows(h, window, 0.25) * (1 + 1e-12)


def test_windows_of_a_constant_trace_are_equal_to_the_last_bit() -> None:
    """A difference by rounding would break ties, and the filter keeps ties."""
    h = np.full(1000, 1e6 / 3)
    assert lowest_window(h, 7) == bottom_windows(h, 7) == lowest_window(h, 64) == 1e6 / 3


def test_confidence_is_high_where_the_model_is_sure() -> None:
    """facebookresearch/deepconf#3: H_t and self-certainty grow from a flat P_t to a peak."""
    v = 50
    logits = np.linspace(0, 1, v)[::-1]
    h = []
    for sharpness in (0.0, 1.0, 5.0, 20.0):
        log_p = sharpness * logits - np.log(np.exp(sharpness * logits).sum())
        h.append(-log_p.sum())
        divergence = sum((math.log(1 / v) - x) / v for x in log_p)
        assert self_certainty(np.array([h[-1]] * 3), v) == pytest.approx(divergence, abs=1e-12)
    assert h == sorted(h) and h[0] == pytest.approx(v * math.log(v))
    assert self_certainty(np.array([v * math.log(v)]) * (1 - 1e-15), v) == 0.0


def test_a_trace_has_tokens_and_a_window_too() -> None:
    windowed: list[Callable[[np.ndarray, int], float]] = [
        lowest_window,
        bottom_windows,
        tail_confidence,
        self_certainty,
    ]
    for aggregate in windowed:
        with pytest.raises(ValueError, match="trace"):
            aggregate(np.array([]), 3)
    for aggregate in windowed[:3]:
        with pytest.raises(ValueError, match="window"):
            aggregate(np.ones(5), 0)


# --- the rules ------------------------------------------------------------------------------------

# Eleven vote, so that the filter keeps two, and who ties with the second. The sixth candidate has
# no answer; its numbers would win each vote. The last five are wanted by no signal.
CLASSES: list[Class] = [0, 0, 0, 1, 1, None, 2, 3, 4, 5, 6, 7]
TABLE = {
    "head": [-3.0, -2.0, -1.0, 4.0, 5.0, 99.0, 0.0],
    "posterior": [0.6, 0.6, 0.3, 0.2, 0.8, 0.99, 0.9],
    "mean": [1.0, 1.0, 1.0, 1.0, 1.0, 99.0, 4.0],
    "lowest": [1.0, 1.0, 1.0, 2.0, 2.0, 99.0, 3.5],
    "bottom": [5.0, 1.0, 1.0, 4.5, 4.0, 99.0, 3.0],
    "tail": [2.0, 2.0, 2.0, 1.0, 1.0, 99.0, 5.0],
    "certainty": [0.0, 0.0, 0.0, 0.0, 0.0, 99.0, 0.0],
    "logprob": [-1.0, -2.0, -3.0, -4.0, -5.0, 0.0, -0.5],
}
LEAST = {"head": -9.0, "logprob": -9.0, "posterior": 0.1}
TABLE = {name: values + [LEAST.get(name, 0.0)] * 5 for name, values in TABLE.items()}


def test_each_rule_on_a_case_worked_out_by_hand() -> None:
    """The five last share the ranks 1 to 5, mean 3, weight 0.2; the six others have 0.5 to 1."""
    assert list(winners(CLASSES, TABLE).items()) == [
        ("majority", 0),  # 3, 2, 1
        ("ARRoL", 1),  # .5 + .6 + .7, .9 + 1, .8
        ("ARRoL, probability", 1),  # .05 + .12 + .27, .98 + .99, .5
        ("ARRoL, log-odds", 2),  # .41 + .41 + 0, 0 + 1.39, 2.20
        ("DeepConf, lowest window", 1),  # 3, 4, 3.5
        ("DeepConf, bottom 10%", 1),  # 7, 8.5, 3
        ("DeepConf, tail", 0),  # 6, 2, 5
        ("DeepConf, mean", 2),  # 3, 2, 4
        ("DeepConf, lowest window, top 10%", 1),  # -, 2 + 2, 3.5
        ("DeepConf, bottom 10%, top 10%", 0),  # 5, 4.5, -
        ("DeepConf, tail, top 10%", 0),  # 2 + 2 + 2, -, 5
        ("DeepConf, mean, top 10%", 2),  # 3, 2, 4
        ("self-certainty", 0),  # all zero: most members
        ("log-prob", 0),  # .9 + .8 + .7, .6 + .5, 1
        ("best of n, head", 1),
        ("best of n, confidence", 2),
    ]


def test_ballots_show_the_weight_of_each_candidate() -> None:
    shown = {rule.name: rule.ballot(CLASSES, TABLE)[1] for rule in rules_for(TABLE)}
    assert list(shown) == list(winners(CLASSES, TABLE)) == [rule.name for rule in RULES]
    assert shown["majority"] == [1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0] + [1.0] * 5
    assert shown["ARRoL"] == pytest.approx([0.5, 0.6, 0.7, 0.9, 1.0, 0.0, 0.8] + [0.2] * 5)
    expected = [0.0474, 0.1192, 0.2689, 0.9820, 0.9933, 0.0, 0.5] + [0.0001] * 5
    assert shown["ARRoL, probability"] == pytest.approx(expected, abs=1e-4)
    assert shown["ARRoL, log-odds"] == pytest.approx([0.405, 0.405, 0, 0, 1.386, 0, 2.197] + [0.0] * 5, abs=1e-3)
    assert shown["DeepConf, bottom 10%"] == [5.0, 1.0, 1.0, 4.5, 4.0, 0.0, 3.0] + [0.0] * 5
    assert shown["DeepConf, bottom 10%, top 10%"] == [5.0, 0.0, 0.0, 4.5] + [0.0] * 8
    assert shown["best of n, head"] == [-3.0, -2.0, -1.0, 4.0, 5.0, 0.0, 0.0] + [-9.0] * 5


def test_rules_without_their_signal_are_left_out_and_unknown_signals_are_an_error() -> None:
    assert list(winners([0, 1], {})) == ["majority"]
    assert list(winners([0, 1], {"mean": [1.0, 2.0]})) == [
        "majority",
        "DeepConf, mean",
        "DeepConf, mean, top 10%",
        "best of n, confidence",
    ]
    with pytest.raises(ValueError, match="heads"):
        winners([0, 1], {"heads": [1.0, 2.0]})
    with pytest.raises(ValueError):
        winners([0, 1], {"head": [1.0]})


@pytest.mark.parametrize("value", [0.0, 1.0, 7.5])
def test_one_candidate_wins_and_equal_scores_leave_a_majority_vote(value: float) -> None:
    """Rank weights of all zero, or 0/0, would lose a lone candidate."""
    for classes in ([0], [None, 0], [0, 1, 1], [1, None, 0, 0], [0, 0, 1, 1, 2]):
        signals = {name: [value] * len(classes) for name in SIGNALS}
        signals["posterior"] = [(1 + value) / 10] * len(classes)
        assert set(winners(classes, signals).values()) == {vote(classes, [1.0] * len(classes))}


def test_the_signals_of_a_trace_are_all_that_rules_use_but_the_heads() -> None:
    h = np.array([50.0, 60.0, 40.0, 70.0])
    found = trace_signals([h], [[-1.0, -2.0, -0.5, 0.0]], window=2, vocabulary=10)
    assert {"head", "posterior", *found} == set(SIGNALS) and found.pop("logprob") == [-0.875]
    assert found.pop("certainty") == [pytest.approx(5.5 - math.log(10))]
    assert found == {"mean": [55.0], "lowest": [50.0], "bottom": [50.0], "tail": [55.0]}


# --- the table's numbers --------------------------------------------------------------------------


def test_two_problems_with_four_samples_each() -> None:
    """lm-evaluation-harness#3248: avg@k is the mean over all samples, and not the first one's."""
    verdicts = [[1, 0, 0, 0], [0, 1, 1, 1]]
    classes = [answer_classes(["5" if right else "4" for right in row], never) for row in verdicts]
    assert statistics.mean(statistics.mean(row) for row in verdicts) == 0.5
    assert statistics.mean(pass_at_k(4, sum(row), 1) for row in verdicts) == 0.5
    assert [pass_at_k(4, sum(row), 4) for row in verdicts] == [1.0, 1.0]
    majority = [row[c.index(winners(c, {})["majority"])] for row, c in zip(verdicts, classes)]
    assert majority == [0, 1]


# --- accuracy of so many candidates ---------------------------------------------------------------


def drawn(n: int, seed: int = 0) -> tuple[list[Class], dict[str, list[float]], set[int]]:
    """A problem of which class 0 is right; the head's scores tell, in part."""
    rng = np.random.default_rng(seed)
    classes = [None if rng.random() < 0.1 else int(rng.integers(4)) for _ in range(n)]
    signals = {name: rng.random(n).tolist() for name in SIGNALS}
    signals["head"] = [float(c == 0) + rng.normal() for c in classes]
    return classes, signals, {0}


def test_one_candidate_is_right_as_often_as_all_are_and_all_of_them_are_the_vote() -> None:
    for seed in range(20):
        classes, signals, right = drawn(12, seed)
        one, all_of_them = (accuracy(classes, signals, right, k, np.random.default_rng(0)) for k in (1, 12))
        assert [rule.name for rule in RULES] == list(one) == list(all_of_them)
        assert list(one.values()) == [pytest.approx(classes.count(0) / 12)] * len(RULES)
        assert all_of_them == {rule: float(won == 0) for rule, won in winners(classes, signals).items()}


def test_accuracy_is_a_mean_over_all_subsets_or_over_random_ones() -> None:
    """Of [a, a, b] with a right: 2/3, 1 (a tie goes to the earliest), 1; with b right 1/3, 0, 0."""

    def by_size(classes: list[Class], right: set[int]) -> list[float]:
        sizes = range(1, len(classes) + 1)
        return [accuracy(classes, {}, right, k, np.random.default_rng(0))["majority"] for k in sizes]

    assert by_size([0, 0, 1], {0}) == [pytest.approx(2 / 3), 1.0, 1.0]
    assert by_size([0, 0, 1], {1}) == [pytest.approx(1 / 3), 0.0, 0.0]
    assert by_size([None, None], {0}) == [0.0, 0.0]
    assert accuracy([], {}, {0}, 0, np.random.default_rng(0)) == {"majority": 0.0}
    classes, signals, right = drawn(12)
    subsets = list(itertools.combinations(range(12), 4))
    exact = statistics.fmean(vote([classes[i] for i in rows], [1.0] * 4) == 0 for rows in subsets)
    sampled = [accuracy(classes, signals, right, 4, np.random.default_rng((0, i)))["majority"] for i in range(20)]
    assert statistics.fmean(sampled) == pytest.approx(exact, abs=0.06)  # of 1,280 subsets; four standard errors
    assert len(set(sampled)) > 5
    again = accuracy(classes, signals, right, 4, np.random.default_rng((0, 0)))
    assert again["majority"] == sampled[0]


# --- the module -----------------------------------------------------------------------------------


def test_the_module_needs_neither_torch_nor_vllm() -> None:
    program = (
        "import sys, tts; sys.exit(bool({'torch', 'vllm', 'transformers', 'scipy', 'support'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0


def test_doctests_of_the_module() -> None:
    assert doctest.testmod(tts).failed == 0
