"""Which answer wins, given candidate responses and how sure the model or the quality head is of each (Sec. 3, 4.4).

    classes = answer_classes(answers, grader.equivalent)
    winners(classes, {"head": logits, "mean": [mean_confidence(h) for h in traces]}, share=0.1)["ARRoL"]

A rule sees classes of equivalent answers and one number per candidate. Where it fills a gap in the paper:

1. Answers are equivalent if the grader says so in either direction, or by way of a third answer: its comparison is
   neither symmetric nor transitive, and the winner must not depend on the order of the candidates.
2. A candidate without an answer (None) never votes, and its numbers are not looked at.
3. Ties go to the class with more votes, then to the one that came first.

Everything is pure and deterministic. Imports numpy, the standard library and, for spellings, `grader.canonical`.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from support.grader import canonical

Class = int | None  # None: no answer
Signals = Mapping[str, Sequence[float]]

# ------------------------------------------------------------------ classes


def answer_classes(
    answers: Sequence[str | None], equivalent: Callable[[list[tuple[str, str]]], list[bool]]
) -> list[Class]:
    """The class of each answer, numbered by first appearance; None for None and for an empty answer.

    Classes are the connected components under "same canonical spelling, or equivalent in one direction or the other".
    `equivalent` is called at most once, with all ordered pairs of different spellings save those of two integers.
    The partition is the same for every order of the answers (if `equivalent` answers the same).

    >>> answer_classes(["0.5", None, "7", "1/2", "07"], lambda pairs: [pair == ("1/2", "0.5") for pair in pairs])
    [0, None, 1, 0, 1]
    """
    keys = [canonical(answer or "") for answer in answers]
    spellings = sorted(set(keys) - {""})
    whole = {key for key in spellings if key.isascii() and key.removeprefix("-").isdigit()}
    pairs = [(a, b) for a, b in itertools.permutations(spellings, 2) if not (a in whole and b in whole)]
    parent = {key: key for key in spellings}

    def root(key: str) -> str:
        while parent[key] != key:
            key = parent[key]
        return key

    for (a, b), same in zip(pairs, equivalent(pairs) if pairs else [], strict=True):
        if same:
            parent[root(a)] = root(b)
    numbers: dict[str, int] = {}
    return [numbers.setdefault(root(key), len(numbers)) if key else None for key in keys]


def representative(answers: Sequence[str | None], classes: Sequence[Class], winner: Class) -> str | None:
    """The spelling that stands for class `winner`: the most frequent in it, then the lexicographically smallest."""
    counts = Counter(answer for answer, c in zip(answers, classes, strict=True) if c is not None and c == winner)
    return min(counts, key=lambda answer: (-counts[answer], answer), default=None)


# ------------------------------------------------------------------ votes


def vote(classes: Sequence[Class], weights: Sequence[float]) -> Class:
    """The class with the highest summed weight; ties: more members, then earliest. None if nobody has an answer.

    Sums are exactly rounded, so that order does not matter. Raises ValueError unless weights are finite and >= 0.

    >>> vote([0, 1, None, 1], [0.9, 0.3, 5.0, 0.4]), vote([0, 1, 1], [0.0, 0.0, 0.0])
    (0, 1)
    """
    votes = _by_class(classes, weights)
    if min(map(min, votes.values()), default=0.0) < 0:
        raise ValueError(f"the weight of a vote cannot be negative: {min(map(min, votes.values()))}")
    return max(votes, key=lambda c: (math.fsum(votes[c]), len(votes[c])), default=None)


def best_of(classes: Sequence[Class], weights: Sequence[float]) -> Class:
    """The class of the highest single weight; ties: more members, then earliest. None if nobody has an answer.

    Raises ValueError unless weights are finite.
    """
    votes = _by_class(classes, weights)
    return max(votes, key=lambda c: (max(votes[c]), len(votes[c])), default=None)


def _by_class(classes: Sequence[Class], weights: Sequence[float]) -> dict[int, list[float]]:
    """The weights of each class, classes in order of appearance."""
    votes: dict[int, list[float]] = {}
    for c, weight in zip(classes, weights, strict=True):
        if c is not None:
            if not math.isfinite(weight):
                raise ValueError(f"the weight of a vote must be finite, not {weight}")
            votes.setdefault(c, []).append(weight)
    return votes


def rank_weights(scores: Sequence[float]) -> list[float]:
    """Ranks of the scores, rescaled linearly from [1, n] to [0, 1], in order of the scores (Sec. 4.4).

    Ties share their mean rank. A single score, or scores that are all equal, say nothing: each weighs 1, a majority
    vote. Raises ValueError on NaN.

    >>> rank_weights([-1.0, 7.5, 0.2, 0.2, 0.3]), rank_weights([4.0, 4.0])
    ([0.0, 1.0, 0.375, 0.375, 0.75], [1.0, 1.0])
    """
    if any(math.isnan(score) for score in scores):
        raise ValueError("a score is NaN and has no rank")
    if len(set(scores)) < 2:
        return [1.0] * len(scores)
    below, weight = 0, {}
    for score, count in sorted(Counter(scores).items()):
        weight[score] = (below + (count - 1) / 2) / (len(scores) - 1)
        below += count
    return [weight[score] for score in scores]


def probabilities(logits: Sequence[float]) -> list[float]:
    """The head's scores s' = sigmoid(logit), in [0, 1]: each vote counts as much as it is likely to be right.

    Not the paper's. Ranks spread the weights over [0, 1] even where the head sees no difference, which costs a quarter
    of the votes: (sum of weights)^2 / (sum of squares) = 3/4 n. Scores then stay alike, and the vote that of the majority.
    Raises ValueError on NaN.

    >>> probabilities([0.0, math.inf, -math.inf])
    [0.5, 1.0, 0.0]
    """
    if any(math.isnan(logit) for logit in logits):
        raise ValueError("a score is NaN and no probability")
    return [1 / (1 + math.exp(-logit)) if logit >= 0 else 1 - 1 / (1 + math.exp(logit)) for logit in logits]


def top_share(classes: Sequence[Class], weights: Sequence[float], share: float) -> list[Class]:
    """DeepConf's filter: the classes, None for all but the ceil(share * voters) with the highest weights.

    Voters are those with an answer. Those that tie with the last one that stays, stay: order must not decide. A share
    of 1 is no filter. Raises ValueError unless 0 < share <= 1, and on NaN.

    >>> top_share([0, None, 1, 1, 0], [3.0, 9.0, 1.0, 2.0, 2.0], share=0.5)
    [0, None, None, 1, 0]
    """
    if not 0 < share <= 1:
        raise ValueError(f"a share must lie in (0, 1], not {share}")
    voters = sorted((w for c, w in zip(classes, weights, strict=True) if c is not None), reverse=True)
    if any(math.isnan(weight) for weight in voters):
        raise ValueError("a weight is NaN: it is neither among the highest nor among the others")
    if not voters:
        return list(classes)
    least = voters[math.ceil(round(share * len(voters), 9)) - 1]  # 0.07 * 100 is a little above 7
    return [c if c is not None and weight >= least else None for c, weight in zip(classes, weights)]


# ------------------------------------------------------------------ trace confidence


def mean_confidence(h: np.ndarray) -> float:
    """Mean token confidence of a trace (Sec. 3). `h` (T,) fp64: H_t of each of its tokens, T >= 1; so for all below.

    H_t = -sum_j log P_t(j) is the paper's form: over all V tokens of the vocabulary, V log V if P_t is uniform and more
    if it is not. It is LARGE WHEN THE MODEL IS SURE: beside a peak nearly all tokens are very unlikely. Because of the
    minus it is taken for an uncertainty again and again (facebookresearch/deepconf#3, LTPO#2); a weight that falls
    where H_t rises, such as -log P of the sampled token, turns the order of the traces round.

    >>> peaked, flat = np.array([0.97, 0.01, 0.01, 0.01]), np.full(4, 0.25)
    >>> bool(-np.log(peaked).sum() > -np.log(flat).sum())
    True

    DeepConf itself takes the k = 20 most likely tokens only, C_t = -(1/k) sum_j log P_t(j), and its example code leaves
    the sampled one out of them. Here the tail of the vocabulary speaks as well, and there is no 1/V, which would change
    no vote.
    """
    return float(_trace(h).mean())


def lowest_window(h: np.ndarray, window: int) -> float:
    """The lowest mean over `window` successive tokens (DeepConf; Sec. 3); a shorter trace is one window."""
    return float(_window_means(h, window).min())


def bottom_windows(h: np.ndarray, window: int, share: float = 0.1) -> float:
    """The mean of the lowest `share` of all windows (stride 1), rounded down, at least one (DeepConf; Sec. 3)."""
    means = np.sort(_window_means(h, window))
    return float(means[: max(1, math.floor(round(share * len(means), 9)))].mean())


def tail_confidence(h: np.ndarray, window: int) -> float:
    """The mean over the last `window` tokens (DeepConf)."""
    return float(_trace(h)[-_at_least_one(window) :].mean())


def self_certainty(h: np.ndarray, vocabulary: int) -> float:
    """Mean KL divergence of P_t from the uniform distribution over `vocabulary` = V tokens (Kang et al., 2025).

    KL(U || P_t) = H_t / V - log V, so it ranks traces as their mean confidence does. As weights they differ: without
    the floor of log V a sure trace outweighs an unsure one by more. Its authors vote by Borda ranks; here it is the
    weight.
    """
    return max(0.0, mean_confidence(h) / vocabulary - math.log(vocabulary))  # below 0 by rounding only


def _trace(h: np.ndarray) -> np.ndarray:
    h = np.asarray(h, np.float64)
    if h.ndim != 1 or not len(h):
        raise ValueError(f"a trace is one confidence for each of its tokens, not an array of shape {h.shape}")
    return h


def _at_least_one(window: int) -> int:
    if window < 1:
        raise ValueError(f"a window has at least one token, not {window}")
    return window


def _window_means(h: np.ndarray, window: int) -> np.ndarray:
    """Means over every `window` successive tokens, (max(1, T - window + 1),)."""
    h = _trace(h)
    width = min(_at_least_one(window), len(h))
    # Sums of differences from one value: a trace of equal tokens then has windows that are equal to the last bit.
    sums = np.concatenate(([0.0], np.cumsum(h - h[0])))
    return h[0] + (sums[width:] - sums[:-width]) / width


# ------------------------------------------------------------------ the rules


@dataclass(frozen=True)
class Rule:
    """A row of the table: who votes, with what weight, and how the winner is found."""

    name: str
    signal: str | None  # what it needs; None: nothing, and every vote weighs 1
    weigh: Callable[[list[float]], list[float]] = list  # from the signal of those that vote; `list`: as it is
    choose: Callable[[Sequence[Class], Sequence[float]], Class] = vote
    filtered: bool = False  # by `top_share` first; then the name has a place for the share

    def title(self, share: float) -> str:
        return self.name.format(f"{100 * share:g}%")

    def ballot(self, classes: Sequence[Class], signals: Signals, share: float) -> tuple[Sequence[Class], list[float]]:
        """Classes, None for those that do not vote, and weights, 0.0 for them."""
        values = signals[self.signal] if self.signal else [1.0] * len(classes)
        voting = top_share(classes, values, share) if self.filtered else classes
        given = iter(self.weigh([value for c, value in zip(voting, values, strict=True) if c is not None]))
        return voting, [0.0 if c is None else next(given) for c in voting]


SIGNALS = {
    "head": "logit of the quality head",
    "mean": "mean_confidence",
    "lowest": "lowest_window",
    "bottom": "bottom_windows",
    "tail": "tail_confidence",
    "certainty": "self_certainty",
    "logprob": "mean log-prob of the sampled tokens",
}
_DEEPCONF = {"lowest window": "lowest", "bottom 10%": "bottom", "tail": "tail", "mean": "mean"}
RULES = [
    Rule("majority", None),
    Rule("ARRoL", "head", rank_weights),
    Rule("ARRoL, probability", "head", probabilities),
    *[Rule(f"DeepConf, {what}", signal) for what, signal in _DEEPCONF.items()],
    *[Rule(f"DeepConf, {what}, top {{}}", signal, filtered=True) for what, signal in _DEEPCONF.items()],
    Rule("self-certainty", "certainty"),
    Rule("log-prob", "logprob", rank_weights),
    Rule("best of n, head", "head", choose=best_of),
    Rule("best of n, confidence", "mean", choose=best_of),
]


def rules_for(signals: Collection[str]) -> list[Rule]:
    """The rules whose signal is among `signals`, in the table's order. Raises ValueError on one that no rule has."""
    if unknown := set(signals) - SIGNALS.keys():
        raise ValueError(f"no rule uses the signals {sorted(unknown)}; there are {list(SIGNALS)}")
    return [rule for rule in RULES if rule.signal is None or rule.signal in signals]


def winners(classes: Sequence[Class], signals: Signals, share: float) -> dict[str, Class]:
    """Row of the table -> winning class, for every rule whose signal is there.

    signals: name (see `SIGNALS`) -> one number for each candidate. share: DeepConf's filter, see `top_share`.

    >>> winners([0, 1, 1, None], {"head": [2.0, -1.0, -3.0, 5.0]}, share=0.1)
    {'majority': 1, 'ARRoL': 0, 'ARRoL, probability': 0, 'best of n, head': 0}
    """
    return {rule.title(share): rule.choose(*rule.ballot(classes, signals, share)) for rule in rules_for(signals.keys())}


def ballots(classes: Sequence[Class], signals: Signals, share: float) -> dict[str, list[float]]:
    """Row of the table -> weight of each candidate, 0.0 for one that has no answer or is filtered out."""
    return {rule.title(share): rule.ballot(classes, signals, share)[1] for rule in rules_for(signals.keys())}


# ------------------------------------------------------------------ the table's numbers


def sizes(n: int) -> list[int]:
    """Powers of two below n, then n.

    >>> sizes(1), sizes(8), sizes(12)
    ([1], [1, 2, 4, 8], [1, 2, 4, 8, 12])
    """
    return [*itertools.takewhile(lambda k: k < n, (2**i for i in itertools.count())), n]


def curve(
    problems: Sequence[tuple[Sequence[Class], Signals, Collection[int]]],
    share: float,
    subsets: int = 64,
    seed: int = 0,
) -> dict[str, list[float]]:
    """Row of the table -> accuracy with each of `sizes(n)` candidates, a mean over problems and over subsets of each.

    problems: for each its classes, its signals and which classes are right; n candidates and the same signals in all.
    All subsets of a size count if there are at most `subsets`, else so many random ones, the same for every rule.
    The classes are those found among all n: a subset may miss the answer that links two others. 500 problems of 32
    candidates with all signals take about 25 s on one core.
    Raises ValueError if there is no problem or if n or the signals differ.
    """
    shapes = {(len(classes), *signals) for classes, signals, _ in problems}
    if len(shapes) != 1:
        raise ValueError(f"a curve needs problems of one number of candidates and the same signals, not {shapes}")
    n = len(problems[0][0])
    totals: dict[str, list[list[float]]] = {}
    for row, (classes, signals, right) in enumerate(problems):
        rng = np.random.default_rng((seed, row))
        for column, size in enumerate(sizes(n)):
            chosen = _subsets(n, size, subsets, rng)
            hits: Counter[str] = Counter()
            for subset in chosen:
                part = {name: [values[i] for i in subset] for name, values in signals.items()}
                won = winners([classes[i] for i in subset], part, share)
                hits.update({name: winner in right for name, winner in won.items()})
            for name, count in hits.items():
                totals.setdefault(name, [[] for _ in sizes(n)])[column].append(count / len(chosen))
    return {name: [math.fsum(column) / len(problems) for column in columns] for name, columns in totals.items()}


def _subsets(n: int, size: int, most: int, rng: np.random.Generator) -> list[tuple[int, ...]]:
    """Subsets of range(n), each in increasing order: all if there are at most `most`, else `most` at random."""
    if math.comb(n, size) <= most:
        return list(itertools.combinations(range(n), size))
    return [tuple(row) for row in np.sort(rng.random((most, n)).argsort(1)[:, :size], 1).tolist()]
