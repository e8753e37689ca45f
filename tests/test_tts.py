"""Test-time scaling, whole: the program on the embedded model, what it leaves on disk, and candidates that are stopped early."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

import tts
import voting
from calibration import Calibrator, bin_index
from engine import Rollout
from quality_head import QualityHead
from support import data
from support.args import TINY, parse_tts
from support.checkpoint import save_head
from support.data import Problem, Prompt
from support.early_stop import KeepBetter, stop_by_head
from support.evaluation import Benchmark, EvalSet, evaluate
from support.grader import Grader, Verdict
from support.judge import Candidates, Judge, hits, sample_scores, signal_quality
from tts import Bench

L_DETECT, N, TOO_LONG = 10, 4, 5  # the embedded model's L_detect; candidates; the place of the problem that is too long
MAIN = ("--early-stop", "--max-num-seqs", "7")
RULES = [rule.title(0.1) for rule in voting.RULES]
TOKENIZER = AutoTokenizer.from_pretrained(TINY)


class FirstNumber(QualityHead):
    """A head whose logit is the first number of the state, so that a test can say what it thinks."""

    def forward(self, states: Tensor) -> Tensor:
        return states[:, 0].float()


@dataclass
class Files:
    head: Path
    rows: list[dict[str, str]]
    data: Path

    def flags(self, output: Path, *more: str) -> list[str]:
        plan = ["--head", str(self.head), "--data", str(self.data), "--n", str(N), "--window", "4", "--warmup", "2"]
        return [*plan, "--output", str(output), *more]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """A head that was never trained, with a calibration; 12 sums, and a problem among them that is longer than 64 tokens."""
    folder = tmp_path_factory.mktemp("files")
    calibrator, generator = Calibrator(bins=64), torch.Generator().manual_seed(0)
    scores = torch.rand(4000, generator=generator)
    calibrator.label(scores, (torch.rand(4000, generator=generator) < scores).float())
    save_head(folder / "head.safetensors", QualityHead(128, 32, seed=3), calibrator, L_DETECT)
    rows = [{"problem": p.text, "answer": p.answer} for p in data.sums(12, 5, "test", (3, 5), 15)]
    rows.insert(TOO_LONG - 1, {"problem": "+".join(["15"] * 30) + "=?", "answer": "450"})
    (folder / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Files(folder / "head.safetensors", rows, folder / "mine.jsonl")


@pytest.fixture(scope="module")
def program(files: Files, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The whole program, once, few candidates at a time; its folder and what it printed."""
    folder = tmp_path_factory.mktemp("program") / "out"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert tts.main(parse_tts(files.flags(folder, *MAIN))) == 0
    return folder, printed.getvalue()


@pytest.fixture(scope="module")
def shared(program: tuple[Path, str], files: Files, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    """An engine for all other tests; the program's own is down by then."""
    args = parse_tts(files.flags(tmp_path_factory.mktemp("shared"), "--max-num-seqs", "64"))
    benchmark, head, table = tts.prepare(args)
    with tts.workbench(args, benchmark, head) as bench:
        yield Shared(bench, benchmark, table)


@dataclass
class Shared:
    bench: Bench
    benchmark: Benchmark
    table: Tensor

    def run(self, **changes: object) -> dict:
        args = replace(self.bench.args, **changes)
        sampling = replace(self.bench.sampling, temperature=args.temperature)
        return tts.run(args, self.benchmark, replace(self.bench, args=args, sampling=sampling), self.table)


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "candidates.jsonl").read_text("utf-8").split("\n") if line]


def majority(rows: list[dict]) -> bool:
    """Whether the most frequent answer, of several the first, is right."""
    counts = Counter(row["answer"] for row in rows if row["answer"] is not None)
    winner = max(counts, key=counts.__getitem__, default=None)
    return any(row["answer"] == winner and row["verdict"] == "right" for row in rows)


# ------------------------------------------------------------------ the program


