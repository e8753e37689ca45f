"""The quality head: how likely a partial rollout is to end right, from one hidden state (Sec. 4.2).

`QualityHead` is the 2-layer MLP, `HeadTrainer` teaches it from a sliding buffer of (state, label) pairs that the run
yields anyway, `head_metrics` says whether it knows anything. The head sees copies of states and never the model that
made them, so no gradient can reach the policy. Imports torch and the standard library only.

    logit = Linear(GELU(Linear(LayerNorm(state))))      state: the final-norm output that is fed to lm_head
    s'    = sigmoid(logit)                              the score that `calibration.py` turns into a posterior

What the paper leaves open: LayerNorm before the MLP (hidden states of different models differ a hundredfold in scale),
the width, AdamW with a few passes over a replay buffer a step, and metrics within groups: a head that only knows which
prompts are easy has a good global AUC and steers no group.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

MAX_MINIBATCHES = 32  # of one `HeadTrainer.train`, so that its cost stays the same when the buffer is large


class QualityHead(nn.Module):
    """LayerNorm -> Linear(H, width) -> GELU -> Linear(width, 1), in fp32.

    Its weights depend on `seed` alone and leave the global generator as it was: building a vLLM engine reseeds that.
    """

    def __init__(self, hidden_size: int, width: int = 256, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would reseed the GPUs as well
            self.norm = nn.LayerNorm(hidden_size, dtype=torch.float32)
            self.hidden = nn.Linear(hidden_size, width, dtype=torch.float32)
            self.out = nn.Linear(width, 1, dtype=torch.float32)

    def forward(self, states: Tensor) -> Tensor:
        """Quality logits (N,) fp32 of `states` (N, H): any float dtype, any device; detached; fp32 under autocast."""
        states = states.detach().to(self.out.weight.device, torch.float32)
        with torch.autocast(states.device.type, enabled=False):
            return self.out(F.gelu(self.hidden(self.norm(states)))).squeeze(-1)


class HeadTrainer:
    """Trains a `QualityHead` by binary cross-entropy on the newest `capacity` labelled states, with its own AdamW.

    The buffer lives on the head's device in fp32 (16-bit floats would clip the outlier channels that some models have):
    capacity x H x 4 bytes, 32 MiB for 4096 states of size 2048. Shuffling draws from the trainer's own generator.
    """

    def __init__(
        self,
        head: QualityHead,
        lr: float = 1e-3,
        weight_decay: float = 0.01,
        passes: int = 4,
        batch_size: int = 256,
        capacity: int = 4096,
        seed: int = 0,
    ) -> None:
        self.head, self.passes, self.batch_size, self.capacity = head, passes, batch_size, capacity
        weight = head.hidden.weight
        self.optimizer = torch.optim.AdamW(head.parameters(), lr=lr, weight_decay=weight_decay)
        self.generator = torch.Generator().manual_seed(seed)
        self.states = torch.zeros(capacity, weight.shape[1], device=weight.device)
        self.labels = torch.zeros(capacity, device=weight.device)
        self.count, self.cursor = 0, 0  # rows in use; where the next one goes

    def add(self, states: Tensor, labels: Tensor) -> int:
        """Puts `states` (N, H) with `labels` (N,) into the buffer; the oldest rows make room. Returns the rows added.

        Rows with a non-finite state are left out: one of them would turn the head to NaN for good. Raises ValueError on
        labels other than 0 and 1: a rollout whose grader failed is not a wrong one.
        """
        states = states.detach().to(self.states.device, torch.float32)
        labels = labels.detach().to(self.states.device, torch.float32)
        if states.shape != (len(labels), self.states.shape[1]):
            raise ValueError(f"states {tuple(states.shape)} do not fit labels {tuple(labels.shape)} or the head")
        if not ((labels == 0) | (labels == 1)).all():
            raise ValueError("every label must be 0 or 1: leave out rollouts that were not judged, and shaped rewards")
        finite = states.isfinite().all(1)
        states, labels = states[finite][-self.capacity :], labels[finite][-self.capacity :]
        rows = (self.cursor + torch.arange(len(labels), device=labels.device)) % self.capacity
        self.states[rows], self.labels[rows] = states, labels
        self.cursor = (self.cursor + len(labels)) % self.capacity
        self.count = min(self.count + len(labels), self.capacity)
        return len(labels)

    def train(self) -> dict[str, float]:
        """`passes` shuffled passes over the buffer, cut at `MAX_MINIBATCHES` of at most `batch_size` rows each.

        Returns `loss` (mean over the rows seen, NaN if none), `n` (rows in the buffer) and `updates`.
        """
        pieces = math.ceil(self.count / self.batch_size)  # of equal size: a left-over row alone would be a noisy update
        batches = [
            batch
            for _ in range(self.passes if self.count else 0)
            for batch in torch.randperm(self.count, generator=self.generator).chunk(pieces)
        ][:MAX_MINIBATCHES]
        total = torch.zeros((), device=self.states.device)
        for batch in batches:
            rows = self._rows(batch)
            loss = F.binary_cross_entropy_with_logits(self.head(self.states[rows]), self.labels[rows])
            self.optimizer.zero_grad(set_to_none=True)
            loss.backward()
            self.optimizer.step()
            total += loss.detach() * len(rows)
        seen = sum(len(batch) for batch in batches)
        return {"loss": total.item() / seen if seen else math.nan, "n": self.count, "updates": len(batches)}

    def _rows(self, ages: Tensor) -> Tensor:
        """Ring rows of entries counted from the oldest, so that training does not depend on where the ring starts."""
        return (self.cursor - self.count + ages.to(self.states.device)) % self.capacity

    def state_dict(self) -> dict[str, object]:
        """Head, optimizer moments, generator, and buffer, oldest first: tensors and numbers, fit for weights_only."""
        rows = self._rows(torch.arange(self.count))
        return {
            "head": self.head.state_dict(),
            "moments": self.optimizer.state_dict()["state"],
            "generator": self.generator.get_state(),
            "states": self.states[rows],
            "labels": self.labels[rows],
        }

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Restores `state_dict`: training then goes on bit for bit.

        lr and weight decay stay those of the constructor, and a smaller `capacity` keeps the newest rows. Raises on a
        state of another shape or a damaged generator.
        """
        self.head.load_state_dict(state["head"])
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state["moments"], "param_groups": groups})
        self.generator.set_state(state["generator"])
        self.count, self.cursor = 0, 0
        self.add(state["states"], state["labels"])


