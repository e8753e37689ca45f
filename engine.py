"""vLLM, one step at a time: score a rollout when it reaches L_detect, and prune it there.

The engine lives in this process, so that one forward pass yields the next token and the state that
the quality head reads (Algorithm 1, line 18). How it departs from `LLM.generate`:
1. `model.compute_logits` is wrapped. It is given exactly the final-norm states of the rows about
   to be sampled, outside CUDA graphs: nothing is computed twice.
2. A rollout is scored on the step that delivers its L_detect-th token, from the state that produced
   that token (position `prompt_len + L_detect - 2`), and aborted before the next step if dropped.
3. Token confidence H_t, if asked for, is computed from the logits of the same step.
4. New weights are loaded in place, and the prefix cache is emptied: it hashes tokens, not weights
   (vllm#9744).
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

# Read by vLLM when it is imported. In-process: the hook needs the model, and on a CPU it starts 8
# times faster. The hook knows the row order of the V1 model runner only.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import numpy as np
import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.core_model_loading import revert_weight_conversion


@dataclass
class Rollout:
    """One sampled response. States are (hidden,) fp32 on the CPU."""

    group: int  # key of its prompt in the mapping given to Engine.generate
    sample: int = 0  # its number within the group
    token_ids: Sequence[int] = field(default_factory=list)  # if another rank's: a range as long
    logprobs: list[float] = field(default_factory=list)  # of token_ids, after temperature; not if pruned
    finish: str = ""  # "stop", "length" or "pruned"
    detect_state: Tensor | None = None  # that produced token L_detect, if the rollout went on
    last_state: Tensor | None = None  # that produced the last token, if asked for; not if pruned
    score: float | None = None  # s' in [0, 1], if it was scored
    posterior: float | None = None  # q
    survival: float | None = None  # p
    confidences: np.ndarray | None = None  # (tokens,) fp64: H_t of each token, if asked for
    # The engine leaves these to whoever grades.
    verdict: str | None = None  # "right", "wrong", "no answer", "timeout", "bad gold"; None: pruned
    answer: str | None = None  # extracted from the text
    reward: float | None = None  # 1.0 right, 0.0 wrong or no answer, None otherwise: no label
    advantage: float | None = None  # if it was trained on
    tail: str = ""  # the last 200 characters of the text, for logs


@dataclass(frozen=True)
class Decision:
    """What a pruner decides on one rollout. Fields that it does not know stay None."""

    keep: bool
    score: float | None = None
    posterior: float | None = None
    survival: float | None = None


class PruneHook(Protocol):
    """All that the engine knows of a pruning method."""

    def decide(self, states: Tensor, groups: list[int], samples: list[int]) -> list[Decision]:
        """Decide on N rollouts that just reached L_detect; `states` is (N, hidden) fp32 on the CPU.

        Rows are ordered by group, as the prompts were given, then by sample.
        """


@dataclass(frozen=True)
class Sampling:
    """All other settings are neutral: nothing comes from the model's generation_config."""

    max_tokens: int
    stop_token_ids: tuple[int, ...]
    temperature: float = 1.0
    top_p: float = 1.0


class EngineError(RuntimeError):
    """Generation failed, on this rank or on another."""


class NothingScored(RuntimeError):
    """Pruning is on, but rollouts were not scored."""


