"""ARRoL: RLVR that prunes rollouts while they are generated (arXiv 2603.24840).

    python arrol.py                                  the embedded model, on a CPU, in minutes
    python arrol.py --model Qwen/Qwen3-1.7B-Base     a real one, on a GPU
    torchrun --nproc-per-node 8 arrol.py --model …   the same on eight

One training step is Algorithm 1 of the paper; read it from `Trainer.step`:

    prompts -> engine.generate -> rollouts -> grade the survivors -> advantages -> policy update
                 |  ^                |                 |
           state |  | keep?          | states, scores, rewards -> head + calibration update
                 v  |
               Pruner: head -> posterior -> survival probability -> draw
"""

from __future__ import annotations

import math
import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from support.args import Args, parse

if __name__ == "__main__":
    # Before the imports below, which take seconds: a bad flag fails at once.
    ARGS = parse(sys.argv[1:])

import torch
from torch import Tensor

from calibration import Calibrator, Settings, SystematicDraw
from engine import Decision, EngineError, NothingScored, Rollout, Sampling
from grpo import Sample, group_advantages, overlong_penalty
from quality_head import HeadTrainer, QualityHead
from support import checkpoint, launch, model
from support.data import Prompt
from support.distributed import engine_number, gather_rollouts, shard
from support.evaluation import evaluate, grade
from support.grader import GraderError
from support.metrics import Metrics, step_metrics
from support.report import Clock, RunLog
from support.show import load_metrics


