"""Transformers, PEFT and accelerate find a model with shift in the tables in which they find the stock model."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, get_peft_model
from peft.utils import constants
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Trainer, TrainingArguments
from transformers.models.auto import modeling_auto

from kvshift.models.retrofit import FAMILIES

from .llama.tiny import random_tokens
from .registry import MODELS
from .retrofit.tiny_families import FAMILIES as TINY
from .retrofit.tiny_families import shifted, stock

BY_TYPE = {TINY[name][0]: name for name in reversed(TINY)}
"""Names of the tiny families by the model type of transformers, for the plain one of each."""
STOCK_TYPES = [next(iter(family.models)).config_class.model_type for family in FAMILIES]
TABLES = {name: table for name, table in vars(constants).items() if name.endswith("_MODULES_MAPPING")}


def build(model_type: str) -> Any:
    if model_type == "baichuan_m1":
        return MODELS["Baichuan-M1"](torch.float32)
    return shifted(BY_TYPE[model_type], torch.float32)


@pytest.mark.parametrize("model_type", [*STOCK_TYPES, "baichuan_m1"])
def test_label_smoothing_compares_each_token_with_the_next(model_type, tmp_path):
    model, rows, epsilon = build(model_type), random_tokens(4, 9), 0.1
    data: Any = [{"input_ids": row, "labels": row.clone()} for row in rows]
    options = {"label_smoothing_factor": epsilon, "report_to": "none", "use_cpu": True, "disable_tqdm": True}
    trainer = Trainer(model, TrainingArguments(str(tmp_path), **options), eval_dataset=data)
    with torch.no_grad():
        surprise = -model(rows, use_cache=False).logits.log_softmax(-1)
    expected = 0.0
    for i, row in enumerate(rows.tolist()):
        for t, following in enumerate(row[1:]):
            expected += (1 - epsilon) * float(surprise[i, t, following]) + epsilon * float(surprise[i, t].mean())
    expected /= 4 * 8
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, abs=1e-4)
    loss = trainer.compute_loss(model, {"input_ids": rows, "labels": rows})
    assert loss.item() == pytest.approx(expected, abs=1e-4)


def test_classes_are_listed_by_model_type():
    for family in FAMILIES:
        decoder, causal, classifier = (model.__name__ for model in family.models.values())
        name = family.config.model_type
        assert modeling_auto.MODEL_MAPPING_NAMES[name] == decoder
        assert modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name] == causal
        assert modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES[name] == classifier
    assert modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["baichuan_m1"] == "BaichuanM1ForCausalLM"


@pytest.mark.parametrize("model_type", STOCK_TYPES)
def test_every_method_of_peft_has_the_default_modules_of_the_family(model_type):
    listed = [name for name, table in TABLES.items() if model_type in table]
    assert listed or model_type == "phi3"
    for name, table in TABLES.items():
        assert table.get(f"kvshift_{model_type}") == table.get(model_type), name


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set to False:UserWarning")  # GPT-2's matrices are transposed
@pytest.mark.parametrize("config", [LoraConfig, IA3Config])
@pytest.mark.parametrize("model_type", [model_type for model_type in STOCK_TYPES if model_type != "phi3"])
def test_adapters_are_placed_as_in_the_stock_model(model_type, config):
    names = [
        get_peft_model(model, config(task_type="CAUSAL_LM")).base_model.targeted_module_names
        for model in (shifted(BY_TYPE[model_type], torch.float32), stock(BY_TYPE[model_type]))
    ]
    assert names[0] == names[1] != []


def test_defaults_of_baichuan_m1_are_those_of_llama_with_one_matrix():
    assert TABLES["TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING"]["baichuan_m1"] == ["W_pack"]
    assert TABLES["TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING"]["baichuan_m1"] == ["W_pack", "down_proj"]
    # It trains the bias of values alone, which has no counterpart in a matrix for all.
    assert "baichuan_m1" not in TABLES["TRANSFORMERS_MODELS_TO_BEFT_TARGET_MODULES_MAPPING"]
    model = get_peft_model(build("baichuan_m1"), LoraConfig(task_type="CAUSAL_LM"))
    assert [name.split(".")[-1] for name in model.base_model.targeted_module_names] == ["W_pack"] * 3


@pytest.mark.parametrize("first", ["peft.utils.constants", "kvshift.models.retrofit"])
def test_peft_is_not_imported_and_may_come_first_or_later(first):
    program = f"""
import importlib, importlib.util, sys
importlib.import_module("{first}")
assert importlib.util.find_spec("peft") is not None
import kvshift.models.retrofit, kvshift.models.baichuan_m1
assert ("peft" in sys.modules) == ("{first}".startswith("peft")), "imported"
importlib.util.find_spec("peft.utils.constants")
from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as table
assert table["kvshift_qwen3"] == table["qwen3"] and table["baichuan_m1"] == ["W_pack"]
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True)


@pytest.mark.parametrize("model_type", [*STOCK_TYPES, "baichuan_m1"])
def test_megatron_is_refused(model_type):
    from accelerate.utils import MegatronLMPlugin

    model = build(model_type)
    with pytest.raises(ValueError, match=f"Megatron-LM.*without the shift of '{model.config.model_type}'"):
        MegatronLMPlugin.set_network_size_args(None, model)


@pytest.mark.parametrize("model_type", STOCK_TYPES)
def test_the_tokenizer_of_a_folder_is_that_of_the_stock_model(model_type, tmp_path):
    """Some families read the tokenizer's class from a table, because folders on the hub name a wrong one."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Tokenizer(models.BPE(vocab=letters, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    loaded = []
    for model in (stock(BY_TYPE[model_type]), shifted(BY_TYPE[model_type], torch.float32)):
        folder = tmp_path / type(model).__name__
        PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(folder)
        written = (folder / "tokenizer_config.json").read_text()
        named = written.replace("TokenizersBackend", "LlamaTokenizer").replace(
            "PreTrainedTokenizerFast", "LlamaTokenizer"
        )
        assert "LlamaTokenizer" in named
        (folder / "tokenizer_config.json").write_text(named)
        model.config.save_pretrained(folder)
        loaded.append(AutoTokenizer.from_pretrained(folder))
    assert type(loaded[0]) is type(loaded[1])
    text = "Two  words,\n\tand 7."
    assert loaded[0](text)["input_ids"] == loaded[1](text)["input_ids"]
