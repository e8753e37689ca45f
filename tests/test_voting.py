"""Voting: hand-made cases for every rule and tie, laws of the classes and the windows, and the table's numbers."""

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

import voting
from support.grader import Grader
from support.metrics import pass_at_k
from voting import (
    RULES,
    SIGNALS,
    Class,
    answer_classes,
    ballots,
    best_of,
    bottom_windows,
    curve,
    lowest_window,
    mean_confidence,
    probabilities,
    rank_weights,
    representative,
    self_certainty,
    sizes,
    tail_confidence,
    top_share,
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


# --- classes ---------------------------------------------------------------------------------------------------------


def test_equivalent_answers_vote_together(grader: Grader) -> None:
    """facebookresearch/deepconf#15: 0.5 and 1/2 were counted apart."""
    answers = ["0.5", r"\frac12", "2", "2", "1/2"]
    classes = answer_classes(answers, grader.equivalent)
    assert classes == [0, 0, 1, 1, 0] and vote(classes, [1.0] * 5) == 0


def test_no_answer_never_votes() -> None:
    """vllm#23201: only a trace with an answer has a vote. None wins only where there is no answer at all."""
    classes = answer_classes([None, None, None, "7"], never)
    assert classes == [None, None, None, 0] and vote(classes, [1.0] * 4) == 0 == best_of(classes, [9.0, 9.0, 9.0, -1.0])
    for answers in ([None, None], [None, "", "  ", "$$"], []):
        classes = answer_classes(answers, never)
        assert classes == [None] * len(answers)
        signals = {name: [1.0] * len(answers) for name in SIGNALS}
        assert set(winners(classes, signals, 0.1).values()) == {None}
        assert representative(answers, classes, None) is None


def test_one_question_with_all_pairs_that_mathematics_must_settle() -> None:
    """Two integers are equal or not, and equal spellings are; the rest is asked at once, in both directions."""
    asked: list[list[tuple[str, str]]] = []

    def equivalent(pairs: list[tuple[str, str]]) -> list[bool]:
        asked.append(pairs)
        return never(pairs)

    assert answer_classes(["7", "x", "$7.0$", "-08", None, "x", "²"], equivalent) == [0, 1, 0, 2, None, 1, 3]
    words = {"7", "-8"}
    assert len(asked) == 1 and set(asked[0]) == {
        pair for pair in itertools.permutations(["7", "-8", "x", "²"], 2) if not set(pair) <= words
    }
    answer_classes(["1", "2", "02", None], equivalent)
    assert len(asked) == 1
    with pytest.raises(ValueError):
        answer_classes(["x", "y"], lambda pairs: [True])


@given(st.integers(1, 6), st.sets(st.tuples(st.integers(0, 5), st.integers(0, 5))), st.randoms(use_true_random=False))
@quick
def test_classes_are_the_components_whatever_the_order(
    n: int, related: set[tuple[int, int]], shuffler: random.Random
) -> None:
    def equivalent(pairs: list[tuple[str, str]]) -> list[bool]:
        return [(int(a[1:]), int(b[1:])) in related for a, b in pairs]

    linked = [[i == j or (i, j) in related or (j, i) in related for j in range(n)] for i in range(n)]
    for middle, i, j in itertools.product(range(n), repeat=3):
        linked[i][j] |= linked[i][middle] and linked[middle][j]
    order = [*range(n), *range(n)]
    shuffler.shuffle(order)
    classes = answer_classes([f"a{i}" for i in order], equivalent)
    assert [[a == b for b in classes] for a in classes] == [[linked[i][j] for j in order] for i in order]
    assert list(dict.fromkeys(classes)) == list(range(len(set(classes))))


def test_all_orders_give_one_partition_and_one_winner(grader: Grader) -> None:
    """50% is 0.5 and is 50, which differ; x < 3 as gold takes the interval for right, and not the reverse."""
    answers = ["0.5", r"50\%", "50", "x<3", r"(-\infty, 3)", "7"]
    pairs = list(itertools.permutations(answers, 2))
    verdicts = dict(zip(pairs, grader.equivalent(pairs), strict=True))
    assert verdicts["0.5", r"50\%"] and verdicts[r"50\%", "50"] and not verdicts["0.5", "50"]
    assert verdicts["x<3", r"(-\infty, 3)"] and not verdicts[r"(-\infty, 3)", "x<3"]
    rng = np.random.default_rng(3)
    signals = {name: rng.random(6).tolist() for name in SIGNALS}
    partitions, won = set(), set()
    for order in itertools.permutations(range(6)):
        shuffled = [answers[i] for i in order]
        classes = answer_classes(shuffled, lambda asked: [verdicts[pair] for pair in asked])
        partitions.add(frozenset(frozenset(shuffled[i] for i in part) for part in partition(classes)))
        result = winners(classes, {name: [values[i] for i in order] for name, values in signals.items()}, 0.3)
        won.add(tuple((rule, representative(shuffled, classes, c)) for rule, c in result.items()))
    assert partitions == {frozenset(map(frozenset, ({*answers[:3]}, {*answers[3:5]}, {"7"})))}
    assert len(won) == 1 and len({spelling for _, spelling in next(iter(won))}) > 1


def test_the_spelling_that_stands_for_a_class() -> None:
    answers, classes = ["1/2", "0.5", "2", "0.5", r"\frac12", "1/2", None], [0, 0, 1, 0, 0, 0, None]
    for order in itertools.permutations(range(7)):
        shuffled = [answers[i] for i in order], [classes[i] for i in order]
        assert representative(*shuffled, 0) == "0.5" and representative(*shuffled, 1) == "2"
    assert representative(answers, classes, None) is None


# --- votes -----------------------------------------------------------------------------------------------------------


def test_ties_go_by_weight_then_members_then_first() -> None:
    assert vote([0, 0, 1], [0.1, 0.1, 0.3]) == 1
    assert vote([0, 1, 1], [1.0, 0.5, 0.5]) == 1
    assert vote([None, 1, 0], [9.0, 1.0, 1.0]) == 1
    assert vote([0, 1, 1], [0.0, 0.0, 0.0]) == 1 and vote([3], [0.0]) == 3
    assert best_of([0, 0, 1], [-3.0, -2.0, -1.0]) == 1
    assert best_of([0, 1, 1], [2.0, 2.0, -7.0]) == 1
    assert best_of([None, 1, 0], [9.0, -1.0, -1.0]) == 1


def test_sums_do_not_depend_on_the_order() -> None:
    """Added from the left, 1e16 + 1 + 1 is 1e16: the class would lose to 1e16 + 2, and win in another order."""
    for order in itertools.permutations([(0, 1e16), (0, 1.0), (0, 1.0), (1, 1e16 + 2)]):
        assert vote(*zip(*order)) == 0


@pytest.mark.parametrize("weight", [math.nan, math.inf, -math.inf])
def test_weights_are_numbers(weight: float) -> None:
    """One NaN makes every comparison false. A candidate without an answer may have any: it has no vote."""
    for rule in (vote, best_of):
        with pytest.raises(ValueError, match="finite"):
            rule([0, 1], [1.0, weight])
        assert rule([0, None], [1.0, weight]) == 0
        with pytest.raises(ValueError):
            rule([0, 1], [1.0])
    with pytest.raises(ValueError, match="negative"):
        vote([0, 1], [1.0, -0.5])


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


# --- trace confidence ------------------------------------------------------------------------------------------------

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
    """facebookresearch/deepconf#3: H_t and self-certainty grow from a uniform distribution to a peak."""
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


# --- the rules -------------------------------------------------------------------------------------------------------

# The sixth candidate has no answer; its numbers would win every vote.
CLASSES: list[Class] = [0, 0, 0, 1, 1, None, 2]
TABLE = {
    "head": [-3.0, -2.0, -1.0, 4.0, 5.0, 99.0, 0.0],
    "mean": [1.0, 1.0, 1.0, 1.0, 1.0, 99.0, 4.0],
    "lowest": [1.0, 1.0, 1.0, 2.0, 2.0, 99.0, 3.5],
    "bottom": [5.0, 1.0, 1.0, 4.5, 4.0, 99.0, 3.0],
    "tail": [2.0, 2.0, 2.0, 1.0, 1.0, 99.0, 5.0],
    "certainty": [0.0, 0.0, 0.0, 0.0, 0.0, 99.0, 0.0],
    "logprob": [-1.0, -2.0, -3.0, -4.0, -5.0, 0.0, -0.5],
}


def test_each_rule_on_a_case_worked_out_by_hand() -> None:
    """With a share of 0.2, 2 of the 6 voters stay, and who ties with the second."""
    assert list(winners(CLASSES, TABLE, 0.2).items()) == [
        ("majority", 0),  # 3, 2, 1
        ("ARRoL", 1),  # 0 + .2 + .4, .8 + 1, .6
        ("ARRoL, probability", 1),  # .05 + .12 + .27, .98 + .99, .5
        ("DeepConf, lowest window", 1),  # 3, 4, 3.5
        ("DeepConf, bottom 10%", 1),  # 7, 8.5, 3
        ("DeepConf, tail", 0),  # 6, 2, 5
        ("DeepConf, mean", 2),  # 3, 2, 4
        ("DeepConf, lowest window, top 20%", 1),  # -, 2 + 2, 3.5
        ("DeepConf, bottom 10%, top 20%", 0),  # 5, 4.5, -
        ("DeepConf, tail, top 20%", 0),  # 2 + 2 + 2, -, 5
        ("DeepConf, mean, top 20%", 2),  # 3, 2, 4
        ("self-certainty", 0),  # all zero: most members
        ("log-prob", 0),  # .8 + .6 + .4, .2 + 0, 1
        ("best of n, head", 1),
        ("best of n, confidence", 2),
    ]
    assert winners(CLASSES, TABLE, 0.1)["DeepConf, lowest window, top 10%"] == 2
    assert "DeepConf, tail, top 12.5%" in winners(CLASSES, TABLE, 0.125)


def test_ballots_show_the_weight_of_each_candidate() -> None:
    shown = ballots(CLASSES, TABLE, 0.2)
    assert list(shown) == list(winners(CLASSES, TABLE, 0.2))
    assert shown["majority"] == [1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 1.0]
    assert shown["ARRoL"] == pytest.approx([0.0, 0.2, 0.4, 0.8, 1.0, 0.0, 0.6])
    assert shown["ARRoL, probability"] == pytest.approx([0.0474, 0.1192, 0.2689, 0.9820, 0.9933, 0.0, 0.5], abs=1e-4)
    assert shown["DeepConf, bottom 10%"] == [5.0, 1.0, 1.0, 4.5, 4.0, 0.0, 3.0]
    assert shown["DeepConf, bottom 10%, top 20%"] == [5.0, 0.0, 0.0, 4.5, 0.0, 0.0, 0.0]
    assert shown["best of n, head"] == [-3.0, -2.0, -1.0, 4.0, 5.0, 0.0, 0.0]


def test_rules_without_their_signal_are_left_out_and_unknown_signals_are_an_error() -> None:
    assert list(winners([0, 1], {}, 0.1)) == ["majority"]
    assert list(winners([0, 1], {"mean": [1.0, 2.0]}, 0.1)) == [
        "majority",
        "DeepConf, mean",
        "DeepConf, mean, top 10%",
        "best of n, confidence",
    ]
    with pytest.raises(ValueError, match="heads"):
        winners([0, 1], {"heads": [1.0, 2.0]}, 0.1)
    with pytest.raises(ValueError):
        winners([0, 1], {"head": [1.0]}, 0.1)


@pytest.mark.parametrize("value", [0.0, 1.0, 7.5])
def test_one_candidate_wins_and_equal_scores_leave_a_majority_vote(value: float) -> None:
    """Rank weights of all zero, or 0/0, would lose a lone candidate."""
    for classes in ([0], [None, 0], [0, 1, 1], [1, None, 0, 0], [0, 0, 1, 1, 2]):
        signals = {name: [value] * len(classes) for name in SIGNALS}
        for share in (0.1, 1.0):
            assert set(winners(classes, signals, share).values()) == {vote(classes, [1.0] * len(classes))}


def test_a_share_of_one_filters_nothing() -> None:
    won = winners(CLASSES, TABLE, 1.0)
    for rule in RULES:
        if rule.filtered:
            assert won[rule.title(1.0)] == won[rule.title(1.0).removesuffix(", top 100%")]


# --- the table's numbers ---------------------------------------------------------------------------------------------


def test_two_problems_with_four_samples_each() -> None:
    """lm-evaluation-harness#3248: avg@k is the mean over all samples, and not the first one's."""
    verdicts = [[1, 0, 0, 0], [0, 1, 1, 1]]
    classes = [answer_classes(["5" if right else "4" for right in row], never) for row in verdicts]
    assert statistics.mean(statistics.mean(row) for row in verdicts) == 0.5
    assert statistics.mean(pass_at_k(4, sum(row), 1) for row in verdicts) == 0.5
    assert [pass_at_k(4, sum(row), 4) for row in verdicts] == [1.0, 1.0]
    majority = [row[c.index(winners(c, {}, 0.1)["majority"])] for row, c in zip(verdicts, classes)]
    assert majority == [0, 1]
    rights = [{c for c, right in zip(of, row) if right} for of, row in zip(classes, verdicts)]
    assert curve([(of, {}, right) for of, right in zip(classes, rights)], 0.1)["majority"][::2] == [0.5, 0.5]


# --- the curve -------------------------------------------------------------------------------------------------------


def drawn(count: int, n: int, seed: int = 0) -> list[tuple[list[Class], dict[str, list[float]], set[int]]]:
    """Problems of which class 0 is right; the head's scores tell, in part."""
    rng = np.random.default_rng(seed)
    problems = []
    for _ in range(count):
        classes = [None if rng.random() < 0.1 else int(rng.integers(4)) for _ in range(n)]
        signals = {name: rng.random(n).tolist() for name in SIGNALS}
        signals["head"] = [float(c == 0) + rng.normal() for c in classes]
        problems.append((classes, signals, {0}))
    return problems


def test_the_curve_starts_at_the_candidates_accuracy_and_ends_at_the_winners() -> None:
    problems = drawn(20, 12)
    points = curve(problems, 0.3, subsets=20)
    assert sizes(12) == [1, 2, 4, 8, 12] and [rule.title(0.3) for rule in RULES] == list(points)
    candidates = statistics.fmean(c == 0 for classes, _, _ in problems for c in classes)
    for rule, accuracy in points.items():
        assert accuracy[0] == pytest.approx(candidates)
        assert accuracy[-1] == statistics.fmean(winners(c, s, 0.3)[rule] == 0 for c, s, _ in problems)


def test_the_curve_averages_over_all_subsets_or_over_random_ones() -> None:
    """By hand, of [a, a, b] with a right: 2/3, then 1 (a tie goes to the earliest), 1; with b right 1/3, 0, 0."""
    assert curve([([0, 0, 1], {}, {0})], 0.1) == {"majority": [pytest.approx(2 / 3), 1.0, 1.0]}
    assert curve([([0, 0, 1], {}, {1})], 0.1) == {"majority": [pytest.approx(1 / 3), 0.0, 0.0]}
    assert curve([([None, None], {}, {0})], 0.1) == {"majority": [0.0, 0.0]}
    classes, signals, right = drawn(1, 12)[0]
    exact, repeated = curve([(classes, signals, right)], 0.1, subsets=1000), [(classes, signals, right)] * 20
    sampled = curve(repeated, 0.1, subsets=30, seed=1)
    for rule in exact:
        assert sampled[rule] == pytest.approx(exact[rule], abs=0.08)  # of 600 subsets; four standard errors
    assert sampled == curve(repeated, 0.1, subsets=30, seed=1) != curve(repeated, 0.1, subsets=30, seed=2)


def test_a_curve_needs_problems_of_one_kind() -> None:
    (one,), (other,) = drawn(1, 4), drawn(1, 5)
    for problems in ([], [one, other], [one, (one[0], {}, {0})]):
        with pytest.raises(ValueError, match="curve"):
            curve(problems, 0.1)


# --- the module ------------------------------------------------------------------------------------------------------


def test_the_module_needs_neither_torch_nor_vllm() -> None:
    program = "import sys, voting; sys.exit(bool({'torch', 'vllm', 'transformers', 'scipy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0


def test_doctests_of_the_module() -> None:
    assert doctest.testmod(voting).failed == 0