class Pruner:
    """Decides at L_detect which rollouts go on, and learns from those that did (Sec. 4.2, App. A.4).

    The chain: hidden state -> score s' -> posterior q -> survival probability p -> keep or drop.
    Call `begin` before a step's rollouts are generated and `learn` after they are graded; the
    engine calls `decide` in between. Pass it to `Engine.generate`.

    hidden_size: of the model's last hidden state. group_size: rollouts per prompt (G).
    head_inputs: "state+logprob" if log-probs come behind states (`state_logprobs` of the engine).
    rule: "arrol", or "random", which keeps with p = κ: its head learns and decides nothing.
    draw: "bernoulli" (the paper) or "systematic", see `calibration.SystematicDraw`.
    min_survivors: a group is never pruned below this. cold_start: first steps without pruning, in
    which head and windows fill. window: rollouts in the calibration's windows and in the head's
    replay buffer. Nothing is pruned at κ = 1.

    A decision depends on the rollout, on the members of its group that have arrived by then, and
    on nothing else: draws are a function of seed, step, group and sample. (vLLM starts rollouts in
    portions when slots are short; then a group's tilt sees them in portions.)
    """

    def __init__(
        self,
        hidden_size: int,
        group_size: int,
        settings: Settings,
        *,
        rule: Literal["arrol", "random"] = "arrol",
        draw: Literal["bernoulli", "systematic"] = "bernoulli",
        min_survivors: int = 2,
        cold_start: int = 20,
        bins: int = 128,
        alpha: float = 1.0,
        window: int = 4096,
        head_width: int = 256,
        head_inputs: Literal["state", "state+logprob"] = "state",
        head_lr: float = 1e-3,
        seed: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        self.group_size, self.settings, self.rule, self.draw = group_size, settings, rule, draw
        self.min_survivors, self.cold_start, self.seed = min_survivors, cold_start, seed
        extras = 2 if head_inputs == "state+logprob" else 0
        self.head = QualityHead(hidden_size, head_width, seed, extras).to(device)
        self.trainer = HeadTrainer(self.head, head_lr, capacity=window, seed=seed)
        self.calibrator = Calibrator(bins, alpha, window)
        # Of last states, for the vote; decisions do not look at it.
        self.finished = Calibrator(bins, alpha, window)
        self.past_cold_start = self.pruning = False

    def begin(self, step: int) -> None:
        """Start training step `step` (from 1)."""
        self.step = step
        self.past_cold_start = self.settings.keep_ratio < 1 and step > self.cold_start
        # Without a scored and labelled rollout there is no posterior to prune by.
        self.pruning = self.past_cold_start and self.calibrator.ready
        self.uniform: dict[int, list[float]] = {}
        self.systematic = SystematicDraw(torch.Generator())  # `_draw` starts its groups
        self.remaining: dict[int, int] = defaultdict(lambda: self.group_size)
        # All that have arrived at L_detect in this step: a group's tilt is about all its members.
        self.posteriors, self.groups = torch.empty(0, dtype=torch.float64), torch.empty(0, dtype=torch.int64)

    @torch.no_grad()
    def decide(self, states: Tensor, groups: list[int], samples: list[int]) -> list[Decision]:
        """Decisions on rollouts that just reached L_detect.

        states: (N, hidden or hidden + 2). groups, samples: (N,) prompt of each, and its number in the group.
        """
        scores = self.head(states).sigmoid().cpu()
        q = self.calibrator.posterior(scores)
        p = self._survival(q, torch.tensor(groups)) if self.pruning else torch.ones(len(groups), dtype=torch.float64)
        decisions = []
        rows = zip(groups, self._draw(p, groups, samples), scores.tolist(), q.tolist(), p.tolist(), strict=True)
        for group, keep, score, posterior, survival in rows:
            if self.remaining[group] <= self.min_survivors:
                # Forced: it stands for itself alone.
                keep, survival = True, 1.0
            self.remaining[group] -= not keep
            decisions.append(Decision(keep, score, posterior, survival))
        return decisions

    def _survival(self, q: Tensor, groups: Tensor) -> Tensor:
        """Survival probabilities (N,) fp64 of the posteriors `q` (N,) that arrive now (Eq. 2)."""
        if self.rule == "random":
            return torch.full_like(q, self.settings.keep_ratio).masked_fill(q.isnan(), 1.0)
        self.posteriors, self.groups = torch.cat([self.posteriors, q]), torch.cat([self.groups, groups])
        return self.calibrator.survival(self.posteriors, self.groups, self.settings)[-len(q) :]

    def _draw(self, p: Tensor, groups: list[int], samples: list[int]) -> list[bool]:
        """Keep decisions (N,). Each group has its own generator: vLLM reseeds the global one."""
        for group in set(groups) - self.uniform.keys():
            generator = random.Random(f"{self.seed}-{self.step}-{group}")
            self.systematic.carry[group] = generator.random()
            # One number for each sample of the group, whether it has arrived or not.
            self.uniform[group] = [generator.random() for _ in range(self.group_size)]
        if self.draw == "systematic":
            return self.systematic(p, torch.tensor(groups)).tolist()
        return [self.uniform[group][sample] < chance for group, sample, chance in zip(groups, samples, p.tolist())]

    def learn(self, rollouts: list[Rollout]) -> Metrics:
        """Update head and calibration from the graded rollouts of a step, pruned ones included."""
        scored = [r for r in rollouts if r.detect_state is not None]
        known = [r for r in scored if r.reward is not None and math.isfinite(r.score)]
        ended = [r for r in rollouts if r.last_state is not None and r.reward is not None]
        if known:
            rewards = torch.tensor([r.reward for r in known])
            self.calibrator.label(torch.tensor([r.score for r in known]), rewards)
            self.trainer.add(torch.stack([r.detect_state for r in known]), rewards)
        if ended:
            # Last states too: test-time voting scores finished answers with the same head.
            states, rewards = torch.stack([r.last_state for r in ended]), torch.tensor([r.reward for r in ended])
            self.finished.label(self.head(states).sigmoid(), rewards)
            self.trainer.add(states, rewards)
        if scored:
            groups = torch.tensor([r.group for r in scored])
            self.calibrator.observe(torch.tensor([r.score for r in scored]), groups)
        return {
            "head_loss": self.trainer.train()["loss"],
            "prior": self.calibrator.prior,
            "scores_rejected": float(self.calibrator.rejected),
        }

    def state_dict(self) -> dict:
        return {name: getattr(self, name).state_dict() for name in ("trainer", "calibrator", "finished")}

    def load_state_dict(self, state: dict) -> None:
        self.trainer.load_state_dict(state["trainer"])
        self.calibrator.load_state_dict(state["calibrator"])
        if "finished" in state:  # not in older checkpoints: the window then starts empty
            self.finished.load_state_dict(state["finished"])


class Trainer:
    """One training run: the step, the loop around it, evaluation and checkpoints.

    args: the flags. parts: engine, tokenizer, prompts and the like, which `launch` builds.
    """

    def __init__(self, args: Args, parts: launch.Parts) -> None:
        self.args, self.parts, self.engine = args, parts, parts.engine
        self.learner = launch.make_learner(args, parts.device, parts.engine.vocabulary)
        self.policy = self.learner.policy
        hidden_size = self.policy.model.config.get_text_config().hidden_size
        self.pruner = launch.make_pruner(Pruner, args, hidden_size, parts.device)
        self.sampling = Sampling(args.max_length, tuple(parts.stop_token_ids), args.temperature)
        self.dtype, self.gap_limits = model.working_dtype(parts.device), model.gap_limits(args, parts.device)
        self.clock = Clock()
        # What a checkpoint holds beside the learner and the pruner; changed at the end of a step only.
        self.step_number, self.prompts_used, self.seconds = 0, 0, 0.0

    def step(self) -> tuple[Metrics, dict[int, Prompt], list[Rollout]]:
        """One training step; returns its metrics, its prompts by group, and all rollouts."""
        started = time.perf_counter()
        step = self.step_number + 1
        with self.clock("sync"):
            self.engine.wake(self.weights())
        if self.pruner:
            self.pruner.begin(step)
        prompts, rollouts = self.sample(step)
        with self.clock("sync"):
            self.engine.sleep()

        groups = self.usable_groups(rollouts)
        survivors = [r for r in rollouts if r.reward is not None and r.group in groups]
        self.set_advantages(survivors, prompts)
        # Token ids stay where a rollout was sampled, and there it is trained on.
        rows = [row for row, r in enumerate(survivors) if isinstance(r.token_ids, list)]
        samples = [
            Sample(prompts[r.group].token_ids, r.token_ids, r.advantage, r.logprobs)
            for r in (survivors[row] for row in rows)
        ]
        update = self.learner.update(samples, *self.gap_limits, rows)
        for phase in ("logprob", "update"):
            self.clock.seconds[phase] += update.pop(f"{phase}_s")
        with self.clock("head"):
            head = self.pruner.learn(rollouts) if self.pruner else {}

        self.step_number, self.prompts_used = step, self.prompts_used + len(prompts)
        self.clock.seconds["step"] += time.perf_counter() - started
        self.seconds += self.clock.seconds["step"]
        metrics = {
            "step": step,
            "wall_clock": self.seconds,
            "epoch": self.prompts_used / len(self.parts.prompts),
            "pruning": bool(self.pruner and self.pruner.pruning),
            "usable_groups": len(groups),
            "prompt_tokens": sum(len(prompts[r.group].token_ids) for r in rollouts),
        }
        described = step_metrics(rollouts, self.args.detect_length)
        return metrics | described | update | head | self.clock.read(), prompts, rollouts

    def sample(self, step: int) -> tuple[dict[int, Prompt], list[Rollout]]:
        """A step's prompts by group and their graded rollouts.

        DAPO replaces groups without variance by those of new prompts, at most `max_refills` times;
        then it goes on with what there is.
        """
        args = self.args
        prompts: dict[int, Prompt] = {}
        rollouts: list[Rollout] = []
        missing = args.prompts
        for attempt in range(1 + (args.max_refills if args.algo == "dapo" else 0)):
            fresh = self.next_prompts(self.prompts_used + len(prompts), missing)
            prompts |= fresh
            rollouts += self.generate(fresh, step, attempt)
            missing = args.prompts - len(self.usable_groups(rollouts))
            if missing <= 0:
                break
        if self.pruner and self.pruner.past_cold_start and not any(r.detect_state is not None for r in rollouts):
            longest = max(len(r.token_ids) for r in rollouts)
            raise NothingScored(
                f"no rollout went beyond L_detect = {args.detect_length} tokens (longest: {longest}), "
                "so that nothing can be pruned: lower --detect-length or use --prune none"
            )
        return prompts, rollouts

    def next_prompts(self, start: int, count: int) -> dict[int, Prompt]:
        """Prompts number `start` to `start + count - 1` of the run; the number is the group id.

        Every epoch has all prompts once, in an order of its own.
        """
        prompts, orders = {}, {}
        for number in range(start, start + count):
            epoch, position = divmod(number, len(self.parts.prompts))
            if epoch not in orders:
                indices = range(len(self.parts.prompts))
                orders[epoch] = random.Random(f"{self.args.seed}-{epoch}").sample(indices, len(indices))
            prompts[number] = self.parts.prompts[orders[epoch][position]]
        return prompts

    def generate(self, prompts: dict[int, Prompt], step: int, attempt: int) -> list[Rollout]:
        """All rollouts of `prompts`: sampled, pruned on the way, graded."""
        args = self.args
        local = shard(prompts)
        # Engines draw different samples, unless every rollout has a generator of its own.
        stream = "everywhere" if args.rollout_seeds else engine_number()
        with self.clock("generate"):
            rollouts = self.engine.generate(
                {group: prompt.token_ids for group, prompt in local.items()},
                args.group_size,
                self.sampling,
                pruner=self.pruner,
                seed=random.Random(f"{args.seed}-{step}-{attempt}-{stream}").getrandbits(62),
                rollout_seeds=args.rollout_seeds,
                last_states=self.pruner is not None,
                state_logprobs=bool(self.pruner and self.pruner.head.extras),
                # One of each group proves the sync; importance weights need all.
                logprobs=None if args.tis_cap else 1,
                progress=True,
            )
        with self.clock("grade"):
            grade(rollouts, local, self.parts.tokenizer, self.parts.grader)
            return gather_rollouts(rollouts)

    def usable_groups(self, rollouts: list[Rollout]) -> set[int]:
        """The groups to train on: all with GRPO, those with different rewards with DAPO."""
        rewards = defaultdict(set)
        for r in rollouts:
            rewards[r.group].add(r.reward)
        return {group for group in rewards if self.args.algo == "grpo" or len(rewards[group] - {None}) > 1}

    def set_advantages(self, survivors: list[Rollout], prompts: dict[int, Prompt]) -> None:
        """Group-relative advantages over survivors alone, noted on each of them (Sec. 3)."""
        rewards = torch.tensor([r.reward for r in survivors])
        if self.args.algo == "dapo":
            # The limit is on prompt and response together.
            lengths = torch.tensor([len(prompts[r.group].token_ids) + len(r.token_ids) for r in survivors])
            rewards = rewards + overlong_penalty(lengths, self.args.max_length, self.args.overlong_cache)
        groups = torch.tensor([r.group for r in survivors], dtype=torch.int64)
        advantages = group_advantages(rewards, groups, scale=self.args.scale_rewards)
        for r, advantage in zip(survivors, advantages.tolist(), strict=True):
            r.advantage = advantage

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The policy's full weights, named as in a checkpoint, in the dtype that is sampled and saved."""
        return model.full_weights(self.policy.model, self.dtype)

    def evaluate(self) -> Metrics:
        """Scores on every evaluation set, see `evaluation.evaluate`."""
        args, parts, started = self.args, self.parts, time.perf_counter()
        if not parts.eval_sets:
            return {}
        self.engine.wake(self.weights())
        scores = evaluate(self.engine, parts.eval_sets, parts.tokenizer, parts.grader, self.sampling, args)
        self.engine.sleep()
        return scores | {"time_eval": time.perf_counter() - started}

    def run(self, name: str, resume_from: Path | None = None, checkpoints: bool = True) -> list[Metrics]:
        """Train to `args.steps`; returns the lines of metrics.jsonl. Ctrl-C drops the step under way."""
        args, folder = self.args, Path(self.args.output)
        if resume_from:
            self.restore(resume_from)
        model.sampler_follows(self)
        with RunLog(args, name, self.step_number if resume_from else None) as log:
            if not resume_from:
                log.metrics({"step": 0} | self.evaluate())
            while self.step_number < args.steps:
                try:
                    metrics, prompts, rollouts = self.step()
                    last = self.step_number == args.steps
                    if last or (args.eval_every and self.step_number % args.eval_every == 0):
                        metrics |= self.evaluate()
                except (EngineError, GraderError):
                    # Of a step that fails nothing has been learnt: this is the state after the last one.
                    if checkpoints and self.step_number:
                        launch.save_or_warn(self, folder)
                    raise
                log.step(metrics, prompts, rollouts)
                if checkpoints and (last or self.step_number % args.checkpoint_every == 0):
                    launch.save_or_warn(self, folder)
        return load_metrics(folder)

    def save(self, folder: Path) -> Path:
        """Write checkpoint-N into the run folder. Raises checkpoint.SaveError."""
        state, head = {"step": self.step_number, "taken": self.prompts_used, "seconds": self.seconds}, None
        if pruner := self.pruner:
            state["pruner"] = pruner.state_dict()
            head = (pruner.head, pruner.calibrator, pruner.finished, self.args.detect_length)
        return checkpoint.save(
            folder,
            self.step_number,
            model=self.policy.model,
            weights=self.weights(),
            tokenizer=self.parts.tokenizer,
            head=head,
            learner=self.learner,
            state=state,
            keep=self.args.keep_checkpoints,
        )

    def restore(self, path: Path) -> None:
        """Go on exactly where the checkpoint at `path` was written."""
        state = checkpoint.load(path, self.learner)
        self.step_number, self.prompts_used, self.seconds = state["step"], state["taken"], state["seconds"]
        if self.pruner:
            self.pruner.load_state_dict(state["pruner"])


if __name__ == "__main__":
    sys.exit(launch.run(ARGS, Trainer))
