"""Samples of text from several trained models, with the same prompt and seed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from kvshift_lab.core.errors import LabError
from kvshift_lab.data.text import load_text_data
from kvshift_lab.run.finished import read_run
from kvshift_lab.run.loading import load_trained
from kvshift_lab.variants.continuing import continue_rows

_PROMPT_TOKENS = 16


def sample(
    folders: Mapping[str, Path], *, prompt: str | None, tokens: int, temperature: float, seed: int
) -> dict[str, Any]:
    """Continue one prompt with the final model of each run, on the CPU.

    Args:
        folders: folders of finished runs on the same data.
        prompt: text to continue; None for the first 16 tokens of the validation text, or half a sequence.
        tokens: maximum number of generated tokens; there are fewer if the model ends the text or has no more positions.
        temperature: sampling temperature; 0 for the most likely token each time.
        seed: seed of the generator of each model.

    Returns:
        "prompt", "seed", "temperature", and "texts" without the prompt, by the names of the models.

    Raises:
        LabError: the prompt fills all positions of a model.
    """
    config = read_run(next(iter(folders.values()))).options()
    data = load_text_data(config.data, seed=config.seed, tokenizer_folder=next(iter(folders.values())) / "tokenizer")
    tokenizer = data.tokenizer
    if prompt is None:
        ids = data.validation[0]["input_ids"][: min(_PROMPT_TOKENS, config.data.sequence_length // 2)].tolist()
        prompt = str(tokenizer.decode(ids))
    else:
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    drawn = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    texts = {}
    for folder in folders.values():
        run = read_run(folder)
        model = load_trained(run).eval()
        positions = model.config.max_position_embeddings
        if len(ids) >= positions:
            raise LabError(
                f"prompt has {len(ids)} tokens, but the models have {positions} positions; the runs are kept: repeat "
                "the command with a shorter prompt"
            )
        generation_config = GenerationConfig(
            **drawn,
            max_new_tokens=min(tokens, positions - len(ids)),
            pad_token_id=tokenizer.eos_token_id,
            eos_token_id=model.generation_config.eos_token_id,
        )
        written = continue_rows(model, [torch.tensor(ids)], generation_config, seed=seed)[0]
        texts[run.name] = tokenizer.decode(written, skip_special_tokens=True)
    return {"prompt": prompt, "seed": seed, "temperature": temperature, "texts": texts}
