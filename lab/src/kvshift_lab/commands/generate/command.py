"""`kvshift generate`: continue prompts with the model of a run, or with any causal language model."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from tqdm import tqdm
from transformers import GenerationConfig, TextStreamer
from transformers.utils import logging

from kvshift_lab.commands.generate.options import GenerateConfig
from kvshift_lab.commands.generate.prompts import Prompt, open_output, read_prompts
from kvshift_lab.core.errors import LabError, require_unicode
from kvshift_lab.core.messages import log
from kvshift_lab.core.options import digest
from kvshift_lab.core.seeds import seed_for
from kvshift_lab.run.inputs import identify_model
from kvshift_lab.run.loading import load_model
from kvshift_lab.variants.continuing import continue_rows
from kvshift_lab.variants.uncached import decodes_with_cache

_log = partial(log, command="generate")

_NEW_TOKENS = 128  # default of max_new_tokens
_MOST_CANDIDATES = 2**24  # limit of torch.multinomial


class Continuation(NamedTuple):
    """A generated continuation.

    Attributes:
        text: generated text, without the prompt.
        tokens: number of generated tokens, including the end token.
        finish: "end" if the model ended the text, "length" if it reached the maximum length.
    """

    text: str
    tokens: int
    finish: str


def generate(config: GenerateConfig) -> None:
    """Print the continuation of one prompt while it is generated, or write JSON lines.

    Each line has the fields "index" (of the prompt), "prompt", "sample", "text", "tokens", "finish", and "settings", a
    digest of the model's content and of the options that affect the text.
    """
    config.check()
    given = [_read_prompt(config)] if config.prompts is None else read_prompts(config.prompts)
    prompts = [prompt.text for prompt in given]
    logging.disable_progress_bar()
    model, tokenizer, source = load_model(config.model, dtype=config.dtype, device=config.device, log=_log)
    if config.prompt_lookup and not decodes_with_cache(model):
        raise LabError(f"prompt_lookup must be 0: {model.config.model_type} does not decode with a cache")
    vocabulary = model.get_input_embeddings().num_embeddings
    if config.num_beams > 1 and config.temperature > 0 and config.num_beams * vocabulary > _MOST_CANDIDATES:
        raise LabError(
            f"num_beams must be at most {_MOST_CANDIDATES // vocabulary} with temperature > 0 and a vocabulary of "
            f"{vocabulary}, because PyTorch samples from at most 2^24 candidates (beams x vocabulary); got "
            f"{config.num_beams}"
        )
    encoded = [encode(tokenizer, *prompt) for prompt in given]
    config, encoded = _fit_to_context(model, tokenizer, encoded, [prompt.name for prompt in given], config)

    if config.prompts is None and config.output is None:
        _print_text(model, tokenizer, encoded[0], config)
        return
    settings = _settings(config, identify_model(source, tokenizer.name_or_path))
    if config.output is None:
        for records in _records(model, tokenizer, prompts, encoded, config, settings, done=0):
            print(*(json.dumps(record, ensure_ascii=False) for record in records), sep="\n", flush=True)
        return
    with open_output(config.output, prompts, config.samples, settings) as answers:
        if answers.count:
            _log(f"{config.output} has {answers.count} of {len(prompts) * config.samples} lines already")
        for records in _records(model, tokenizer, prompts, encoded, config, settings, done=answers.count):
            answers.append(records)


def encode(tokenizer: Any, prompt: str, name: str = "prompt") -> list[int]:
    """Return the token ids of a prompt; if it has none, the beginning-of-text token or, without one, the end token."""
    ids = list(tokenizer(prompt)["input_ids"])
    if ids:
        return ids
    begin = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if begin is None:
        raise LabError(f"{name} is empty, and the tokenizer has no token that begins or ends a text (bos, eos)")
    return [begin]


def continue_batch(
    model: Any, tokenizer: Any, prompts: Sequence[list[int]], config: GenerateConfig, *, first: int = 0, **kwargs: Any
) -> list[list[Continuation]]:
    """Generate `config.samples` continuations of each prompt with one call of `model.generate`.

    Args:
        model: a causal language model.
        tokenizer: its tokenizer.
        prompts: token ids of each prompt.
        config: options.
        first: index of the first prompt. It enters the seed, so that no two batches draw the same random numbers.
        kwargs: further arguments of `model.generate`.
    """
    pad = _first_token_ids(tokenizer.pad_token_id, tokenizer.eos_token_id, 0)[0]
    ends = _first_token_ids(model.generation_config.eos_token_id, tokenizer.eos_token_id)
    seed = seed_for(f"generate from {first}", config.seed)
    written = continue_rows(
        model,
        [torch.tensor(row) for row in prompts],
        _generation_config(config, pad=pad, ends=ends),
        seed=seed,
        **kwargs,
    )
    rows = [
        _continuation(tokenizer, prompts[number // config.samples], row.tolist(), ends)
        for number, row in enumerate(written)
    ]
    return [rows[start : start + config.samples] for start in range(0, len(rows), config.samples)]


def _generation_config(config: GenerateConfig, *, pad: int, ends: list[int]) -> GenerationConfig:
    """Convert the options to a GenerationConfig that sets everything, so that no default of the model applies."""
    drawn: dict[str, Any] = {"do_sample": config.temperature > 0}
    if drawn["do_sample"]:
        drawn |= {name: getattr(config, name) for name in ("temperature", "top_k", "top_p")}
        drawn["min_p"] = config.min_p or None
    return GenerationConfig(
        **drawn,
        max_new_tokens=config.max_new_tokens,
        repetition_penalty=config.repetition_penalty,
        num_beams=config.num_beams,
        num_return_sequences=config.samples,
        prompt_lookup_num_tokens=config.prompt_lookup or None,
        pad_token_id=pad,
        eos_token_id=ends or None,
    )


def _continuation(tokenizer: Any, prompt: list[int], generated: list[int], ends: list[int]) -> Continuation:
    """Convert the generated ids of one sequence, which may end with padding, to a `Continuation`."""
    end = next((n for n, token in enumerate(generated) if token in ends), None)
    tokens = generated if end is None else generated[:end]
    # Decode prompt and continuation together, because some tokenizers decode the beginning of a text differently.
    before = _decode(tokenizer, prompt)
    whole = _decode(tokenizer, prompt + tokens)
    text = whole[len(before) :] if whole.startswith(before) else _decode(tokenizer, tokens)
    return Continuation(text, len(generated) if end is None else end + 1, "length" if end is None else "end")


def _decode(tokenizer: Any, tokens: list[int]) -> str:
    return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _records(
    model: Any,
    tokenizer: Any,
    prompts: list[str],
    encoded: list[list[int]],
    config: GenerateConfig,
    settings: str,
    *,
    done: int,
) -> Iterator[list[dict[str, Any]]]:
    """Yield the records after the first `done`, one batch at a time.

    Batches have the same boundaries as in an uninterrupted process, so that the same random numbers are drawn. A batch
    of which some records are done is generated again, and only its other records are yielded.
    """
    if done == len(prompts) * config.samples:
        return
    alone = config.repetition_penalty != 1 or config.prompt_lookup  # both would treat padding as text
    size = 1 if alone else config.batch_size
    skipped = done // config.samples // size * size
    bar = tqdm(total=len(prompts), initial=skipped, unit="prompt", disable=not sys.stderr.isatty())
    with bar:
        for start in range(skipped, len(prompts), size):
            batch = encoded[start : start + size]
            lines = [
                {"index": start + row, "sample": sample, "prompt": prompts[start + row], **continuation._asdict()}
                for row, continuations in enumerate(_continue(model, tokenizer, batch, config, start))
                for sample, continuation in enumerate(continuations)
            ]
            yield [line | {"settings": settings} for line in lines[max(0, done - start * config.samples) :]]
            bar.update(len(batch))


def _continue(
    model: Any, tokenizer: Any, prompts: list[list[int]], config: GenerateConfig, first: int
) -> list[list[Continuation]]:
    if not config.prompt_lookup or config.samples == 1:
        return continue_batch(model, tokenizer, prompts, config, first=first)
    one = dataclasses.replace(config, samples=1)  # speculative decoding needs a batch size of 1
    (prompt,) = prompts  # `_records` gives only one
    numbers = range(first * config.samples, (first + 1) * config.samples)
    return [[continue_batch(model, tokenizer, [prompt], one, first=number)[0][0] for number in numbers]]


def _print_text(model: Any, tokenizer: Any, prompt: list[int], config: GenerateConfig) -> None:
    """Print each sample while it is generated or, with a beam search, at the end."""
    if config.num_beams > 1:
        for number, continuation in enumerate(continue_batch(model, tokenizer, [prompt], config)[0]):
            _print_heading(number, config.samples)
            print((_decode(tokenizer, prompt) if config.echo else "") + continuation.text, flush=True)
        return
    one = dataclasses.replace(config, samples=1)
    for number in range(config.samples):
        _print_heading(number, config.samples)
        streamer = TextStreamer(
            tokenizer, skip_prompt=not config.echo, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        continue_batch(model, tokenizer, [prompt], one, first=number, streamer=streamer)


def _print_heading(number: int, samples: int) -> None:
    if samples > 1:
        print(f"--- {number + 1} of {samples}", flush=True)


def _read_prompt(config: GenerateConfig) -> Prompt:
    prompt, name = config.prompt, "prompt"
    if prompt == "-":
        name = "prompt (stdin)"
        try:
            prompt = sys.stdin.read().removesuffix("\n")
        except UnicodeDecodeError as error:
            raise LabError(f"{name} is not UTF-8: byte {error.start} is 0x{error.object[error.start]:02x}") from error
    assert prompt is not None  # guaranteed by `GenerateConfig.check`
    require_unicode(prompt, name)
    return Prompt(prompt, name)


def _fit_to_context(
    model: Any, tokenizer: Any, prompts: list[list[int]], names: list[str], config: GenerateConfig
) -> tuple[GenerateConfig, list[list[int]]]:
    """Return the options with `max_new_tokens` resolved and, with `crop_prompts`, cropped prompts.

    Raises:
        LabError: a prompt and its new tokens exceed the model's maximum length.
    """
    context = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    new = config.max_new_tokens
    if context is None:
        return dataclasses.replace(config, max_new_tokens=new or _NEW_TOKENS), prompts
    if config.crop_prompts:
        longest = context - (new or min(_NEW_TOKENS, context // 2))
        if longest < 1:
            raise LabError(f"max_new_tokens must be less than the model's maximum length, {context}, got {new}")
        if cropped := sum(len(ids) > longest for ids in prompts):
            _log(f"{cropped} prompt(s) are cropped to their last {longest} tokens, so that the new tokens fit")
        prompts = [_crop(ids, longest, tokenizer.bos_token_id) for ids in prompts]
    for ids, name in zip(prompts, names, strict=True):
        _check_length(len(ids), new or 1, context, name)
    if new is None:
        new = min(_NEW_TOKENS, context - max(map(len, prompts)))
        if new < _NEW_TOKENS:
            _log(f"max_new_tokens is {new}: the model's maximum length is {context} tokens, including the prompt")
    return dataclasses.replace(config, max_new_tokens=new), prompts


def _crop(ids: list[int], longest: int, begin: int | None) -> list[int]:
    """Return the last `longest` tokens of a prompt, keeping the beginning-of-text token `begin` if it has one."""
    kept = 1 if ids[0] == begin and longest > 1 else 0
    return ids if len(ids) <= longest else ids[:kept] + ids[len(ids) - longest + kept :]


def _check_length(prompt: int, new: int, context: int, name: str) -> None:
    if prompt + new > context:
        advice = "give a shorter prompt, or crop_prompts"
        if prompt < context:
            advice = f"max_new_tokens may be at most {context - prompt}"
        raise LabError(
            f"{name} has {prompt} token(s); with max_new_tokens {new} that is more than the model's maximum length "
            f"of {context} tokens: {advice}"
        )


def _settings(config: GenerateConfig, model: str) -> str:
    """Return a digest (16 hexadecimal digits) of the model's content and the options that affect the texts."""
    free = ["model", "prompt", "prompts", "output", "echo", "device"]
    if config.temperature == 0:
        free += ["batch_size", "seed"]  # they only affect sampling
    decisive = {name: value for name, value in dataclasses.asdict(config).items() if name not in free}
    return digest(decisive | {"model": model})


def _first_token_ids(*candidates: int | list[int] | None) -> list[int]:
    """Return the first candidate that is not None, as a list; empty if all are None."""
    for ids in candidates:
        if ids is not None:
            return ids if isinstance(ids, list) else [ids]
    return []
