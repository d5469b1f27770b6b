"""Trainer, which resumes from the released names, and adapters."""

from __future__ import annotations

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import CompileConfig, Trainer, TrainingArguments

from ..llama.checks import assert_greedy, logits_of, new_tokens_of
from ..llama.tiny import left_padded, random_tokens
from .tiny import CONFIG, load, shapes, write


def trained(folder, out, resume=None):
    arguments = TrainingArguments(
        out,
        max_steps=4,
        save_steps=2,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    examples = [{"input_ids": tokens, "labels": tokens} for tokens in random_tokens(24, 12)]
    model = load(folder, dtype=torch.float32).train()
    Trainer(model, arguments, train_dataset=examples).train(resume_from_checkpoint=resume)
    return model.state_dict()


def test_trainer_resumes_to_the_same_bits(tmp_path):
    write(tmp_path)
    start = load(tmp_path, dtype=torch.float32).state_dict()
    whole = trained(tmp_path, tmp_path / "run")
    assert set(load_file(tmp_path / "run" / "checkpoint-2" / "model.safetensors")) == set(shapes(CONFIG))
    resumed = trained(tmp_path, tmp_path / "run", resume=str(tmp_path / "run" / "checkpoint-2"))
    for name, tensor in whole.items():
        assert torch.equal(resumed[name], tensor), name
        assert not torch.equal(start[name], tensor), name


def test_an_adapter_and_its_merged_model_agree(tmp_path):
    model, ids = load(write(tmp_path)), random_tokens(1, 9)
    before = logits_of(model, ids)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False))
    logits = logits_of(adapted, ids)
    assert (logits - before).abs().max() > 0.1
    torch.testing.assert_close(logits_of(adapted.merge_and_unload(), ids), logits, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_decoding_compiles_without_a_break(tmp_path):
    model = load(write(tmp_path))
    compile_config = CompileConfig(fullgraph=True, dynamic=False, backend="aot_eager", mode=None)
    compile_config._compile_all_devices = True  # otherwise generate compiles on accelerators alone
    rows = [random_tokens(length, seed=length) for length in (4, 7)]
    ids, mask = left_padded(rows)
    options = {"cache_implementation": "static", "compile_config": compile_config, "max_new_tokens": 5}
    assert_greedy(model, rows, new_tokens_of(model, ids, mask, **options))