def _ranks(scores: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's rank within its group, from 1, ties sharing their mean (N,) fp64; and dense group numbers (N,)."""
    level = torch.unique(scores, return_inverse=True)[1]
    group = torch.unique(groups, return_inverse=True)[1]
    cell, count = torch.unique(group * (level.max() + 1) + level, return_inverse=True, return_counts=True)[1:]
    rank = (count.cumsum(0) - (count.double() - 1) / 2)[cell]
    size = torch.bincount(group)
    return rank - (size.cumsum(0) - size)[group], group


def within_group_auc(scores: Tensor, labels: Tensor, groups: Tensor) -> float:
    """Share of (right, wrong) pairs of the same group in which the right one scores higher; ties count half.

    `scores` (N,) finite, `labels` (N,) 0/1, `groups` (N,) int64. Pairs of all groups are pooled; NaN if there is none.

    >>> within_group_auc(torch.tensor([0.9, 0.8, 0.2, 0.1]), torch.tensor([1, 1, 0, 0]), torch.tensor([0, 1, 0, 1]))
    1.0
    """
    if not len(scores):
        return math.nan
    rank, group = _ranks(scores, groups)
    right = labels.double()
    positives = torch.bincount(group, right)
    pairs = (positives * (torch.bincount(group) - positives)).sum()
    wins = torch.bincount(group, rank * right) - positives * (positives + 1) / 2  # Mann-Whitney U of each group
    return (wins.sum() / pairs).item() if pairs else math.nan


def auc(scores: Tensor, labels: Tensor) -> float:
    """Area under the ROC curve over all rows, ties counting half; NaN if one class is missing."""
    return within_group_auc(scores, labels, torch.zeros_like(scores, dtype=torch.int64))


def spearman(scores: Tensor, labels: Tensor) -> float:
    """Spearman's rank correlation of `scores` (N,) with 0/1 `labels` (N,), ties sharing their mean rank (Fig. 2c).

    NaN if either is constant.
    """
    if not len(scores):
        return math.nan
    nobody = torch.zeros_like(scores, dtype=torch.int64)
    x, y = _ranks(scores, nobody)[0], _ranks(labels, nobody)[0]
    x, y = x - x.mean(), y - y.mean()
    scale = (x.square().sum() * y.square().sum()).sqrt()
    return (x @ y / scale).item() if scale else math.nan


def head_metrics(scores: Tensor, labels: Tensor, groups: Tensor) -> dict[str, float]:
    """How well scores s' (N,) in [0, 1] tell right from wrong: `labels` (N,) 0/1, `groups` (N,) int64.

    `auc` over all rows, `auc_within` groups, `accuracy` at the threshold 1/2 beside `base_rate` (what the better
    constant guess would get), `spearman`. NaN where a value is undefined. Rows with a NaN score are left out. Raises
    ValueError on scores outside [0, 1]: those are logits.
    """
    scores, labels, groups = scores.detach().cpu().double(), labels.detach().cpu(), groups.detach().cpu()
    known = ~scores.isnan()
    scores, labels, groups = scores[known], labels[known].double(), groups[known]
    if ((scores < 0) | (scores > 1)).any():
        raise ValueError("scores must lie in [0, 1]: pass sigmoid(logit)")
    ratio = labels.mean().item()
    return {
        "auc": auc(scores, labels),
        "auc_within": within_group_auc(scores, labels, groups),
        "accuracy": ((scores > 0.5) == labels.bool()).double().mean().item(),
        "base_rate": max(ratio, 1 - ratio),
        "spearman": spearman(scores, labels),
    }
