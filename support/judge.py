"""Candidate responses to a problem, judged and made ready to vote; and scores over problems, with intervals (App. A.2).

every = Judge(tokenizer, grader, head, window=2048, vocabulary=151_936)(rollouts, prompts)
hits(every, share=0.1)["ARRoL"]         1.0 or 0.0 for each problem
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from tqdm import tqdm

import voting
from engine import Rollout
from quality_head import QualityHead
from support.data import Prompt
from support.evaluation import grade
from support.grader import Grader, Verdict
from support.metrics import auc, interval, pass_at_k, within_group_auc

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class Candidates:
    """The complete candidates of one problem, what voting needs of them, and which of their answers' classes are right.

    unsure: how many of their signals were not finite numbers, see `_finite`.
    """

    rollouts: list[Rollout] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    classes: list[voting.Class] = field(default_factory=list)
    signals: dict[str, list[float]] = field(default_factory=dict)
    right: set[int] = field(default_factory=set)
    unsure: int = 0

    @property
    def count_right(self) -> int:
        return sum(verdict.kind == "right" for verdict in self.verdicts)

    def winners(self, share: float) -> dict[str, voting.Class]:
        return voting.winners(self.classes, self.signals, share)


@dataclass
class Judge:
    """What turns rollouts into candidates: grader, head, and the sizes that confidence depends on."""

    tokenizer: PreTrainedTokenizerBase
    grader: Grader
    head: QualityHead | None
    window: int
    vocabulary: int

    def __call__(self, rollouts: list[Rollout], prompts: dict[int, Prompt]) -> list[Candidates]:
        """The candidates of each prompt, in order of `prompts`. Pruned rollouts are left out: they have no answer to vote for."""
        grade(rollouts, prompts, self.tokenizer, self.grader)
        found = {group: self.nobody() for group in prompts}
        for rollout in rollouts:
            if rollout.verdict is not None:
                found[rollout.group].rollouts.append(rollout)
                found[rollout.group].verdicts.append(Verdict(rollout.verdict, rollout.answer))
        for candidates in tqdm(found.values(), desc="answers", unit="problem", leave=False, disable=None):
            answers = [verdict.answer for verdict in candidates.verdicts]
            kinds = {verdict.answer: verdict.kind for verdict in candidates.verdicts}
            candidates.classes = voting.answer_classes(answers, self.grader.equivalent)
            raw = self._signals(candidates.rollouts)
            candidates.signals = {name: _finite(values) for name, values in raw.items()}
            candidates.unsure = sum(not math.isfinite(value) for values in raw.values() for value in values)
            spelling = {c: voting.representative(answers, candidates.classes, c) for c in set(candidates.classes)}
            candidates.right = {c for c, answer in spelling.items() if c is not None and kinds[answer] == "right"}
        return list(found.values())

    def nobody(self) -> Candidates:
        """A problem without candidates: whatever the rule, no answer."""
        return Candidates(signals=self._signals([]))

    @torch.no_grad()
    def _signals(self, rollouts: list[Rollout]) -> dict[str, list[float]]:
        traces = [rollout.confidences for rollout in rollouts]
        signals = {
            "mean": [voting.mean_confidence(h) for h in traces],
            "lowest": [voting.lowest_window(h, self.window) for h in traces],
            "bottom": [voting.bottom_windows(h, self.window) for h in traces],
            "tail": [voting.tail_confidence(h, self.window) for h in traces],
            "certainty": [voting.self_certainty(h, self.vocabulary) for h in traces],
            "logprob": [statistics.fmean(rollout.logprobs) for rollout in rollouts],
        }
        if self.head is not None:
            states = [rollout.last_state for rollout in rollouts]
            signals["head"] = self.head(torch.stack(states)).tolist() if states else []
        return signals


def _finite(values: list[float]) -> list[float]:
    """A number that overflowed vouches for nothing: it becomes the lowest of the problem's others, and all 0 if there is none.

    A rule would refuse to rank it, and end the program when everything has been sampled.
    """
    least = min(filter(math.isfinite, values), default=0.0)
    return [value if math.isfinite(value) else least for value in values]


def hits(problems: Sequence[Candidates], share: float) -> dict[str, list[float]]:
    """Row of the table -> for each problem, 1.0 if the rule's winner is right, else 0.0."""
    rows: dict[str, list[float]] = {}
    for candidates in problems:
        for name, winner in candidates.winners(share).items():
            rows.setdefault(name, []).append(float(winner is not None and winner in candidates.right))
    return rows


def sample_scores(problems: Sequence[Candidates], n: int) -> dict[str, list[float]]:
    """avg@n, and unbiased pass@k for k = 1, 2, 4 ... n, of each problem. A problem without candidates has none right."""
    right = [candidates.count_right for candidates in problems]
    scores = {f"avg@{n}": [count / n for count in right]}
    return scores | {f"pass@{k}": [pass_at_k(n, count, k) for count in right] for k in voting.sizes(n)}


def with_interval(values: list[float], seed: int) -> dict[str, float]:
    low, high = interval(values, seed)
    return {"value": statistics.fmean(values), "low": low, "high": high}


def candidates_curve(every: Sequence[Candidates], n: int, share: float, seed: int) -> dict[str, list[float]]:
    """Accuracy of each rule with 1, 2, 4 ... n candidates, and of an oracle (pass@k). Problems without candidates are wrong."""
    sampled = [candidates for candidates in every if candidates.rollouts]
    problems = [(candidates.classes, candidates.signals, candidates.right) for candidates in sampled]
    curves = voting.curve(problems, share, seed=seed)
    curves["oracle"] = [
        statistics.fmean(pass_at_k(n, candidates.count_right, k) for candidates in sampled) for k in voting.sizes(n)
    ]
    return {name: [value * len(sampled) / len(every) for value in values] for name, values in curves.items()}


def signal_quality(every: Sequence[Candidates], majority: Sequence[float]) -> dict[str, dict[str, float | None]]:
    """How well each signal tells right candidates from wrong ones: AUC over all, within problems, and within those problems that
    the majority (1.0 or 0.0 each) gets wrong, where a vote has something to gain. None where there is no pair to tell apart."""
    quality = {}
    for name in every[0].signals:
        rows = [
            (value, verdict.kind == "right", group, won)
            for group, (candidates, won) in enumerate(zip(every, majority, strict=True))
            for value, verdict, c in zip(candidates.signals[name], candidates.verdicts, candidates.classes, strict=True)
            if c is not None
        ]
        values, right, groups, won = (
            (torch.tensor(column, dtype=torch.float64) for column in zip(*rows)) if rows else (torch.empty(0),) * 4
        )
        lost = won == 0
        found = {
            "auc": auc(values, right),
            "auc_within": within_group_auc(values, right, groups.long()),
            "auc_within_majority_wrong": within_group_auc(values[lost], right[lost], groups[lost].long()),
        }
        quality[name] = {key: None if math.isnan(value) else value for key, value in found.items()}
    return quality