def test_the_scores_are_those_of_the_candidates(program: tuple[Path, str], files: Files) -> None:
    """avg@n and maj@n recomputed from the file of candidates, over all problems, also the one that nobody sampled."""
    folder, rows = program[0], lines(program[0])
    scores = json.loads((folder / "scores.json").read_text("utf-8"))
    problems = [f"mine:{number}" for number in range(1, 14)]
    by_problem = {problem: [row for row in rows if row["problem"] == problem] for problem in problems}
    assert [len(found) for found in by_problem.values()] == [0 if i == TOO_LONG - 1 else N for i in range(13)]
    assert all(row["gold"] == files.rows[int(row["problem"].removeprefix("mine:")) - 1]["answer"] for row in rows)
    average = [sum(row["verdict"] == "right" for row in found) / N for found in by_problem.values()]
    best = [float(majority(found)) for found in by_problem.values()]
    for score, values in ((scores["samples"][f"avg@{N}"], average), (scores["votes"]["majority"], best)):
        assert score["value"] == pytest.approx(sum(values) / 13, abs=1e-12)
        assert 0 < score["low"] < score["value"] < score["high"] <= 1
    assert scores["samples"]["pass@1"]["value"] == pytest.approx(sum(average) / 13)
    assert scores["samples"]["pass@4"]["value"] == sum(a > 0 for a in average) / 13
    assert list(scores["votes"]) == RULES
    counts = scores["counts"]
    assert counts["prompts too long (they count as wrong)"] == 1 and counts["candidates"] == len(rows) == 12 * N
    assert counts["right"] + counts["wrong"] + counts.get("no answer", 0) == len(rows)
    assert counts["tokens"] == sum(row["tokens"] for row in rows)
    assert scores["settings"] == dataclasses.asdict(parse_tts(files.flags(folder / "x", *MAIN))) | {
        "output": str(folder)
    }
    assert scores["set"]["problems"] == 13 and len(scores["set"]["digest"]) == 12


def test_a_line_for_each_candidate_with_its_weight_under_each_rule(program: tuple[Path, str]) -> None:
    rows = lines(program[0])
    for start in range(0, len(rows), N):
        group = rows[start : start + N]
        assert [row["candidate"] for row in group] == list(range(N))
        numbers = {row["answer"]: row["class"] for row in group}  # all integers: a class for each spelling
        assert all(row["class"] == numbers[row["answer"]] for row in group) and len(set(numbers.values())) == len(
            numbers
        )
        voters = [row["signals"]["head"] for row in group if row["answer"] is not None]
        for row in group:
            assert list(row["weights"]) == RULES and set(row["signals"]) == set(voting.SIGNALS)
            score, n = row["signals"]["head"], len(voters)
            below, tied = sum(other < score for other in voters), sum(other == score for other in voters)
            rank = 1.0 if len(set(voters)) < 2 else (below + (tied - 1) / 2) / (n - 1)
            assert row["weights"]["ARRoL"] == pytest.approx(rank if row["answer"] is not None else 0.0)
            assert row["weights"]["majority"] == (row["answer"] is not None)
        assert sum(row["weights"]["DeepConf, tail, top 10%"] > 0 for row in group) >= 1


