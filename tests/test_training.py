"""Whole training steps on the embedded model and a real engine."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import arrol
from arrol import Trainer
from engine import Engine, EngineError, NothingScored, Rollout, Sampling
from grpo import SamplerGapError
from support import checkpoint, data
from support.args import TINY, parse, parse_tts
from support.evaluation import Benchmark
from support.grader import Grader, GraderError, Verdict
from support.launch import Parts, load_prompts
from support.report import tracker_name
from support.show import load_metrics
from support.test_time import KeepBetter, Sampler

ROOT = Path(arrol.__file__).parent


@pytest.fixture(scope="module")
def engine(make_engine: Callable[..., Engine]) -> Engine:
    return make_engine(max_model_len=256, max_num_seqs=128)


@pytest.fixture
def trainer(engine: Engine, tmp_path: Path) -> Callable[..., Trainer]:
    """Builds a trainer from flags; small steps unless they say otherwise."""
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    with Grader() as grader:

        def make(eval_sets: Sequence[Benchmark] = (), **changes: object) -> Trainer:
            flags = {
                "steps": 6,
                "prompts": 6,
                "group_size": 8,
                "cold_start": 1,
                "eval_problems": 0,
                "output": tmp_path / str(time.monotonic_ns()),
                "token_budget": 4096,
                "warmup_steps": 2,
            } | changes
            args = parse([f"--{name.replace('_', '-')}={value}" for name, value in flags.items()])
            prompts, _ = data.tokenize(data.sums(200, 1), tokenizer, args)
            stops = data.stop_token_ids(
                tokenizer, AutoModelForCausalLM.from_pretrained(TINY).config, GenerationConfig.from_pretrained(TINY)
            )
            parts = Parts(engine, tokenizer, prompts, list(eval_sets), stops, grader, torch.device("cpu"))
            return Trainer(args, parts)

        yield make


def outcome(trainer: Trainer) -> list[list[dict]]:
    """Run to the end; every rollout of every step, as rollouts.jsonl has it."""
    trainer.run("test", checkpoints=False)
    lines = (Path(trainer.args.output) / "rollouts.jsonl").read_text().split("\n")
    return [json.loads(line) for line in lines if line]


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.weights()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("head_inputs", ["state", "state+logprob"])
def test_six_steps_straight_equal_three_and_three(trainer: Callable[..., Trainer], head_inputs: str) -> None:
    """EasyR1#57: same prompts, same decisions, same weights, bit for bit; through files, at a
    mid-epoch data position.
    """
    straight = trainer(log_rollouts="all", head_inputs=head_inputs)
    expected = outcome(straight)
    assert any(row["pruned"] for row in expected)
    first = trainer(log_rollouts="all", steps=3, head_inputs=head_inputs)
    folder = Path(first.args.output)
    first.run("test")
    start = weights(first)
    second = trainer(log_rollouts="all", seed=0, head_inputs=head_inputs, output=folder / "elsewhere")
    second.args.output = str(folder)
    second.run("test", resume_from=checkpoint.complete(folder)[-1])
    rows = [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().split("\n") if line]
    assert rows == expected
    assert same(weights(straight), weights(second)) and not same(start, weights(second))


def test_keep_ratio_1_is_no_pruning(trainer: Callable[..., Trainer]) -> None:
    plain, all_kept = (
        trainer(prune="none", steps=3, log_rollouts="all"),
        trainer(keep_ratio=1, steps=3, log_rollouts="all"),
    )
    own = {"score", "posterior", "survival"}
    assert [[(k, v) for k, v in row.items() if k not in own] for row in outcome(plain)] == [
        [(k, v) for k, v in row.items() if k not in own] for row in outcome(all_kept)
    ]
    assert same(weights(plain), weights(all_kept))


def test_without_scaling_advantages_are_rewards_less_their_mean(trainer: Callable[..., Trainer]) -> None:
    plain = trainer(steps=1, log_rollouts="all")
    plain.args.scale_rewards = parse(["--no-scale-rewards"]).scale_rewards
    rows = outcome(plain)
    groups = {row["group"]: [other for other in rows if other["group"] == row["group"]] for row in rows}
    for members in groups.values():
        rewards = [float(row["verdict"] == "right") for row in members]
        mean = sum(rewards) / len(rewards)
        assert [row["advantage"] for row in members] == pytest.approx([reward - mean for reward in rewards])
    assert any(row["advantage"] for row in rows)


def test_a_run_keeps_its_ratio_and_its_sampler_in_step(trainer: Callable[..., Trainer]) -> None:
    """33 steps: keep rate within 3 points of kappa, and the gap between sampler and trainer below
    1e-3 at every token.
    """
    lines = trainer(steps=33, cold_start=3).run("test", checkpoints=False)[1:]
    assert [line["pruning"] for line in lines] == [False] * 3 + [True] * 30
    rate = sum(line["scored"] * line["keep_ratio"] for line in lines[3:]) / sum(line["scored"] for line in lines[3:])
    assert abs(rate - 0.5) < 0.03
    # none in a step in which the first rollout of every group was pruned
    gaps = [line["gap_max"] for line in lines if "gap_max" in line]
    assert len(gaps) > 25 and max(gaps) < 1e-3
    # the sync had something to do after every step, but for those in which all groups were dead
    assert all(line["optimizer_steps"] > 0 or line["zero_variance_after"] == 1 for line in lines)
    assert lines[3]["tokens_trained"] < lines[3]["tokens_generated"]


def test_a_sync_that_misses_lm_head_stops_the_run(
    trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tied lm_head fault: found before the first step, and in the second one without the proof,
    before anything is learnt from the wrong samples."""
    broken = trainer(lr=1e-3, warmup_steps=0)
    monkeypatch.setattr(broken.engine, "_packed", [])
    with pytest.raises(SamplerGapError, match="weight sync"):
        broken.run("test", checkpoints=False)
    assert broken.step_number == 0
    with pytest.raises(SamplerGapError, match="weight sync"):
        for _ in range(3):
            broken.step()
    monkeypatch.undo()
    broken.engine.sync(broken.weights())


