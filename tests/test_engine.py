"""The engine against transformers, on real models: the hook sees the right state, pruning drops what
it should and nothing else, and after a sync the engine samples from the trainer's weights.

Codes such as vllm#9744 name the fault that a test guards.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from conftest import DETECT
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

import engine as engine_module
from engine import Decision, Engine, EngineError, NothingScored, Rollout, Sampling, token_confidence
from support import data
from support.args import TINY

TOKENIZER = AutoTokenizer.from_pretrained(TINY)
EOS = TOKENIZER.eos_token_id
PROMPTS = {
    7 * i: TOKENIZER.encode(problem.text + "\n") for i, problem in enumerate(data.sums(12, 3, "test", (6, 10), 15))
}
SAMPLING = Sampling(90, (EOS,))
GREEDY = Sampling(90, (EOS,), temperature=0.0)


class Keep:
    """Keeps the rollouts for which `rule(number in order of arrival)` is true, and records what it was shown."""

    def __init__(self, rule: Callable[[int], bool] = lambda number: True) -> None:
        self.rule, self.shown = rule, []

    def decide(self, states: Tensor, groups: list[int], samples: list[int]) -> list[Decision]:
        decisions = [Decision(self.rule(len(self.shown) + i), score=0.25) for i in range(len(groups))]
        self.shown += groups
        return decisions


@pytest.fixture(scope="module", params=["tied", "tied, asynchronous", "untied"])
def kind(request: pytest.FixtureRequest) -> str:
    """Which model, and whether vLLM schedules a batch while the one before runs, as it does on a GPU."""
    return request.param


@pytest.fixture(scope="module")
def model(kind: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    """The embedded model, which ties lm_head to the embedding, and a random one that does not."""
    if kind != "untied":
        return TINY, AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    folder = tmp_path_factory.mktemp("untied")
    config = Qwen3Config.from_pretrained(TINY, tie_word_embeddings=False)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        untied = Qwen3ForCausalLM(config).float()
        for parameter in untied.parameters():
            if parameter.dim() == 2:
                parameter.data.normal_(0, 0.08)
    untied.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder, untied


@pytest.fixture(scope="module")
def engine(kind: str, model: tuple[Path, PreTrainedModel], make_engine: Callable[..., Engine]) -> Engine:
    return make_engine(model[0], asynchronous="asynchronous" in kind)


@pytest.fixture
def weights(model: tuple[Path, PreTrainedModel], engine: Engine) -> Iterator[PreTrainedModel]:
    """The model, to be changed by a test; afterwards it and the engine are as before."""
    saved = {name: p.detach().clone() for name, p in model[1].named_parameters()}
    yield model[1]
    with torch.no_grad():
        for name, p in model[1].named_parameters():
            p.copy_(saved[name])
    engine.sync(saved.items())


def change(model: PreTrainedModel, scale: float) -> dict[str, Tensor]:
    """Move all weights at random; returns the new ones."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(scale * torch.randn(parameter.shape, generator=generator))
    return {name: p.detach() for name, p in model.named_parameters()}


@torch.no_grad()
def forward(model: PreTrainedModel, rollout: Rollout) -> tuple[Tensor, Tensor]:
    """Final-norm states (T, H) and logits (T, V) of prompt and response."""
    output = model(torch.tensor([PROMPTS[rollout.group] + rollout.token_ids]), output_hidden_states=True)
    return output.hidden_states[-1][0], output.logits[0]


def gap(model: PreTrainedModel, rollouts: list[Rollout], temperature: float = 1.0) -> float:
    """Largest |log-prob in transformers - in the engine| of the sampled tokens."""
    largest = 0.0
    for rollout in rollouts:
        start = len(PROMPTS[rollout.group])
        logprobs = (forward(model, rollout)[1][start - 1 : -1] / temperature).log_softmax(-1)
        of_sampled = logprobs.gather(1, torch.tensor(rollout.token_ids)[:, None])[:, 0]
        largest = max(largest, (of_sampled - torch.tensor(rollout.logprobs)).abs().max().item())
    return largest


def tokens(rollouts: list[Rollout]) -> list[list[int]]:
    return [rollout.token_ids for rollout in rollouts]


