"""Token confidence H_t, taken from the logits of a decoding step while they are there (Sec. 3; Kang et al. 2025; Fu et al. 2025).

`token_confidence` is the number, `ConfidenceRecorder` keeps it for all rollouts in flight, on the device: nothing is sent to the
host but a rollout's whole trace when it ends and, where low confidence stops rollouts, one flag per row and step.
`voting.py` makes trace confidences of it. Imports torch, numpy and the standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Confidence:
    """What to do with token confidence: record it and, for groups that have a floor, stop a rollout whose mean over the last
    `window` tokens falls below it (DeepConf's online mode). A rollout shorter than the window is never stopped."""

    window: int = 2048
    floors: Mapping[int, float] = field(default_factory=dict)


def token_confidence(logits: Tensor) -> Tensor:
    """H_t = -sum_j log P_t(j) = V (logsumexp - mean of the logits), over the whole vocabulary (Sec. 3).

    `logits` (N, V) of any float type, before temperature; returns (N,) fp32. The surer the model, the larger: a peak leaves all
    other tokens a tiny probability.

    >>> token_confidence(torch.tensor([[0.0, 0.0, 0.0, 0.0], [9.0, 0.0, 0.0, 0.0]]))
    tensor([ 5.5452, 27.0015])
    """
    logits = logits.float()
    return logits.shape[-1] * (logits.logsumexp(-1) - logits.mean(-1))


class ConfidenceRecorder:
    """Running sums of H_t, a line of a table for each rollout in flight: a window's mean is then one difference.

    length: most tokens of a rollout. lines: rollouts in flight; the table grows when there are more. fp64, or late windows of long
    rollouts would be the small difference of two large sums: lines x (length + 1) x 8 bytes, 33 MB for 512 rollouts of 8,192 tokens.
    """

    def __init__(self, confidence: Confidence, length: int, lines: int) -> None:
        self.window, self.floors = confidence.window, confidence.floors
        self._sums = torch.zeros(lines, length + 1, dtype=torch.float64)  # column 0 stays 0
        self._line: dict[str, int] = {}  # rollout -> its line
        self._free = list(range(lines))[::-1]
        self._latest: tuple[list[str], np.ndarray, Tensor, Tensor] | None = None

    def record(self, ids: list[str], delivered: np.ndarray, logits: Tensor) -> None:
        """Note one step: row i of `logits` yields token number `delivered[i]` (from 1) of rollout `ids[i]`; 0 yields none."""
        rows = np.flatnonzero(delivered)
        if len(rows) < len(ids):
            ids, delivered, logits = [ids[row] for row in rows], delivered[rows], logits[torch.from_numpy(rows)]
        if self._sums.device != logits.device:
            self._sums = self._sums.to(logits.device)
        line = torch.tensor([self._line_of(name) for name in ids], dtype=torch.int64, device=logits.device)
        number = torch.tensor(delivered, dtype=torch.int64, device=logits.device)
        self._sums[line, number] = self._sums[line, number - 1] + token_confidence(logits)
        self._latest = (ids, delivered, line, number)

    def _line_of(self, name: str) -> int:
        if name not in self._line:
            if not self._free:
                lines = len(self._sums)
                self._sums = torch.cat([self._sums, torch.zeros_like(self._sums)])
                self._free = list(range(lines, 2 * lines))[::-1]
            self._line[name] = self._free.pop()
        return self._line[name]

    def below_floor(self, groups: Mapping[str, int]) -> list[str]:
        """Of the rollouts of the latest step, those in `groups` (rollout -> group) whose newest full window is below its floor."""
        if self._latest is None or not self.floors:
            return []
        ids, delivered, line, number = self._latest
        rows = [
            row for row, name in enumerate(ids) if delivered[row] >= self.window and groups.get(name) in self.floors
        ]
        if not rows:
            return []
        floors = torch.tensor([self.floors[groups[ids[row]]] for row in rows], dtype=torch.float64)
        picked = torch.tensor(rows, device=line.device)
        line, number = line[picked], number[picked]
        means = (self._sums[line, number] - self._sums[line, number - self.window]) / self.window
        return [ids[rows[i]] for i in (means.cpu() < floors).nonzero()[:, 0].tolist()]

    def pop(self, name: str, tokens: int) -> np.ndarray:
        """H_t (tokens,) fp64 of a rollout that ended, and its line is free for another."""
        line = self._line.pop(name)
        self._free.append(line)
        return np.diff(self._sums[line, : tokens + 1].cpu().numpy())
