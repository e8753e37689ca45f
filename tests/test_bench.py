"""The tables of bench/: what they make of runs whose numbers are known, and of runs that are there
already or fail.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import accuracy, convergence, cost, early_stop, keep_ratio, peers, pruning, report, runs, speed, trainer
from bench.runs import Plan, Run, interpolate, load, read_flags, run_parser, scores, train
from bench.tables import estimate, estimates, new_figure, publish
from grpo import Learner, LossConfig, Policy
from support import data
from support.args import parse, parse_tts

MACHINE = {"processor": "abacus", "cores": 2, "versions": {"torch": "2"}}
rewards_and_count = st.lists(st.sampled_from([0.0, 1.0]), min_size=2, max_size=8).flatmap(
    lambda rewards: st.tuples(st.just(rewards), st.integers(1, len(rewards)))
)


def run_of(
    method: str,
    seed: int,
    seconds: float,
    scores_at: list[float],
    rewards: list[float] | None = None,
    tokens: int = 1000,
) -> Run:
    """A run of 4 steps of equal length, the first without pruning, evaluated before it and after
    every other step.
    """
    rewards = rewards or [0.5] * 4
    lines: list[dict] = [{"step": 0, "eval/held-out/avg@16": scores_at[0], "eval/held-out/greedy": 0.9}]
    for step in range(1, 5):
        line = {
            "step": step,
            "wall_clock": seconds * step / 4,
            "time_step": seconds / 4,
            "tokens_generated": tokens,
            "reward": rewards[step - 1],
            "rho_mean": rewards[step - 1],
            "rho_variance": 0.25 if step == 1 else 0.2,
            "zero_variance_after": 0.5,
            "keep_ratio": 1.0 if step == 1 else 0.5,
        }
        if step % 2 == 0:
            line |= {"eval/held-out/avg@16": scores_at[step // 2], "eval/held-out/greedy": 0.9}
        lines.append(line)
    record = {"method": method, "seed": seed, "seconds": seconds, "machine": MACHINE, "code": "abc"}
    return Run(method, seed, Path("nowhere"), {"cold_start": 1}, lines, record)


# ------------------------------------------------------------------ numbers


def test_interval_is_students_t_of_the_paired_differences() -> None:
    """Differences 1, 2, 3: mean 2, standard error 1 / √3, t(2) = 4.303. Pairing takes what a seed
    does to both methods out.
    """
    first = [run_of("GRPO", seed, 100.0, [0.0, 0.0, 10.0 * seed]) for seed in range(3)]
    second = [run_of("GRPO + ARRoL", seed, 100.0, [0.0, 0.0, 11.0 * seed + 1.0]) for seed in range(3)]
    found = estimate([b.score("avg") - a.score("avg") for a, b in zip(first, second)])
    assert (found.mean, found.high) == (2.0, pytest.approx(2.0 + 4.303 / math.sqrt(3)))
    assert found.low == pytest.approx(2.0 - 4.303 / math.sqrt(3))
    assert found.show("+.1f") == "+2.0 (−0.5 to +4.5)" and found.show(".1f") == "2.0 ± 2.5"
    assert estimate([0.7]).show() == "0.700"  # one seed has no interval


def test_a_score_is_the_mean_over_sets_that_have_it() -> None:
    line = {
        "step": 1,
        "eval/a/avg@16": 0.2,
        "eval/b/avg@32": 0.4,
        "eval/a/greedy": 0.5,
        "eval/b/pass@16": 0.9,
        "loss": 1.0,
    }
    assert scores(line) == {"avg": pytest.approx(0.3), "greedy": 0.5, "pass@16": 0.9}


def test_equal_time_lies_on_the_line_between_two_evaluations() -> None:
    points = [(0.0, 0.5), (100.0, 0.7), (200.0, 0.8)]
    assert interpolate(points, 150.0) == pytest.approx(0.75) and interpolate(points, 200.0) == 0.8
    for outside in (-1.0, 200.1):  # nobody knows what it would have been
        with pytest.raises(ValueError, match="not within"):
            interpolate(points, outside)


@pytest.mark.parametrize(("seconds", "gain"), [(50.0, 0.3), (200.0, 0.05)])
def test_equal_time_is_when_the_faster_run_ended(seconds: float, gain: float) -> None:
    """GRPO: 0.5, 0.6 after 50 s, 0.7 after 100 s. ARRoL ends with 0.9 after 50 s, or is half as
    fast: then it had 0.75 after 100 s. It samples half of the tokens: 0.9 where GRPO had 0.6.
    """
    plain = run_of("GRPO", 0, 100.0, [0.5, 0.6, 0.7])
    pruned = run_of("GRPO + ARRoL", 0, seconds, [0.5, 0.75, 0.9], tokens=500)
    found = accuracy.against(plain, pruned)
    assert found["equal time"] == pytest.approx(gain)
    assert (found["equal steps"], found["equal tokens"]) == (pytest.approx(0.2), pytest.approx(0.3))
    assert found["speed-up"] == found["speed-up of a step"] == pytest.approx(100.0 / seconds)
    assert {key for key, value in accuracy.against(plain, plain).items() if value == 0} >= {
        "equal time",
        "equal tokens",
    }


def test_keep_ratios_leave_the_cold_start_out_of_what_was_kept() -> None:
    plain, run = run_of("GRPO", 0, 100.0, [0.5, 0.6, 0.7]), run_of("GRPO + ARRoL", 0, 80.0, [0.5, 0.7, 0.8])
    found = keep_ratio.against(plain, run)
    assert (found["keep_ratio"], found["rho_variance"]) == (0.5, pytest.approx(0.2))
    assert (found["equal steps"], found["speed-up"]) == (pytest.approx(0.1), 1.25)


def test_convergence_is_the_time_to_the_last_reward_of_grpo() -> None:
    """Smoothed over 5 steps, at their beginnings: GRPO 0.3, 0.4, 0.4, 0.467 at 0, 25, 50, 75 s; the
    other is at 0.5 at 20 s; one at 0.1 never is.
    """
    plain = run_of("GRPO", 0, 100.0, [0, 0, 0], [0.2, 0.2, 0.5, 0.7])
    quick = run_of("GRPO + ARRoL", 0, 80.0, [0, 0, 0], [0.2, 0.2, 0.7, 0.9])
    never = run_of("GRPO + random", 0, 80.0, [0, 0, 0], [0.1] * 4)
    found = convergence.compare({"GRPO": [plain], "GRPO + ARRoL": [quick], "GRPO + random": [never]})
    assert (found["GRPO + ARRoL"]["time"].mean, found["GRPO + ARRoL"]["ahead"].mean) == (20.0, 3.75)
    assert found["GRPO"]["equal time"].mean == pytest.approx(0.4 + 0.2 / 3 * 10 / 25)  # at 60 s
    flat = convergence.compare({"GRPO": [run_of("GRPO", 0, 100.0, [0, 0, 0], [0.5] * 4)]})["GRPO"]
    assert flat["time"].mean == 0.0 and "ahead" not in flat  # there from the start
    assert "time" not in found["GRPO + random"] and found["GRPO + random"]["last"].mean == pytest.approx(0.1)


# ------------------------------------------------------------------ selectors


@given(rewards_and_count)
@settings(max_examples=60, deadline=None)
def test_selectors_against_all_subsets(group: tuple[list[float], int]) -> None:
    """PODS reaches the largest variance of all subsets. CPPO's least advantage is no smaller than
    any that it left out.
    """
    rewards, count = group
    subsets = [[rewards[i] for i in chosen] for chosen in itertools.combinations(range(len(rewards)), count)]
    chosen = pruning.pods(rewards, count)
    assert len(set(chosen)) == count
    assert statistics.pvariance([rewards[i] for i in chosen]) == max(map(statistics.pvariance, subsets))
    kept, mean = pruning.cppo(rewards, count), statistics.fmean(rewards)
    left = [abs(rewards[i] - mean) for i in range(len(rewards)) if i not in kept]
    assert len(set(kept)) == count and min(abs(rewards[i] - mean) for i in kept) >= max(left, default=0.0)


def test_selectors_on_rewards_that_are_not_binary() -> None:
    assert pruning.pods([0.1, 0.5, 0.9, 0.45], 2) == [0, 2] and pruning.cppo([0.0, 0.5, 1.2, 0.5], 1) == [2]
    with pytest.raises(ValueError, match="cannot be kept"):
        pruning.pods([0.0, 1.0], 3)


def scored(folder: Path, rows: list[dict], cold_start: int = 1) -> Run:
    """A run that scored everything and pruned nothing."""
    (folder / "rollouts.jsonl").write_text("".join(json.dumps({"answer": None} | row) + "\n" for row in rows))
    args = dataclasses.asdict(parse([])) | {"cold_start": cold_start}
    return dataclasses.replace(run_of(pruning.SCORED, 0, 1.0, [0, 0, 0]), folder=folder, args=args)


def test_selectors_see_complete_groups_after_the_cold_start(tmp_path: Path) -> None:
    """A group with a rollout that was not judged (a timeout) is no complete group; the cold start
    is left out. One that was not scored survives under every rule.
    """

    def row(step: int, group: int, verdict: str) -> dict:
        return {"step": step, "group": group, "verdict": verdict, "score": None if verdict == "no answer" else 0.5}

    rows = [row(1, 0, "right"), row(1, 0, "wrong"), row(2, 1, "right"), row(2, 1, "timeout")]
    rows += [row(2, 2, kind) for kind in ("wrong", "right", "no answer", "wrong")]
    rows += [row(3, 3, "no answer"), row(3, 3, "no answer")]
    found = pruning.select(scored(tmp_path, rows), 0.5)
    assert found["nothing pruned"]["rho_variance"] == pytest.approx(3 / 32) and found["PODS"]["rho_variance"] == 0.125
    assert found["CPPO"]["zero_variance"] == 0.5
    assert 0.5 < found["random"]["zero_variance"] < 1.0


def test_rules_on_the_same_rollouts(tmp_path: Path) -> None:
    """Groups of 16 with 4 right and a head that tells which: ARRoL evens them out, more so if it
    may steer harder; Eq. 2 as printed takes the right ones away; PODS is as even as 8 of them can
    be.
    """
    rows = [
        {"step": step, "group": 4 * step + g, "verdict": "right" if i < 4 else "wrong", "score": 0.7 if i < 4 else 0.3}
        for step in range(1, 7)
        for g in range(4)
        for i in range(16)
    ]
    lone = dataclasses.replace(run := scored(tmp_path, rows), args=run.args | {"min_survivors": 0})
    assert pruning.select(lone, 0.06)["random"]["kept"] >= 1  # groups that lost all are left out
    found = pruning.select(run, 0.5)
    even = [
        found[name]["rho_variance"]
        for name in ("Eq. 2 as printed, λ = 0.5", "random", "ARRoL, λ = 0.5", "ARRoL", "PODS")
    ]
    assert even == sorted(set(even)) and even[-1] == 0.25
    assert found["random"]["rho_mean"] == pytest.approx(0.25, abs=0.02) and found["ARRoL"]["rho_mean"] > 0.4


def test_information_is_the_inverse_of_the_gradients_variance() -> None:
    """3 right, 1 wrong: 1/3 + 1/1 and its inverse. Where all are alike, there is none, and no noise
    to average; a survivor has the sum of all groups over the sum of all survivors.
    """
    found = [pruning.balance(rewards) for rewards in ([1.0, 1.0, 1.0, 0.0], [1.0, 1.0])]
    assert found[0]["noise"] == pytest.approx(4 / 3) and found[0]["information"] == pytest.approx(3 / 4)
    assert found[1] == {"rho_mean": 1.0, "rho_variance": 0.0, "zero_variance": 1.0, "information": 0.0, "kept": 2}
    both = pruning.means(found)
    assert both["noise"] == found[0]["noise"] and both["per_survivor"] == pytest.approx(0.75 / 6)


def test_rules_that_choose_among_groups(tmp_path: Path) -> None:
    """A head that knows the group alone, groups with 8 of 16 right and with 1 or 15: survivors go
    where right and wrong are both to be expected, as many as at random, but for the two that each
    group keeps. They know more, and more of the other groups are all alike. Rewards as scores even
    out each group, too.
    """
    rates = {8: 0.5, 1: 1 / 16, 15: 15 / 16}
    rows = [
        {"step": step, "group": 8 * step + g, "verdict": "right" if i < right else "wrong", "score": rates[right]}
        for step in range(1, 7)
        for g, right in enumerate((8, 1, 8, 15, 8, 1, 8, 15))
        for i in range(16)
    ]
    found = pruning.select(scored(tmp_path, rows), 0.5)
    random = found["random"]
    chosen = [f"ARRoL, λ = 2, {how}" for how in ("focus 2", "focus 4", "decided groups dropped")]
    for name in (*chosen, "marginal information, β = 2"):
        assert found[name]["kept"] == pytest.approx(random["kept"], abs=0.75), name
        assert found[name]["per_survivor"] > 1.1 * random["per_survivor"], name
        assert found[name]["zero_variance"] > random["zero_variance"], name
    assert found["ARRoL, λ = 2"]["per_survivor"] == pytest.approx(random["per_survivor"], rel=0.05)
    assert found["ARRoL, λ = 2, oracle"]["zero_variance"] < 0.5 * random["zero_variance"]
    assert found["ARRoL, λ = 2, focus 2, oracle"]["per_survivor"] > found["ARRoL, λ = 2, focus 2"]["per_survivor"]
    assert found["random, systematic draws"]["kept"] == 8.0 != random["kept"]


def test_speed_limits_follow_from_token_counts() -> None:
    """Half of the tokens at half of the time: the whole of what the counts allow, in each phase and
    in the step.
    """
    times = {"generate": 4.0, "logprob": 2.0, "update": 2.0, "grade": 0.0, "head": 0.0, "sync": 0.0, "step": 8.0}
    plain = {f"time_{name}": seconds for name, seconds in times.items()}
    plain |= {"tokens_generated": 800, "tokens_trained": 800, "rollouts": 40, "pruned": 0}
    pruned = {f"time_{name}": seconds / 2 for name, seconds in times.items()}
    pruned |= {"tokens_generated": 400, "tokens_trained": 400, "rollouts": 40, "pruned": 20}
    found = speed.compare([plain] * 3, [pruned] * 3, prompt_tokens=5.0)
    for phase in ("generate", "logprob", "update", "step"):
        assert found[phase]["medians"] == found[phase]["allowed"] == found[phase]["ratio"].mean == 2.0
    assert found["grade"]["medians"] is None  # no division by no time at all


def test_costs_are_recovered_from_times_that_obey_them() -> None:
    """And held-out cells tell a model that is wrong: a time that grows with the square of the tokens."""
    lengths = [5 + 7 * i % 60 for i in range(16 * 32)]
    true = {"generation": {"coefficients": [0.5, 2e-3, 1e-5]}, "rest": {"coefficients": [0.25, 4e-5]}}
    true |= {"lengths": lengths, "group_size": 16, "prompt_tokens": 12.0}
    lines = []
    for number, (prompts, slots, (keep, share)) in enumerate(itertools.product((8, 32), cost.SLOTS, cost.PRUNING)):
        steps, sampled = 100 * prompts // slots + 60, 16 * prompts * (10 + 20 * keep)
        trained = sampled + 12 * 16 * prompts
        line = dict(prompts=prompts, slots=slots, keep=keep, share=share, steps=steps, sampled=sampled, trained=trained)
        line["held_out"] = number % 4 == 3
        lines.append(line | {"generation": 0.5 + 2e-3 * steps + 1e-5 * sampled, "rest": 0.25 + 4e-5 * trained})
    model, shown = cost.tables(lines, lengths, 16)
    for phase in ("generation", "rest"):
        assert model[phase]["coefficients"] == pytest.approx(true[phase]["coefficients"])
        assert model[phase]["held_out"] == pytest.approx(0, abs=1e-9)
    assert model["prompt_tokens"] == pytest.approx(12.0)
    assert cost.predict(model, 16, 64, 0.5, 0.25) == pytest.approx(cost.predict(true, 16, 64, 0.5, 0.25))
    squares = [line | {"rest": 1e-9 * line["trained"] ** 2} for line in lines]
    assert cost.fit(squares)["rest"]["held_out"] > 0.1


def test_more_is_saved_the_earlier_and_the_more_is_pruned() -> None:
    model: dict = {"lengths": [5 + 7 * i % 60 for i in range(512)], "group_size": 16, "prompt_tokens": 12.0}
    model |= {"generation": {"coefficients": [0.0, 1e-3, 1e-5]}, "rest": {"coefficients": [0.0, 4e-5]}}
    assert cost.decoding_steps([4, 1, 2, 2], slots=2) == 5
    assert cost.speed_up(model, 0.5, 1.0, 0.25) == 1.0 and cost.more_prompts(model, 64, 1.0, 0.25) == 32
    by_detect = [cost.speed_up(model, 0.5, 0.5, share) for share in (0.1, 0.5, 1.0)]
    by_keep = [cost.more_prompts(model, 64, keep, 0.1) for keep in (0.25, 0.5, 0.75)]
    assert by_detect == sorted(by_detect, reverse=True) and by_detect[-1] > 1.0
    assert by_keep == sorted(by_keep, reverse=True) and by_keep[-1] > 32


def test_the_papers_step_and_the_keep_ratios_of_table_6() -> None:
    """The model of Table 5 has not seen 2.33 and 1.17."""
    for fixed in (0.0, 0.2):
        assert cost.paper_speed_up(fixed, 0.5, 512)[0] == pytest.approx(1.61)
        assert cost.paper_speed_up(fixed, 0.25, 512)[0] == pytest.approx(2.33, rel=0.06)
        assert cost.paper_speed_up(fixed, 0.75, 512)[0] == pytest.approx(1.17, rel=0.06)


# ------------------------------------------------------------------ early stop


def test_early_stop_is_compared_with_a_plain_vote_that_costs_as_much() -> None:
    """Of 40 tokens, a plain vote is right at 0.7, half way between 2 and 4 candidates; of 1 s, at 0.8;
    one that costs more than all of them is compared with all of them.
    """
    plain = {
        count: {"tokens": 10.0 * count, "seconds": count / 4, "majority": right, "ARRoL": right + 0.1}
        for count, right in ((2, 0.6), (4, 0.8), (8, 0.9))
    }
    found = early_stop.gains({"tokens": 30.0, "seconds": 1.0, "majority": 0.75, "ARRoL": 0.75}, plain)
    assert found["majority, tokens"] == pytest.approx(0.05) and found["majority, seconds"] == pytest.approx(-0.05)
    assert found["ARRoL, tokens"] == pytest.approx(-0.05) and found["ARRoL, seconds"] == pytest.approx(-0.15)
    dear = {"tokens": 90.0, "seconds": 2.5, "majority": 0.9, "ARRoL": 1.0}
    assert early_stop.gains(dear, plain) == pytest.approx(dict.fromkeys(found, 0.0), abs=1e-12)


def test_early_stop_of_the_embedded_model(tmp_path: Path) -> None:
    """The more go on, and the later the others stop, the more tokens; all less than without a stop.
    Plain votes cost in proportion to their size.
    """
    rows = [{"problem": p.text, "answer": p.answer} for p in data.sums(12, 5, "test", (3, 5), 15)]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--data", str(tmp_path / "mine.jsonl"), "--n", "8", "--output", str(tmp_path / "unused")]
    plain, stopped = early_stop.measure(parse_tts(flags))
    length = plain[8]["tokens"] / 8
    assert list(plain) == [1, 2, 3, 4, 5, 6, 7, 8] and plain[3]["tokens"] == pytest.approx(3 * length)
    for fraction in early_stop.FRACTIONS:
        tokens = [stopped[fraction, kept]["tokens"] for kept in early_stop.KEPT]
        assert tokens == sorted(set(tokens)) and tokens[-1] < plain[8]["tokens"]
        assert stopped[fraction, 0.5]["L_detect"] == round(fraction * length)
    tokens = [stopped[fraction, 0.25]["tokens"] for fraction in early_stop.FRACTIONS]
    assert tokens == sorted(set(tokens)) and all(one["seconds"] > 0 for one in (*plain.values(), *stopped.values()))
    majority = plain[8]["majority"]
    assert majority * 12 == round(majority * 12)  # one vote of all eight for each of 12 problems
    lines = early_stop.table({"all": estimates([plain[8]]), "half": estimates([stopped[0.5, 0.5]])}).splitlines()
    assert [line.count("|") for line in lines] == [11] * 4 and " – |" not in lines[3]


# ------------------------------------------------------------------ runs, whole program


def plan_in(folder: Path, *flags: str) -> Plan:
    small = "--steps 1 --prompts 2 --group-size 2 --cold-start 0 --eval-problems 2 --eval-n 1".split()
    own = ("--seeds", "0", "--runs", str(folder), "--results", str(folder))
    plan = read_flags(run_parser("test"), [*own, *small, *flags])[0]
    return dataclasses.replace(plan, regimes={"sums": [], "long sums": ["--dataset", "sums:6-10:15"]})


def test_a_run_that_ended_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each regime has a run, which is on a core of its own and counts that core's seconds, and has a
    process group of its own.
    """
    monkeypatch.setenv("MASTER_PORT", "29555")
    plan = plan_in(tmp_path)
    begun = time.monotonic()
    found = train(plan, ["GRPO"])
    first, other = (found[regime]["GRPO"][0] for regime in ("sums", "long sums"))
    assert [line["step"] for line in first.lines] == [0, 1] and load(first.folder) == first
    assert first.args["prune"] == "none" and (first.folder / "checkpoint-1").is_dir()
    assert (first.args["dataset"], other.args["dataset"]) == ("sums", "sums:6-10:15")
    assert 0 < first.seconds + other.seconds < time.monotonic() - begun
    before = (first.folder / "metrics.jsonl").stat().st_mtime_ns
    again = train(plan, ["GRPO"])["sums"]["GRPO"][0]
    assert again == first and (again.folder / "metrics.jsonl").stat().st_mtime_ns == before
    # other flags, another run
    assert plan_in(tmp_path, "--lr", "0.1").folder("sums", "GRPO", 0)[0] != first.folder
    assert plan.folder("sums", "GRPO + ARRoL", 0)[0] != first.folder != plan.folder("sums", "GRPO", 1)[0]