def test_the_curve_ends_at_the_table_and_starts_at_one_candidate(program: tuple[Path, str]) -> None:
    """With one candidate every rule names its answer; with all of them it is the row of the table."""
    scores = json.loads((program[0] / "scores.json").read_text("utf-8"))
    curve = scores["curve"]
    assert curve.pop("sizes") == [1, 2, 4] and set(curve) == {*RULES, "oracle"}
    for name, values in curve.items():
        table = scores["samples"]["pass@4"] if name == "oracle" else scores["votes"][name]
        assert values[0] == pytest.approx(scores["samples"]["pass@1"]["value"])
        assert values[-1] == pytest.approx(table["value"])
    assert (program[0] / "votes.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_what_is_printed(program: tuple[Path, str]) -> None:
    """A row for each score and each rule, and the plans of --early-stop with what they save, over all 13 problems."""
    folder, printed = program
    scores = json.loads((folder / "scores.json").read_text("utf-8"))
    names = ["avg@4", "pass@1", "pass@2", "pass@4", "maj@4", *RULES[1:], "oracle (pass@4)"]
    table = {line[:34].rstrip(): line[34:].split() for line in printed.splitlines()}
    for name in names:
        score = scores["samples"].get(name) or scores["votes"].get({"maj@4": "majority"}.get(name, name))
        value, low, _, high = table[name]
        if score:
            assert (value, low, high) == tuple(f"{score[key]:.3f}" for key in ("value", "low", "high"))
    assert "1 prompts too long (they count as wrong)" in printed and scores["set"]["digest"] in printed
    plans = [(row["plan"], row["rule"]) for row in scores["early_stop"]]
    assert plans == [
        ("head at L_detect", "majority"),
        ("head at L_detect", "ARRoL"),
    ]
    for row in scores["early_stop"]:
        assert any(line.startswith(row["plan"]) and f"{row['saved']:.1%}" in line for line in printed.splitlines())
        before = scores["votes"][row["rule"]]["value"]
        assert row["difference"]["value"] == pytest.approx(row["accuracy"]["value"] - before)
        assert row["saved"] == pytest.approx(1 - row["tokens"] / scores["counts"]["tokens"])
        assert 13 * row["accuracy"]["value"] == pytest.approx(round(13 * row["accuracy"]["value"]))


def test_the_same_seed_gives_the_same_bytes(shared: Shared, program: tuple[Path, str], tmp_path: Path) -> None:
    """And, as every candidate has a seed of its own, the same answers however many are sampled at once; another seed, others."""
    first, again = (shared.run(output=str(tmp_path / name)) for name in ("first", "again"))
    assert (tmp_path / "first" / "candidates.jsonl").read_bytes() == (
        tmp_path / "again" / "candidates.jsonl"
    ).read_bytes()
    assert {name: value for name, value in first.items() if name != "settings"} == {
        name: value for name, value in again.items() if name != "settings"
    }
    columns = ("problem", "candidate", "tokens", "finish", "answer", "class", "verdict")
    here, there = ([[row[c] for c in columns] for row in lines(f)] for f in (tmp_path / "first", program[0]))
    assert here == there
    shared.run(output=str(tmp_path / "other"), seed=1)
    assert [[row[c] for c in columns] for row in lines(tmp_path / "other")] != here


def test_one_greedy_candidate(shared: Shared, tmp_path: Path) -> None:
    """The same number as the greedy score of the evaluation in training, and no picture of one point."""
    results = shared.run(n=1, temperature=0.0, output=str(tmp_path / "out"))
    bench = shared.bench
    evaluated = evaluate(
        bench.engine,
        [EvalSet("mine", "avg", list(bench.prompts.values()), bench.too_long)],
        TOKENIZER,
        bench.judge.grader,
        bench.sampling,
        1,
        0,
    )
    value = results["samples"]["avg@1"]["value"]
    assert value == pytest.approx(evaluated["eval/mine/greedy"]) and 0 < value <= 12 / 13
    assert all(score["value"] == pytest.approx(value) for score in results["votes"].values())
    assert "maj@1" in tts.show(results) and not (tmp_path / "out" / "votes.png").exists()


def test_what_is_done_is_on_disk_before_more_is_sampled(
    shared: Shared,
    files: Files,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ctrl-C then says what is there; no traceback."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tts, "workbench", lambda args, *_: contextlib.nullcontext(replace(shared.bench, args=args)))
    for broken, there in (
        ("early_stop", "scores.json, candidates.jsonl, votes.png"),
        ("plot", "scores.json, candidates.jsonl"),
    ):
        folder = tmp_path / broken
        with monkeypatch.context() as patch:
            patch.setattr(tts, broken, interrupt)
            assert tts.main(parse_tts(files.flags(folder, "--early-stop"))) == 130
        assert capsys.readouterr().err == f"\nstopped; in {folder}: {there}\n"
        scores = json.loads((folder / "scores.json").read_text("utf-8"))
        assert len(lines(folder)) == 12 * N and list(scores["votes"]) == RULES and "early_stop" not in scores


# ------------------------------------------------------------------ flags


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--n 4 --temperature 0", "--temperature 0.0: greedy samples are all alike: use --n 1, or a temperature"),
        ("--n 0", "--n 0: must be in [1, inf)"),
        ("--temperature 2.1", "--temperature 2.1: must be in [0, 2]"),
        ("--seed -1", "--seed -1: must be in [0, 4294967295]"),
        ("--early-stop --n 16", "--warmup 16: must be below --n 16"),
        ("--early-stop --detect-length 256", "--detect-length 256: must be below --max-length 256"),
        ("--share 0", "--share 0.0: must be in (0, 1]"),
        ("--data nothing", "--data nothing: neither a known set nor a file nor sums"),
        ("--data nothing.jsonl", "--data nothing.jsonl: No such file"),
        ("--trained-on nothing.jsonl", "--trained-on nothing.jsonl: No such file"),
        ("--head nothing", "--head nothing: it holds no quality head (No such file"),
        ("--head {tiny}/model.safetensors", "it holds no quality head"),
        ("--head {here}/note.txt", "it holds no quality head"),
        ("--head {here}/other.safetensors", "it reads states of 64 numbers, the model's have 128"),
        (
            "--head {here}/late.safetensors --early-stop",
            "--detect-length 10: {here}/late.safetensors was trained at 99",
        ),
        ("--output {here}/done", "--output {here}/done: it is a file, or has results"),
        ("--output {here}/note.txt", "--output {here}/note.txt: it is a file, or has results"),
        ("--model {here}/done", "--model {here}/done: the folder lacks config.json"),
        ("--model {here}/none", "--model {here}/none: there is no such folder"),
        ("--model {here}/note.txt", "--model {here}/note.txt: there is no such folder"),
        ("--max-prompt 2", "--max-prompt 2: no prompt of sums is that short"),
    ],
)
def test_bad_flags_end_in_one_sentence_and_nothing_is_created(
    flags: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """T = 0 with several candidates (lighteval#559) is n times one candidate, which no vote can help."""
    (tmp_path / "done").mkdir()
    (tmp_path / "done" / "scores.json").write_text("{}")
    (tmp_path / "note.txt").write_text("no head")
    save_head(tmp_path / "other.safetensors", QualityHead(64, 8), Calibrator(bins=4), L_DETECT)
    save_head(tmp_path / "late.safetensors", QualityHead(128, 8), Calibrator(bins=4), 99)
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        tts.main(parse_tts(flags.format(here=tmp_path, tiny=TINY).split()))
    message = capsys.readouterr().err.strip().splitlines()
    assert stop.value.code == 2 and len(message) == 1 and words.format(here=tmp_path) in message[0]
    assert sorted(tmp_path.rglob("*")) == before


def test_several_ranks_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Each would sample everything and write over the others' files."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        parse_tts([])
    assert "start it without torchrun" in capsys.readouterr().err


def test_a_checkpoint_brings_its_head_and_the_settings_of_its_run(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint-20"
    (checkpoint / "model").mkdir(parents=True)
    for name in ("config.json", "tokenizer.json"):
        (checkpoint / "model" / name).write_text("{}")
    (checkpoint / "quality_head.safetensors").write_bytes(b"")
    (tmp_path / "args.json").write_text(
        json.dumps({"max_prompt": 30, "max_length": 300, "detect_length": 7, "seed": 5})
    )
    args = parse_tts(["--model", str(checkpoint), "--n", "8"])
    assert args.model == str(checkpoint / "model") and args.head == str(checkpoint / "quality_head.safetensors")
    assert (args.max_length, args.detect_length, args.window, args.seed, args.n) == (300, 7, 300 // 32, 0, 8)
    assert parse_tts(["--model", str(checkpoint), "--head", ""]).head == ""
    assert parse_tts(["--model", str(checkpoint), "--max-length", "8192"]).window == 2048


# ------------------------------------------------------------------ the head decides at L_detect


def keep(pruner: KeepBetter, logits: list[float], groups: list[int]) -> list[bool]:
    states = torch.tensor(logits)[:, None].expand(-1, 8)
    decisions = pruner.decide(states, groups, list(range(len(groups))))
    assert [decision.keep for decision in decisions] == [bool(decision.keep) for decision in decisions]
    return [decision.keep for decision in decisions]


def better(keep_ratio: float = 0.5, table: Tensor | None = None, seed: int = 0) -> KeepBetter:
    return KeepBetter(FirstNumber(8, 2), table, keep_ratio, seed)


@pytest.mark.parametrize("keep_ratio", [0.25, 0.5, 0.75])
@pytest.mark.parametrize("calibrated", [True, False])
def test_the_better_ones_of_each_group_go_on(keep_ratio: float, calibrated: bool) -> None:
    """Exactly kappa n of each group, those with the highest posterior, though one group is all better than the other."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.cat([torch.randperm(8, generator=generator) - 8, torch.randperm(8, generator=generator) + 1]) / 2
    table = torch.linspace(1, 0, 1000, dtype=torch.float64) if calibrated else None  # high scores are bad news
    order = torch.randperm(16, generator=generator)
    groups = (order >= 8).long()
    kept = torch.tensor(keep(better(keep_ratio, table), logits[order].tolist(), groups.tolist()))
    for group in (0, 1):
        rows = groups == group
        ranked = logits[order][rows].argsort(descending=not calibrated)
        assert set(kept[rows].nonzero()[:, 0].tolist()) == set(ranked[: round(8 * keep_ratio)].tolist())


def test_those_that_tie_share_what_is_left() -> None:
    """2 above, 4 of one bin, 2 below, kappa = 1/2: both above, 2 of the 4, each of them as often as the others."""
    logits, chosen = [3.0, 0.0, 0.0, -3.0, 0.0, 0.0, 3.0, -3.0], Counter()
    for seed in range(60):
        kept = keep(better(seed=seed), logits, [7] * 8)
        assert kept[0] and kept[6] and not kept[3] and not kept[7] and sum(kept) == 4
        chosen.update(row for row in (1, 2, 4, 5) if kept[row])
    assert all(20 <= chosen[row] <= 40 for row in (1, 2, 4, 5))


def test_kappa_1_and_a_share_that_is_no_whole_number() -> None:
    assert keep(better(1.0), [-3.0, 0.0, 3.0, math.nan], [0, 0, 1, 1]) == [True] * 4
    totals = [sum(keep(better(seed=seed), [-2.0, -1.0, 0.0, 1.0, 2.0], [0] * 5)) for seed in range(40)]
    assert set(totals) == {2, 3} and 10 <= totals.count(2) <= 30
    assert keep(better(), [-2.0, -1.0, 0.0, 1.0, 2.0], [0] * 5)[-2:] == [True, True]


@pytest.mark.parametrize("table", [None, torch.linspace(0, 1, 64, dtype=torch.float64)])
def test_a_score_that_is_not_a_number_goes_on_and_costs_nobody_a_place(table: Tensor | None) -> None:
    logits = [1.0, math.nan, -1.0, 2.0, math.nan, -2.0]
    assert keep(better(table=table), logits, [0] * 6) == [True, True, False, True, True, False]
    assert keep(better(table=table), [math.nan] * 3, [0, 0, 1]) == [True] * 3
    assert keep(better(table=table), [math.inf, -math.inf], [0, 0]) == [True, False]


def test_later_ones_are_held_against_all_that_have_arrived() -> None:
    pruner = better()
    assert keep(pruner, [1.0, 2.0], [0, 0]) == [False, True]
    assert keep(pruner, [-1.0, -2.0, 5.0, 4.0], [0, 0, 9, 9]) == [False, False, True, False]
    assert keep(pruner, [3.0, 4.0], [0, 0]) == [True, True]
    generator = torch.Generator().manual_seed(0)
    pruner, groups = better(), list(range(200))  # one at a time, in no order: kappa of all
    kept = [keep(pruner, torch.randn(200, generator=generator).tolist(), groups) for _ in range(8)]
    assert abs(np.mean(kept) - 0.5) < 0.03


def test_candidates_that_the_head_stops_are_cut_and_the_others_unchanged(shared: Shared) -> None:
    bench = shared.bench
    whole = bench.sample(N)
    rollouts, stopped = stop_by_head(bench, shared.table)
    assert shared.table.shape == (64,) and len(rollouts) == len(whole) == 12 * N
    scored: dict[int, list[Rollout]] = {}
    for full, short in zip(whole, rollouts, strict=True):
        assert short.group == full.group
        if short.finish == "pruned":
            assert short.token_ids == full.token_ids[:L_DETECT] and len(full.token_ids) > L_DETECT
        else:
            assert (short.token_ids, short.finish) == (full.token_ids, full.finish)
        assert (short.detect_state is None) == (len(full.token_ids) <= L_DETECT)
        if short.detect_state is not None:
            score = bench.judge.head(short.detect_state[None]).sigmoid()
            assert short.posterior == pytest.approx(shared.table[bin_index(score, 64)].item())
            scored.setdefault(short.group, []).append(short)
    for group in scored.values():
        kept, dropped = ([r.posterior for r in group if (r.finish == "pruned") is gone] for gone in (False, True))
        assert abs(len(kept) - 0.5 * len(group)) <= 0.5 and (not dropped or min(kept, default=1.0) >= max(dropped))
    assert sum(r.finish == "pruned" for r in rollouts) >= 15
    assert len(stopped) == 13 and not stopped[-1].rollouts
    for group, candidates in enumerate(stopped[:-1]):
        assert candidates.rollouts == [r for r in rollouts if r.group == group and r.finish != "pruned"]
        assert len(candidates.verdicts) == len(candidates.classes) == len(candidates.signals["head"])


# ------------------------------------------------------------------ the judge


def response(text: str, score: float = 0.0, group: int = 0, finish: str = "stop") -> Rollout:
    ids = TOKENIZER.encode(text) + [TOKENIZER.eos_token_id]
    state = None if finish == "pruned" else torch.full((8,), score)
    logprobs, confidences = [-0.5] * len(ids), np.full(len(ids), 300.0)
    return Rollout(group, token_ids=ids, logprobs=logprobs, finish=finish, last_state=state, confidences=confidences)


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    with Grader(timeout=20.0) as grader:
        yield Judge(TOKENIZER, grader, FirstNumber(8, 2), 4, 64)


def test_equivalent_answers_are_one_class_and_pruned_candidates_none(judge: Judge) -> None:
    """deepconf#15: 1/2 and 0.5 vote together; no answer never votes; what was pruned is not there (vllm#23201)."""
    texts = [r"1+1=\boxed{2}", r"\boxed{1/2}", "0.5", r"\boxed{0.5}", r"\boxed{2/4}"]
    rollouts = [response(text, score) for score, text in enumerate(texts)]
    rollouts.insert(2, response(r"\boxed{2}", finish="pruned"))
    prompts = {group: Prompt(Problem(f"p{group}", "?", gold), [5]) for group, gold in ((3, "2"), (0, "0.5"))}
    empty, found = judge(rollouts, prompts)  # in order of prompts: nobody answered the first
    assert found.classes == [0, 1, None, 1, 1] and found.right == {1} and found.count_right == 3
    assert [v.kind for v in found.verdicts] == ["wrong", "right", "no answer", "right", "right"]
    assert found.signals["head"] == [0.0, 1.0, 2.0, 3.0, 4.0] and found.unsure == 0
    assert found.winners(0.1)["majority"] == found.winners(0.1)["best of n, head"] == 1
    for nobody in (empty, judge.nobody()):
        assert nobody == Candidates(signals=dict.fromkeys(voting.SIGNALS, []))
        assert set(nobody.winners(0.1)) == set(RULES) and set(nobody.winners(0.1).values()) == {None}
    assert all(values == [0.0, 1.0] for values in hits([empty, found], 1.0).values())


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_not_finite_ranks_lowest_and_ends_nothing(judge: Judge, odd: float) -> None:
    """All has been sampled by then. It is counted; where no score is a number, the head votes as the majority does."""
    prompts = {0: Prompt(Problem("p", "?", "2"), [5])}
    texts = [r"\boxed{1}", r"\boxed{2}", r"\boxed{3}"]
    (found,) = judge([response(text, score) for text, score in zip(texts, (odd, 0.5, -0.5))], prompts)
    assert found.signals["head"] == [-0.5, 0.5, -0.5] and found.unsure == 1
    assert found.winners(0.1)["ARRoL"] == found.winners(0.1)["best of n, head"] == 1
    (found,) = judge([response(text, odd) for text in (texts[1], texts[0], texts[0])], prompts)
    assert found.signals["head"] == [0.0] * 3 and found.unsure == 3
    assert found.winners(0.1)["ARRoL"] == found.winners(0.1)["majority"] == 1 and found.right == {0}


def test_scores_of_two_problems(judge: Judge) -> None:
    """lm-eval#3248: all samples count. [1, 0, 0, 0] and [0, 1, 1, 1]; a third problem that nobody sampled is wrong."""
    prompts = {group: Prompt(Problem(f"p{group}", "?", "1"), [5]) for group in (0, 1)}
    every = judge(
        [response(rf"\boxed{{{a}}}", group=g) for g, answers in enumerate(("1222", "2111")) for a in answers], prompts
    )
    assert sample_scores(every, 4) == {
        "avg@4": [0.25, 0.75],
        "pass@1": [0.25, 0.75],
        "pass@2": [0.5, 1.0],
        "pass@4": [1.0, 1.0],
    }
    assert hits(every, 0.1)["majority"] == [0.0, 1.0]
    assert [values[2] for values in sample_scores([*every, judge.nobody()], 4).values()] == [0.0] * 4


def test_signal_quality_counts_pairs_of_right_and_wrong() -> None:
    """Over all, within problems, and within those that the majority gets wrong; candidates without an answer do not count."""

    def candidates(values: list[float], kinds: str) -> Candidates:
        names = {"r": "right", "w": "wrong", "-": "no answer"}
        classes = [None if kind == "-" else int(kind == "w") for kind in kinds]
        return Candidates([], [Verdict(names[kind], None) for kind in kinds], classes, {"head": values}, {0})

    every = [
        candidates([3.0, 1.0, 9.0], "rw-"),  # 1 of 1 pair
        candidates([0.0, 2.0, 2.0, 5.0], "rrww"),  # 2-2 ties, all others lose: 1/2 of 4 pairs
        candidates([7.0], "w"),
        Candidates(signals={"head": []}),
    ]
    quality = signal_quality(every, [1.0, 0.0, 0.0, 0.0])["head"]
    values = {"r": [3.0, 0.0, 2.0], "w": [1.0, 2.0, 5.0, 7.0]}
    wins = sum((r > w) + (r == w) / 2 for r in values["r"] for w in values["w"])
    assert quality == pytest.approx(
        {"auc": wins / 12, "auc_within": 1.5 / 5, "auc_within_majority_wrong": 0.5 / 4}, abs=1e-12
    )
    nothing = dict.fromkeys(quality, None)
    assert signal_quality([every[2]], [0.0])["head"] == nothing == signal_quality([every[3]], [0.0])["head"]
