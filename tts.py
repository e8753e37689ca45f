"""Test-time scaling: n answers to a problem vote, weighed by the quality head (Sec. 4.4).

    python tts.py --model runs/NAME/checkpoint-200 --data aime24    (see support/test_time.py)

    classes = answer_classes(answers, grader.equivalent)
    winners(classes, {"head": logits, "mean": [mean_confidence(h) for h in traces]})["ARRoL"]

A rule sees each candidate's class of equivalent answers and one number. Where the paper is silent:

1. The grader's comparison is neither symmetric nor transitive: see `answer_classes`.
2. A candidate without an answer (None) never votes, and its numbers are not looked at.
3. Ties go to the class with more members, then to the one that came first.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

Class = int | None  # None: no answer
Signals = Mapping[str, Sequence[float]]  # name, one of SIGNALS -> one number for each candidate

# ------------------------------------------------------------------ answer classes


def answer_classes(
    answers: Sequence[str | None], equivalent: Callable[[list[tuple[str, str]]], list[bool]]
) -> list[Class]:
    r"""The class of each answer, numbered by first appearance; None where there is no answer.

    Two spellings match if `equivalent` takes either for the other. A spelling is clear if all that
    match it match each other: those are one class. A spelling that matches clear ones of different
    classes (`28\%` is taken for 28 and for 0.28, `1,2` for (1,2) and for (2,1)), or no clear one,
    joins none of them and is a class with those that match just the same.

    So no class holds two that do not match, and the order of the answers is nothing. `equivalent`
    is called at most once, with all ordered pairs of different spellings, white space aside.

    >>> pairs_that_match = [("1/2", "0.5"), ("50%", "0.5"), ("50%", "50"), ("50%", "1/2")]
    >>> equivalent = lambda pairs: [pair in pairs_that_match for pair in pairs]
    >>> answer_classes(["0.5", None, "50%", "1/2", " 0.5", "50"], equivalent)
    [0, None, 1, 0, 0, 2]
    """
    spellings = [" ".join((answer or "").split()) for answer in answers]
    matches = {spelling: {spelling} for spelling in sorted(set(spellings) - {""})}
    pairs = list(itertools.permutations(matches, 2))
    for (first, second), same in zip(pairs, equivalent(pairs) if pairs else [], strict=True):
        if same:
            matches[first].add(second)
            matches[second].add(first)
    clear = {s for s, own in matches.items() if all(own <= matches[other] for other in own)}

    def family(spelling: str) -> frozenset[str]:
        # Clear spellings that match each other match the same ones, which name their class.
        claims = {frozenset(matches[other]) for other in matches[spelling] & clear}
        return claims.pop() if len(claims) == 1 else frozenset(matches[spelling])

    numbers: dict[frozenset[str], int] = {}
    return [numbers.setdefault(family(s), len(numbers)) if s else None for s in spellings]


def representative(answers: Sequence[str | None], classes: Sequence[Class], winner: Class) -> str | None:
    """The spelling of class `winner`: the most frequent in it, then the lexicographically first."""
    counts = Counter(answer for answer, c in zip(answers, classes, strict=True) if c is not None and c == winner)
    return min(counts, key=lambda answer: (-counts[answer], answer), default=None)


# ------------------------------------------------------------------ trace confidence


def mean_confidence(h: np.ndarray) -> float:
    """Mean token confidence of a trace (Sec. 3). `h` (T,) fp64: H_t of each of its T >= 1 tokens.

    H_t = -sum_j log P_t(j) over all V tokens of the vocabulary. It is LARGE WHEN THE MODEL IS SURE:
    beside a peak nearly all tokens are very unlikely (facebookresearch/deepconf#3 took it for an
    uncertainty). DeepConf sums over the 20 most likely tokens only.
    """
    return float(_trace(h).mean())


def lowest_window(h: np.ndarray, window: int) -> float:
    """The lowest mean over `window` successive tokens (Sec. 3); a shorter trace is one window."""
    return float(_window_means(h, window).min())


def bottom_windows(h: np.ndarray, window: int, share: float = 0.1) -> float:
    """The mean of the lowest `share` of all windows, rounded down, at least one (Sec. 3)."""
    means = np.sort(_window_means(h, window))
    return float(means[: max(1, math.floor(round(share * len(means), 9)))].mean())


def tail_confidence(h: np.ndarray, window: int) -> float:
    """The mean over the last `window` tokens (DeepConf)."""
    return float(_trace(h, window)[-window:].mean())


def self_certainty(h: np.ndarray, vocabulary: int) -> float:
    """Mean KL divergence of P_t from the uniform distribution over V tokens (Kang et al., 2025).

    KL(U || P_t) = H_t / V - log V, so that it ranks traces as their mean confidence does. As a
    weight it differs: it can be 0. Its authors vote by Borda ranks.
    """
    # Below 0 by rounding only.
    return max(0.0, mean_confidence(h) / vocabulary - math.log(vocabulary))


def trace_signals(
    traces: Sequence[np.ndarray], logprobs: Sequence[Sequence[float]], window: int, vocabulary: int
) -> dict[str, list[float]]:
    """All `SIGNALS` of finished traces but the head's two; logprobs: of the sampled tokens."""
    return {
        "mean": [mean_confidence(h) for h in traces],
        "lowest": [lowest_window(h, window) for h in traces],
        "bottom": [bottom_windows(h, window) for h in traces],
        "tail": [tail_confidence(h, window) for h in traces],
        "certainty": [self_certainty(h, vocabulary) for h in traces],
        "logprob": [math.fsum(row) / len(row) for row in logprobs],
    }


