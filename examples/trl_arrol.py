"""TRL's GRPOTrainer, its rollouts pruned while vLLM generates them; no code of TRL's is changed.

    make example-trl      adds TRL to .venv; trains without and with pruning, a minute on a CPU

For TRL 1.16, whose `rollout_func` may change; for one process and one optimizer step per batch.
docs/copying.md tells what more of either need.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from arrol import Pruner
from calibration import Settings
from engine import Engine, Sampling
from tiny.sums import sums

MODEL, HIDDEN_SIZE, DETECT_LENGTH, MAX_TOKENS = str(ROOT / "tiny"), 128, 10, 107
PROMPTS, GROUP, COLD_START, STEPS = 8, 16, 4, 12
GAP = "sampling/sampling_logp_difference/max"  # TRL's name; from a loss one can log to its private `_metrics` alone
logging.getLogger("trl.trainer.grpo_trainer").setLevel(logging.ERROR)  # it warns of each None


def accuracy(completions: list[str], answer: list[str], **_: object) -> list[float]:
    """1 or 0, as the pruner needs it. TRL passes the columns of the data set, such as `answer`."""
    return [float(text.endswith(f"\\boxed{{{right}}}")) for text, right in zip(completions, answer, strict=True)]


class Sampler(TrainerCallback):
    """What TRL calls: for rollouts, for rewards, after each step."""

    def __init__(self, engine: Engine, prune: bool, seed: int) -> None:
        pruner = Pruner(HIDDEN_SIZE, GROUP, Settings(), cold_start=COLD_START, bins=32, seed=seed)
        self.engine, self.pruner = engine, pruner if prune else None

    def rollout(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, list]:
        """TRL's `rollout_func`. `prompts` has each prompt GROUP times in a row."""
        model, step = trainer.accelerator.unwrap_model(trainer.model), trainer.state.global_step
        self.engine.wake((name, parameter.detach()) for name, parameter in model.named_parameters())
        pruner = self.pruner if model.training else None
        if pruner:
            pruner.begin(step + 1)
        ids = trainer.processing_class(prompts[::GROUP])["input_ids"]
        # No two groups of a run have the same number: the calibration goes by it.
        groups, seed = dict(enumerate(ids, step * len(ids))), 1000 * trainer.args.seed + step
        sampling = Sampling(MAX_TOKENS, tuple(trainer.eos_token_ids))
        self.rollouts = self.engine.generate(groups, GROUP, sampling, seed=seed, pruner=pruner, last_states=True)
        self.engine.sleep()
        return {
            "prompt_ids": [groups[r.group] for r in self.rollouts],
            "completion_ids": [r.token_ids for r in self.rollouts],
            "logprobs": [r.logprobs for r in self.rollouts],
            # 0: neither in the loss nor in the number of tokens that it is divided by.
            "env_mask": [[int(r.finish != "pruned")] * len(r.token_ids) for r in self.rollouts],
        }

    def reward(self, completions: list[str], **columns: object) -> list[float | None]:
        """None for the pruned: their group's mean is without them, and their advantage 0."""
        for r, reward in zip(self.rollouts, accuracy(completions, **columns), strict=True):
            r.reward = None if r.finish == "pruned" else reward
        if scored := [r for r in self.rollouts if r.score is not None]:
            columns["log_metric"]("keep_rate", sum(r.reward is not None for r in scored) / len(scored))
        return [r.reward for r in self.rollouts]

    def on_step_end(self, *_: object, **__: object) -> None:
        if self.pruner:
            self.pruner.learn(self.rollouts)


class PruningTrainer(GRPOTrainer):
    """Drops the pruned rows: that they are short saves nothing, TRL pads a batch to its longest."""

    def __init__(self, sampler: Sampler, **arguments: object) -> None:
        super().__init__(rollout_func=sampler.rollout, reward_funcs=sampler.reward, callbacks=[sampler], **arguments)

    def compute_loss(self, model: torch.nn.Module, inputs: dict[str, torch.Tensor], *args, **kwargs) -> torch.Tensor:
        mask = (inputs["completion_mask"] * inputs["tool_mask"]).bool()  # tool_mask is env_mask, padded
        rows = mask.any(1)
        rows[0] |= not rows.any()  # if all were pruned one stays, and its loss is 0
        inputs = {name: value[rows] if value.ndim else value for name, value in inputs.items()}
        outputs = []  # TRL compares log-probs only where it runs vLLM itself, and does not return its own
        hook = model.register_forward_hook(lambda _model, _inputs, output: outputs.append(output.log_probs.detach()))
        loss = super().compute_loss(model, inputs, *args, **kwargs)
        hook.remove()
        gaps = (outputs[0][:, -mask.shape[1] :] - inputs["sampling_per_token_logps"])[mask[rows]].abs()
        self._metrics["train" if model.training else "eval"][GAP] += [gaps.max().item()] if len(gaps) else []
        return loss


def arguments(steps: int, seed: int) -> dict[str, object]:
    """Of GRPOTrainer, with our sampler or its own."""
    batch = dict(per_device_train_batch_size=64, gradient_accumulation_steps=2, per_device_eval_batch_size=256)
    rollouts = dict(num_generations=GROUP, max_completion_length=MAX_TOKENS, max_steps=steps, seed=seed)
    rate = dict(learning_rate=1e-4, lr_scheduler_type="constant", gradient_checkpointing=False, bf16=False)
    files = dict(output_dir="runs/trl", save_strategy="no", report_to="none", logging_steps=COLD_START)
    data = {"train_dataset": sums(steps * PROMPTS, seed, terms=(6, 8)), "eval_dataset": sums(32, 0, "test", (6, 8))}
    for name, found in data.items():
        data[name] = Dataset.from_dict({"prompt": [f"{text}\n" for text in found], "answer": list(found.values())})
    return {"model": MODEL, "args": GRPOConfig(**batch, **rollouts, **rate, **files), **data}


if __name__ == "__main__":
    engine = Engine(MODEL, DETECT_LENGTH, 128, dtype=torch.float32, kv_cache_gb=0.5)
    for prune in (False, True):
        trainer = PruningTrainer(Sampler(engine, prune, seed=0), **arguments(STEPS, seed=0))
        before, _, after = (trainer.evaluate(), trainer.train(), trainer.evaluate())
        rows = [row for row in trainer.state.log_history if GAP in row]
        kept = sum(row.get("keep_rate", 1.0) for row in rows[1:]) / len(rows[1:])
        found = f"pruning {prune}: keep rate {kept:.2f}, gap {max(row[GAP] for row in rows):.0e}"
        print(f"{found}, held-out reward {before['eval_reward']:.3f} -> {after['eval_reward']:.3f}")
    engine.close()
