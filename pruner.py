"""The method as one object: hidden state -> score s' -> posterior q -> survival probability p -> keep or drop."""

from __future__ import annotations

import math
import random
from collections import defaultdict

import torch
from torch import Tensor

from calibration import Calibrator, Settings, SystematicDraw, draw_bernoulli
from engine import Decision, Rollout
from quality_head import HeadTrainer, QualityHead
from support.args import Args
from support.metrics import ece, head_metrics
from support.report import Metrics


class Pruner:
    """ARRoL's decisions at L_detect (Sec. 4.2, App. A.4), and what they are learnt from.

    `--prune random` is the same object with p = κ: its head learns and is measured, and decides nothing.
    One object per run; `begin` is called before each generation, `decide` by the engine, `learn` after grading.
    A decision depends on the rollout, on the members of its group that have arrived by then, and on nothing else that is sampled: draws
    are a function of seed, step, group and sample. So it does not matter on which rank a group is, where all its members start and arrive
    together. vLLM starts them in portions when slots or its prefill budget are short, and then the group's tilt sees them in portions.
    """

    def __init__(self, args: Args, hidden_size: int, device: torch.device | str = "cpu") -> None:
        self.args = args
        self.head = QualityHead(hidden_size, args.head_width, seed=args.seed).to(device)
        self.trainer = HeadTrainer(
            self.head, args.head_lr, passes=args.head_passes, capacity=args.head_buffer, seed=args.seed
        )
        self.calibrator = Calibrator(args.bins, args.alpha, args.window)
        self.due = self.active = (
            False  # whether pruning should be on; whether it can be: something was scored and labelled
        )

    def begin(self, step: int) -> None:
        """Start the generations of training step `step` (from 1). Nothing is pruned in the cold start or at κ = 1."""
        self.due = self.args.keep_ratio < 1 and step > self.args.cold_start
        self.active = self.due and self.calibrator.ready
        self.step = step
        self.draws: dict[int, SystematicDraw] = {}
        self.alive: dict[int, int] = defaultdict(lambda: self.args.group_size)
        self.posteriors, self.groups = torch.empty(0, dtype=torch.float64), torch.empty(0, dtype=torch.int64)

    @torch.no_grad()
    def decide(self, states: Tensor, groups: list[int], samples: list[int]) -> list[Decision]:
        """Decisions on rollouts that just reached L_detect: `states` (N, hidden), `groups` and `samples` (N)."""
        scores, group = self.head(states).sigmoid().cpu(), torch.tensor(groups)
        q = self.calibrator.posterior(scores)
        p = self._survival(q, group) if self.active else torch.ones(len(groups), dtype=torch.float64)
        keep = self._draw(p, groups, samples)
        return [self._decision(*row) for row in zip(groups, keep, scores.tolist(), q.tolist(), p.tolist())]

    def _survival(self, q: Tensor, group: Tensor) -> Tensor:
        a = self.args
        if a.prune == "random":
            return torch.full_like(q, a.keep_ratio).masked_fill(q.isnan(), 1.0)
        # a group's mean is over all its members that have arrived so far
        self.posteriors, self.groups = torch.cat([self.posteriors, q]), torch.cat([self.groups, group])
        settings = Settings(a.keep_ratio, a.positive_target, a.balance, a.p_min, a.p_max, a.tilt)
        return self.calibrator.survival(self.posteriors, self.groups, settings)[-len(q) :]

    def _draw(self, p: Tensor, groups: list[int], samples: list[int]) -> list[bool]:
        """Keep decisions, each group's from a generator of its own: never the global one, which the engine reseeds."""
        keep, rows = [True] * len(p), defaultdict(list)
        for row, group in enumerate(groups):
            rows[group].append(row)
        for group, members in rows.items():
            seed = random.Random(f"{self.args.seed}-{self.step}-{group}").getrandbits(62)
            generator = torch.Generator().manual_seed(seed)
            if self.args.survival == "systematic":
                draw = self.draws.setdefault(group, SystematicDraw(generator))
                drawn = draw(p[members], torch.full((len(members),), group))
            else:  # a draw for each of the group's samples, of which these rollouts have arrived
                numbers = [samples[row] for row in members]
                whole = torch.zeros(self.args.group_size, dtype=torch.float64)
                whole[numbers] = p[members]
                drawn = draw_bernoulli(whole, generator)[numbers]
            for row, kept in zip(members, drawn.tolist()):
                keep[row] = kept
        return keep

    def _decision(self, group: int, keep: bool, score: float, q: float, p: float) -> Decision:
        if self.alive[group] <= self.args.min_survivors:
            keep, p = True, 1.0  # forced: it stands for itself alone
        self.alive[group] -= not keep
        return Decision(keep, score, q, p)

    def learn(self, rollouts: list[Rollout], labels: list[float | None]) -> Metrics:
        """Update head and windows from all rollouts of a step; a label is None for those pruned or not judged.

        The metrics compare each score with the label that came after it: the head has not seen these rollouts yet.
        """
        scored = [(r, y) for r, y in zip(rollouts, labels) if r.detect_state is not None]
        known = [(r, y) for r, y in scored if y is not None and math.isfinite(r.score)]
        metrics: Metrics = {}
        if known:
            scores, truth = torch.tensor([r.score for r, _ in known]), torch.tensor([y for _, y in known])
            group = torch.tensor([r.group for r, _ in known])
            metrics = {f"head_{name}": value for name, value in head_metrics(scores, truth, group).items()}
            metrics["ece"] = ece(torch.tensor([r.posterior for r, _ in known]), truth)
            self.calibrator.label(scores, truth)
            self.trainer.add(torch.stack([r.detect_state for r, _ in known]), truth)
        if self.args.head_states == "both":
            ended = [(r.last_state, y) for r, y in zip(rollouts, labels) if r.last_state is not None and y is not None]
            if ended:
                self.trainer.add(torch.stack([state for state, _ in ended]), torch.tensor([y for _, y in ended]))
        if scored:
            self.calibrator.observe(
                torch.tensor([r.score for r, _ in scored]), torch.tensor([r.group for r, _ in scored])
            )
        metrics["head_loss"] = self.trainer.train()["loss"]
        return metrics | {"prior": self.calibrator.prior, "scores_rejected": float(self.calibrator.rejected)}

    def state_dict(self) -> dict:
        return {"trainer": self.trainer.state_dict(), "calibrator": self.calibrator.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        self.trainer.load_state_dict(state["trainer"])
        self.calibrator.load_state_dict(state["calibrator"])
