"""Candidates that are stopped by the quality head at L_detect, while they are sampled.

The same candidates are sampled again (they have seeds of their own), and compared with letting all of them finish.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from calibration import SystematicDraw, bin_index, solve_bias, survival_probability
from engine import Decision, Rollout
from quality_head import QualityHead
from support.judge import Candidates, hits, with_interval

if TYPE_CHECKING:
    from tts import Bench

STEEP = 1e6  # slope of survival in the posterior, so that the better ones of a group go on for certain


class KeepBetter:
    """At L_detect, the better ones of each problem's candidates go on: survival by posterior alone, no balance target.

    p = clip(kappa + delta_g + slope * q, 0, 1), the slope so steep that all with a posterior above some level survive, none below
    it, and those on it (a bin holds many) share what is left. delta_g gives E[p] = kappa over those of the group that have arrived.
    table: posterior of each bin of the score; without one (a head that came without its calibration), the score itself.
    A candidate whose score is not a number goes on and does not count among those that have arrived.
    """

    def __init__(self, head: QualityHead, table: Tensor | None, keep_ratio: float, seed: int) -> None:
        self.head, self.table, self.keep_ratio = head, table, keep_ratio
        self.draw = SystematicDraw(torch.Generator().manual_seed(seed))
        self.arrived: dict[int, Tensor] = {}

    @torch.no_grad()
    def decide(self, states: Tensor, groups: list[int], samples: list[int]) -> list[Decision]:
        scores = self.head(states).sigmoid().cpu()
        known, q = ~scores.isnan(), scores.double()
        if self.table is not None:
            q[known] = self.table[bin_index(scores[known], len(self.table))]
        group, p = torch.tensor(groups), torch.ones(len(groups), dtype=torch.float64)
        for name in dict.fromkeys(groups):
            rows = (group == name) & known
            self.arrived[name] = torch.cat([self.arrived.get(name, q[:0]), q[rows]])
            if self.keep_ratio < 1 and rows.any():
                bias = solve_bias(STEEP * self.arrived[name], self.keep_ratio, 0.0, 1.0)
                p[rows] = survival_probability(STEEP * q[rows], bias, self.keep_ratio, 0.0, 1.0)
        rows = zip(self.draw(p, group).tolist(), scores.tolist(), q.tolist(), p.tolist())
        return [Decision(*row) for row in rows]


def stop_by_head(bench: Bench, table: Tensor | None) -> tuple[list[Rollout], list[Candidates]]:
    """All candidates again, of which the head stops the worse ones at L_detect."""
    pruner = KeepBetter(bench.judge.head, table, bench.args.keep_ratio, bench.args.seed)
    rollouts = bench.sample(bench.args.n, pruner=pruner)
    return rollouts, bench.candidates(rollouts)


def early_stop(bench: Bench, whole: list[Rollout], every: list[Candidates], table: Tensor | None) -> list[dict]:
    """The rows of the early-stop table: for each plan and rule tokens, share saved, accuracy, and the difference from all candidates,
    by problem. whole, every: all candidates, sampled to their end, and judged."""
    plans = {}
    if bench.judge.head is not None:
        plans["head at L_detect"] = (stop_by_head(bench, table), ("majority", "ARRoL"))
    seed, before = bench.args.seed, hits(every, bench.args.share)
    of_all, rows = sum(len(rollout.token_ids) for rollout in whole), []
    for name, ((rollouts, stopped), rules) in plans.items():
        tokens, after = sum(len(rollout.token_ids) for rollout in rollouts), hits(stopped, bench.args.share)
        for rule in rules:
            row = {
                "plan": name,
                "rule": rule,
                "tokens": tokens,
                "saved": 1 - tokens / of_all,
                "stopped": sum(rollout.finish == "pruned" for rollout in rollouts) / len(rollouts),
                "accuracy": with_interval(after[rule], seed),
                "difference": with_interval([b - a for a, b in zip(before[rule], after[rule])], seed),
            }
            rows.append(row)
    return rows
