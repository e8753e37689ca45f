"""`tts.py` as a program, on the embedded model: what it leaves, early stop, judged candidates."""

from __future__ import annotations

import contextlib
import copy
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
from bench import voting
from bench.head_states import signal_quality
from bench.tables import estimates
from calibration import Calibrator, bin_index
from engine import Rollout
from quality_head import QualityHead
from support import data, test_time
from support.args import TINY, parse, parse_tts
from support.checkpoint import save_head
from support.data import Problem, Prompt
from support.evaluation import evaluate
from support.grader import Grader
from support.test_time import Candidates, KeepBetter, Sampler, accuracies

L_DETECT, N, TOO_LONG = 10, 4, 5  # the embedded model's L_detect; candidates; the place of the problem that is too long
MAIN = ("--early-stop", "--max-num-seqs", "7")
LONG = "+".join(["15"] * 30) + "=?"
RULES = [rule.name for rule in tts.RULES]
TOKENIZER = AutoTokenizer.from_pretrained(TINY)


class FirstNumber(QualityHead):
    """A head whose logit is the first number of the state: a test can say what it thinks."""

    def forward(self, states: Tensor) -> Tensor:
        return states[:, 0].float()


@dataclass
class Files:
    head: Path
    rows: list[dict[str, str]]
    data: Path

    def flags(self, output: Path, *more: str) -> list[str]:
        plan = ["--head", str(self.head), "--data", str(self.data), "--n", str(N)]
        return [*plan, "--output", str(output), *more]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """An untrained head with a calibration; 12 sums, and a problem of more than 64 tokens."""
    folder = tmp_path_factory.mktemp("files")
    calibrator, generator = Calibrator(bins=64), torch.Generator().manual_seed(0)
    scores = torch.rand(4000, generator=generator)
    calibrator.label(scores, (torch.rand(4000, generator=generator) < scores).float())
    save_head(folder / "head.safetensors", QualityHead(128, 32, seed=3), calibrator, calibrator, L_DETECT)
    rows = [{"problem": p.text, "answer": p.answer} for p in data.sums(12, 5, "test", (3, 5), 15)]
    rows.insert(TOO_LONG - 1, {"problem": LONG, "answer": "450"})
    (folder / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Files(folder / "head.safetensors", rows, folder / "mine.jsonl")


@pytest.fixture(scope="module")
def program(files: Files, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The program, once, few candidates at a time; its folder and what it printed."""
    folder = tmp_path_factory.mktemp("program") / "out"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert test_time.main(parse_tts(files.flags(folder, *MAIN))) == 0
    return folder, printed.getvalue()


@pytest.fixture(scope="module")
def sampler(program: tuple[Path, str], files: Files, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sampler]:
    """An engine for all other tests; the program's own is down by then."""
    args = parse_tts(files.flags(tmp_path_factory.mktemp("shared"), "--max-num-seqs", "64"))
    with Sampler(args).running() as running:
        yield running


def run(sampler: Sampler, **changes: object) -> dict:
    """The program's scores with other flags, by the same engine."""
    other = copy.copy(sampler)
    other.args = replace(sampler.args, **changes)
    other.sampling = replace(sampler.sampling, temperature=other.args.temperature)
    return test_time.run(other)


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "candidates.jsonl").read_text("utf-8").split("\n") if line]


def majority(rows: list[dict]) -> bool:
    """Whether the most frequent answer, of several the first, is right."""
    counts = Counter(row["answer"] for row in rows if row["answer"] is not None)
    winner = max(counts, key=counts.__getitem__, default=None)
    return any(row["answer"] == winner and row["verdict"] == "right" for row in rows)


# ------------------------------------------------------------------ the program


def test_the_scores_are_those_of_the_candidates(program: tuple[Path, str], files: Files) -> None:
    """avg@n and maj@n recomputed from candidates.jsonl, over all problems, the long one too."""
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
    assert list(scores["votes"]) == [*RULES, "oracle"]
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
            assert list(row["weights"]) == RULES and set(row["signals"]) == set(tts.SIGNALS)
            score, n = row["signals"]["head"], len(voters)
            below, tied = sum(other < score for other in voters), sum(other == score for other in voters)
            rank = 1.0 if len(set(voters)) < 2 else (below + (tied - 1) / 2) / (n - 1)
            assert row["weights"]["ARRoL"] == pytest.approx(rank if row["answer"] is not None else 0.0)
            assert row["weights"]["majority"] == (row["answer"] is not None)
        assert sum(row["weights"]["DeepConf, tail, top 10%"] > 0 for row in group) >= 1