def test_a_program_on_one_core_has_one_and_counts_its_seconds(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    lines = ["import os, sys, time", "a = time.perf_counter()", "time.sleep(0.5)", "b = time.perf_counter()"]
    program.write_text("\n".join([*lines, "print(os.sched_getaffinity(0), sys.argv[1:], b - a < 0.4)"]))
    core = max(os.sched_getaffinity(0))
    command = [sys.executable, str(runs.ROOT / "bench" / "one_core.py"), str(core), str(program), "--flag"]
    assert subprocess.run(command, capture_output=True, text=True).stdout == f"{{{core}}} ['--flag'] True\n"


def test_a_run_that_fails_ends_the_table(tmp_path: Path) -> None:
    """A limit on the gap between sampler and trainer that rounding exceeds ends the run in its
    first step: no number of it enters a mean, and the same command trains it again.
    """
    plan = plan_in(tmp_path, "--max-gap", "1e-12")
    with pytest.raises(SystemExit, match="sums, GRPO, seed 0: arrol.py failed, see .*output.log"):
        train(plan, ["GRPO"])
    assert not (plan.folder("sums", "GRPO", 0)[0] / "run.json").exists()


def test_a_run_shorter_than_its_cold_start_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        plan_in(tmp_path, "--cold-start", "1")
    assert "--cold-start 1, after which pruning begins" in capsys.readouterr().err


def test_tables_of_runs() -> None:
    """A row for each method, with its means over seeds and its differences from the first."""
    of = {
        method: [run_of(method, seed, seconds, [0.5, 0.6, last + 0.1 * seed]) for seed in (0, 1)]
        for method, seconds, last in (("GRPO", 100.0, 0.7), ("GRPO + ARRoL", 50.0, 0.8))
    }
    found = {method: estimates(map(accuracy.against, of["GRPO"], some)) for method, some in of.items()}
    text = accuracy.table(found, 16)
    assert "| GRPO | 0.750 ± 0.635 | 0.900 ± 0.000 |  |  |  | 100 ± 0 |  |  |" in text
    assert "| GRPO + ARRoL | 0.850 ± 0.635 | 0.900 ± 0.000 | +0.100 (+0.100 to +0.100) |" in text
    assert "| 50 ± 0 | 2.00 ± 0.00 × | 2.00 ± 0.00 × |" in text


def test_a_table_is_published_with_its_text_and_what_it_was_measured_on(tmp_path: Path) -> None:
    """Numbers go to the JSON; bench/notes has the words; no brace of them is left."""
    of = {m: [run_of(m, seed, 80.0, [0.5, 0.7, 0.8]) for seed in (0, 1)] for m in ("GRPO", "GRPO + ARRoL")}
    figure, _ = new_figure("one panel")
    regimes = {"sums": [], "long sums": ["--dataset", "sums:6-10:15"]}
    plan, found = Plan([0, 1], ["--steps", "4"], regimes, tmp_path, tmp_path), {"smoothed_over_steps": 5}
    tables = dict.fromkeys(regimes, convergence.table(convergence.compare(of)))
    publish("convergence", plan, dict.fromkeys(regimes, of), found, figure, table=tables)
    text, results = ((tmp_path / f"convergence.{kind}").read_text() for kind in ("md", "json"))
    assert text.startswith("## Convergence") and "rewards are means of 5 steps" in text
    assert text.count("| GRPO + ARRoL | 80 ± 0 |") == 2 and "**long sums** (`--dataset sums:6-10:15`)" in text
    measured = "Seeds 0, 1; flags `--steps 4`, each run on one core, in seconds of that core; abacus, 2 cores, torch 2"
    assert f"{measured}; code abc; 640 s of runs" in text
    assert json.loads(results)["seconds_of_runs"] == 640.0 and "{" not in text
    assert (tmp_path / "convergence.png").exists()


# ------------------------------------------------------------------ the page


def test_the_page_says_gains_first_then_differences_then_targets_then_tables(tmp_path: Path) -> None:
    def leave(name: str, results: dict, text: str) -> None:
        (tmp_path / f"{name}.json").write_text(json.dumps(results))
        (tmp_path / f"{name}.md").write_text(text)

    gain = {"mean": 0.01, "low": -0.005, "high": 0.025}
    loss = {"mean": -0.1, "low": -0.2, "high": 0.0}
    found = {"GRPO + ARRoL": {"equal steps": gain, "equal time": loss}}
    leave("accuracy", {"regimes": {"sums": found}}, "## Accuracy\n\n| a |")
    leave("speed", {"phases": {"step": {"ratio": {"mean": 1.7, "low": 1.65, "high": 1.75}}}}, "# Time\n\n## By phase")
    (tmp_path / "differences.md").write_text("Voting did not help.\n")
    text = report.assemble(tmp_path)
    order = ["Not written yet.", "Voting did not help.", "## Targets", "## Accuracy", "## Time", "### By phase"]
    assert sorted(order, key=text.index) == order
    assert "equal steps, sums, at least 0 | +0.010 (−0.005 to +0.025) | **met** by the mean; the interval" in text
    assert "equal steps, long sums, at least 0 | no result | **not measured** |" in text
    assert (
        "equal time, sums, above 0 | −0.100 (−0.200 to +0.000) | **not met**, though the interval reaches it |" in text
    )
    assert "at least 1.6 × faster | 1.70 (1.65 to 1.75) | **met** |" in text
    assert "majority, at least 0 | no result | **not measured** |" in text
    assert "Not run: dapo, convergence, cost, pruning, keep_ratio, voting, early_stop, head, theory." in text


def test_zero_is_at_least_zero_and_not_above_it() -> None:
    found = {"mean": 0.0, "low": None, "high": None}
    assert report.verdict(found, 0.0, strictly=False) == "met (no interval)"
    assert report.verdict(found, 0.0, strictly=True) == "**not met**"


# ------------------------------------------------------------------ beside others


def test_peers_are_compared_turn_by_turn() -> None:
    """Twice as fast by step, and as fast by token, since it samples half; memory and tokens are means."""
    turn = {
        "TRL": {"steps": [[8.0, 100], [4.0, 140]], "memory_gb": 1.0},
        "ARRoL": {"steps": [[3.0, 60]], "memory_gb": 2.0},
    }
    slower = {kind: {**one, "steps": [[2 * s, n] for s, n in one["steps"]]} for kind, one in turn.items()}
    found = peers.compare([turn, slower])
    assert found["TRL"]["seconds"].values == [6.0, 12.0] and found["TRL"]["tokens"].mean == 120.0
    assert found["TRL"]["ms per token"].values == [50.0, 100.0] == found["ARRoL"]["ms per token"].values
    assert found["ARRoL"]["faster by step"].values == [2.0, 2.0] and found["ARRoL"]["faster by token"].mean == 1.0
    assert found["TRL"]["faster by step"].mean == 1.0 and found["ARRoL"]["memory_gb"].mean == 2.0


def test_a_peer_that_cannot_run_ends_the_table() -> None:
    with pytest.raises(SystemExit, match="TRL: ended with status"):
        peers.run("TRL", sys.executable, 0, 0)


def test_a_peer_is_not_given_what_support_sets() -> None:
    """TRL runs as it comes: how OpenMP waits, and the like, is this program's choice."""
    script = """
import os
before = dict(os.environ)
from bench import peers
import support
print([name for name in os.environ if name not in before], peers.ENVIRONMENT == before)
"""
    chosen = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "TORCH_CPP_LOG_LEVEL")
    environment = {name: value for name, value in os.environ.items() if name not in chosen}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, cwd=peers.ROOT, env=environment, capture_output=True, text=True)
    assert "ONEDNN" in done.stdout and done.stdout.strip().endswith("True"), done.stderr


def test_trainer_and_bare_have_the_same_gradient() -> None:
    """Else they would not be comparable; and tokens per second go by medians."""
    model = trainer.load("embedded")
    samples = trainer.make_samples(model.config.vocab_size, 6, 3, 9)
    trainer.bare(model, samples, budget=64)
    policy = Policy(trainer.load("embedded"), 1.0)
    still = dict(lr=0.0, warmup_steps=1, weight_decay=0.0, grad_clip=math.inf)
    norm = Learner(policy, LossConfig(), **still, token_budget=40).update(samples, math.inf)["grad_norm"]
    assert torch.stack([p.grad.norm() for p in model.parameters()]).norm().item() == pytest.approx(norm, rel=1e-4)
    found = trainer.compare(100, [2.0, 4.0, 4.0], [1.0, 2.0, 2.0])
    assert found["tokens_per_s"] == {"bare": 25.0, "update": 50.0} and found["ratio"].values == [2.0, 2.0, 2.0]
