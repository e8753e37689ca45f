"""vLLM, one step at a time: score a rollout when it reaches L_detect, and prune it there.

The engine lives in this process, so that one forward pass yields the next token and the state that
the quality head reads (Algorithm 1, line 18). How it departs from `LLM.generate`:
1. `model.compute_logits` is wrapped. It is given exactly the final-norm states of the rows about
   to be sampled, outside CUDA graphs: nothing is computed twice.
2. A rollout is scored on the step that delivers its L_detect-th token, from the state that produced
   that token (position `prompt_len + L_detect - 2`), and aborted before the next step if dropped.
   With asynchronous scheduling one more batch has been launched by then: it costs a late token.
3. Token confidence H_t, if asked for, is computed from the logits of the same step.
4. New weights are loaded in place, and the prefix cache is emptied: it hashes tokens, not weights.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import NamedTuple, Protocol

# Read by vLLM when it is imported. In-process: the hook needs the model, and on a CPU it starts 8
# times faster. The hook knows the row order of the V1 model runner only.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion


@dataclass
class Rollout:
    """One sampled response. States are (hidden,), or with `state_logprobs` (hidden + 2,), fp32 on the CPU."""

    group: int  # key of its prompt in the mapping given to Engine.generate
    sample: int = 0  # its number within the group
    token_ids: Sequence[int] = field(default_factory=list)  # if another rank's: a range as long
    logprobs: list[float] = field(default_factory=list)  # of token_ids, after temperature, if asked for
    finish: str = ""  # "stop", "length" or "pruned"
    late: int = 0  # tokens sampled before the decision to prune it came, and thrown away
    detect_state: Tensor | None = None  # that produced token L_detect, if the rollout went on
    last_state: Tensor | None = None  # that produced the last token, if asked for; not if pruned
    score: float | None = None  # s' in [0, 1], if it was scored
    posterior: float | None = None  # q
    survival: float | None = None  # p
    confidences: array = field(default_factory=lambda: array("d"))  # H_t of each token, if asked for
    # The engine leaves these to whoever grades.
    verdict: str | None = None  # "right", "wrong", "no answer", "timeout", "bad gold"; None: pruned
    answer: str | None = None  # extracted from the text
    reward: float | None = None  # 1.0 right, 0.0 wrong or no answer, None otherwise: no label
    advantage: float | None = None  # if it was trained on
    tail: str = ""  # the last 200 characters of the text, for logs


class Decision(NamedTuple):
    """What a pruner decides on one rollout. Fields that it does not know stay None."""

    keep: bool
    score: float | None = None
    posterior: float | None = None
    survival: float | None = None


class PruneHook(Protocol):
    """All that the engine knows of a pruning method."""

    def decide(self, states: Tensor, groups: list[int], samples: list[int]) -> list[Decision]:
        """Decide on N rollouts that just reached L_detect; `states` (N, hidden or hidden + 2) as in `Rollout`.

        Rows are ordered by group, as the prompts were given, then by sample.
        """


@dataclass(frozen=True)
class Sampling:
    """All other settings are neutral: nothing comes from the model's generation_config."""

    max_tokens: int
    stop_token_ids: tuple[int, ...]
    temperature: float = 1.0
    top_p: float = 1.0


class Batch(NamedTuple):
    """What the hook notes of one forward pass."""

    rows: dict[str, int]  # request -> row
    tokens: np.ndarray  # (rows,) number of the token that is sampled, from 1; 0: still in prefill
    states: Tensor  # (rows, hidden) that it is sampled from, on the device
    confidences: Tensor | None  # (rows,) H_t, if asked for

    def states_of(self, rollouts: Mapping[str, Rollout], logprobs: bool) -> Tensor:
        """States, fp32 on the CPU, that produced the newest tokens: (N, hidden), or with log-probs (N, hidden + 2)."""
        rows = [self.rows[request] for request in rollouts]
        lengths = [len(r.token_ids) for r in rollouts.values()]
        if self.tokens[rows].tolist() != lengths:
            raise RuntimeError("vLLM handed out other tokens than those of the oldest batch")
        states = self.states[torch.tensor(rows, device=self.states.device)].float().cpu()
        if not logprobs:
            return states
        sums = torch.tensor([sum(r.logprobs) for r in rollouts.values()])
        return torch.column_stack([states, sums, sums / torch.tensor(lengths)])


