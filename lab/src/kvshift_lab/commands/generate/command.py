"""`kvshift generate`: continue prompts with the model of a run, or with any causal language model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, TextStreamer
from transformers.utils import logging

from kvshift_lab.commands.generate.options import GenerateConfig
from kvshift_lab.core.errors import LabError
from kvshift_lab.core.messages import log
from kvshift_lab.core.seeds import seed_for
from kvshift_lab.run.loading import load_model, num_appended_tokens
from kvshift_lab.variants.continuing import continue_rows

_NEW_TOKENS = 128  # default of max_new_tokens


def generate(config: GenerateConfig) -> None:
    """Print the continuation of one prompt while it is generated, or JSON lines for a file of prompts.

    Each line has the fields "prompt", "sample" (from 0) and "text".
    """
    config.check()
    texts = [config.prompt or ""] if config.prompts is None else read_prompts(config.prompts)
    logging.disable_progress_bar()
    model, tokenizer, _ = load_model(
        config.model, dtype=config.dtype, device=config.device, log=partial(log, command="generate")
    )
    prompts = [encode(tokenizer, text) for text in texts]
    all_settings = [
        _generation_config(
            model, tokenizer, ids, config, "prompt" if config.prompts is None else f"prompt {text[:40]!r}"
        )
        for text, ids in zip(texts, prompts, strict=True)
    ]
    for number, (text, ids, settings) in enumerate(zip(texts, prompts, all_settings, strict=True)):
        for sample in range(config.samples):
            if config.prompts is None and config.samples > 1:
                print(f"--- {sample + 1} of {config.samples}", flush=True)
            streamer = None
            if config.prompts is None:
                streamer = TextStreamer(tokenizer, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            seed = seed_for(f"generate sample {sample} of prompt {number}", config.seed)
            (row,) = continue_rows(model, [torch.tensor(ids)], settings, seed=seed, streamer=streamer)
            if config.prompts is not None:
                line = {"prompt": text, "sample": sample, "text": _continuation(tokenizer, ids, row.tolist())}
                print(json.dumps(line, ensure_ascii=False), flush=True)


def read_prompts(path: Path) -> list[str]:
    """Return the lines of a file that are not blank."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise LabError(f"prompts: {path} cannot be read: {error}") from error
    prompts = [line for line in lines if line.strip()]
    if not prompts:
        raise LabError(f"prompts: {path} is empty")
    return prompts


def encode(tokenizer: Any, prompt: str) -> list[int]:
    """Return the token ids of a prompt; if it has none, the beginning-of-text token or, without one, the end token."""
    ids = list(tokenizer(prompt)["input_ids"])
    ids = ids[: len(ids) - num_appended_tokens(tokenizer, prompt)]
    if ids:
        return ids
    begin = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if begin is None:
        raise LabError("prompt is empty, and the tokenizer has no token that begins or ends a text (bos, eos)")
    return [begin]


def _generation_config(
    model: Any, tokenizer: Any, ids: Sequence[int], config: GenerateConfig, what: str
) -> GenerationConfig:
    """Convert the options to a GenerationConfig that sets everything, so that no default of the model applies.

    Args:
        ids: token ids of the prompt, which an error calls `what`.
    """
    prompt = len(ids)
    context, new = getattr(model.config.get_text_config(), "max_position_embeddings", None), config.max_new_tokens
    if context is not None and prompt + (new or 1) > context:
        raise LabError(
            f"{what} has {prompt} token(s); with max_new_tokens {new or 1} that is more than the model's maximum "
            f"length of {context} tokens"
        )
    ends = model.generation_config.eos_token_id
    ends = tokenizer.eos_token_id if ends is None else ends
    drawn = {"do_sample": True, "temperature": config.temperature, "top_p": config.top_p, "top_k": 0}
    return GenerationConfig(
        **drawn if config.temperature > 0 else {"do_sample": False},
        max_new_tokens=new or (_NEW_TOKENS if context is None else min(_NEW_TOKENS, context - prompt)),
        pad_token_id=next(i for i in (tokenizer.pad_token_id, tokenizer.eos_token_id, 0) if i is not None),
        eos_token_id=ends,
    )


def _continuation(tokenizer: Any, prompt: list[int], generated: list[int]) -> str:
    """Return the text of generated ids; some tokenizers decode the beginning of a text in another way."""
    decode = partial(tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    before, whole = decode(prompt), decode(prompt + generated)
    return whole[len(before) :] if whole.startswith(before) else decode(generated)
