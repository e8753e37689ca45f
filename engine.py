"""vLLM, driven one step at a time: score a rollout when it reaches L_detect, prune it there, return them all.

The engine lives in this process, so that one forward pass yields the next token and the state that the quality head reads
(Algorithm 1, line 18). How it departs from `LLM.generate`:
1. `model.compute_logits` is wrapped: it is handed exactly the final-norm states of the rows about to be sampled, outside CUDA
   graphs. Nothing is computed twice, nothing leaves the device but the rows that are needed.
2. A rollout is scored on the step that delivers its L_detect-th token, from the state that produced that token: position
   `prompt_len + L_detect - 2` of the sequence. Those that the pruner drops are aborted before the next step.
3. New weights are loaded in place. The prefix cache is emptied after every sync: it hashes tokens, not weights (vllm#9744).

4. Token confidence is taken from the same step's logits, if asked for, and low confidence may stop a rollout (`confidence.py`).

This is the only file that imports vLLM.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import random
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from vllm import SamplingParams

# Read by vLLM when it is imported. In-process: the hook needs the model, and on a CPU it starts 8 times faster. The hook
# knows the row order of the V1 model runner only.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import numpy as np
import torch
import torch._dynamo
from torch import Tensor
from tqdm import tqdm

from confidence import Confidence, ConfidenceRecorder
from support.distributed import gather, of_leader


@dataclass
class Rollout:
    """One sampled response; `group` is the key of its prompt in the mapping that was given to `Engine.generate`."""

    group: int
    token_ids: Sequence[int] = field(default_factory=list)  # of one that another rank sampled, a range as long
    logprobs: list[float] = field(default_factory=list)  # of each sampled id, after temperature; empty when pruned
    finish: str = ""  # "stop", "length" or "pruned"
    detect_state: Tensor | None = (
        None  # (hidden,) fp32 on the CPU: the state that produced token L_detect, if it went on
    )
    last_state: Tensor | None = (
        None  # (hidden,) fp32 on the CPU: the state that produced the last token, if asked for; None when pruned
    )
    score: float | None = None  # s' in [0, 1], if it was scored
    posterior: float | None = None  # q
    survival: float | None = None  # p
    confidences: np.ndarray | None = None  # (tokens,) fp64: H_t of each token, if asked for
    sample: int = 0  # its number within the group


@dataclass(frozen=True)
class Decision:
    """What a pruner says of one rollout; fields it does not know stay None."""

    keep: bool
    score: float | None = None
    posterior: float | None = None
    survival: float | None = None


class Pruner(Protocol):
    """All that the engine knows of a pruning method."""

    def decide(self, states: Tensor, groups: list[int], samples: list[int]) -> list[Decision]:
        """`states` (N, hidden) fp32 on the CPU, `groups` and `samples` (N) of rollouts that just reached L_detect.

        Rows are ordered by group, as the prompts were given, then by sample, not by how vLLM happens to batch them.
        """
        ...


@dataclass(frozen=True)
class Sampling:
    """Every field is explicit in the request: nothing comes from the model's generation_config."""

    max_tokens: int
    stop_token_ids: tuple[int, ...]
    temperature: float = 1.0
    top_p: float = 1.0


class EngineError(RuntimeError):
    """vLLM failed while it generated, on this rank or on another."""


class NothingScored(RuntimeError):
    """Pruning is on and no rollout could be scored."""