def _window_means(h: np.ndarray, window: int) -> np.ndarray:
    """Means over each `window` successive tokens, (max(1, T - window + 1),)."""
    h = _trace(h, window)
    width = min(window, len(h))
    # Differences from one value: a trace of equal tokens has windows equal to the last bit.
    sums = np.concatenate(([0.0], np.cumsum(h - h[0])))
    return h[0] + (sums[width:] - sums[:-width]) / width


def _trace(h: np.ndarray, window: int = 1) -> np.ndarray:
    h = np.asarray(h, np.float64)
    if h.ndim != 1 or not len(h):
        raise ValueError(f"a trace is one confidence for each of its tokens, not an array of shape {h.shape}")
    if window < 1:
        raise ValueError(f"a window has at least one token, not {window}")
    return h


# ------------------------------------------------------------------ votes


def vote(classes: Sequence[Class], weights: Sequence[float]) -> Class:
    """The class of the highest summed weight; ties: more members, then earliest; None without one.

    Sums are exactly rounded: order does not matter. Raises ValueError unless 0 <= weights < inf.

    >>> vote([0, 1, None, 1], [0.9, 0.3, 5.0, 0.4]), vote([0, 1, 1], [0.0, 0.0, 0.0])
    (0, 1)
    """
    votes = _by_class(classes, weights)
    if min(map(min, votes.values()), default=0.0) < 0:
        raise ValueError(f"the weight of a vote cannot be negative: {min(map(min, votes.values()))}")
    return max(votes, key=lambda c: (math.fsum(votes[c]), len(votes[c])), default=None)


def best_of(classes: Sequence[Class], weights: Sequence[float]) -> Class:
    """The class of the highest single weight; ties and errors as in `vote`."""
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
    """Ranks of the scores, rescaled linearly from [1, n] to [0, 1] (Sec. 4.4).

    Ties share their mean rank. A single score, or scores that are all equal, say nothing: each
    weighs 1, a majority vote. Raises ValueError on NaN.

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
    """The head's scores s' = sigmoid(logit): a vote counts as much as it is likely to be right.

    Not the paper's. Ranks spread over [0, 1] even where the head sees no difference, and so cost a
    quarter of the votes: (sum of weights)^2 / (sum of squares) = 3/4 n. Raises ValueError on NaN.

    >>> probabilities([0.0, math.inf, -math.inf])
    [0.5, 1.0, 0.0]
    """
    if any(math.isnan(logit) for logit in logits):
        raise ValueError("a score is NaN and no probability")
    return [1 / (1 + math.exp(-logit)) if logit >= 0 else 1 - 1 / (1 + math.exp(logit)) for logit in logits]


def log_odds(posteriors: Sequence[float]) -> list[float]:
    """Weights max(0, log(q / (1 - q))) of posteriors q, not the paper's: the best ones for independent
    voters between two answers (Nitzan and Paroush, 1982). If all are 0, `vote` goes by the majority.
    Raises ValueError unless 0 < q < 1.

    >>> [round(weight, 2) for weight in log_odds([0.5, 0.9, 0.75, 0.2])]
    [0.0, 2.2, 1.1, 0.0]
    """
    if not all(0 < q < 1 for q in posteriors):
        raise ValueError("a posterior must lie in (0, 1), or its log-odds are not finite")
    return [max(0.0, math.log(q / (1 - q))) for q in posteriors]


def top_share(classes: Sequence[Class], weights: Sequence[float], share: float) -> list[Class]:
    """DeepConf's filter: classes, None for all but the ceil(share * voters) of the highest weights.

    Voters are those with an answer. Those that tie with the last one that stays, stay: order must
    not decide. Raises ValueError unless 0 < share <= 1, and on NaN.

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
    # Rounded: 0.07 * 100 is a little above 7.
    least = voters[math.ceil(round(share * len(voters), 9)) - 1]
    return [c if c is not None and weight >= least else None for c, weight in zip(classes, weights)]