class EngineError(RuntimeError):
    """Generation failed, on this rank or on another."""


class NothingScored(RuntimeError):
    """Pruning is on, but rollouts were not scored."""


def token_confidence(logits: Tensor) -> Tensor:
    """H_t = -sum_j log P_t(j) = V (logsumexp - mean of the logits), over the vocabulary (Sec. 3).

    `logits` (N, V), before temperature; returns (N,) fp32. The surer the model, the larger.
    """
    logits = logits.float()
    return logits.shape[-1] * (logits.logsumexp(-1) - logits.mean(-1))


class Engine:
    """An in-process vLLM engine with a hook at L_detect.

    model: a folder or a hub id. detect_length: L_detect, in tokens.
    max_model_len: of prompt and response together, in tokens. max_num_seqs: rollouts in flight.
    tensor_parallel: how many successive ranks drive this engine in lockstep.
    gpu_memory_utilization: share of the GPU for weights and KV cache, which `sleep` gives back.
    kv_cache_gb: size of the KV cache on a CPU.
    vocabulary: ids from this one on are never sampled: rows of a padded vocabulary, without a text.
    async_scheduling: let vLLM prepare a batch while the GPU runs the one before. Never on a CPU.
    """

    def __init__(
        self,
        model: str,
        detect_length: int,
        max_model_len: int,
        max_num_seqs: int = 256,
        *,
        dtype: torch.dtype,
        tensor_parallel: int = 1,
        gpu_memory_utilization: float = 0.5,
        kv_cache_gb: float = 1.0,
        vocabulary: int | None = None,
        async_scheduling: bool = True,
        verbose: bool = False,
    ) -> None:
        self.detect_length, self.max_model_len = detect_length, max_model_len
        self._shapes, constructors = _describe(model)
        self.on_gpu = torch.cuda.is_available()
        _prepare_environment(self.on_gpu, verbose)
        import vllm
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        both = dict(skip_tokenizer_init=True, generation_config="vllm", logprobs_mode="processed_logprobs")
        both |= dict(enable_prefix_caching=True, async_scheduling=async_scheduling, disable_log_stats=True)
        sizes = dict(max_model_len=max_model_len, max_num_seqs=max_num_seqs, tensor_parallel_size=tensor_parallel)
        gpu = dict(enable_sleep_mode=True, gpu_memory_utilization=gpu_memory_utilization)
        # Chunked prefill rewinds the generator of a rollout, which a CPU's generator cannot do.
        cpu = dict(enforce_eager=True, kv_cache_memory_bytes=int(kv_cache_gb * 2**30), enable_chunked_prefill=False)
        self.llm = vllm.LLM(
            model,
            dtype=str(dtype).removeprefix("torch."),
            # Ranks of one torchrun may share this engine; without a process group it is alone.
            distributed_executor_backend="external_launcher" if dist.is_initialized() else None,
            use_tqdm_on_load=verbose,
            **(sizes | both | (gpu if self.on_gpu else cpu)),
        )
        for cls, constructor in constructors.items():
            # A trainer's model is of this class too, and is none of vLLM's to compile.
            cls.__init__, cls.do_not_compile = constructor, True
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.runner = self.engine.model_executor.driver_worker.worker.model_runner
        if not isinstance(self.runner, GPUModelRunner):
            raise RuntimeError(f"the hook knows vLLM's V1 model runner, not {type(self.runner)}")
        self._compute_logits = self.runner.model.compute_logits
        self._packed = [] if self.on_gpu else list(self.runner.model.modules())
        self.vocabulary = self.llm.model_config.get_vocab_size() if vocabulary is None else vocabulary
        self._stream = torch.cuda.Stream(priority=-1) if self.on_gpu else None  # none of those of vLLM
        self._numbers = count()  # of requests; none can be taken for one of an earlier call
        self._names: dict[str, str] = {}  # "7" -> "7-" and 8 random characters, as vLLM's insides call it
        self._live: dict[str, Rollout] = {}  # request, by the longer name -> rollout in flight or waiting
        self._aborted: set[str] = set()  # since the last batch
        self._batches: deque[Batch] = deque()  # whose tokens are not handed out yet, oldest first
        self.hook_seconds = 0.0  # of the last generate, in the hook and the pruner

    def generate(
        self,
        prompts: Mapping[int, list[int]],
        samples: int,
        sampling: Sampling,
        *,
        seed: int,
        rollout_seeds: bool = False,
        pruner: PruneHook | None = None,
        last_states: bool = False,
        state_logprobs: bool = False,
        confidence: bool = False,
        logprobs: int | None = None,
        progress: bool = False,
    ) -> list[Rollout]:
        """Sample rollouts; returns all, pruned ones cut at L_detect, by prompt and then by sample.

        prompts: group -> token ids. All ranks call this together; some may have no prompts.
        seed: the same seed and prompts give the same rollouts, on one machine.
        rollout_seeds: each rollout has its own generator, so that its tokens do not depend on what
            is sampled beside it, up to rounding. A tenth slower on a CPU.
        last_states, confidence: whether to fill these fields of the rollouts.
        state_logprobs: append to each state the sum and the mean of the log-probs up to its token.
        logprobs: how many rollouts of a group get log-probs; None, or with state_logprobs: all.
        Raises ValueError for a prompt that leaves no room, EngineError, NothingScored.
        """
        if (longest := max(map(len, prompts.values()), default=0)) >= self.max_model_len:
            raise ValueError(f"a prompt of {longest} tokens leaves no room in {self.max_model_len}")
        torch.manual_seed(seed)  # vLLM samples from the global generator
        failure, rollouts = None, [Rollout(group, sample) for group in prompts for sample in range(samples)]
        show = progress and os.environ.get("RANK", "0") == "0"
        bar = tqdm(total=len(rollouts), desc="rollouts", unit="rollout", leave=False, disable=not show or None)
        self._names, self._confidence, self._state_logprobs, self.hook_seconds = {}, confidence, state_logprobs, 0.0
        self.runner.model.compute_logits = self._hook
        try:
            for rollout in rollouts:
                wanted = state_logprobs or logprobs is None or rollout.sample < logprobs
                self._add(rollout, prompts[rollout.group], sampling, seed if rollout_seeds else None, wanted)
            # A batch may still run when vLLM learns that all rollouts have ended.
            while self.engine.has_unfinished_requests() or self.core.batch_queue:
                self._step(pruner, last_states)
                bar.update(len(rollouts) - len(self._live) - bar.n)
            if confidence and any(len(r.confidences) != len(r.token_ids) for r in rollouts):
                raise RuntimeError("the hook did not see all tokens")
        except Exception as error:  # whatever vLLM raises
            # A batch that failed under way has its own error, and what was launched after it another.
            queue = self.core.batch_queue or deque()
            failure = next((f.exception() for f, *_ in reversed(queue) if f.done() and f.exception()), error)
            queue.clear()
        finally:
            bar.close()
            self.runner.model.compute_logits = self._compute_logits
            self._batches.clear()
            with contextlib.suppress(Exception if failure else ()):  # a broken engine cannot be spoken to
                self._abort(list(self._live | self.engine.output_processor.request_states))  # one more at Ctrl-C
        _stop_together(failure)
        unseen = [r for r in rollouts if r.detect_state is None and len(r.token_ids) > self.detect_length]
        if pruner is not None and unseen:
            raise NothingScored(f"{len(unseen)} rollouts passed L_detect unseen: use a vLLM that the README names")
        return rollouts

    def _add(self, rollout: Rollout, prompt: list[int], sampling: Sampling, seed: int | None, logprobs: bool) -> None:
        """Queue a rollout."""
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        neutral = dict(n=1, top_k=0, min_p=0.0, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0)
        # These parameters are the request's own: vLLM need not copy them.
        outputs = dict(flat_logprobs=True, detokenize=False, min_tokens=0, ignore_eos=True, skip_clone=True)
        if seed is not None:
            seed = random.Random(f"{seed}-{rollout.group}-{rollout.sample}").getrandbits(62)
        params = SamplingParams(
            seed=seed,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=min(sampling.max_tokens, self.max_model_len - len(prompt)),
            stop_token_ids=list(sampling.stop_token_ids),
            # Thousands of partial outputs a step would cost more than the hook does.
            output_kind=RequestOutputKind.FINAL_ONLY,
            logprobs=0 if logprobs else None,  # of the sampled token alone
            **(neutral | outputs),
        )
        number = str(next(self._numbers))
        name = self._names[number] = self.engine.add_request(number, {"prompt_token_ids": prompt}, params)
        self._live[name] = rollout

    def _hook(self, hidden: Tensor) -> Tensor:
        """In place of `model.compute_logits`: note whose rows (rows, H) are sampled, and which tokens."""
        logits = self._compute_logits(hidden)
        logits[:, self.vocabulary :] = -torch.inf
        start, batch, size = time.perf_counter(), self.runner.input_batch, len(hidden)
        if size != batch.num_reqs:
            raise RuntimeError(f"vLLM sampled {size} rows for {batch.num_reqs} requests: the hook cannot tell whose")
        # The token of a row that is still in (re)prefill is thrown away.
        tokens = batch.num_tokens_no_spec[:size] - batch.num_prompt_tokens[:size] + 1
        tokens[self.runner.discard_request_mask.np[:size]] = 0
        rows = batch.req_id_to_index.copy()
        if not rows.keys().isdisjoint(self._aborted):
            raise RuntimeError("vLLM went on with a rollout that was aborted")
        self._aborted.clear()
        confidences = token_confidence(logits[:, : self.vocabulary]) if self._confidence else None
        self._batches.append(Batch(rows, tokens, hidden, confidences))
        self.hook_seconds += time.perf_counter() - start
        return logits

    def _step(self, pruner: PruneHook | None, last_states: bool) -> None:
        """Let vLLM launch a batch; complete or prune rollouts by the one whose tokens it hands out."""
        outputs, start = self.engine.step(), time.perf_counter()
        ended = {name: self._live.pop(name) for name in [self._names[output.request_id] for output in outputs]}
        for rollout, completion in zip(ended.values(), [output.outputs[0] for output in outputs]):
            rollout.token_ids, rollout.finish = list(completion.token_ids), completion.finish_reason
            rollout.logprobs = list(completion.logprobs.logprobs) if completion.logprobs else []
        running = sum(output.total_num_scheduled_tokens > 0 for _, output, _ in self.core.batch_queue or ())
        if len(self._batches) > running:
            batch = self._batches.popleft()
            # On a stream of its own: it need not wait for the batch that runs.
            with torch.cuda.stream(self._stream):
                self._read(batch, ended, last_states)
                if pruner is not None and self.detect_length in batch.tokens:
                    self._decide(batch, pruner)
        self.hook_seconds += time.perf_counter() - start

    def _read(self, batch: Batch, ended: Mapping[str, Rollout], last_states: bool) -> None:
        """Note H_t of all rollouts, and the last states of those that ended."""
        if self._confidence:
            known, values = self._live | ended, batch.confidences.tolist()
            for request, row in batch.rows.items():
                if batch.tokens[row] and request in known:  # others went on for a token after the end
                    known[request].confidences.append(values[row])
        if last_states and ended:
            for rollout, state in zip(ended.values(), batch.states_of(ended, self._state_logprobs)):
                rollout.last_state = state

    def _decide(self, batch: Batch, pruner: PruneHook) -> None:
        """Prune what the pruner drops of the rollouts that reached L_detect and go on."""
        arrived = set(np.flatnonzero(batch.tokens == self.detect_length).tolist())
        reached = {name: rollout for name, rollout in self._live.items() if batch.rows.get(name) in arrived}
        if not reached:
            return
        for request, rollout in reached.items():  # vLLM returns nothing of those that are aborted
            sampled = self.engine.output_processor.request_states[request]
            rollout.token_ids = list(sampled.detokenizer.output_token_ids)
            logprobs = sampled.logprobs_processor.logprobs
            rollout.logprobs = list(logprobs.logprobs) if logprobs else []
        states, rollouts = batch.states_of(reached, self._state_logprobs), reached.values()
        decisions = pruner.decide(states, [r.group for r in rollouts], [r.sample for r in rollouts])
        for (request, rollout), state, decision in zip(reached.items(), states, decisions, strict=True):
            rollout.detect_state = state
            rollout.score, rollout.posterior, rollout.survival = decision.score, decision.posterior, decision.survival
            if not decision.keep:
                rollout.finish, rollout.late = "pruned", sum(request in later.rows for later in self._batches)
        self._abort([request for request, rollout in reached.items() if rollout.finish == "pruned"])

    def _abort(self, requests: list[str]) -> None:
        # One by one: the order in which vLLM frees several may differ between ranks that share an engine.
        for request in requests:
            self._live.pop(request, None)
            self.engine.abort_request([request], internal=True)
        self._aborted.update(requests)
        if self.engine.get_num_unfinished_requests() != len(self._live):
            raise RuntimeError("vLLM did not abort a request")

    def sync(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load new weights, named as in the Hugging Face checkpoint, and forget the old ones.

        Raises EngineError where tensors are missing, unknown or of another shape: vLLM does not.
        """
        wrong = dict(self._shapes)

        def right() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                if wrong.pop(name, None) == tensor.shape:
                    yield name, tensor
                else:
                    wrong[name] = tensor.shape

        # On a CPU weights are packed; vLLM packs neither experts anew nor an lm_head that is tied.
        for module in self._packed:
            if hasattr(method := getattr(module, "quant_method", None), "moe_kernel"):
                method.moe_kernel = None
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": right()})
        for module in self._packed:
            if type(module).__name__ == "ParallelLMHead":
                module.quant_method.process_weights_after_loading(module)
        if not self.engine.reset_prefix_cache():
            raise RuntimeError("vLLM did not empty its prefix cache: requests are still running")
        if wrong:
            some = ", ".join(sorted(wrong)[:3])
            raise EngineError(f"a weight sync had {len(wrong)} tensors too few, too many or of another shape: {some}")

    def sleep(self) -> None:
        """Give the GPU's memory to the trainer. Level 1: level 2 loses buffers (vllm#16564)."""
        if self.on_gpu:
            self.llm.sleep(level=1)

    def wake(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Undo `sleep`, and sync before the KV cache is back: the weights are there twice by then."""
        asleep = self.on_gpu and self.engine.is_sleeping()
        if asleep:
            self.llm.wake_up(tags=["weights"])
        self.sync(weights)
        if asleep:
            self.llm.wake_up(tags=["kv_cache"])

    def close(self) -> None:
        """Take the engine down; before the process group, which it uses."""
        core = self.engine.engine_core
        del self.core, self.runner, self.engine, self.llm, self._compute_logits, self._packed
        core.shutdown()
        gc.collect()


def _describe(model: str) -> tuple[dict[str, torch.Size], dict[type, Callable]]:
    """Shapes of the checkpoint's tensors, and how its classes are built: vLLM changes some of them."""
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    tensors = revert_weight_conversion(empty, {name: p.detach() for name, p in empty.named_parameters()})
    return {k: tensor.shape for k, tensor in tensors.items()}, {cls: cls.__init__ for cls in map(type, empty.modules())}


def _stop_together(failure: Exception | None) -> None:
    """Raise EngineError on all ranks if one failed; none leaves before all are here."""
    failed = [failure is not None]
    if dist.is_initialized() and dist.get_world_size() > 1:
        failed *= dist.get_world_size()
        dist.all_gather_object(failed, failure is not None)
    if any(failed):
        reason = f"{type(failure).__name__}: {failure}" if failure else "on another rank"
        raise EngineError(f"generation failed: {reason}") from failure


def _prepare_environment(on_gpu: bool, verbose: bool) -> None:
    """Set what vLLM reads when it is imported."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO" if verbose else "ERROR")
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])  # until it reads the variable
    if not on_gpu:
        # One OpenMP pool for sampler and trainer, on all cores: vLLM would pin threads of its own.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        # vLLM would compile a line of its sampler: half a minute, and many machines have no compiler.
        torch._dynamo.config.disable = True
