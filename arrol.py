"""ARRoL: RLVR that prunes rollouts while they are generated (arXiv 2603.24840). The training step and the program.

    python arrol.py                                  the embedded model, on a CPU, in minutes
    python arrol.py --model Qwen/Qwen3-1.7B-Base     a real one, on a GPU
    torchrun --nproc-per-node 8 arrol.py --model …   on several, of one machine or, with --nnodes, of more with one file system

One training step (Algorithm 1), read from `Trainer.step`:

    prompts -> engine.generate -> rollouts -> grade the survivors -> advantages -> policy update
                 |  ^                |                 |
           state |  | keep?          | states, scores, labels -> head + calibration update
                 v  |
               Pruner: head -> posterior -> survival probability -> draw

Several ranks do the same with one more move: each samples and grades a share of the prompts, whole groups, and trains on its own survivors
under FSDP; what head, calibration and metrics are made of is gathered, so that they are the same on every rank.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import math
import os
import random
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

from support.args import Args, fail, parse

if __name__ == "__main__":
    ARGS = parse(sys.argv[1:])  # before the imports below, which take seconds: a bad flag fails at once
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during them: nothing to clean up yet, and no traceback

# Before torch loads OpenMP: threads that spin while they wait make a step 20 times slower beside one other busy process, and only
# a quarter faster on an idle machine (2 cores).
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# oneDNN keeps a compiled kernel for each shape that it has met, 1,024 by default, and the sizes of batches differ from step to step:
# 80 MB more after 200 steps of the embedded model. 64 are as fast.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "64")
if __name__ == "__main__" and not ARGS.verbose:
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM

from engine import Engine, EngineError, NothingScored, Rollout, Sampling
from grpo import (
    Learner,
    LossConfig,
    NonFiniteGradients,
    Policy,
    SamplerGapError,
    Sequence,
    group_advantages,
    overlong_penalty,
    shard,
)
from pruner import Pruner
from support import checkpoint, data
from support.distributed import (
    barrier,
    engine_number,
    gather,
    leads,
    node_by_node,
    of_first,
    part,
    rank,
    say,
    share,
    start_process_group,
    world_size,
)
from support.evaluation import EvalSet, evaluate, grade
from support.grader import Grader, Verdict
from support.launch import engine_from, load_prompts, load_tokenizer, quiet, working_dtype
from support.memory import first_misfit
from support.report import Metrics, RunLog, labels_by_group, load_metrics, plot_reward, rollout_metrics, summary


@dataclasses.dataclass
class Batch:
    """Rollouts of one training step, ordered by group and sample, with their verdicts (None when pruned)."""

    rollouts: list[Rollout] = dataclasses.field(default_factory=list)
    verdicts: list[Verdict | None] = dataclasses.field(default_factory=list)

    def extend(self, other: Batch) -> None:
        self.rollouts += other.rollouts
        self.verdicts += other.verdicts

    @property
    def labels(self) -> list[float | None]:
        return [None if verdict is None else verdict.reward for verdict in self.verdicts]

    def everywhere(self) -> Batch:
        """The rollouts of all ranks, on every rank, in the order that one rank would have them.

        Token ids and log-probs stay with the rank that sampled them; of the ids their number is known everywhere.
        """
        if world_size() == 1:
            return self

        def bare(r: Rollout) -> Rollout:  # states as numpy arrays: a tensor would take along all that it is a view of
            detect, last = (None if state is None else state.numpy() for state in (r.detect_state, r.last_state))
            return dataclasses.replace(
                r, token_ids=range(len(r.token_ids)), logprobs=[], detect_state=detect, last_state=last
            )

        rows = zip(self.rollouts, self.verdicts, strict=True) if leads() else ()
        parts = gather([(bare(r), verdict) for r, verdict in rows])
        rows = sorted((row for part in parts for row in part), key=lambda row: (row[0].group, row[0].sample))
        for r, _ in rows:
            r.detect_state, r.last_state = (
                None if state is None else torch.from_numpy(state) for state in (r.detect_state, r.last_state)
            )
        return Batch([r for r, _ in rows], [verdict for _, verdict in rows])

    def verdict_counts(self) -> Metrics:
        kinds = Counter(verdict.kind for verdict in self.verdicts if verdict)
        return {
            f"verdict_{kind.replace(' ', '_')}": kinds[kind]
            for kind in ("right", "wrong", "no answer", "timeout", "bad gold")
        }


class Trainer:
    """One training run on an engine that it may share with an earlier one."""

    def __init__(
        self,
        args: Args,
        engine: Engine,
        tokenizer,
        prompts: list[data.Prompt],
        eval_sets: list[EvalSet],
        stop_token_ids: list[int],
        grader: Grader,
        device: torch.device,
    ) -> None:
        self.args, self.engine, self.tokenizer, self.grader = args, engine, tokenizer, grader
        self.prompts, self.eval_sets, self.device = prompts, eval_sets, device
        model, self.policy = self._policy(frozen=False)
        reference = self._policy(frozen=True)[1] if args.beta > 0 else None
        high = args.clip_high if args.clip_high is not None else (0.28 if args.algo == "dapo" else 0.2)
        config = LossConfig(args.algo, args.clip_low, high, args.beta, args.tis_cap)
        self.learner = Learner(
            self.policy,
            config,
            args.lr,
            args.warmup_steps,
            args.weight_decay,
            (args.beta1, args.beta2),
            args.grad_clip,
            args.token_budget,
            args.minibatches,
            reference,
        )
        self.pruner = Pruner(args, model.config.hidden_size, device) if args.prune != "none" else None
        self.sampling = Sampling(args.max_length, tuple(stop_token_ids), args.temperature)
        self.step_number, self.taken, self.seconds = 0, 0, 0.0  # steps done, prompts taken, seconds of training
        self._epoch, self._order = -1, []

    def _policy(self, frozen: bool) -> tuple[torch.nn.Module, Policy]:
        model = AutoModelForCausalLM.from_pretrained(self.args.model, dtype=torch.float32)
        on_gpu = self.device.type == "cuda"
        policy = shard(
            Policy(model, self.args.temperature), self.device, on_gpu and not frozen, offload=self.args.offload
        )
        return model, policy.requires_grad_(not frozen)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The policy's full weights, named as in a checkpoint, in the type that it is sampled and saved in."""
        for name, parameter in self.policy.model.named_parameters():
            tensor = parameter.detach()
            yield name, (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).to(working_dtype(self.device))

    def take(self, count: int) -> dict[int, data.Prompt]:
        """The next `count` prompts of this epoch's or the next epochs' order, by their running number, which is their group id."""
        taken = {}
        for number in range(self.taken, self.taken + count):
            epoch, position = divmod(number, len(self.prompts))
            if epoch != self._epoch:
                everything = range(len(self.prompts))
                self._order = random.Random(f"{self.args.seed}-{epoch}").sample(everything, len(everything))
                self._epoch = epoch
            taken[number] = self.prompts[self._order[position]]
        self.taken += count
        return taken

    # --- one step ---

    def step(self) -> tuple[Metrics, list[dict]]:
        """One training step; returns its line of metrics.jsonl and its rows for rollouts.jsonl, of all ranks."""
        started, clock = time.perf_counter(), defaultdict(float)
        self.step_number += 1
        with timed(clock, "sync"):
            self.engine.wake(self.weights())
        if self.pruner:
            self.pruner.begin(self.step_number)
        prompts, mine, batch, usable = self._sample(clock)
        with timed(clock, "sync"):
            self.engine.sleep()
        memory = max(gather(memory_in_use(self.device)))
        advantages = self._advantages(prompts, batch, usable)
        learned = self._update(prompts, mine, advantages)
        clock["logprob"], clock["update"] = learned.pop("logprob_s"), learned.pop("update_s")
        with timed(clock, "head"):
            head = self.pruner.learn(batch.rollouts, batch.labels) if self.pruner else {}
        clock["step"] = time.perf_counter() - started
        self.seconds += clock["step"]
        metrics = {
            "step": self.step_number,
            "wall_clock": self.seconds,
            "epoch": self.taken / len(self.prompts),
            "pruning": bool(self.pruner and self.pruner.active),
            **{f"time_{name}": seconds for name, seconds in clock.items()},
            **rollout_metrics(batch.rollouts, batch.labels, self.args.detect_length),
            **batch.verdict_counts(),
            "usable_groups": len(usable),
            "memory_gb": memory,
            "tokens_trained": sum(len(r.token_ids) for r in batch.rollouts if (r.group, r.sample) in advantages),
            "prompt_tokens": sum(len(prompts[r.group].token_ids) for r in batch.rollouts),
            **learned,
            **head,
        }
        return metrics, self._rows(prompts, mine, advantages)

    def _sample(self, clock: dict[str, float]) -> tuple[dict[int, data.Prompt], Batch, Batch, set[int]]:
        """Generate and grade a step's rollouts; returns the prompts, this rank's rollouts, all ranks', and the groups to train on.

        DAPO replaces groups without variance by new prompts, at most `max_refills` times, then goes on with what there is.
        """
        args, prompts, mine, batch, usable = self.args, {}, Batch(), Batch(), set()
        for attempt in range(1 + (args.max_refills if args.algo == "dapo" else 0)):
            fresh = self.take(args.prompts - len(usable))
            prompts |= fresh
            with timed(clock, "generate"):
                rollouts = self.engine.generate(
                    {group: prompt.token_ids for group, prompt in share(fresh).items()},
                    args.group_size,
                    self.sampling,
                    pruner=self.pruner,
                    seed=self._seed(attempt),
                    rollout_seeds=args.rollout_seeds,
                    must_score=attempt == 0 and self.pruner is not None and self.pruner.due,
                    last_states=self.pruner is not None and args.head_states == "both",
                    progress=rank() == 0,
                )
                barrier()  # the phase lasts as long as on the slowest rank
            with timed(clock, "grade"):
                grade(rollouts, share(fresh), self.tokenizer, self.grader)
                verdicts = [r.verdict and Verdict(r.verdict, r.answer) for r in rollouts]
                fresh_batch = Batch(rollouts, verdicts)
                mine.extend(fresh_batch)
                batch.extend(fresh_batch.everywhere())
            groups = labels_by_group(batch.rollouts, batch.labels)
            usable = {group for group, labels in groups.items() if args.algo == "grpo" or len(set(labels)) > 1}
            if len(usable) >= args.prompts:
                break
        return prompts, mine, batch, usable

    def _seed(self, attempt: int) -> int:
        """Of a generation: another one on every engine, but where it is only half of each rollout's own."""
        where = "everywhere" if self.args.rollout_seeds else engine_number()
        return random.Random(f"{self.args.seed}-{self.step_number}-{attempt}-{where}").getrandbits(62)

    def _advantages(
        self, prompts: dict[int, data.Prompt], batch: Batch, usable: set[int]
    ) -> dict[tuple[int, int], float]:
        """The advantage of each labelled survivor of the groups to train on, by group and sample."""
        args, labels = self.args, batch.labels
        rows = [(r, y) for r, y in zip(batch.rollouts, labels, strict=True) if y is not None and r.group in usable]
        rewards = torch.tensor([y for _, y in rows])
        if args.algo == "dapo":  # the limit is on prompt and response together
            lengths = torch.tensor([len(prompts[r.group].token_ids) + len(r.token_ids) for r, _ in rows])
            rewards = rewards + overlong_penalty(lengths, args.max_length, args.overlong_cache)
        groups = torch.tensor([r.group for r, _ in rows], dtype=torch.int64)
        advantages = group_advantages(rewards, groups).tolist()
        return {(r.group, r.sample): advantage for (r, _), advantage in zip(rows, advantages, strict=True)}

    def _update(
        self, prompts: dict[int, data.Prompt], mine: Batch, advantages: dict[tuple[int, int], float]
    ) -> Metrics:
        """The optimizer steps, on this rank's survivors, re-batched without the pruned ones."""
        args, numbers = self.args, {key: number for number, key in enumerate(advantages)}
        trained = part([r for r in mine.rollouts if (r.group, r.sample) in advantages])
        sequences = [
            Sequence(prompts[r.group].token_ids, r.token_ids, advantages[r.group, r.sample], r.logprobs)
            for r in trained
        ]
        max_gap, max_mean_gap = (0.01, 0.001) if working_dtype(self.device) == torch.float32 else (5.0, 0.1)
        return self.learner.update(
            sequences,
            max_gap if args.max_gap is None else args.max_gap,
            max_mean_gap if args.max_mean_gap is None else args.max_mean_gap,
            [numbers[r.group, r.sample] for r in trained],
        )

    def _rows(
        self, prompts: dict[int, data.Prompt], mine: Batch, advantages: dict[tuple[int, int], float]
    ) -> list[dict]:
        """What rollouts.jsonl says of the rollouts of all ranks: of all of them, or of the step's first group."""
        rows = []
        for r, verdict in zip(mine.rollouts, mine.verdicts, strict=True):
            if self.args.log_rollouts == "none" or (
                self.args.log_rollouts == "sample" and r.group != next(iter(prompts))
            ):
                continue
            problem = prompts[r.group].problem
            rows.append(
                {
                    "step": self.step_number,
                    "prompt": problem.id,
                    "group": r.group,
                    "sample": r.sample,
                    "tokens": len(r.token_ids),
                    "finish": r.finish,
                    "tail": self.tokenizer.decode(r.token_ids)[-200:],
                    "answer": verdict and verdict.answer,
                    "gold": problem.answer,
                    "verdict": verdict and verdict.kind,
                    **{name: finite(getattr(r, name)) for name in ("score", "posterior", "survival")},
                    "pruned": r.finish == "pruned",
                    "advantage": advantages.get((r.group, r.sample)),
                }
            )
        everyone = gather(rows if leads() else [])
        return sorted((row for some in everyone for row in some), key=lambda row: (row["group"], row["sample"]))

    # --- evaluation, checkpoints, the loop ---

    def evaluate(self) -> Metrics:
        """Scores on every evaluation set, with the sampling settings of evaluation; see `evaluation.evaluate`."""
        args, started = self.args, time.perf_counter()
        if not self.eval_sets:
            return {}
        self.engine.wake(self.weights())
        sampling = dataclasses.replace(self.sampling, temperature=args.eval_temperature, top_p=args.eval_top_p)
        metrics = evaluate(
            self.engine,
            self.eval_sets,
            self.tokenizer,
            self.grader,
            sampling,
            args.eval_n,
            args.seed,
            args.rollout_seeds,
        )
        self.engine.sleep()
        return metrics | {"time_eval": time.perf_counter() - started}

    def save(self, run: Path) -> Path:
        state = {"step": self.step_number, "taken": self.taken, "seconds": self.seconds}
        if self.pruner:
            state["pruner"] = self.pruner.state_dict()
        return checkpoint.save(
            run,
            self.step_number,
            model=self.policy.model,
            weights={name: tensor for name, tensor in self.weights() if rank() == 0},  # gathered by all, kept by one
            tokenizer=self.tokenizer,
            head=(self.pruner.head, self.pruner.calibrator, self.args.detect_length) if self.pruner else None,
            learner=self.learner,
            state=state,
            keep=self.args.keep_checkpoints,
        )

    def restore(self, path: Path) -> None:
        state = checkpoint.load(path, self.learner)
        self.step_number, self.taken, self.seconds = state["step"], state["taken"], state["seconds"]
        if self.pruner:
            self.pruner.load_state_dict(state["pruner"])

    def run(self, name: str, resume_from: Path | None = None, checkpoints: bool = True) -> list[Metrics]:
        """Train to `args.steps`; returns the lines of metrics.jsonl. On Ctrl-C the step under way is dropped.

        Rank 0 writes the files; all ranks write checkpoints.
        """
        folder, args = Path(self.args.output), self.args
        if resume_from:
            self.restore(resume_from)
        log = RunLog(folder, args.tracker, self.step_number if resume_from else None, write=rank() == 0)
        if not resume_from:
            log.metrics({"step": 0} | self.evaluate())
        bar = tqdm(
            total=args.steps,
            initial=self.step_number,
            desc=name,
            unit="step",
            dynamic_ncols=True,
            disable=rank() > 0,
        )
        try:
            while self.step_number < args.steps:
                metrics, rows = self._step_or_save(folder if checkpoints else None)
                if self.step_number == args.steps or (args.eval_every and self.step_number % args.eval_every == 0):
                    metrics |= self.evaluate()
                log.metrics(metrics)
                log.rollouts(rows)
                if checkpoints and (self.step_number % args.checkpoint_every == 0 or self.step_number == args.steps):
                    self._try_to_save(folder)
                rate = metrics["tokens_generated"] / metrics["time_generate"]
                bar.set_postfix_str(
                    f"reward {metrics['reward']:.2f}, kept {metrics['keep_ratio']:.2f}, {rate:,.0f} tok/s"
                )
                bar.update()
        finally:
            bar.close()
            log.close()
        return load_metrics(folder)

    def _step_or_save(self, folder: Path | None) -> tuple[Metrics, list[dict]]:
        """`step`; if the engine fails in it, a checkpoint of the step before is written first: nothing has been learnt since."""
        before = self.step_number, self.taken
        try:
            return self.step()
        except EngineError:
            self.step_number, self.taken = before
            if folder and self.step_number:
                self._try_to_save(folder)
            raise

    def _try_to_save(self, folder: Path) -> None:
        """A full disk costs the checkpoint and not the run."""
        try:
            self.save(folder)
        except checkpoint.SaveError as error:
            say(f"\n{Path(sys.argv[0]).name}: {error}. {where_to_resume(folder)} The run goes on.", sys.stderr)