def test_captured_states_are_those_of_transformers(engine: Engine, model: tuple[Path, PreTrainedModel]) -> None:
    rollouts = engine.generate(PROMPTS, 4, SAMPLING, seed=1, pruner=Keep(), last_states=True)
    beyond = [r for r in rollouts if len(r.token_ids) > DETECT]
    assert len(beyond) >= 10 and all(r.detect_state is not None for r in beyond)
    for rollout in rollouts:
        hidden, logits = forward(model[1], rollout)
        start = len(PROMPTS[rollout.group])
        torch.testing.assert_close(rollout.last_state, hidden[-2], atol=1e-4, rtol=0)  # it produced the last token
        if rollout.detect_state is not None:
            torch.testing.assert_close(rollout.detect_state, hidden[start + DETECT - 2], atol=1e-4, rtol=0)
            logprobs = model[1].lm_head(rollout.detect_state).log_softmax(-1)
            torch.testing.assert_close(logprobs, logits[start + DETECT - 2].log_softmax(-1), atol=1e-4, rtol=0)
            assert logprobs[rollout.token_ids[DETECT - 1]].item() == pytest.approx(
                rollout.logprobs[DETECT - 1], abs=1e-4
            )
    assert gap(model[1], rollouts) < 1e-4


def test_logprobs_behind_states(engine: Engine, model: tuple[Path, PreTrainedModel]) -> None:
    """Sum and mean up to the token that the state produced, of pruned rollouts too, whose log-probs
    end at L_detect. Tokens and states are those without."""
    bare, rollouts = (
        engine.generate(
            PROMPTS,
            6,
            SAMPLING,
            seed=1,
            pruner=Keep(lambda number: number % 3 > 0),
            last_states=True,
            state_logprobs=wanted,
            logprobs=0,
        )
        for wanted in (False, True)
    )
    assert tokens(bare) == tokens(rollouts) and {r.finish for r in rollouts} >= {"stop", "pruned"}
    lengths = {"detect_state": lambda r: DETECT, "last_state": lambda r: len(r.token_ids)}
    for one, r in zip(bare, rollouts, strict=True):
        assert len(r.logprobs) == len(r.token_ids) and not one.logprobs
        assert (r.last_state is None) == (r.finish == "pruned")
        for name, length in lengths.items():
            state, expected = getattr(r, name), getattr(one, name)
            assert (state is None) == (expected is None)
            if state is not None:
                seen = torch.tensor(r.logprobs[: length(r)], dtype=torch.float64)
                assert state.dtype == torch.float32 and len(state) == len(expected) + 2
                torch.testing.assert_close(state[:-2], expected, atol=1e-4, rtol=0)
                torch.testing.assert_close(state[-2:].double(), torch.stack([seen.sum(), seen.mean()]))
    assert gap(model[1], rollouts) < 1e-4


def test_confidence_is_that_of_transformers_logits(engine: Engine, model: tuple[Path, PreTrainedModel]) -> None:
    """H_t = -sum_j log P_t(j) over the vocabulary, at temperature 1 whatever the sampling's. Pruned
    rollouts have it too, and those that wait for a slot."""
    pruner = Keep(lambda number: number % 3 > 0)
    hot = Sampling(90, (EOS,), temperature=0.7)
    rollouts = engine.generate(PROMPTS, 8, hot, seed=1, pruner=pruner, confidence=True)
    assert len(rollouts) == 96
    assert {r.finish for r in rollouts} >= {"stop", "pruned"}
    for rollout in rollouts:
        start = len(PROMPTS[rollout.group])
        expected = -forward(model[1], rollout)[1][start - 1 : -1].double().log_softmax(-1).sum(-1)
        torch.testing.assert_close(torch.tensor(rollout.confidences).double(), expected, atol=2e-3, rtol=1e-5)
    assert not any(r.confidences for r in engine.generate(PROMPTS, 1, GREEDY, seed=1))


def test_confidence_does_not_change_what_is_sampled(engine: Engine) -> None:
    assert tokens(engine.generate(PROMPTS, 4, SAMPLING, seed=1)) == tokens(
        engine.generate(PROMPTS, 4, SAMPLING, seed=1, confidence=True, last_states=True)
    )