def test_the_curve_ends_at_the_table_and_starts_at_one_candidate(program: tuple[Path, str]) -> None:
    """With one candidate each rule names its answer; with all it is the row of the table."""
    scores = json.loads((program[0] / "scores.json").read_text("utf-8"))
    curve = scores["curve"]
    assert curve.pop("sizes") == [1, 2, 4] and set(curve) == {*RULES, "oracle"}
    assert scores["votes"]["oracle"] == scores["samples"]["pass@4"]
    for name, values in curve.items():
        assert values[0] == pytest.approx(scores["samples"]["pass@1"]["value"])
        assert values[-1] == pytest.approx(scores["votes"][name]["value"])
    assert (program[0] / "votes.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_the_table_of_votes_with_and_without_log_odds(program: tuple[Path, str]) -> None:
    """Gains at 2 and 4 candidates are those of the curve. An older head has a dash for log-odds."""
    scores = json.loads((program[0] / "scores.json").read_text("utf-8"))
    found, curve = voting.votes([scores]), scores["curve"]
    for rule in ("ARRoL", "ARRoL, probability", "ARRoL, log-odds", "log-prob"):
        gains = [value - least for value, least in zip(curve[rule], curve["majority"], strict=True)]
        assert [found[f"{rule} − majority, of {k}"] for k in (2, 4)] == pytest.approx(gains[1:])
        assert found[f"{rule} − majority"] == pytest.approx(gains[-1])
    for key in ("votes", "curve"):
        del scores[key]["ARRoL, log-odds"]
    older = voting.votes([scores])
    assert older == {key: value for key, value in found.items() if "log-odds" not in key}
    both = {"new": estimates([found]), "older": estimates([older])}
    for table, dashes in ((voting.table(both, N), [2]), (voting.table_of_few(both), [1, 1])):
        lines = table.splitlines()
        assert len({line.count("|") for line in lines}) == 1
        assert [line.count("–") for line in lines if "| older |" in line] == dashes
        assert not any("–" in line for line in lines if "| older |" not in line)


def test_what_is_printed(program: tuple[Path, str]) -> None:
    """A row for each score and rule, and what early stop costs and saves, over 13 problems."""
    folder, printed = program
    scores = json.loads((folder / "scores.json").read_text("utf-8"))
    table = {line[:34].rstrip(): line[34:].split() for line in printed.splitlines()}
    stopped = scores["early_stop"]
    assert table["stopped early: tokens saved"] == [f"{stopped.pop('tokens saved'):.1%}"]
    assert list(stopped) == ["majority", "majority, change", "ARRoL", "ARRoL, change"]
    for rule in ("majority", "ARRoL"):
        accuracy, change = stopped[rule]["value"], stopped[f"{rule}, change"]["value"]
        assert change == pytest.approx(accuracy - scores["votes"][rule]["value"])
        assert 13 * accuracy == pytest.approx(round(13 * accuracy))
    named = {"majority": "maj@4", "oracle": "oracle (pass@4)"}
    expected = scores["samples"] | {named.get(name, name): score for name, score in scores["votes"].items()}
    expected |= {f"stopped early: {name}": score for name, score in stopped.items()}
    for name, score in expected.items():
        value, low, _, high = table[name]
        assert (value, low, high) == tuple(f"{score[key]:.3f}" for key in ("value", "low", "high"))
    assert "1 prompts too long (they count as wrong)" in printed and scores["set"]["digest"] in printed


def test_the_same_seed_gives_the_same_bytes(sampler: Sampler, program: tuple[Path, str], tmp_path: Path) -> None:
    """However many are sampled at once: each has a seed of its own. Another seed gives others."""
    first, again = (run(sampler, output=str(tmp_path / name)) for name in ("first", "again"))
    written = [(tmp_path / name / "candidates.jsonl").read_bytes() for name in ("first", "again")]
    assert written[0] == written[1]
    assert first | {"settings": None} == again | {"settings": None}
    columns = ("problem", "candidate", "tokens", "finish", "answer", "class", "verdict")
    here, there = ([[row[c] for c in columns] for row in lines(f)] for f in (tmp_path / "first", program[0]))
    assert here == there
    run(sampler, output=str(tmp_path / "other"), seed=1)
    assert [[row[c] for c in columns] for row in lines(tmp_path / "other")] != here


def test_one_greedy_candidate(sampler: Sampler, tmp_path: Path) -> None:
    """The same number as the greedy score of the evaluation in training."""
    results = run(sampler, n=1, temperature=0.0, output=str(tmp_path / "out"))
    sets, args = [sampler.benchmark], parse(["--eval-n", "1"])
    evaluated = evaluate(sampler.engine, sets, TOKENIZER, sampler.grader, sampler.sampling, args)
    value = results["samples"]["avg@1"]["value"]
    assert value == pytest.approx(evaluated["eval/mine/greedy"]) and 0 < value <= 12 / 13
    assert all(score["value"] == pytest.approx(value) for score in results["votes"].values())
    assert "maj@1" in test_time.show(results)


def test_what_is_done_is_on_disk_before_more_is_sampled(
    sampler: Sampler,
    files: Files,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Ctrl-C while candidates are sampled again: no traceback, and the scores of all are there."""

    class Interrupted(Sampler):
        def running(self) -> contextlib.AbstractContextManager[Sampler]:
            self.engine, self.grader = sampler.engine, sampler.grader
            return contextlib.nullcontext(self)

        def sample(self, samples: int, **options: object) -> list[Rollout]:
            if "pruner" in options:
                raise KeyboardInterrupt
            return super().sample(samples, **options)

    folder = tmp_path / "out"
    monkeypatch.setattr(test_time, "Sampler", Interrupted)
    assert test_time.main(parse_tts(files.flags(folder, "--early-stop"))) == 130
    assert capsys.readouterr().err == f"\nstopped; what was done is in {folder}\n"
    scores = json.loads((folder / "scores.json").read_text("utf-8"))
    assert len(lines(folder)) == 12 * N and list(scores["votes"]) == [*RULES, "oracle"] and "early_stop" not in scores
    assert (folder / "votes.png").is_file()


# ------------------------------------------------------------------ flags


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--n 4 --temperature 0", "--temperature 0.0: greedy samples are all alike: use --n 1, or a temperature"),
        ("--n 0", "--n 0: must be in [1, inf)"),
        ("--temperature 2.1", "--temperature 2.1: must be in [0, 2]"),
        ("--seed -1", "--seed -1: must be in [0, 4294967295]"),
        ("--early-stop --head=", "--early-stop True: a quality head stops"),
        ("--early-stop --detect-length 256", "--detect-length 256: must be below --max-length 256"),
        ("--data nothing", "--data nothing: neither a known set nor a file nor sums"),
        ("--data nothing.jsonl", "--data nothing.jsonl: No such file"),
        ("--trained-on nothing.jsonl", "--trained-on nothing.jsonl: No such file"),
        ("--head nothing", "--head nothing: there is no such file"),
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
    """T = 0 with several candidates (lighteval#559) is one candidate n times, for any vote."""
    (tmp_path / "done").mkdir()
    (tmp_path / "done" / "scores.json").write_text("{}")
    (tmp_path / "note.txt").write_text("no head")
    windows = Calibrator(bins=4), Calibrator(bins=4)
    save_head(tmp_path / "other.safetensors", QualityHead(64, 8), *windows, L_DETECT)
    save_head(tmp_path / "late.safetensors", QualityHead(128, 8), *windows, 99)
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        test_time.main(parse_tts(flags.format(here=tmp_path, tiny=TINY).split()))
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
    assert (args.max_length, args.detect_length, args.seed, args.n) == (300, 7, 0, 8)
    assert parse_tts(["--model", str(checkpoint), "--head", ""]).head == ""


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
    """Exactly kappa n of each group, of the highest posterior, though one group is all better."""
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
    """2 above, 4 of one bin, 2 below, kappa = 1/2: both above, and 2 of the 4, each as often."""
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


def test_candidates_that_the_head_stops_are_cut_and_the_others_unchanged(sampler: Sampler) -> None:
    full_rollouts = sampler.sample(N)
    rollouts = sampler.sample(N, pruner=KeepBetter(sampler.head, sampler.table, 0.5, 0))
    stopped = sampler.judge(rollouts)
    assert sampler.table.shape == (64,) and len(rollouts) == len(full_rollouts) == 12 * N
    scored: dict[int, list[Rollout]] = {}
    for full, short in zip(full_rollouts, rollouts, strict=True):
        assert short.group == full.group
        if short.finish == "pruned":
            assert short.token_ids == full.token_ids[:L_DETECT] and len(full.token_ids) > L_DETECT
        else:
            assert (short.token_ids, short.finish) == (full.token_ids, full.finish)
        assert (short.detect_state is None) == (len(full.token_ids) <= L_DETECT)
        if short.detect_state is not None:
            score = sampler.head(short.detect_state[None]).sigmoid()
            assert short.posterior == pytest.approx(sampler.table[bin_index(score, 64)].item())
            scored.setdefault(short.group, []).append(short)
    for group in scored.values():
        kept, dropped = ([r.posterior for r in group if (r.finish == "pruned") is gone] for gone in (False, True))
        assert abs(len(kept) - 0.5 * len(group)) <= 0.5 and (not dropped or min(kept, default=1.0) >= max(dropped))
    assert sum(r.finish == "pruned" for r in rollouts) >= 15
    assert len(stopped) == 13 and not stopped[-1].rollouts
    for group, candidates in enumerate(stopped[:-1]):
        assert candidates.rollouts == [r for r in rollouts if r.group == group and r.finish != "pruned"]
        assert len(candidates.classes) == len(candidates.signals["head"]) == len(candidates.rollouts)


# ------------------------------------------------------------------ judged candidates


def response(text: str, score: float = 0.0, group: int = 0, finish: str = "stop") -> Rollout:
    ids = TOKENIZER.encode(text) + [TOKENIZER.eos_token_id]
    state = None if finish == "pruned" else torch.full((8,), score)
    logprobs, confidences = [-0.5] * len(ids), np.full(len(ids), 300.0)
    return Rollout(group, token_ids=ids, logprobs=logprobs, finish=finish, last_state=state, confidences=confidences)


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sampler]:
    """A sampler that cannot sample, for problems that each test brings along."""
    judge = Sampler(parse_tts(["--output", str(tmp_path_factory.mktemp("judge") / "out"), "--head", ""]))
    with Grader(timeout=20.0) as judge.grader:
        judge.head, judge.too_long = FirstNumber(8, 2), 0
        judge.finished = torch.tensor([0.1, 0.2, 0.6, 0.9], dtype=torch.float64)
        yield judge


def prompts(*golds: str) -> dict[int, Prompt]:
    return {group: Prompt(Problem(f"p{group}", "?", gold), [5]) for group, gold in enumerate(golds)}


def test_equivalent_answers_are_one_class_and_pruned_candidates_none(judge: Sampler) -> None:
    """deepconf#15: 1/2 and 0.5 vote together; neither no answer nor a pruned one votes."""
    texts = [r"1+1=\boxed{2}", r"\boxed{1/2}", "0.5", r"\boxed{0.5}", r"\boxed{2/4}"]
    rollouts = [response(text, score, group=1) for score, text in enumerate(texts)]
    rollouts.insert(2, response(r"\boxed{2}", group=1, finish="pruned"))
    judge.prompts = prompts("2", "0.5")
    unanswered, found = judge.judge(rollouts)
    assert found.classes == [0, 1, None, 1, 1] and found.right == {1} and found.count_right == 3
    assert [r.verdict for r in found.rollouts] == ["wrong", "right", "no answer", "right", "right"]
    assert found.signals["head"] == [0.0, 1.0, 2.0, 3.0, 4.0]
    # sigmoid(1) = 0.73 is in the third quarter, sigmoid(2) = 0.88 in the last
    assert found.signals["posterior"] == [0.6, 0.6, 0.9, 0.9, 0.9]
    won = tts.winners(found.classes, found.signals)
    assert won["majority"] == won["best of n, head"] == 1
    assert unanswered == Candidates([], [], dict.fromkeys(tts.SIGNALS, []), set(), 0)
    scores = accuracies([unanswered, found], 5, 0)
    assert list(scores) == [*RULES, "oracle"] and all(values == [0.0, 1.0] for values in scores.values())


def test_a_head_whose_file_counts_no_finished_answers_has_no_log_odds(judge: Sampler, tmp_path: Path) -> None:
    """The embedded model's own is one, and votes by all other rules."""
    older = Sampler(parse_tts(["--output", str(tmp_path / "out")]))
    older.grader, older.prompts, older.too_long = judge.grader, prompts("2"), 0
    rollouts = [response(r"\boxed{2}"), response(r"\boxed{3}")]
    for r in rollouts:
        r.last_state = torch.ones(128)
    (found,) = older.judge(rollouts)
    assert older.table is not None and set(found.signals) == set(tts.SIGNALS) - {"posterior"}
    assert list(tts.winners(found.classes, found.signals)) == [rule for rule in RULES if rule != "ARRoL, log-odds"]


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_score_that_is_not_finite_ranks_lowest_and_ends_nothing(judge: Sampler, odd: float) -> None:
    """All has been sampled by then. Where no score is a number, the head votes as the majority."""
    judge.prompts = prompts("2")
    texts = [r"\boxed{1}", r"\boxed{2}", r"\boxed{3}"]
    (found,) = judge.judge([response(text, score) for text, score in zip(texts, (odd, 0.5, -0.5))])
    assert found.signals["head"] == [-0.5, 0.5, -0.5]
    won = tts.winners(found.classes, found.signals)
    assert won["ARRoL"] == won["best of n, head"] == 1
    (found,) = judge.judge([response(text, odd) for text in (texts[1], texts[0], texts[0])])
    assert found.signals["head"] == [0.0] * 3
    won = tts.winners(found.classes, found.signals)
    assert won["ARRoL"] == won["majority"] == 1 and found.right == {0}


def test_scores_of_three_problems(judge: Sampler) -> None:
    """lm-eval#3248: all samples count. Verdicts 1000 and 0111; a third has no candidates: wrong."""
    judge.prompts = prompts("1", "1", "1")
    answers = [(group, answer) for group, row in enumerate(("1222", "2111")) for answer in row]
    problems = judge.judge([response(rf"\boxed{{{answer}}}", group=group) for group, answer in answers])
    assert [one.count_right for one in problems] == [1, 3, 0]
    oracle = {k: accuracies(problems, k, 0)["oracle"] for k in (1, 2, 4)}
    assert oracle == {1: [0.25, 0.75, 0.0], 2: [0.5, 1.0, 0.0], 4: [1.0, 1.0, 0.0]}
    assert accuracies(problems, 4, 0)["majority"] == [0.0, 1.0, 0.0]
    assert accuracies(problems, 1, 0)["majority"] == oracle[1]


def test_signal_quality_counts_pairs_of_right_and_wrong() -> None:
    """Over all, and within problems; candidates without an answer do not count."""

    def candidates(values: list[float], kinds: str) -> Candidates:
        names = {"r": "right", "w": "wrong", "-": "no answer"}
        rollouts = [Rollout(0) for _ in kinds]
        for rollout, kind in zip(rollouts, kinds):
            rollout.verdict = names[kind]
        classes = [None if kind == "-" else int(kind == "w") for kind in kinds]
        return Candidates(rollouts, classes, {"head": values}, {0}, kinds.count("r"))

    problems = [
        candidates([3.0, 1.0, 9.0], "rw-"),  # 1 of 1 pair
        candidates([0.0, 2.0, 2.0, 5.0], "rrww"),  # 2-2 ties, all others lose: 1/2 of 4 pairs
        candidates([7.0], "w"),
        candidates([], ""),
    ]
    quality = signal_quality(problems)["head"]
    values = {"r": [3.0, 0.0, 2.0], "w": [1.0, 2.0, 5.0, 7.0]}
    wins = sum((r > w) + (r == w) / 2 for r in values["r"] for w in values["w"])
    assert quality == pytest.approx({"auc": wins / 12, "auc_within": 1.5 / 5}, abs=1e-12)
    nothing = dict.fromkeys(quality, None)
    assert signal_quality([problems[2]])["head"] == nothing == signal_quality([problems[3]])["head"]