def finite(value: float | None) -> float | None:
    """`value`, or None where it is not a number that JSON has."""
    return value if value is not None and math.isfinite(value) else None


@contextlib.contextmanager
def timed(clock: dict[str, float], phase: str) -> Iterator[None]:
    """Add the seconds of the block to `clock[phase]`."""
    start = time.perf_counter()
    yield
    clock[phase] += time.perf_counter() - start


def memory_in_use(device: torch.device) -> float:
    """GB of the GPU that are taken, by whomever; without one, resident GB of this process, once malloc has given back what is free:
    fragments of it, which come and go with the sizes of batches, would look like a leak (10 ms)."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return (total - free) / 1e9
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e9


# --- the program -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def workbench(args: Args) -> Iterator[Callable[[Args], Trainer]]:
    """What the runs of one process share: data, grader, engine. Yields the function that builds a run from its flags."""
    quiet(args.verbose)
    try:
        device = start_process_group(args.tp)
    except RuntimeError as error:
        fail(str(error))
    try:
        with node_by_node():
            tokenizer, stop_token_ids, config = load_tokenizer(args)
            if device.type == "cuda":
                total = torch.cuda.get_device_properties(device).total_memory
                if problem := first_misfit(config, args, world_size(), total):
                    fail(f"--model {args.model}: {problem}")
            prompts, eval_sets = load_prompts(args, tokenizer)
        with Grader(args.grader_workers) as grader, engine_from(args, device, args.tp) as engine:
            engine.sleep()  # before the trainer's weights go to the GPU
            yield lambda flags: Trainer(flags, engine, tokenizer, prompts, eval_sets, stop_token_ids, grader, device)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def main(args: Args) -> int:
    """Train as `args` say; returns the exit status."""
    for notice in (signal.SIGINT, signal.SIGTERM):  # a cluster's notice is treated as Ctrl-C
        signal.signal(notice, signal.default_int_handler)
    resume_from = None
    if args.resume:
        found = checkpoint.complete(Path(args.output))
        if not found:
            fail(f"--resume {args.resume}: there is no complete checkpoint in it; start again with another --output")
        resume_from = found[-1]
    try:
        with workbench(args) as trainer:
            args.output, resume_from = of_first((args.output, resume_from))  # ranks may differ in the time of day
            folder = Path(args.output)
            if rank() == 0:
                folder.mkdir(parents=True, exist_ok=True)
                kept = dataclasses.asdict(args) | {"resume": ""}
                (folder / "args.json").write_text(json.dumps(kept, indent=2, ensure_ascii=False))
            barrier()
            runs, method = {}, args.algo.upper()
            if args.baseline_steps and args.prune != "none" and not resume_from:
                plain = dataclasses.replace(
                    args, prune="none", steps=args.baseline_steps, output=str(folder / "baseline")
                )
                trainer(plain).run(method, checkpoints=False)
            if (folder / "baseline").is_dir():
                runs[method] = load_metrics(folder / "baseline")
            name = method + {"arrol": " + ARRoL", "random": " + random pruning", "none": ""}[args.prune]
            runs[name] = trainer(args).run(name, resume_from)
        if rank() == 0:
            plot_reward(runs, folder / "reward.png")
            saved = "".join(f", {found.name}" for found in checkpoint.complete(folder)[-1:])
            print(
                f"{summary(runs)}\n\nreward against time: {folder / 'reward.png'}\n"
                f"run folder: {folder}  (metrics.jsonl, rollouts.jsonl{saved})"
            )
        return 0
    except KeyboardInterrupt:
        say(f"\nstopped; the step under way was dropped. {where_to_resume(Path(args.output))}", sys.stderr)
        return 130
    except (
        SamplerGapError,
        NothingScored,
        NonFiniteGradients,
        EngineError,
    ) as error:  # on all ranks, or on this one alone
        who = f"arrol.py, rank {rank()}" if rank() else "arrol.py"
        print(f"\n{who}: stopped: {error}\n{where_to_resume(Path(args.output))}", file=sys.stderr)
        return 1


def where_to_resume(folder: Path) -> str:
    """One sentence on the newest checkpoint of a run folder."""
    found = checkpoint.complete(folder)
    return (
        f"The last checkpoint is {found[-1]}: go on with --resume {folder}"
        if found
        else f"There is no checkpoint in {folder} yet."
    )


if __name__ == "__main__":
    sys.exit(main(ARGS))
