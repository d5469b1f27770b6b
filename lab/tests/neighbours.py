"""A result of PEFT, Trainer (accelerate), TRL and lm-eval on every model with shift, compared with a forward pass.

    PYTHON -P lab/tests/neighbours.py

`make test-newest` runs it with the newest version of each that the package allows, beside the newest of the others;
`make test-newest NEIGHBOURS=newest` also with versions that it does not allow yet. A pair of versions that do not fit
each other must give the right result or be refused by name. The first failure ends the script with a traceback.
"""

from __future__ import annotations

import os
import tempfile
from importlib.metadata import version
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import transformers
from datasets import Dataset, disable_progress_bars
from lm_eval.models.huggingface import HFLM
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Trainer, TrainingArguments
from trl import SFTConfig, SFTTrainer

from kvshift_lab.check.stock_models import GROUPS, build_stock

ROWS = torch.randint(3, 50, (4, 9), generator=torch.Generator().manual_seed(3))
NEW = 6


def tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{i}": i for i in range(50)}
    backend = Tokenizer(models.WordLevel(words, unk_token="w2"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="w0", pad_token="w1")


@torch.no_grad()
def surprise(model: Any, **inputs: Any) -> torch.Tensor:
    """Return -log p of every token at every position, (B, T, V)."""
    return -model(use_cache=False, **inputs).logits.float().log_softmax(-1)


def require_close(found: float, expected: float, what: str) -> None:
    assert abs(found - expected) < 1e-3 * max(1, abs(expected)), f"{what}: {found}, a forward pass gives {expected}"


def default_lora(name: str) -> None:
    try:
        model = get_peft_model(build_stock(name), LoraConfig(task_type="CAUSAL_LM"))
    except ValueError as error:
        if name == "phi3 with shift" and "target_modules" in str(error):  # PEFT has no defaults for Phi-3
            return
        raise
    assert model.base_model.targeted_module_names


def prompt_tuning(name: str) -> None:
    torch.manual_seed(0)
    base = build_stock(name)
    model = get_peft_model(base, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    ids = ROWS[:1]
    learned, embed = model.get_prompt(1).detach(), base.get_input_embeddings()
    expected = ids
    for _ in range(NEW):
        logits = -surprise(base, inputs_embeds=torch.cat([learned, embed(expected)], dim=1))[:, -1]
        expected = torch.cat([expected, logits.argmax(-1, keepdim=True)], dim=1)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": NEW, "min_new_tokens": NEW, "pad_token_id": 1}
    try:
        found = model.generate(input_ids=ids, do_sample=False, **options)
    except ValueError as error:
        if "does not fit transformers" in str(error):
            return
        raise
    assert torch.equal(found, expected), f"{name}: {found.tolist()}, a forward pass gives {expected.tolist()}"


def label_smoothing(name: str) -> None:
    model, share = build_stock(name), 0.1
    data: Any = [{"input_ids": row, "labels": row.clone()} for row in ROWS]
    cost = surprise(model, input_ids=ROWS)[:, :-1]
    expected = (1 - share) * cost.gather(-1, ROWS[:, 1:, None]).mean() + share * cost.mean()
    with tempfile.TemporaryDirectory() as folder:
        options = {"label_smoothing_factor": share, "report_to": "none", "use_cpu": True, "disable_tqdm": True}
        trainer = Trainer(model, TrainingArguments(folder, **options), eval_dataset=data)
        require_close(trainer.evaluate()["eval_loss"], float(expected), f"{name}, Trainer")


def fine_tuning(name: str) -> None:
    model = build_stock(name).train()
    with tempfile.TemporaryDirectory() as folder:
        options = {"report_to": "none", "bf16": False, "use_cpu": True, "gradient_checkpointing": False}
        config = SFTConfig(folder, per_device_train_batch_size=2, **options)
        data = Dataset.from_dict({"input_ids": ROWS.tolist()})
        trainer = SFTTrainer(model, config, train_dataset=data, processing_class=tokenizer())
        batch = dict(next(iter(trainer.get_train_dataloader())))
        trainer.model.eval()  # no dropout
        loss = trainer.compute_loss(trainer.model, dict(batch))
        ids = batch["input_ids"]
        expected = surprise(trainer.model, input_ids=ids)[:, :-1].gather(-1, ids[:, 1:, None]).mean()
        require_close(loss.item(), float(expected), f"{name}, SFTTrainer")


def likelihood(name: str) -> None:
    model, row = build_stock(name), ROWS[0].tolist()
    harness = HFLM(pretrained=model, tokenizer=tokenizer(), batch_size=1, max_length=64)
    ((found, _),) = harness._loglikelihood_tokens([(("", ""), row[:5], row[5:])], disable_tqdm=True)
    expected = surprise(model, input_ids=ROWS[:1])[0, 4:-1].gather(-1, ROWS[0, 5:, None]).sum()
    require_close(found, -float(expected), f"{name}, lm-eval")


def main() -> None:
    """Run every check on every model with shift."""
    transformers.logging.set_verbosity_error()
    disable_progress_bars()
    packages = ("transformers", "peft", "accelerate", "trl", "lm-eval")
    print("neighbours:", *(f"{package} {version(package)}" for package in packages), flush=True)
    for name in GROUPS["With KV shift"]:
        for check in (default_lora, prompt_tuning, label_smoothing, fine_tuning, likelihood):
            check(name)
        print(f"neighbours: {name}: right", flush=True)


if __name__ == "__main__":
    main()
