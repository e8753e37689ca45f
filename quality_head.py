"""The quality head: how likely a partial rollout is to end right, from one hidden state (Sec. 4.2).

    logit = Linear(GELU(Linear(LayerNorm(state))))    state: the final-norm output, fed to lm_head
    s'    = sigmoid(logit)                            the score, calibrated in `calibration.py`

The paper's head sees the state alone. Ours may see two numbers more, which no LayerNorm flattens:
how likely the model found what it has sampled so far, as a sum and as a mean of log-probs.

`QualityHead` is the 2-layer MLP. `HeadTrainer` teaches it from a sliding buffer of (state, label)
pairs. The head sees copies of states and never the model that made them, so no gradient reaches
the policy. Imports torch and the standard library only.

What the paper leaves open: LayerNorm before the MLP (the scale of hidden states differs a
hundredfold between models), the width, and AdamW with a few passes over a replay buffer per step.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Of one `HeadTrainer.train`, so that its cost does not grow with the buffer.
MAX_MINIBATCHES = 32


class QualityHead(nn.Module):
    """LayerNorm -> Linear(H, width) -> GELU -> Linear(width, 1), in fp32.

    Its weights depend on `seed` alone, and the global generator stays as it was.

    extras: 2 if behind each state come the sum S <= 0 and the mean of log-probs; they join it past
    the LayerNorm, as log(1 - S), since S grows with the length to thousands, and the mean as it is.
    """

    def __init__(self, hidden_size: int, width: int = 256, seed: int = 0, extras: Literal[0, 2] = 0) -> None:
        super().__init__()
        self.extras = extras
        with torch.random.fork_rng(devices=[]):
            # torch.manual_seed would reseed the GPUs as well
            torch.default_generator.manual_seed(seed)
            self.norm = nn.LayerNorm(hidden_size, dtype=torch.float32)
            self.hidden = nn.Linear(hidden_size + extras, width, dtype=torch.float32)
            self.out = nn.Linear(width, 1, dtype=torch.float32)

    def forward(self, states: Tensor) -> Tensor:
        """Quality logits (N,) fp32 of `states` (N, H + extras), of any float dtype and device; detached."""
        states = states.detach().to(self.out.weight.device, torch.float32)
        states, extras = states.split([*self.norm.normalized_shape, self.extras], 1)
        with torch.autocast(states.device.type, enabled=False):
            seen = self.norm(states)
            if self.extras:
                # Rounding may put a sum a little above 0.
                total, mean = extras.split(1, 1)
                seen = torch.cat([seen, total.clamp_max(0).neg().log1p(), mean], 1)
            return self.out(F.gelu(self.hidden(seen))).squeeze(-1)


class HeadTrainer:
    """Trains a `QualityHead` by binary cross-entropy on the newest `capacity` labelled states.

    It has its own AdamW and its own generator for shuffling. The buffer lies on the head's device,
    in fp32 (fp16 would clip the outlier channels of some models): 32 MiB for 4096 states of 2048.
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
        """Put `states` (N, H) with `labels` (N,) into the buffer, in place of the oldest.

        Returns the number of rows added. Rows with a non-finite state are left out: one of them
        would turn the head to NaN for good. Raises ValueError on labels other than 0 and 1.
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
        """`passes` shuffled passes over the buffer, in at most `MAX_MINIBATCHES` minibatches.

        Returns `loss` (mean over the rows seen, NaN if none), `n` (rows in the buffer), `updates`.
        """
        # pieces of equal size: a left-over row alone would be a noisy update
        pieces = math.ceil(self.count / self.batch_size)
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
        """Ring rows of entries counted from the oldest: training ignores where the ring starts."""
        return (self.cursor - self.count + ages.to(self.states.device)) % self.capacity

    def state_dict(self) -> dict[str, object]:
        """Head, optimizer moments, generator and buffer, oldest first; loads under weights_only."""
        rows = self._rows(torch.arange(self.count))
        return {
            "head": self.head.state_dict(),
            "moments": self.optimizer.state_dict()["state"],
            "generator": self.generator.get_state(),
            "states": self.states[rows],
            "labels": self.labels[rows],
        }

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Restore `state_dict`: training then goes on bit for bit. Raises on a damaged state.

        lr and weight decay stay those of the constructor; a smaller `capacity` keeps the newest.
        """
        self.head.load_state_dict(state["head"])
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": state["moments"], "param_groups": groups})
        self.generator.set_state(state["generator"])
        self.count, self.cursor = 0, 0
        self.add(state["states"], state["labels"])