def test_pruned_rollouts_reach_nothing_behind_the_engine(
    trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, int] = {}
    run = trainer(cold_start=0)
    run.step()
    grade, update = run.parts.grader.grade, run.learner.update
    monkeypatch.setattr(
        run.parts.grader, "grade", lambda texts, golds: seen.update(graded=len(texts)) or grade(texts, golds)
    )
    monkeypatch.setattr(
        run.learner,
        "update",
        lambda sequences, *limits: seen.update(trained=len(sequences)) or update(sequences, *limits),
    )
    metrics, *_ = run.step()
    assert metrics["pruned"] > 0
    assert seen == {
        "graded": metrics["rollouts"] - metrics["pruned"],
        "trained": metrics["rollouts"] - metrics["pruned"],
    }


def test_the_head_teaches_the_policy_nothing(trainer: Callable[..., Trainer]) -> None:
    """No gradient of the quality head reaches the policy, whose states it learns from."""
    run = trainer(cold_start=0, lr=0.0, head_lr=0.1)
    run.step()
    before, head = weights(run), [p.clone() for p in run.pruner.head.parameters()]
    run.step()
    assert same(before, weights(run)) and all(p.grad is None for p in run.policy.parameters())
    assert not any(torch.equal(old, new) for old, new in zip(head, run.pruner.head.parameters()))