def test_confidences_that_are_missing_are_noticed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Engine._read
    monkeypatch.setattr(Engine, "_read", lambda self, batch, *rest: max(batch.tokens) == 7 or read(self, batch, *rest))
    with pytest.raises(EngineError, match="did not see all tokens"):
        engine.generate(PROMPTS, 2, SAMPLING, seed=1, confidence=True)


def test_a_batch_is_not_read_as_another_one(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """With asynchronous scheduling two batches are under way: their states must not be mixed up."""
    hook = Engine._hook
    monkeypatch.setattr(Engine, "_hook", lambda self, hidden: (hook(self, hidden), self._batches.reverse())[0])
    noticed = pytest.raises(EngineError, match="other tokens than those of the oldest batch")
    with noticed if engine.core.batch_queue is not None else contextlib.nullcontext():
        engine.generate(PROMPTS, 2, SAMPLING, seed=1, pruner=Keep(), last_states=True)


def test_logprobs_of_some_rollouts(engine: Engine) -> None:
    """The first of each group; the others' tokens are the same as with all log-probs."""
    some, all_of_them = (engine.generate(PROMPTS, 4, SAMPLING, seed=1, logprobs=n) for n in (1, None))
    assert tokens(some) == tokens(all_of_them)
    assert [r.logprobs for r in some] == [r.logprobs if r.sample == 0 else [] for r in all_of_them]
    assert not any(r.logprobs for r in engine.generate(PROMPTS, 2, SAMPLING, seed=1, logprobs=0))


def test_rollout_seeds_free_a_rollout_from_its_neighbours(engine: Engine) -> None:
    """The same rollouts whatever else is sampled: other prompts, another order, fewer samples."""
    rollouts = engine.generate(PROMPTS, 4, SAMPLING, seed=3, rollout_seeds=True)
    expected = {(r.group, r.sample): r.token_ids for r in rollouts}
    few = dict(reversed(list(PROMPTS.items())[2:5]))
    for r in engine.generate(few, 2, SAMPLING, seed=3, rollout_seeds=True):
        assert r.token_ids == expected[r.group, r.sample]
    assert len({tuple(ids) for ids in expected.values()}) > len(PROMPTS)
    other = engine.generate(few, 2, SAMPLING, seed=4, rollout_seeds=True)
    assert tokens(other) != [expected[r.group, r.sample] for r in other]


def test_logprobs_are_taken_after_temperature(engine: Engine, model: tuple[Path, PreTrainedModel]) -> None:
    """trl#4159: raw log-probs would make the first ratio about 2 at T = 0.6."""
    warm = Sampling(90, (EOS,), temperature=0.6)
    assert gap(model[1], engine.generate(PROMPTS, 2, warm, seed=1), temperature=0.6) < 1e-4


def test_pruning_changes_nothing_else(engine: Engine) -> None:
    """Greedy decoding: the survivors' tokens are those of a run without pruning, and of one without the hook."""
    plain = engine.generate(PROMPTS, 4, GREEDY, seed=1)
    watched = engine.generate(PROMPTS, 4, GREEDY, seed=1, pruner=Keep())
    pruned = engine.generate(PROMPTS, 4, GREEDY, seed=1, pruner=Keep(lambda number: number % 2 == 0))
    assert [r.token_ids for r in plain] == [r.token_ids for r in watched]
    assert [r.logprobs for r in plain] == [r.logprobs for r in watched]
    assert [r.group for r in pruned] == [group for group in PROMPTS for _ in range(4)]
    dropped = [(a, b) for a, b in zip(plain, pruned) if b.finish == "pruned"]
    assert len(dropped) == sum(r.detect_state is not None for r in watched) // 2 > 0
    assert all(b.token_ids == a.token_ids[:DETECT] and b.score == 0.25 for a, b in dropped)
    assert all(a.token_ids == b.token_ids for a, b in zip(plain, pruned) if b.finish != "pruned")


def test_samples_do_not_depend_on_being_watched(engine: Engine) -> None:
    plain = engine.generate(PROMPTS, 4, SAMPLING, seed=1)
    again = engine.generate(PROMPTS, 4, SAMPLING, seed=1, pruner=Keep())
    other = engine.generate(PROMPTS, 4, SAMPLING, seed=2)
    assert [r.token_ids for r in plain] == [r.token_ids for r in again] != [r.token_ids for r in other]


def test_scored_at_l_detect_and_freed_on_the_next_step(engine: Engine) -> None:
    """SkyRL#1250: 8 of 16 rollouts are dropped at token 12 of 64, so the next step runs 8."""
    rows: list[int] = []
    inner = engine._compute_logits
    engine._compute_logits = lambda hidden: rows.append(len(hidden)) or inner(hidden)
    try:
        endless = Sampling(64, (), temperature=1.0)
        rollouts = engine.generate(
            {1: PROMPTS[0], 2: PROMPTS[7]}, 8, endless, seed=1, pruner=Keep(lambda number: number % 2 == 0)
        )
    finally:
        engine._compute_logits = inner
    assert sorted(len(r.token_ids) for r in rollouts) == [DETECT] * 8 + [64] * 8
    late = engine.core.batch_queue is not None
    assert rows[-64:] == [16] * (DETECT + late) + [8] * (64 - DETECT - late)
    assert sum(r.late for r in rollouts) == 8 * late
    assert engine.engine.get_num_unfinished_requests() == 0 and not engine._live


def test_an_abort_that_does_nothing_is_noticed(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """SkyRL#1250: vLLM ignores ids that it does not know. Neither side of the check may be silent."""
    before, abort = tokens(engine.generate(PROMPTS, 2, SAMPLING, seed=3)), engine.engine.abort_request
    monkeypatch.setattr(
        engine.engine, "abort_request", lambda ids, internal: abort([f"{name}-" for name in ids], internal)
    )
    with pytest.raises(EngineError, match="did not abort a request"):
        engine.generate(PROMPTS, 2, SAMPLING, seed=1, pruner=Keep(lambda number: number > 0))
    monkeypatch.setattr(engine.engine, "get_num_unfinished_requests", lambda: len(engine._live))
    abort(list(engine.engine.output_processor.external_req_ids))
    with pytest.raises(EngineError, match="went on with a rollout that was aborted"):
        engine.generate(PROMPTS, 2, SAMPLING, seed=1, pruner=Keep(lambda number: number > 0))
    monkeypatch.undo()
    abort(list(engine.engine.output_processor.external_req_ids))
    assert tokens(engine.generate(PROMPTS, 2, SAMPLING, seed=3)) == before


def test_waiting_rollouts_take_the_slots_of_pruned_ones(engine: Engine) -> None:
    """128 rollouts on 64 slots: the second half is scored too, and every one comes back in order."""
    keep = Keep(lambda number: False)
    rollouts = engine.generate(PROMPTS, 12, Sampling(40, ()), seed=1, pruner=keep)
    assert len(rollouts) == 144 and all(r.finish == "pruned" and len(r.token_ids) == DETECT for r in rollouts)
    assert sorted(keep.shown) == sorted(group for group in PROMPTS for _ in range(12))


def test_stop_and_length(engine: Engine) -> None:
    """trl#7039: each of several stop ids ends a response, stays in it, and counts as a stop; the
    limit counts as length."""
    stops = tuple(range(64))
    assert all(
        len(r.token_ids) == 1 and r.finish == "stop" for r in engine.generate(PROMPTS, 1, Sampling(90, stops), seed=1)
    )
    assert all(
        len(r.token_ids) == 5 and r.finish == "length" for r in engine.generate(PROMPTS, 1, Sampling(5, ()), seed=1)
    )


def test_prompts_at_the_limit(engine: Engine) -> None:
    """vllm#16445: a prompt of max_model_len tokens; one token less leaves room for one."""
    rng = random.Random(0)
    prompt = [rng.randrange(4, 20) for _ in range(128)]
    assert [len(r.token_ids) for r in engine.generate({0: prompt[:127]}, 1, SAMPLING, seed=1)] == [1]
    with pytest.raises(ValueError, match="128 tokens leaves no room"):
        engine.generate({0: prompt}, 1, SAMPLING, seed=1)


def test_an_interrupted_generation_leaves_no_trace(engine: Engine) -> None:
    """vllm#10583: ids of the interrupted requests must not come back in the next call."""

    def interrupt(number: int) -> bool:
        raise KeyboardInterrupt

    before = engine.generate(PROMPTS, 2, SAMPLING, seed=3)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, 4, SAMPLING, seed=1, pruner=Keep(interrupt))
    after = engine.generate(PROMPTS, 2, SAMPLING, seed=3)
    assert [r.token_ids for r in before] == [r.token_ids for r in after]


def test_an_interrupt_while_rollouts_are_queued_leaves_no_trace(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C after vLLM has taken a request and before its name is known here."""
    before, add, taken = tokens(engine.generate(PROMPTS, 2, SAMPLING, seed=3)), engine.engine.add_request, []

    def interrupted(*arguments: object) -> str:
        taken.append(add(*arguments))
        if len(taken) == 3:
            raise KeyboardInterrupt
        return taken[-1]

    monkeypatch.setattr(engine.engine, "add_request", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, 2, SAMPLING, seed=1)
    monkeypatch.undo()
    assert engine.engine.get_num_unfinished_requests() == 0
    assert tokens(engine.generate(PROMPTS, 2, SAMPLING, seed=3)) == before


def test_an_error_inside_vllm_is_told_and_forgotten(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """With asynchronous scheduling vLLM launches another batch, which fails otherwise, before it tells."""
    before, sample, calls = tokens(engine.generate(PROMPTS, 2, SAMPLING, seed=3)), engine.runner._sample, []

    def fail(*arguments: object) -> object:
        calls.append(arguments)
        if len(calls) == 20:
            raise MemoryError("no room for the logits")
        return sample(*arguments)

    monkeypatch.setattr(engine.runner, "_sample", fail)
    with pytest.raises(EngineError, match="MemoryError: no room for the logits"):
        engine.generate(PROMPTS, 2, SAMPLING, seed=1)
    monkeypatch.undo()
    assert tokens(engine.generate(PROMPTS, 2, SAMPLING, seed=3)) == before


def test_raises_when_the_hook_is_dead(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vLLM that no longer calls the hook must not train in silence."""
    monkeypatch.setattr(Engine, "_hook", lambda self, hidden: self._compute_logits(hidden))
    with pytest.raises(NothingScored, match="24 rollouts passed L_detect unseen"):
        engine.generate(PROMPTS, 2, Sampling(40, ()), seed=1, pruner=Keep())


def fail_on_rank_1(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    engine_module._stop_together(None)
    try:
        engine_module._stop_together(MemoryError("KV cache") if rank == 1 else None)
    except EngineError as error:
        Path(folder, f"rank-{rank}").write_text(str(error))
    dist.destroy_process_group()


def test_a_failure_on_one_rank_stops_all(tmp_path: Path) -> None:
    """Else the other ranks would wait for the failed one."""
    torch.multiprocessing.spawn(fail_on_rank_1, (str(tmp_path),), nprocs=2)
    said = [(tmp_path / f"rank-{rank}").read_text() for rank in (0, 1)]
    assert said == ["generation failed: on another rank", "generation failed: MemoryError: KV cache"]


def test_the_engine_samples_from_synced_weights(engine: Engine, weights: PreTrainedModel) -> None:
    engine.sync(change(weights, 0.02).items())
    assert gap(weights, engine.generate(PROMPTS, 4, SAMPLING, seed=1)) < 1e-4


def test_a_stale_packed_head_shows_in_the_gap(
    engine: Engine, weights: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fault that the gap exists for: without the refresh a tied model samples from a mixture of
    old and new weights."""
    monkeypatch.setattr(engine, "_packed", [])
    engine.sync(change(weights, 0.02).items())
    measured = gap(weights, engine.generate(PROMPTS, 4, SAMPLING, seed=1))
    assert measured > 0.05 if weights.config.tie_word_embeddings else measured < 1e-4


def test_generation_config_of_the_model_is_ignored(make_engine: Callable[..., Engine], tmp_path: Path) -> None:
    """NeMo-RL#3497: a checkpoint's repetition_penalty must not reach the samples.

    From here on the tests replace the shared engine.
    """
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    model.generation_config.repetition_penalty, model.generation_config.do_sample = 1.3, True
    model.save_pretrained(tmp_path)
    assert gap(model, make_engine(tmp_path).generate(PROMPTS, 2, SAMPLING, seed=1)) < 1e-4


@pytest.fixture(scope="module", params=[False, True], ids=["", "asynchronous"])
def small_cache(request: pytest.FixtureRequest, make_engine: Callable[..., Engine]) -> Engine:
    """Rollouts of several cache blocks (128 tokens each on a CPU), of which there are 16."""
    return make_engine(asynchronous=request.param, max_model_len=384, kv_cache_gb=0.004)


@pytest.mark.parametrize("emptied", [True, False])
def test_a_sync_empties_the_prefix_cache(small_cache: Engine, emptied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm#9744: blocks cached under the old weights must not be read. If they are, the gap shows it."""
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    monkeypatch.setitem(PROMPTS, 0, [token for ids in PROMPTS.values() for token in ids][:300])
    prompt = {0: PROMPTS[0]}
    small_cache.generate(prompt, 1, Sampling(8, ()), seed=1)
    with monkeypatch.context() as patch:
        if not emptied:
            patch.setattr(small_cache.engine, "reset_prefix_cache", lambda: True)
        small_cache.sync(change(model, 0.02).items())
    measured = gap(model, small_cache.generate(prompt, 1, Sampling(8, ()), seed=1))
    assert measured < 1e-4 if emptied else measured > 0.01
    small_cache.sync(start.items())


def test_preempted_rollouts_are_seen_once_per_token(small_cache: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the cache is full, vLLM gives a rollout's blocks to others and computes them again later."""
    scheduler, preempted = small_cache.engine.engine_core.engine_core.scheduler, []
    preempt = scheduler._preempt_request
    monkeypatch.setattr(
        scheduler, "_preempt_request", lambda *args, **options: preempted.append(args) or preempt(*args, **options)
    )
    prompts = dict(list(PROMPTS.items())[:4])
    pruner = Keep(lambda number: number % 4 > 0)
    rollouts = small_cache.generate(
        prompts, 5, Sampling(250, ()), seed=1, pruner=pruner, last_states=True, confidence=True
    )
    assert preempted and {r.finish for r in rollouts} == {"length", "pruned"}
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    for rollout in rollouts:
        hidden, logits = forward(model, rollout)
        start = len(PROMPTS[rollout.group])
        expected = -logits[start - 1 : -1].double().log_softmax(-1).sum(-1)
        torch.testing.assert_close(torch.tensor(rollout.confidences).double(), expected, atol=2e-3, rtol=1e-5)
        torch.testing.assert_close(rollout.detect_state, hidden[start + DETECT - 2], atol=1e-4, rtol=0)
        if rollout.finish == "length":
            torch.testing.assert_close(rollout.last_state, hidden[-2], atol=1e-4, rtol=0)


def test_token_confidence_by_hand() -> None:
    """Four equal tokens give 4 log 4; a peak leaves the others a tiny probability and gives more (Sec. 3)."""
    found = token_confidence(torch.tensor([[0.0, 0.0, 0.0, 0.0], [9.0, 0.0, 0.0, 0.0]]))
    torch.testing.assert_close(found, torch.tensor([4 * math.log(4), 27.0015]), atol=1e-4, rtol=0)


def test_asynchronous_scheduling_changes_nothing(make_engine: Callable[..., Engine]) -> None:
    """With a generator for each rollout: tokens and decisions are the same; log-probs, H_t and states
    too, but for the rounding of other batch sizes. What is dropped has cost one token more."""
    pruner, found = Keep(lambda number: number % 3 > 0), []
    for asynchronous in (False, True):
        engine = make_engine(asynchronous=asynchronous, max_num_seqs=16)
        arguments = dict(rollout_seeds=True, last_states=True, state_logprobs=True, confidence=True)
        found.append(engine.generate(PROMPTS, 6, SAMPLING, seed=3, pruner=pruner, **arguments))
        pruner.shown.clear()
    for synchronous, r in zip(*found, strict=True):
        assert (r.token_ids, r.finish) == (synchronous.token_ids, synchronous.finish)
        assert r.late == (r.finish == "pruned") and synchronous.late == 0
        for name in ("logprobs", "confidences", "detect_state", "last_state"):
            value, expected = getattr(r, name), getattr(synchronous, name)
            assert (value is None) == (expected is None)
            if value is not None:
                torch.testing.assert_close(torch.as_tensor(value), torch.as_tensor(expected), atol=1e-4, rtol=1e-5)
    assert {r.finish for r in found[0]} >= {"stop", "pruned"}
