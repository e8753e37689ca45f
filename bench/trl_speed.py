"""Seconds per step of TRL's GRPOTrainer with four ways to sample, in turn on the same prompts.

    .venv-trl/bin/python -m bench.trl_speed     # four minutes on 2 idle cores

"transformers" is TRL alone, "engine" and "arrol" are examples/trl_arrol.py without and with pruning.
"rows kept" prunes too, but its pruned rows stay in the batch: what dropping them saves. Means over
the steps after the cold start, then over seeds; in brackets the smallest and largest of the seeds.
"""

from __future__ import annotations

import statistics
import time

import torch
from trl import GRPOTrainer

from engine import Engine
from examples import trl_arrol as example

# Rewards count as sampling; a step also holds the optimizer's and the head's.
STEPS, SEEDS = 8, 3


class Timed:
    """Mixed into a trainer: seconds of each phase, a row for each step."""

    def timed(self) -> list[tuple[float, float, float]]:
        self.rows, self.sampling, self.training, self.begun = [], 0.0, 0.0, time.perf_counter()
        self.train()
        return self.rows

    def _prepare_inputs(self, inputs: list) -> dict:
        begun = time.perf_counter()
        prepared = super()._prepare_inputs(inputs)
        self.sampling += time.perf_counter() - begun
        return prepared

    def training_step(self, *args: object) -> torch.Tensor:
        begun = time.perf_counter()
        loss = super().training_step(*args)
        self.training += time.perf_counter() - begun
        return loss

    def log(self, logs: dict[str, float], *args: object) -> None:
        super().log(logs, *args)
        if "reward" in logs:  # what TRL logs of a step, after the callbacks
            self.rows.append((self.sampling, self.training - self.sampling, time.perf_counter() - self.begun))
            self.sampling, self.training, self.begun = 0.0, 0.0, time.perf_counter()


class Plain(Timed, GRPOTrainer): ...


class Pruning(Timed, example.PruningTrainer): ...


def make_trainer(kind: str, engine: Engine, seed: int) -> Timed:
    arguments = example.arguments(STEPS, seed)
    arguments["args"].logging_steps = 1
    if kind == "transformers":
        return Plain(reward_funcs=example.accuracy, **arguments)
    sampler = example.Sampler(engine, kind != "engine", seed)
    if kind == "rows kept":
        hooks = dict(rollout_func=sampler.rollout, reward_funcs=sampler.reward, callbacks=[sampler])
        return Plain(**hooks, **arguments)
    return Pruning(sampler, **arguments)


if __name__ == "__main__":
    engine = Engine(example.MODEL, example.DETECT_LENGTH, 128, dtype=torch.float32, kv_cache_gb=0.5)
    seconds = {kind: [] for kind in ("transformers", "engine", "rows kept", "arrol")}
    for seed in range(SEEDS):
        for kind, runs in seconds.items():
            rows = make_trainer(kind, engine, seed).timed()[example.COLD_START :]
            runs.append([statistics.mean(column) for column in zip(*rows)])
    engine.close()
    print("| seconds | sampling | update | step |\n|---|---|---|---|")
    for kind, runs in seconds.items():
        print(f"| {kind} |", *(f"{statistics.mean(c):.2f} ({min(c):.2f}–{max(c):.2f}) |" for c in zip(*runs)))