def test_a_run_in_which_nothing_reaches_l_detect_stops(
    trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it would be plain GRPO under the name of ARRoL, without a word."""
    run = trainer(detect_length=200, cold_start=1)
    monkeypatch.setattr(run.engine, "detect_length", 200)
    with pytest.raises(NothingScored, match="lower --detect-length"):
        run.run("test", checkpoints=False)
    assert run.step_number == 1


def test_dapo_refills_groups_without_variance_and_gives_up(
    trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """verl#953: refills are bounded, and rewards that are all 0 end the step without an update, not with an error."""
    run = trainer(algo="dapo", prompts=4, max_refills=2)
    metrics, *_ = run.step()
    assert metrics["rollouts"] > 4 * 8 and 0 < metrics["usable_groups"] <= 12
    before = weights(run)
    wrong = Verdict("wrong", "1")
    monkeypatch.setattr(run.parts.grader, "grade", lambda texts, golds: [wrong] * len(texts))
    metrics, *_ = run.step()
    assert metrics["usable_groups"] == 0 and metrics["rollouts"] == 3 * 4 * 8 and metrics["optimizer_steps"] == 0
    assert same(before, weights(run))


def test_checkpoints_are_chosen_by_number_and_only_when_complete(tmp_path: Path) -> None:
    """speculators#739, dirty-trading-bot#15: 9 < 10, and 11 was cut off."""
    for number, whole in ((9, True), (10, True), (11, False)):
        (tmp_path / f"checkpoint-{number}").mkdir()
        if whole:
            (tmp_path / f"checkpoint-{number}" / "state.pt").write_bytes(b"")
    (tmp_path / ".writing-checkpoint-12").mkdir()
    assert [path.name for path in checkpoint.complete(tmp_path)] == ["checkpoint-9", "checkpoint-10"]


def test_a_checkpoint_loads_in_transformers_with_its_head(
    trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And with both calibrations: at L_detect, and of the answers that were finished and graded."""
    run = trainer(steps=3, checkpoint_every=1, keep_checkpoints=2)
    learn, ended = run.pruner.learn, []

    def noted(rollouts: list[Rollout]) -> dict:
        # The head as it is before it learns from this step.
        rows = [r for r in rollouts if r.last_state is not None and r.reward is not None]
        scores = run.pruner.head(torch.stack([r.last_state for r in rows])).sigmoid().tolist()
        ended.extend(zip(scores, (r.reward for r in rows)))
        return learn(rollouts)

    monkeypatch.setattr(run.pruner, "learn", noted)
    run.run("test")
    folder = Path(run.args.output)
    assert [path.name for path in checkpoint.complete(folder)] == ["checkpoint-2", "checkpoint-3"]
    model = AutoModelForCausalLM.from_pretrained(folder / "checkpoint-3" / "model", dtype=torch.float32)
    assert same(dict(model.named_parameters()), weights(run))
    assert AutoTokenizer.from_pretrained(folder / "checkpoint-3" / "model").encode("1+2=?\n")
    head, table, finished, detect_length = checkpoint.load_head(folder / "checkpoint-3" / "quality_head.safetensors")
    states = torch.randn(5, model.config.hidden_size)
    assert torch.equal(head(states), run.pruner.head(states)) and detect_length == run.args.detect_length
    centres = (torch.arange(len(table)) + 0.5) / len(table)
    assert len(table) == run.args.bins and torch.equal(table, run.pruner.calibrator.posterior(centres))
    scores, labels = torch.tensor(ended, dtype=torch.float64).T
    for label, kind in ((1.0, "positives"), (0.0, "negatives")):
        with safe_open(folder / "checkpoint-3" / "quality_head.safetensors", "pt") as file:
            counts = file.get_tensor(f"finished.{kind}").double()
        assert counts.sum() > 0 and torch.equal(counts, torch.histc(scores[labels == label], len(table), 0, 1))
    assert torch.equal(finished, run.pruner.finished.posterior(centres))
    with pytest.raises(ValueError, match="no quality head"):
        checkpoint.load_head(folder / "checkpoint-3" / "model" / "model.safetensors")


def test_votes_are_weighed_by_what_the_head_was_trained_on(trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    """tts.py asks for log-probs behind states where the head of a checkpoint has seen them."""
    run = trainer(steps=2, head_inputs="state+logprob")
    run.run("test")
    head = Path(run.args.output) / "checkpoint-2" / "quality_head.safetensors"
    sampler = Sampler(parse_tts(["--head", str(head), "--output", str(tmp_path / "tts"), "--n", "4"]))
    sampler.engine, sampler.grader = run.engine, run.parts.grader
    sampler.prompts = dict(list(sampler.prompts.items())[:6])
    pruner = KeepBetter(sampler.head, sampler.table, 0.5, seed=0)
    rollouts = sampler.sample(4, pruner=pruner)
    assert {r.finish for r in rollouts} >= {"stop", "pruned"}
    for candidates in sampler.judge(rollouts)[:6]:
        for r, logit in zip(candidates.rollouts, candidates.signals["head"], strict=True):
            total = torch.tensor([sum(r.logprobs), sum(r.logprobs) / len(r.logprobs)])
            torch.testing.assert_close(r.last_state[-2:], total)
            assert logit == pytest.approx(run.pruner.head(r.last_state[None]).item(), abs=1e-5)
    for r in rollouts:
        if r.detect_state is not None:
            assert r.score == pytest.approx(run.pruner.head(r.detect_state[None]).sigmoid().item(), abs=1e-5)


def test_a_full_disk_costs_the_checkpoint_and_not_the_run(
    trainer: Callable[..., Trainer], capsys: pytest.CaptureFixture[str]
) -> None:
    """No file may grow beyond a megabyte, which is less than the weights: the older checkpoint
    stays, the run goes on to its end.
    """
    run = trainer(steps=1)
    run.run("test")
    folder = Path(run.args.output)
    second = trainer(steps=3, checkpoint_every=1, output=folder / "elsewhere")
    second.args.output = str(folder)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write beyond the limit then fails as on a full disk
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limits[1]))
    try:
        lines = second.run("test", resume_from=folder / "checkpoint-1")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert [path.name for path in folder.glob("*checkpoint*")] == ["checkpoint-1"]
    said = capsys.readouterr().err
    assert "checkpoint-2 could not be written" in said and "go on with --resume" in said and "The run goes on." in said
    second.save(folder)  # room again
    assert [path.name for path in checkpoint.complete(folder)] == ["checkpoint-1", "checkpoint-3"]


def test_an_engine_that_fails_leaves_a_checkpoint_of_the_step_before(
    trainer: Callable[..., Trainer], engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From it the run goes on as if nothing had happened."""
    straight = trainer(steps=4)
    straight.run("test")
    broken = trainer(steps=4, checkpoint_every=100)
    folder, step = Path(broken.args.output), engine.engine.step

    def fail_in_step_3() -> list:
        if broken.step_number == 2:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return step()

    monkeypatch.setattr(engine.engine, "step", fail_in_step_3)
    with pytest.raises(EngineError, match="illegal memory access"):
        broken.run("test")
    monkeypatch.undo()
    assert [path.name for path in checkpoint.complete(folder)] == ["checkpoint-2"]
    resumed = trainer(steps=4, output=folder / "elsewhere")
    resumed.args.output = str(folder)
    resumed.run("test", resume_from=folder / "checkpoint-2")
    assert same(weights(straight), weights(resumed))


@pytest.mark.parametrize("eval_every", [0, 3], ids=["in a step", "in an evaluation"])
def test_a_grader_that_fails_leaves_a_checkpoint(
    eval_every: int, trainer: Callable[..., Trainer], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its workers cannot start any more: what has been learnt until then is kept."""
    _, sets = eval_sets(tmp_path, problem_file(tmp_path / "mine.jsonl", data.sums(2, 4, "test", (2, 3))))
    run = trainer(sets if eval_every else (), steps=4, checkpoint_every=100, eval_every=eval_every, eval_n=1)
    grade = run.parts.grader.grade

    def broken(texts: list[str], golds: list[str]) -> list[Verdict]:
        if run.step_number == (3 if eval_every else 2):
            raise GraderError("grading workers keep dying")
        return grade(texts, golds)

    monkeypatch.setattr(run.parts.grader, "grade", broken)
    with pytest.raises(GraderError, match="keep dying"):
        run.run("test")
    found = checkpoint.complete(Path(run.args.output))
    assert [path.name for path in found] == [f"checkpoint-{3 if eval_every else 2}"]


def test_beta_adds_a_kl_to_the_start_model(trainer: Callable[..., Trainer]) -> None:
    run = trainer(steps=2, beta=0.1, prune="none", lr=1e-3, warmup_steps=0, minibatches=1)
    lines = run.run("test", checkpoints=False)[1:]
    assert lines[0]["kl"] == pytest.approx(0, abs=1e-6) and lines[1]["kl"] > 1e-5


# ------------------------------------------------------------------ evaluation


def test_the_glossary_has_what_is_written(trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    """In docs/training.md: all metrics, no others, each in its group."""
    _, sets = eval_sets(tmp_path, problem_file(tmp_path / "SET.jsonl", data.sums(8, 2, "test", (3, 4))))
    lines = trainer(sets, steps=2, cold_start=1, beta=0.1, eval_n=16).run("test", checkpoints=False)
    page = (Path(__file__).parent.parent / "docs" / "training.md").read_text()
    glossary, group = {}, ""
    for row in page.partition("| group | metric |")[2].partition("\n\n")[0].splitlines()[2:]:
        _, named, metrics, _ = row.split("|", 3)
        group = named.strip(" `") or group
        glossary |= dict.fromkeys(re.findall("`(.+?)`", metrics), group)
    written = {name.replace("avg@16", "avg@n") for line in lines for name in line} - {"step"}
    # A problem that is too long comes in another test.
    assert glossary.keys() - {"eval/SET/too_long"} == written
    assert glossary == {name: tracker_name(name).partition("/")[0] for name in glossary}


def problem_file(path: Path, problems: Sequence[data.Problem]) -> str:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps({"problem": p.text, "answer": p.answer}) + "\n" for p in problems))
    return str(path)


def eval_sets(tmp_path: Path, *specs: str, **changes: object) -> tuple[list[data.Prompt], list[Benchmark]]:
    """What the program makes of `--eval-data`, for a training set of 60 sums."""
    training = problem_file(tmp_path / "train.jsonl", data.sums(60, 1, terms=(3, 5)))
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in changes.items()]
    args = parse(["--dataset", training, *flags, "--eval-data", *specs])
    return load_prompts(args, AutoTokenizer.from_pretrained(TINY))


LONG = data.Problem("long", "+".join(["15"] * 30) + "=?", "450")  # 90 tokens


def test_sets_to_evaluate_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each is announced: its size and digest, what is too long, and what the model is trained on as well."""
    mine = [*data.sums(3, 2, "test", (3, 5)), LONG, *data.sums(60, 1, terms=(3, 5))[40:50]]
    amc = data.sums(40, 3, "test", (3, 5))
    prompts, sets = eval_sets(
        tmp_path,
        "held-out",
        problem_file(tmp_path / "mine.jsonl", mine),
        f"amc23={problem_file(tmp_path / 'copy.jsonl', amc)}",
        "sums:2-3:20",
        eval_problems=7,
    )
    assert [(s.name, s.metric, len(s.prompts), len(s.problems)) for s in sets] == [
        ("held-out", "avg", 6, 6),  # a tenth
        ("mine", "avg", 13, 14),
        ("amc23", "pass@16", 40, 40),
        ("sums", "avg", 7, 7),
    ]
    trained = {prompt.problem.text for prompt in prompts}
    assert len(trained) == 54 and trained.isdisjoint(prompt.problem.text for prompt in sets[0].prompts)
    report = {line.split(":")[1].strip(): line for line in capsys.readouterr().out.splitlines()[1:]}
    both = len(trained & {problem.text for problem in mine})
    assert 0 < both <= 10 and f"CONTAMINATED: {both} of them are in the training set" in report["mine"]
    assert "1 longer than 64 tokens count as wrong" in report["mine"] and "14 problems" in report["mine"]
    assert not any("CONTAMINATED" in report[name] for name in ("held-out", "amc23"))
    assert all(f"digest {s.digest}, headline {s.metric}" in report[s.name] for s in sets) and len(report) == 4


@pytest.mark.parametrize(
    ("specs", "name"),
    [
        (["sums", "sums:2-3:20"], "sums"),
        (["held-out", "held-out"], "held-out"),
        (["{here}/a/mine.jsonl", "{here}/b/mine.jsonl"], "mine"),
        (["amc23={here}/a/amc23.jsonl", "{here}/b/amc23.jsonl"], "amc23"),
    ],
)
def test_two_sets_of_one_name_are_refused(
    specs: list[str], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The scores of the second would take the place of the first's."""
    for folder in "ab":
        for stem in ("mine", "amc23"):
            problem_file(tmp_path / folder / f"{stem}.jsonl", data.sums(40, ord(folder), "test", (3, 5)))
    with pytest.raises(SystemExit) as stop:
        eval_sets(tmp_path, *(spec.format(here=tmp_path) for spec in specs))
    message = capsys.readouterr().err.splitlines()
    assert stop.value.code == 2 and len(message) == 1 and f"--eval-data: 2 sets are called {name}" in message[0]


@pytest.mark.parametrize("flags", ["--seed -1", "--seed 4294967296", "--temperature 2.5", "--eval-temperature 2.5"])
def test_what_the_engine_would_not_take_is_refused_before_it_starts(
    flags: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(flags.split())
    assert f"error: {flags}: must" in capsys.readouterr().err


def test_evaluation_keeps_to_its_schedule_and_out_of_training(trainer: Callable[..., Trainer], tmp_path: Path) -> None:
    """Before the first step, every second one, after the last; rollouts and weights are bit for bit
    those of a run without.
    """
    problems = [*data.sums(4, 2, "test", (3, 4)), LONG, *data.sums(3, 5, "test", (3, 4))]
    _, sets = eval_sets(tmp_path, problem_file(tmp_path / "mine.jsonl", problems))
    small = dict(prompts=4, group_size=4, log_rollouts="all", eval_every=2, eval_n=2)
    plain = trainer(steps=5, **small)
    watched = trainer(sets, steps=5, **small)
    watched.engine.sync(watched.weights())
    greedy = watched.engine.generate(
        {i: prompt.token_ids for i, prompt in enumerate(sets[0].prompts)}, 1, Sampling(200, (1,), 0.0), seed=0
    )
    assert outcome(watched) == outcome(plain) and same(weights(watched), weights(plain))
    lines = [json.loads(line) for line in (Path(watched.args.output) / "metrics.jsonl").read_text().splitlines()]
    scores = {line["step"]: {k: v for k, v in line.items() if k.startswith("eval/")} for line in lines}
    assert [step for step, found in scores.items() if found] == [0, 2, 4, 5] and list(scores) == list(range(6))
    assert not any("eval/" in key for line in load_metrics(Path(plain.args.output)) for key in line)
    for found in filter(None, scores.values()):
        # of 8 problems, one of which nobody can get right
        assert list(found) == ["eval/mine/avg@2", "eval/mine/greedy", "eval/mine/too_long"]
        assert found["eval/mine/too_long"] == 1
        for name, samples in (("avg@2", 2), ("greedy", 1)):
            right = found[f"eval/mine/{name}"] * samples * 8
            assert right == pytest.approx(round(right)) and right <= samples * 7
    tokenizer, golds = watched.parts.tokenizer, [prompt.problem.answer for prompt in sets[0].prompts]
    right = [tokenizer.decode(r.token_ids[:-1]).endswith(f"boxed{{{gold}}}") for r, gold in zip(greedy, golds)]
    assert scores[0]["eval/mine/greedy"] == pytest.approx(sum(right) / 8) and any(right)
    ends = trainer(sets, steps=2, **small | {"eval_every": 0}).run("test", checkpoints=False)
    assert [any("eval/" in key for key in line) for line in ends] == [True, False, True]


def test_pass_at_16_takes_16_samples_whatever_eval_n(
    trainer: Callable[..., Trainer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At evaluation's own temperature and nucleus; then one greedy sample (lighteval#559), and 2 of the other sets'."""
    amc = problem_file(tmp_path / "copy.jsonl", data.sums(40, 3, "test", (2, 3)))
    mine = problem_file(tmp_path / "mine.jsonl", data.sums(2, 4, "test", (2, 3)))
    hopeless = problem_file(tmp_path / "hopeless.jsonl", [LONG, LONG])
    _, sets = eval_sets(tmp_path, f"amc23={amc}", mine, hopeless)
    run = trainer(sets, eval_n=2, eval_temperature=0.7, eval_top_p=0.9)
    generate, asked = run.engine.generate, []

    def spy(prompts: dict, samples: int, sampling: Sampling, **options: object) -> list[Rollout]:
        asked.append((len(prompts), samples, sampling.temperature, sampling.top_p))
        return generate(prompts, samples, sampling, **options)

    monkeypatch.setattr(run.engine, "generate", spy)
    scores = run.evaluate()
    assert [row for row in asked if row[0]] == [
        (40, 16, 0.7, 0.9),
        (40, 1, 0.0, 1.0),
        (2, 2, 0.7, 0.9),
        (2, 1, 0.0, 1.0),
    ]
    assert 0 < scores["eval/amc23/avg@16"] < scores["eval/amc23/pass@16"] <= 1
    assert (40 * scores["eval/amc23/pass@16"]) == pytest.approx(round(40 * scores["eval/amc23/pass@16"]))  # k = n
    assert "eval/mine/avg@2" in scores and "eval/mine/pass@16" not in scores and scores["time_eval"] > 0
    assert scores["eval/hopeless/avg@2"] == scores["eval/hopeless/greedy"] == 0.0


def test_ctrl_c_says_where_to_go_on_and_leaves_no_process(tmp_path: Path) -> None:
    """A real run in its own session: SIGINT to the whole group, as a terminal sends it; then the run is resumed."""
    command = [
        sys.executable,
        "arrol.py",
        "--prompts",
        "4",
        "--group-size",
        "8",
        "--eval-problems",
        "0",
        "--baseline-steps",
        "0",
    ]
    # this process is the only rank of a group of its own, and has said so in its environment
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    }
    run = subprocess.Popen(
        [*command, "--steps", "500", "--checkpoint-every", "1", "--output", str(tmp_path / "run")],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 240
    while not checkpoint.complete(tmp_path / "run") and run.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
    os.killpg(run.pid, signal.SIGINT)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 130, errors
    assert "The last checkpoint is" in errors and f"--resume {tmp_path / 'run'}" in errors and "Traceback" not in errors
    with pytest.raises(ProcessLookupError):
        os.killpg(run.pid, 0)
    done = int(checkpoint.complete(tmp_path / "run")[-1].name.removeprefix("checkpoint-"))
    again = subprocess.run(
        [sys.executable, "arrol.py", "--resume", str(tmp_path / "run"), "--steps", str(done + 1)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert again.returncode == 0, again.stderr
    assert "whole step, s" in again.stdout and (tmp_path / "run" / "reward.png").exists()
    steps = [line["step"] for line in map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())]
    assert steps == list(range(done + 2))
