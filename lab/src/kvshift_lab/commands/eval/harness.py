"""Ask a model benchmark questions through lm-eval, each distinct request once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import islice
from typing import Any

from kvshift_lab.commands.eval.answer_cache import AnswerCache, answer_key
from kvshift_lab.commands.eval.benchmarks import BENCHMARKS, LONGEST_SOLUTION, make_task, prompts
from kvshift_lab.commands.eval.items import Questions
from kvshift_lab.core.errors import LabError, install_command
from kvshift_lab.core.messages import quiet
from kvshift_lab.run.progress import ProgressReporter
from kvshift_lab.variants.uncached import decodes_with_cache

try:
    from lm_eval.models import huggingface
    from lm_eval.models.utils_hf import stop_sequences_criteria
except ModuleNotFoundError as error:
    missing = (error.name or "lm_eval").partition(".")[0]
    raise LabError(f"tasks: needs the package {missing!r}: {install_command('eval')}") from error

_HFLM: Any = huggingface.HFLM  # its decorator hides its type

logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns about every model that it did not load itself


class LMEvalModel(_HFLM):
    """lm-eval's model for transformers, which generates without a cache for variants that do not support one."""

    def _model_generate(self, context: Any, max_length: int, stop: list[str], **kwargs: Any) -> Any:
        return self.model.generate(
            context,
            attention_mask=kwargs["attention_mask"],
            max_length=max_length,
            stopping_criteria=stop_sequences_criteria(self.tokenizer, stop, context.shape[1], context.shape[0]),
            pad_token_id=self.tokenizer.pad_token_id,
            do_sample=False,
            use_cache=decodes_with_cache(self.model),
        )


def wrap_for_lm_eval(model: Any, tokenizer: Any, *, batch_size: int, window: int | None = None) -> LMEvalModel:
    """Wrap a loaded model for lm-eval, as `lm_eval --model hf` with softmax_dtype=float32 does.

    Args:
        window: Maximum number of tokens that the model sees. None: its context length.
    """
    return LMEvalModel(
        pretrained=model,
        tokenizer=tokenizer,
        batch_size=batch_size,
        max_length=window,
        softmax_dtype="float32",
    )


class CachedModel:
    """An lm-eval model that answers each distinct request once and saves its answers.

    It replaces lm-eval's own `CachingLM`, whose file contains pickles, which are not read here; whose keys do not
    identify the model; and which sends equal requests, such as the same choice twice, to the model more than once.

    Attributes:
        model: The wrapped model of lm-eval.
    """

    def __init__(
        self,
        model: Any,
        cache: AnswerCache | None = None,
        *,
        source: str = "",
        log: Callable[[str], object] = quiet,
    ) -> None:
        """Wrap `model` without running it.

        Args:
            model: A model of lm-eval.
            cache: Answers from before, to which new ones are added. None: keep the answers in memory only.
            source: Identifies the model, so that its answers are not mixed up with those of another model.
            log: Called with the number of answers every few seconds.
        """
        self.model, self._source, self._log = model, source, log
        self._cache = AnswerCache() if cache is None else cache
        self._counter: ProgressReporter | None = None

    def loglikelihood(self, requests: list[Any]) -> list[tuple[float, bool]]:
        """See `lm_eval.api.model.LM`."""
        return [tuple(answer) for answer in self._answer_requests("loglikelihood", requests)]

    def generate_until(self, requests: list[Any]) -> list[str]:
        """See `lm_eval.api.model.LM`."""
        return self._answer_requests("generate_until", requests)

    def add_partial(self, kind: str, arguments: Any, answer: Any) -> None:
        """Save an answer; lm-eval's models call this hook for each answer as soon as they have it."""
        key = self._key(kind, arguments)
        if key in self._cache:
            return
        self._cache.add(key, answer)
        if self._counter is not None:
            self._counter.update()

    def _answer_requests(self, kind: str, requests: list[Any]) -> list[Any]:
        keys = [self._key(kind, request.args) for request in requests]
        missing = {key: request for key, request in zip(keys, requests, strict=True) if key not in self._cache}
        if missing:
            self._counter = ProgressReporter(kind, len(missing), "answers", log=self._log)
            self.model.set_cache_hook(self)
            try:
                given = getattr(self.model, kind)(list(missing.values()), disable_tqdm=True)
                for request, answer in zip(missing.values(), given, strict=True):  # for models that call no hook
                    self.add_partial(kind, request.args, answer)
            finally:
                self._counter.close()
                self._counter = None
        return [self._cache[key] for key in keys]

    def _key(self, kind: str, arguments: Any) -> str:
        return answer_key(self._source, kind, *arguments)


def evaluate_benchmark(
    answers: CachedModel, name: str, questions: Questions, limit: int | None = None
) -> list[dict[str, Any]]:
    """Return lm-eval's metrics and the facts of the prompt for each question of a benchmark, in order."""
    benchmark, model = BENCHMARKS[name], answers.model
    longest = min(LONGEST_SOLUTION, model.max_length // 2)
    most_tokens = model.max_length - longest if benchmark.kind == "solution" else model.max_length + 1

    def fits(prompt: str, answer: str) -> bool:
        if len(model.tok_encode(prompt + answer)) <= most_tokens:
            return True
        if len(model.tok_encode(answer)) > model.max_length:
            raise LabError(f"tasks: {name} has an answer longer than the model's window of {model.max_length} tokens")
        return False

    task = make_task(name, list(prompts(benchmark, questions, fits, limit)), longest_solution=longest)
    records = list(task.eval_docs)
    requests = []
    for record in records:
        constructed = task.construct_requests(record, task.fewshot_context(record, 0))
        requests.append(constructed if isinstance(constructed, list) else [constructed])
    flat_requests = [request for group in requests for request in group]
    given = iter(getattr(answers, flat_requests[0].request_type)(flat_requests))
    facts = ("subject", "shots", "whole")
    return [
        task.process_results(record, list(islice(given, len(group)))) | {fact: record[fact] for fact in facts}
        for record, group in zip(records, requests, strict=True)
    ]
