"""PEFT's tests of decoders, on ours.

PEFT loads small models from the hub by name. Folders of these names in the working directory take their place, with
models of transformers after `add_kv_shift`.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from datasets import Dataset, DatasetDict
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from kvshift import ShiftOptions
from kvshift.models.retrofit import add_kv_shift

from . import sources
from .subjects import STOCK

sources.add_to_path()

from peft_tests import test_decoder_models as theirs  # noqa: E402

LLAMA = "trl-internal-testing/tiny-random-LlamaForCausalLM"
MODELS = {
    LLAMA: "Llama",
    "hf-internal-testing/tiny-random-Gemma3ForCausalLM": "Gemma3",
    "hf-internal-testing/tiny-random-MistralForCausalLM": "Mistral",
    "hf-internal-testing/tiny-random-gpt2": "GPT2",
    "peft-internal-testing/tiny-dummy-qwen2": "Qwen2",
    "peft-internal-testing/tiny-random-GPT2LMHeadModel": "GPT2",
    "peft-internal-testing/tiny-random-OPTForCausalLM": "Llama",  # tests that read nothing of the model's kind
    "trl-internal-testing/tiny-Qwen3ForCausalLM": "Qwen3",
}
TEXT = "Be yourself ; everyone else is already taken . This is a test prompt"

if "ALL" not in os.environ:
    theirs.PEFT_DECODER_MODELS_TO_TEST[:] = [LLAMA]
theirs.PEFT_DECODER_MODELS_TO_TEST[:] = [name for name in theirs.PEFT_DECODER_MODELS_TO_TEST if name in MODELS]


def quotes() -> DatasetDict:
    return DatasetDict(train=Dataset.from_dict({"quote": [TEXT] * 16}))


theirs.load_dataset_english_quotes = quotes


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the models of all names, after `add_kv_shift`."""
    root = tmp_path_factory.mktemp("peft")
    words = dict.fromkeys(["<pad>", "<s>", "</s>", "<unk>", *TEXT.split()])
    vocabulary = {word: number for number, word in enumerate(words)}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    torch.manual_seed(0)
    for name, family in MODELS.items():
        model = AutoModelForCausalLM.from_config(STOCK[family].config())
        add_kv_shift(model, ShiftOptions(init="uniform"))
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    return root


class TestDecoders(theirs.TestDecoderModels):
    """PEFT's tests, on models with shift."""

    test_prefix_tuning_gemma4_raises_if_all_layers_skipped = None  # not a family of ours
    test_prefix_tuning_gemma4_warns_if_some_layers_skipped = None
    test_prefix_tuning_gemma4_works = None
    test_prompt_tuning_trust_remote_code = None  # reads a module of OPT

    @pytest.fixture(autouse=True)
    def models_by_name(self, folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(folders)
