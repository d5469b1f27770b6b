"""A vLLM engine in this process with a monitored scheduler, and the comparison with the model in transformers."""

from __future__ import annotations

import gc
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.model_executor.models import registry
from vllm.outputs import RequestOutput
from vllm.triton_utils import dispatcher

Prompt = Sequence[int]


def _register_once(overrides: Any, register: Any = dispatcher.register_kernels) -> None:
    """Register only new kernels: vLLM registers all for each engine, and fails on modules of numba the second time."""
    new = {name: kernel for name, kernel in overrides.items() if name not in dispatcher._registry}
    if new:
        register(new)


_freeze = gc.freeze


def keep_what_is_here() -> None:
    """Exclude all existing objects from later garbage collections.

    vLLM collects garbage nine times for each engine. It would also freeze engines, and then unfreeze everything: half
    of the tests' time was spent on traversing its modules.
    """
    gc.collect()
    _freeze()


keep_what_is_here()
gc.freeze = gc.unfreeze = lambda: None
dispatcher.register_kernels = _register_once
registry._run_in_subprocess = lambda inspected: inspected()  # vLLM would be imported again for each class


class Engine:
    """vLLM with a model, and a record of what its scheduler did.

    Attributes:
        pieces: Number of tokens that each step computed, by request.
        preemptions: How often a running request lost its blocks.
        drafts: For each draft, the tokens of the request before it, and the draft.
        rejected: Number of rejected draft tokens.
    """

    def __init__(self, folder: Path, **options: Any) -> None:
        eager = {"dtype": "float32", "block_size": 32, "num_gpu_blocks_override": 512, "enforce_eager": True}
        self.llm = LLM(str(folder), skip_tokenizer_init=True, max_model_len=384, seed=0, **eager | options)
        self.scheduler: Any = self.llm.llm_engine.engine_core.engine_core.scheduler
        self.pieces: defaultdict[str, list[int]] = defaultdict(list)
        self.drafts: list[tuple[list[int], list[int]]] = []
        self.preemptions = self.rejected = 0
        self._watch()

    def _watch(self) -> None:
        schedule, update = self.scheduler.schedule, self.scheduler.update_from_output
        preempt = self.scheduler._preempt_request

        def watched_schedule(*args: Any, **options: Any) -> Any:
            planned = schedule(*args, **options)
            for request, tokens in planned.num_scheduled_tokens.items():
                self.pieces[request].append(tokens)
            return planned

        def watched_update(planned: Any, output: Any) -> Any:
            for request, drafts in planned.scheduled_spec_decode_tokens.items():
                sampled = output.sampled_token_ids[output.req_id_to_index[request]]
                if request in self.scheduler.requests:  # if planned ahead, it may have ended
                    self.drafts.append((list(self.scheduler.requests[request].all_token_ids), list(drafts)))
                self.rejected += len(drafts) + 1 - len(sampled)
            return update(planned, output)

        def watched_preempt(*args: Any, **options: Any) -> Any:
            self.preemptions += 1
            return preempt(*args, **options)

        self.scheduler.schedule = watched_schedule
        self.scheduler.update_from_output = watched_update
        self.scheduler._preempt_request = watched_preempt

    def generate(self, prompts: Sequence[Prompt], tokens: int = 16, **options: Any) -> list[RequestOutput]:
        """Generate greedily and with logprobs from all prompts in one batch. See `LLM.generate` for options."""
        greedy = SamplingParams(temperature=0, max_tokens=tokens, logprobs=1, ignore_eos=True, detokenize=False)
        requests: Any = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        return self.llm.generate(requests, greedy, use_tqdm=False, **options)

    def chunks(self, output: RequestOutput) -> int:
        """Return the number of pieces in which the prompt of a request was computed."""
        computed = len(output.prompt_token_ids or ()) - (output.num_cached_tokens or 0)
        (pieces,) = (self.pieces[name] for name in self.pieces if name.rpartition("-")[0] == output.request_id)
        return 1 + sum(total < computed for total in accumulate(pieces))

    @property
    def drafted(self) -> int:
        return sum(len(draft) for _, draft in self.drafts)

    @property
    def free_blocks(self) -> int:
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


@contextmanager
def engine(folder: Path, **options: Any) -> Iterator[Engine]:
    """Run an engine and remove it afterwards, so that the next one finds the process unchanged."""
    running = None
    keep_what_is_here()
    try:
        running = Engine(folder, **options)
        yield running
    finally:
        if running is not None:
            running.llm.llm_engine.engine_core.shutdown()
            del running.llm, running.scheduler  # a test may keep the record longer
        cleanup_dist_env_and_memory()


def different(model: PreTrainedModel, outputs: Sequence[RequestOutput], tolerance: float = 1e-4) -> list[str]:
    """Return the answers of vLLM that deviate: each token must be the model's likeliest and have the model's logprob.

    By induction, all tokens of an answer are then those of greedy decoding.
    """
    faults = []
    for output in outputs:
        likeliest, errors = compared(model, output)
        wrong = ~likeliest | (errors > tolerance)
        if wrong.any():
            faults.append(
                f"{len(output.prompt_token_ids or ())} tokens, {output.num_cached_tokens} of them cached: "
                f"token {int(wrong.nonzero()[0])} of the answer"
            )
    return faults


@torch.no_grad()
def compared(model: PreTrainedModel, output: RequestOutput) -> tuple[torch.Tensor, torch.Tensor]:
    """Return whether each token of an answer is the model's likeliest, and how far its logprob is from the model's."""
    prompt, answer = output.prompt_token_ids or (), output.outputs[0]
    logits = model(torch.tensor([[*prompt, *answer.token_ids]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    expected, tokens = logits.float().log_softmax(-1), torch.tensor(answer.token_ids)
    by_token = zip(answer.logprobs or (), answer.token_ids, strict=True)
    own = torch.tensor([by[token].logprob for by, token in by_token])
    return expected.argmax(-1) == tokens, (own - expected.gather(1, tokens[:, None])[:, 0]).abs()


def drawn(*lengths: int, seed: int = 0, vocabulary: int = 97) -> list[list[int]]:
    """Return random prompts of these lengths."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocabulary, (length,), generator=generator).tolist() for length in lengths]


def count(outputs: Sequence[RequestOutput]) -> Counter[int]:
    """Return the number of requests for each number of tokens found in the prefix cache."""
    return Counter(output.num_cached_tokens or 0 for output in outputs)