# ------------------------------------------------------------------ the rules

TOP = 0.1  # share of the voters that DeepConf's filter keeps (its η)


@dataclass(frozen=True)
class Rule:
    """A row of the table: who votes, with what weight, and how the winner is found."""

    name: str
    signal: str | None  # what it needs; None: nothing, and each vote weighs 1
    weigh: Callable[[list[float]], list[float]] = list  # from the signal of those that vote; `list`: as it is
    choose: Callable[[Sequence[Class], Sequence[float]], Class] = vote
    filtered: bool = False  # by `top_share` first

    def ballot(self, classes: Sequence[Class], signals: Signals) -> tuple[Sequence[Class], list[float]]:
        """Classes, None for those that do not vote, and weights, 0.0 for them."""
        values = signals[self.signal] if self.signal else [1.0] * len(classes)
        voting = top_share(classes, values, TOP) if self.filtered else classes
        given = iter(self.weigh([value for c, value in zip(voting, values, strict=True) if c is not None]))
        return voting, [0.0 if c is None else next(given) for c in voting]


_DEEPCONF = {"lowest window": "lowest", "bottom 10%": "bottom", "tail": "tail", "mean": "mean"}
RULES = [
    Rule("majority", None),
    Rule("ARRoL", "head", rank_weights),
    Rule("ARRoL, probability", "head", probabilities),
    Rule("ARRoL, log-odds", "posterior", log_odds),
    *[Rule(f"DeepConf, {name}", signal) for name, signal in _DEEPCONF.items()],
    *[Rule(f"DeepConf, {name}, top {TOP:.0%}", signal, filtered=True) for name, signal in _DEEPCONF.items()],
    Rule("self-certainty", "certainty"),
    Rule("log-prob", "logprob", rank_weights),
    Rule("best of n, head", "head", choose=best_of),
    Rule("best of n, confidence", "mean", choose=best_of),
]
SIGNALS = tuple(dict.fromkeys(rule.signal for rule in RULES if rule.signal))


def winners(classes: Sequence[Class], signals: Signals) -> dict[str, Class]:
    """Row of the table -> winning class, for each rule whose signal is there.

    >>> winners([0, 1, 1, None], {"head": [2.0, -1.0, -3.0, 5.0]})
    {'majority': 1, 'ARRoL': 0, 'ARRoL, probability': 0, 'best of n, head': 0}
    """
    return {rule.name: rule.choose(*rule.ballot(classes, signals)) for rule in rules_for(signals)}


def rules_for(signals: Signals) -> list[Rule]:
    """The rules that need no other signals."""
    if unknown := set(signals).difference(SIGNALS):
        raise ValueError(f"no rule uses the signals {sorted(unknown)}; there are {SIGNALS}")
    return [rule for rule in RULES if rule.signal is None or rule.signal in signals]


def accuracy(
    classes: Sequence[Class], signals: Signals, right: Collection[int], size: int, rng: np.random.Generator
) -> dict[str, float]:
    """Row of the table -> how often its winner among `size` of the candidates is in `right`.

    A mean over all subsets of that size, or over 64 random ones where there are more, the same for
    all rules. The classes stay those of all candidates.
    """
    if math.comb(len(classes), size) <= 64:
        subsets = list(itertools.combinations(range(len(classes)), size))
    else:
        subsets = np.sort(rng.random((64, len(classes))).argsort(1)[:, :size], 1).tolist()
    hits: Counter[str] = Counter()
    for rows in subsets:
        chosen = {name: [values[i] for i in rows] for name, values in signals.items()}
        won = winners([classes[i] for i in rows], chosen)
        hits.update({name: winner in right for name, winner in won.items()})
    return {name: count / len(subsets) for name, count in hits.items()}


if __name__ == "__main__":
    import sys

    from support.args import parse_tts

    # Flags first: a bad one fails before the imports below, which take seconds.
    args = parse_tts(sys.argv[1:])
    from support.test_time import main

    sys.exit(main(args))