class Engine:
    """An in-process vLLM engine with a hook at L_detect.

    model: a folder or a hub id. detect_length: L_detect in tokens. max_model_len: prompt and response together, in tokens.
    tensor_parallel: successive ranks that drive this engine in lockstep. kv_cache_gb: size of the KV cache on a CPU.
    gpu_memory_utilization: share of the GPU for weights and KV cache, which `sleep` gives back. Raises ValueError for
    `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`, with which sleep frees nothing.
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
        verbose: bool = False,
    ) -> None:
        self.on_gpu = torch.cuda.is_available()
        for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
            if self.on_gpu and "expandable_segments:True" in os.environ.get(name, ""):
                raise ValueError(
                    f"{name}=expandable_segments:True keeps a sleeping engine from freeing memory: unset it"
                )
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO" if verbose else "ERROR")
        logging.getLogger("vllm").setLevel(
            os.environ["VLLM_LOGGING_LEVEL"]
        )  # for what it says before it reads the variable
        if not self.on_gpu:
            # One OpenMP pool for sampler and trainer, on the cores this process may use: vLLM would pin threads of its own.
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
            # vLLM would compile one line of its sampler: half a minute, and no C++ compiler on many machines.
            torch._dynamo.config.disable = True
        import vllm

        where = (
            dict(enable_sleep_mode=True, gpu_memory_utilization=gpu_memory_utilization)
            if self.on_gpu
            else dict(
                enforce_eager=True,
                kv_cache_memory_bytes=int(kv_cache_gb * 2**30),
                # after a part of a prompt vLLM rewinds a rollout's own generator, which a CPU's cannot do
                enable_chunked_prefill=False,
            )
        )
        self.detect_length, self.max_model_len, self.max_num_seqs = detect_length, max_model_len, max_num_seqs
        self.llm = vllm.LLM(
            model,
            dtype=str(dtype).removeprefix("torch."),
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            seed=seed,
            tensor_parallel_size=tensor_parallel,
            skip_tokenizer_init=True,
            generation_config="vllm",
            logprobs_mode="processed_logprobs",
            enable_prefix_caching=True,
            async_scheduling=False,
            distributed_executor_backend="external_launcher",
            disable_log_stats=True,
            use_tqdm_on_load=verbose,
            **where,
        )
        self.engine = self.llm.llm_engine
        self.runner = self.engine.model_executor.driver_worker.worker.model_runner
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        if not isinstance(self.runner, GPUModelRunner):
            raise RuntimeError(
                f"the hook knows vLLM's V1 model runner, not {type(self.runner)}: set VLLM_USE_V2_MODEL_RUNNER=0"
            )
        self._compute_logits = self.runner.model.compute_logits
        self.runner.model.compute_logits = self._hook
        self._recording, self._last_states = False, False
        self._recorder: ConfidenceRecorder | None = None
        self._rows: tuple[list[str], np.ndarray, Tensor] | None = None
        self._internal: dict[str, str] = {}  # the id that outputs carry -> the one that the model runner uses
        self._aborted: set[str] = set()
        self._next_id = 0  # never reused, so that an output can't be taken for one of an earlier request
        self.hook_seconds = self.step_seconds = 0.0  # of the last `generate`: hook + pruner, and all of it

    def _hook(self, hidden: Tensor) -> Tensor:
        """Note which rows are sampled in this step; vLLM may reorder its batch before `step` returns, so copy the order."""
        logits = self._compute_logits(hidden)
        if self._recording:
            start, batch = time.perf_counter(), self.runner.input_batch
            count = batch.num_reqs
            if hidden.shape[0] != count:
                raise RuntimeError(
                    f"vLLM sampled {hidden.shape[0]} rows for {count} requests: the hook cannot tell whose they are"
                )
            ids = batch.req_ids[:count]
            if not self._aborted.isdisjoint(ids):
                raise RuntimeError("vLLM went on with a rollout that was aborted")
            self._aborted.clear()
            length = (
                batch.num_tokens_no_spec[:count] - batch.num_prompt_tokens[:count] + 1
            )  # counting the token of this step
            # A row that is still in (re)prefill is computed, but its token is thrown away: it delivers nothing.
            delivered = np.where(self.runner.discard_request_mask.np[:count], 0, length)
            self._rows = (list(ids), delivered, hidden)
            if self._recorder is not None:
                self._recorder.record(ids, delivered, logits)
            self.hook_seconds += time.perf_counter() - start
        return logits

    def generate(
        self,
        prompts: Mapping[int, list[int]],
        samples: int,
        sampling: Sampling,
        *,
        seed: int,
        rollout_seeds: bool = False,
        first_sample: int = 0,
        pruner: Pruner | None = None,
        must_score: bool = False,
        last_states: bool = False,
        confidence: Confidence | None = None,
        progress: bool = False,
    ) -> list[Rollout]:
        """`samples` rollouts of each prompt, in order of prompts; those that were pruned are among them, cut where they were.

        prompts: group -> token ids; a rank may have none. seed: fixes the samples, on one machine. rollout_seeds: each has a generator of its own, made
        from seed, group and its number (from `first_sample`), so that it does not depend on what is sampled beside it, up to the
        rounding of another batch size; a tenth slower on a CPU. Without a pruner nothing is scored; with `last_states` the state
        that produced a rollout's last token is kept too; with `confidence`, H_t of every token.
        Raises NothingScored if `must_score` and no rollout of any rank reached L_detect, ValueError for a prompt that leaves no room.
        """
        torch.manual_seed(seed)  # vLLM samples from the global generator
        self.hook_seconds, start, failure = 0.0, time.perf_counter(), None
        plan = {group: self._params(prompt, sampling) for group, prompt in prompts.items()}
        rollouts, live = [], {}
        self._recording = pruner is not None or last_states or confidence is not None
        self._last_states = last_states
        if confidence is not None:
            lines = min(len(prompts) * samples, self.max_num_seqs)
            self._recorder = ConfidenceRecorder(confidence, min(sampling.max_tokens, self.max_model_len), lines)
        try:
            for group, params in plan.items():
                for sample in range(first_sample, first_sample + samples):
                    if rollout_seeds:
                        params = params.clone()
                        params.seed = random.Random(f"{seed}-{group}-{sample}").getrandbits(62)
                    rollouts.append(Rollout(group, sample=sample))
                    live[self._add(prompts[group], params)] = rollouts[-1]
            with tqdm(
                total=len(rollouts), desc="rollouts", unit="rollout", leave=False, disable=None if progress else True
            ) as bar:
                while self.engine.has_unfinished_requests():
                    self._rows = None
                    finished = self._collect(self.engine.step(), live)
                    if self._rows is not None:
                        self._score(finished, live, pruner)
                    bar.update(len(rollouts) - len(live) - bar.n)
        except Exception as error:  # whatever vLLM raises
            failure = error
        finally:
            self._recording, self._rows, self._recorder = False, None, None
            with contextlib.suppress(Exception if failure else ()):  # a broken engine cannot be spoken to
                self._abort(list(live))
        self.step_seconds = time.perf_counter() - start
        if any(gather(failure is not None)):  # all ranks stop together, or the others would wait for this one
            raise EngineError(f"generation failed: {failure or 'on another rank'}") from failure
        if pruner is not None:
            self._check(rollouts, must_score)
        return rollouts

    def _params(self, prompt: list[int], sampling: Sampling) -> SamplingParams:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        room = self.max_model_len - len(prompt)
        if room < 1:
            raise ValueError(f"a prompt of {len(prompt)} tokens leaves no room for a response in {self.max_model_len}")
        return SamplingParams(
            n=1,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=0,
            min_p=0.0,
            presence_penalty=0.0,
            frequency_penalty=0.0,
            repetition_penalty=1.0,
            max_tokens=min(sampling.max_tokens, room),
            min_tokens=0,
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=True,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            # One output per request, at its end: thousands of partial ones a step would cost more than the hook does.
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def _add(self, prompt: list[int], params: SamplingParams) -> str:
        """Queue one request; returns vLLM's internal id, the one that the model runner knows."""
        self._next_id += 1
        internal = self.engine.add_request(str(self._next_id), {"prompt_token_ids": prompt}, params)
        if not internal.startswith(f"{self._next_id}-"):
            raise RuntimeError(
                f"vLLM calls request {self._next_id} {internal}: the hook expects random characters behind a dash"
            )
        self._internal[str(self._next_id)] = internal
        return internal

    def _collect(self, outputs: list, live: dict[str, Rollout]) -> dict[str, Rollout]:
        """Move the requests that ended in this step out of `live`; returns them by internal id."""
        finished = {}
        for output in outputs:
            internal, completion = self._internal.pop(output.request_id), output.outputs[0]
            rollout = finished[internal] = live.pop(internal)
            rollout.token_ids = list(completion.token_ids)
            rollout.finish = completion.finish_reason
            if completion.logprobs.token_ids != rollout.token_ids:  # one entry a position, that of the sampled id
                raise RuntimeError("vLLM returned the log-probs of other tokens than the sampled ones")
            rollout.logprobs = list(completion.logprobs.logprobs)
            if self._recorder is not None:
                rollout.confidences = self._recorder.pop(internal, len(rollout.token_ids))
        return finished

    def _score(self, finished: dict[str, Rollout], live: dict[str, Rollout], pruner: Pruner | None) -> None:
        """Keep the states that the head needs, let the pruner decide on what just reached L_detect, and drop what it drops."""
        start = time.perf_counter()
        ids, delivered, hidden = self._rows
        ended = (
            [row for row, internal in enumerate(ids) if internal in finished] if finished and self._last_states else []
        )
        at_detect = np.flatnonzero(delivered == self.detect_length).tolist() if pruner is not None else []
        reached = sorted((row for row in at_detect if ids[row] in live), key=lambda row: _number(ids[row]))
        if ended or reached:
            states = hidden[torch.tensor(ended + reached, device=hidden.device)].float().cpu()
            for row, state in zip(ended, states):
                finished[ids[row]].last_state = state
            if reached:
                self._decide([ids[row] for row in reached], states[len(ended) :], live, pruner)
        if self._recorder is not None and self._recorder.floors:
            self._drop(self._recorder.below_floor({i: live[i].group for i in ids if i in live}), live)
        self.hook_seconds += time.perf_counter() - start

    def _decide(self, reached: list[str], states: Tensor, live: dict[str, Rollout], pruner: Pruner) -> None:
        dropped = []
        arrived = [live[internal] for internal in reached]
        # made once: two decisions that differ by a rounding would drive the ranks of one engine apart
        decisions = of_leader(pruner.decide(states, [r.group for r in arrived], [r.sample for r in arrived]))
        for internal, rollout, state, decision in zip(reached, arrived, states, decisions, strict=True):
            rollout.detect_state = state
            rollout.score, rollout.posterior, rollout.survival = decision.score, decision.posterior, decision.survival
            if not decision.keep:
                dropped.append(internal)
        self._drop(dropped, live)

    def _drop(self, internals: list[str], live: dict[str, Rollout]) -> None:
        """Prune rollouts in flight; what they have so far is read from the runner: an aborted request returns nothing."""
        for internal in internals:
            rollout = live.pop(internal)
            rollout.finish = "pruned"
            rollout.token_ids = list(self.runner.requests[internal].output_token_ids)
            if self._recorder is not None:
                rollout.confidences = self._recorder.pop(internal, len(rollout.token_ids))
        self._abort(internals)

    def _abort(self, internals: list[str]) -> None:
        if internals:
            self.engine.abort_request(internals, internal=True)
            self._aborted.update(internals)
            for internal in internals:
                self._internal.pop(str(_number(internal)), None)  # gone, if interrupted within _collect
            if not self._aborted.isdisjoint(self.engine.output_processor.request_states):
                raise RuntimeError("vLLM did not abort a request")

    def _check(self, rollouts: list[Rollout], must_score: bool) -> None:
        for rollout in rollouts:
            if len(rollout.token_ids) > self.detect_length and rollout.detect_state is None:
                raise NothingScored(
                    f"a rollout of {len(rollout.token_ids)} tokens passed L_detect = {self.detect_length} unseen: "
                    "this vLLM does not call the hook as expected; a tested version is in the README"
                )
        if must_score and not any(gather(any(rollout.detect_state is not None for rollout in rollouts))):
            longest = max(gather(max((len(rollout.token_ids) for rollout in rollouts), default=0)))
            raise NothingScored(
                f"no rollout went beyond L_detect = {self.detect_length} tokens (longest: {longest}), "
                "so that nothing can be pruned: lower --detect-length or use --prune none"
            )

    def sync(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load new weights, named as in the Hugging Face checkpoint, and forget all that was computed with the old ones.

        Whether it worked is for the caller to verify, by the log-probs of the next rollouts: a partial load raises no error.
        """
        self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": iter(weights)})
        self._refresh_packed_head()
        if not self.engine.reset_prefix_cache():
            raise RuntimeError("vLLM did not empty its prefix cache: requests are still running")

    def _refresh_packed_head(self) -> None:
        """On a CPU lm_head is packed at load time; where its weight is the embedding's, `reload_weights` leaves the old pack."""
        if not self.on_gpu:
            head = self.runner.model.lm_head
            head.quant_method.process_weights_after_loading(head)

    def sleep(self) -> None:
        """Give the GPU's memory to the trainer. Level 1 (weights go to the host): level 2 loses buffers (vllm#16564)."""
        if self.on_gpu:
            self.llm.sleep(level=1)

    def wake(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Undo `sleep` and sync, in the order that never needs memory for both KV cache and two copies of the weights."""
        if self.on_gpu and self.engine.is_sleeping():
            self.llm.wake_up(tags=["weights"])
            self.sync(weights)
            self.llm.wake_up(tags=["kv_cache"])
        else:
            self.sync(weights)

    def close(self) -> None:
        """Take the engine down; before the process group, which it uses."""
        self.runner.model.compute_logits = self._compute_logits
        core = self.engine.engine_core
        del self.runner, self.engine, self.llm, self._compute_logits
        core.shutdown()
        gc.collect()


def _number(internal: str) -> int:
    """The running number of the request that vLLM calls `internal`."""
    return int(internal.partition("-")[0])