def token_confidence(logits: Tensor) -> Tensor:
    """H_t = -sum_j log P_t(j) = V (logsumexp - mean of the logits), over the vocabulary (Sec. 3).

    `logits` (N, V), before temperature; returns (N,) fp32. The surer the model, the larger: a peak
    leaves all other tokens a tiny probability.
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
    number: which of several engines of a run this is; callers derive seeds from it.
    vocabulary: ids from this one on are never sampled: rows of a padded vocabulary, without a text.
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
        seed: int = 0,
        gpu_memory_utilization: float = 0.5,
        kv_cache_gb: float = 1.0,
        number: int = 0,
        vocabulary: int | None = None,
        verbose: bool = False,
    ) -> None:
        self.detect_length, self.max_model_len, self.number = detect_length, max_model_len, number
        self._shapes, constructors = _describe(model)
        self.on_gpu = torch.cuda.is_available()
        _prepare_environment(self.on_gpu, verbose)
        import vllm
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        both = dict(skip_tokenizer_init=True, generation_config="vllm", logprobs_mode="processed_logprobs")
        both |= dict(enable_prefix_caching=True, async_scheduling=False, disable_log_stats=True)
        sizes = dict(max_model_len=max_model_len, max_num_seqs=max_num_seqs, tensor_parallel_size=tensor_parallel)
        gpu = dict(enable_sleep_mode=True, gpu_memory_utilization=gpu_memory_utilization)
        # Chunked prefill rewinds the generator of a rollout, which a CPU's generator cannot do.
        cpu = dict(enforce_eager=True, kv_cache_memory_bytes=int(kv_cache_gb * 2**30), enable_chunked_prefill=False)
        self.llm = vllm.LLM(
            model,
            dtype=str(dtype).removeprefix("torch."),
            seed=seed,
            # Ranks of one torchrun may share this engine; without a process group it is alone.
            distributed_executor_backend="external_launcher" if dist.is_initialized() else None,
            use_tqdm_on_load=verbose,
            **(sizes | both),
            **(gpu if self.on_gpu else cpu),
        )
        for cls, constructor in constructors.items():
            if cls.__init__ is not constructor:
                # A trainer's model is of this class too, and is none of vLLM's to compile.
                cls.__init__, cls.do_not_compile = constructor, True
        self.engine = self.llm.llm_engine
        self.runner = self.engine.model_executor.driver_worker.worker.model_runner
        if not isinstance(self.runner, GPUModelRunner):
            raise RuntimeError(f"the hook knows vLLM's V1 model runner, not {type(self.runner)}")
        self._compute_logits = self.runner.model.compute_logits
        self._packed = [] if self.on_gpu else list(self.runner.model.modules())
        width = self.llm.model_config.get_vocab_size()
        self.vocabulary = width if vocabulary is None else min(vocabulary, width)
        self._padded = self.vocabulary < width
        self._next_request = 0  # never reused: no output can be taken for one of an earlier request
        self._live: dict[int, Rollout] = {}  # request -> rollout in flight or waiting
        self._aborted: set[int] = set()  # since the last step
        # Noted by the hook. Of this step: (request, token number) -> row, and the states (rows, H).
        self._step: tuple[dict[tuple[int, int], int], Tensor] | None = None
        # Of all steps: (request, token number) of each row, and H_t (rows,).
        self._confidences: list[tuple[np.ndarray, Tensor]] | None = None
        self.hook_seconds = self.step_seconds = 0.0  # of the last generate: hook + pruner, and all

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
        confidence: bool = False,
        progress: bool = False,
    ) -> list[Rollout]:
        """Sample rollouts; returns all, pruned ones cut at L_detect, by prompt and then by sample.

        prompts: group -> token ids. All ranks call this together; some may have no prompts.
        seed: the same seed and prompts give the same rollouts, on one machine.
        rollout_seeds: each rollout has its own generator, so that its tokens do not depend on what
            is sampled beside it, up to rounding. A tenth slower on a CPU.
        last_states, confidence: whether to fill these fields of the rollouts.
        Raises ValueError for a prompt that leaves no room, EngineError, NothingScored.
        """
        for prompt in prompts.values():
            if len(prompt) >= self.max_model_len:
                raise ValueError(f"a prompt of {len(prompt)} tokens leaves no room in {self.max_model_len}")
        start, failure, first = time.perf_counter(), None, self._next_request
        torch.manual_seed(seed)  # vLLM samples from the global generator
        rollouts = [Rollout(group, sample) for group in prompts for sample in range(samples)]
        show = progress and os.environ.get("RANK", "0") == "0"
        bar = tqdm(total=len(rollouts), desc="rollouts", unit="rollout", leave=False, disable=not show or None)
        self.hook_seconds, self._confidences = 0.0, [] if confidence else None
        if self._padded or pruner is not None or last_states or confidence:
            self.runner.model.compute_logits = self._hook
        try:
            for rollout in rollouts:
                self._add(rollout, prompts[rollout.group], sampling, seed if rollout_seeds else None)
            while self.engine.has_unfinished_requests():
                self._step = None
                ended = self._collect(self.engine.step())
                if self._step is not None:
                    self._score(ended if last_states else {}, pruner)
                bar.update(len(rollouts) - len(self._live) - bar.n)
            if confidence:
                self._set_confidences(rollouts, first)
        except Exception as error:  # whatever vLLM raises
            failure = error
        finally:
            bar.close()
            self.runner.model.compute_logits = self._compute_logits
            self._step = self._confidences = None
            with contextlib.suppress(Exception if failure else ()):  # a broken engine cannot be spoken to
                self._abort(list(self._live))
        self.step_seconds = time.perf_counter() - start
        _stop_together(failure)
        unseen = [r for r in rollouts if r.detect_state is None and len(r.token_ids) > self.detect_length]
        if pruner is not None and unseen:
            raise NothingScored(f"{len(unseen)} rollouts passed L_detect unseen: use a vLLM that the README names")
        return rollouts

    def _add(self, rollout: Rollout, prompt: list[int], sampling: Sampling, seed: int | None) -> None:
        """Queue a rollout. Request n is "n" in outputs, and "n-" + 8 random characters inside vLLM."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        neutral = dict(n=1, top_k=0, min_p=0.0, presence_penalty=0.0, frequency_penalty=0.0, repetition_penalty=1.0)
        # Log-probs of the sampled token alone.
        outputs = dict(logprobs=0, flat_logprobs=True, detokenize=False, min_tokens=0, ignore_eos=True)
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
            **neutral,
            **outputs,
        )
        request, self._next_request = self._next_request, self._next_request + 1
        self._live[request] = rollout
        internal = self.engine.add_request(str(request), {"prompt_token_ids": prompt}, params)
        if not internal.startswith(f"{request}-"):
            raise RuntimeError(f"vLLM calls request {request} {internal}: the hook cannot tell its rows")

    def _hook(self, hidden: Tensor) -> Tensor:
        """In place of `model.compute_logits`: note whose rows (rows, H) are sampled, and which tokens."""
        logits = self._compute_logits(hidden)
        logits[:, self.vocabulary :] = -torch.inf
        start, batch = time.perf_counter(), self.runner.input_batch
        count = batch.num_reqs
        if len(hidden) != count:
            raise RuntimeError(f"vLLM sampled {len(hidden)} rows for {count} requests: the hook cannot tell whose")
        # Numbers from 1. The token of a row that is still in (re)prefill is thrown away: 0.
        tokens = batch.num_tokens_no_spec[:count] - batch.num_prompt_tokens[:count] + 1
        tokens = np.where(self.runner.discard_request_mask.np[:count], 0, tokens).tolist()
        # Copied now: vLLM may reorder its batch before `step` returns.
        requests = [int(name.split("-")[0]) for name in batch.req_ids[:count]]
        if not self._aborted.isdisjoint(requests):
            raise RuntimeError("vLLM went on with a rollout that was aborted")
        self._aborted.clear()
        rows = {key: row for row, key in enumerate(zip(requests, tokens))}
        self._step = (rows, hidden)
        if self._confidences is not None:
            self._confidences.append((np.array(list(rows)), token_confidence(logits[:, : self.vocabulary])))
        self.hook_seconds += time.perf_counter() - start
        return logits

    def _collect(self, outputs: list) -> dict[int, Rollout]:
        """Complete the rollouts that ended in this step; returns them by request."""
        ended = {}
        for output in outputs:
            request, completion = int(output.request_id), output.outputs[0]
            rollout = ended[request] = self._live.pop(request)
            rollout.token_ids, rollout.finish = list(completion.token_ids), completion.finish_reason
            if completion.logprobs.token_ids != rollout.token_ids:
                raise RuntimeError("vLLM returned the log-probs of other tokens than the sampled ones")
            rollout.logprobs = list(completion.logprobs.logprobs)
        return ended

    def _score(self, ended: Mapping[int, Rollout], pruner: PruneHook | None) -> None:
        """Set the last states of `ended`; let the pruner decide on those that reached L_detect."""
        start = time.perf_counter()
        rows, hidden = self._step
        reached = [request for request, token in rows if token == self.detect_length and request in self._live]
        reached = sorted(reached) if pruner is not None else []
        wanted = [(request, len(rollout.token_ids)) for request, rollout in ended.items()]
        wanted += [(request, self.detect_length) for request in reached]
        if wanted:
            states = hidden[torch.tensor([rows[key] for key in wanted], device=hidden.device)].float().cpu()
            for rollout, state in zip(ended.values(), states):
                rollout.last_state = state
            if reached:
                self._decide(reached, states[len(ended) :], pruner)
        self.hook_seconds += time.perf_counter() - start

    def _decide(self, reached: list[int], states: Tensor, pruner: PruneHook) -> None:
        """Prune what the pruner drops; `reached` are requests, `states` (N, H) what to decide on."""
        rollouts = [self._live[request] for request in reached]
        decisions = pruner.decide(states, [r.group for r in rollouts], [r.sample for r in rollouts])
        for rollout, state, decision in zip(rollouts, states, decisions, strict=True):
            rollout.detect_state = state
            rollout.score, rollout.posterior, rollout.survival = decision.score, decision.posterior, decision.survival
        dropped = [request for request, decision in zip(reached, decisions) if not decision.keep]
        # From the model runner: vLLM returns nothing of an aborted request.
        sampled = {int(name.split("-")[0]): state.output_token_ids for name, state in self.runner.requests.items()}
        for request in dropped:
            self._live[request].finish, self._live[request].token_ids = "pruned", list(sampled[request])
        self._abort(dropped)

    def _abort(self, requests: list[int]) -> None:
        for request in requests:
            del self._live[request]
        self._aborted.update(requests)
        self.engine.abort_request([str(request) for request in requests])  # it ignores unknown ids
        if self.engine.get_num_unfinished_requests() != len(self._live):
            raise RuntimeError("vLLM did not abort a request")

    def _set_confidences(self, rollouts: list[Rollout], first: int) -> None:
        """Sort by rollout what was noted by step. `first` is the request of the first rollout."""
        table = np.zeros((len(rollouts), self.max_model_len + 1), np.float32)  # column: token number
        for keys, values in self._confidences:
            table[keys[:, 0] - first, keys[:, 1]] = values.cpu()
        for row, rollout in zip(table, rollouts):
            rollout.confidences = row[1 : len(rollout.token_ids) + 1].astype(np.float64)
            if not rollout.confidences.all():  # H_t is at least V log V
                raise RuntimeError("the hook did not see all tokens")

    def sync(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load new weights, named as in the Hugging Face checkpoint, and forget the old ones.

        Raises EngineError where tensors are missing, unknown or of another shape, which vLLM does
        not. Compare the log-probs of the next rollouts with the trainer's all the same.
        """
        wrong = dict(self._shapes)

        def right() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                if wrong.pop(name, None) == tensor.shape:
                    yield name, tensor
                else:
                    wrong[name] = tensor.shape

        for module in self._packed:
            if hasattr(method := getattr(module, "quant_method", None), "moe_kernel"):
                method.moe_kernel = None  # experts are packed when it is made, and not again
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": right()})
        self._refresh_packed_head()
        if not self.engine.reset_prefix_cache():
            raise RuntimeError("vLLM did not empty its prefix cache: requests are still running")
        if wrong:
            some = ", ".join(sorted(wrong)[:3])
            raise EngineError(f"a weight sync had {len(wrong)} tensors too few, too many or of another shape: {some}")

    def _refresh_packed_head(self) -> None:
        """On a CPU lm_head is packed at load time; a tied one's pack is not renewed by vLLM."""
        for module in self._packed:
            if type(module).__name__ == "ParallelLMHead":
                module.quant_method.process_weights_after_loading(module)

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
        del self.runner, self.engine, self.llm, self._compute_logits, self._packed
        core.shutdown()
        gc.collect()


def _describe(model: str) -> tuple[dict[str, torch.Size], dict[type, Callable]]:
    """Shapes of the checkpoint's tensors, and how its classes are built: vLLM changes some of them."""
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model))
    tensors = revert_weight_conversion(empty, {name: p.detach() for name, p in empty.named_parameters()})
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    return shapes, {cls: cls.__init__ for cls in map(type, empty.modules())}


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
    """Set what vLLM reads when it is imported. Raises ValueError where `sleep` would free nothing."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if on_gpu and "expandable_segments:True" in os.environ.get(name, ""):
            raise ValueError(f"{name}=expandable_segments:True keeps a sleeping engine from freeing memory: unset it")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO" if verbose else "ERROR")
    logging.getLogger("vllm").setLevel(os.environ["VLLM_LOGGING_LEVEL"])  # until it reads the variable
    if not on_gpu:
        # One OpenMP pool for sampler and trainer, on all cores: vLLM would pin threads of its own.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        # vLLM would compile a line of its sampler: half a minute, and many machines have no compiler.
        torch._dynamo.config.disable = True
