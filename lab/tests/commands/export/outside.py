"""Uses of a folder that brings its own code, run by the tests, and where kvshift cannot be imported.

python outside.py FOLDER OUT writes tensors and facts about the folder to OUT.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

LENGTHS = (7, 1, 12, 4)
PROMPT = "to be or not"


def prompts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(5, 277, (length,), generator=generator) for length in LENGTHS]


def padded(side: str = "left") -> tuple[Tensor, Tensor]:
    """Return all prompts in one batch, and its mask."""
    longest = max(LENGTHS)
    spare = [(longest - n, 0) if side == "left" else (0, longest - n) for n in LENGTHS]
    ids = [torch.nn.functional.pad(prompt, pad, value=3) for prompt, pad in zip(prompts(), spare, strict=True)]
    mask = [torch.nn.functional.pad(torch.ones_like(p), pad) for p, pad in zip(prompts(), spare, strict=True)]
    return torch.stack(ids), torch.stack(mask)


@torch.no_grad()
def inference(model: Any) -> dict[str, Tensor]:
    """Return logits and tokens, by the way in which they were computed."""
    found: dict[str, Tensor] = {}
    tokens: dict[str, Any] = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False, "pad_token_id": 3}
    for i, prompt in enumerate(prompts()):
        found[f"alone {i}"] = model(prompt.unsqueeze(0)).logits
        found[f"greedy {i}"] = model.generate(prompt.unsqueeze(0), **tokens)
    for side in ("left", "right"):
        ids, mask = padded(side)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        found[f"padded {side}"] = model(ids, attention_mask=mask, position_ids=positions).logits[mask.bool()]
    ids, mask = padded()
    for name, how in {
        "padded, greedy": {},
        "padded, beams": {"num_beams": 3},
        "padded, static cache": {"cache_implementation": "static", "disable_compile": True},
        "padded, chunked prefill": {"prefill_chunk_size": 5},
    }.items():
        found[name] = model.generate(ids, attention_mask=mask, **tokens, **how)
    repeated = torch.tensor([[8, 9, 10, 11, 8, 9, 10, 11, 8, 9]])
    found["prompt lookup"] = model.generate(repeated, prompt_lookup_num_tokens=3, **tokens)
    packed = torch.cat(prompts()).unsqueeze(0)
    lengths = torch.tensor(LENGTHS)
    restarting = torch.cat([torch.arange(n) for n in LENGTHS]).unsqueeze(0)
    found["packed by position_ids"] = model(packed, position_ids=restarting).logits
    numbers = torch.repeat_interleave(torch.arange(len(LENGTHS)), lengths).unsqueeze(0)
    found["packed by seq_idx"] = model(packed, seq_idx=numbers).logits
    boundaries = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    found["packed by cu_seq_lens_q"] = model(packed, cu_seq_lens_q=boundaries).logits
    return {name: tensor.contiguous() for name, tensor in found.items()}


def training(model: Any, place: Path) -> Tensor:
    """Return the losses of a few steps of Trainer."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Losses(TrainerCallback):
        seen: list[float]

        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            self.seen += [logs["loss"]] if "loss" in logs else []

    losses = Losses()
    losses.seen = []
    generator = torch.Generator().manual_seed(2)
    data = [{"input_ids": ids, "labels": ids} for ids in torch.randint(5, 277, (12, 16), generator=generator)]
    arguments = TrainingArguments(
        output_dir=str(place), max_steps=4, per_device_train_batch_size=3, learning_rate=1e-2, logging_steps=1,
        report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True, seed=0,
    )  # fmt: skip
    Trainer(model=model, args=arguments, train_dataset=data, callbacks=[losses]).train()
    return torch.tensor(losses.seen)


def adapter(model: Any, place: Path) -> dict[str, Tensor]:
    """Return logits with trained LoRA and coefficients: in memory, after saving and loading, and merged."""
    from peft import LoraConfig, PeftModel, get_peft_model

    plain = copy.deepcopy(model)
    torch.manual_seed(0)
    config = LoraConfig(r=2, target_modules=["q_proj", "v_proj"], modules_to_save=["shift"], init_lora_weights=False)
    adapted = get_peft_model(model, config)
    ids = prompts()[2].unsqueeze(0)
    adapted(ids, labels=ids).loss.backward()
    steps = {name: p.grad for name, p in adapted.named_parameters() if p.requires_grad}
    assert all(grad is not None and bool(grad.ne(0).any()) for grad in steps.values()), steps
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad
    adapted.eval()
    adapted.save_pretrained(place)
    again = PeftModel.from_pretrained(plain, place).eval()
    with torch.no_grad():
        found = {"adapter": adapted(ids).logits, "adapter, loaded": again(ids).logits}
        found["adapter, merged"] = adapted.merge_and_unload()(ids).logits
    return found


def main(folder: str, out: Path) -> None:
    import importlib.util

    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, pipeline

    try:
        there = importlib.util.find_spec("kvshift") is not None
    except ValueError:  # None in sys.modules blocks the import
        there = False
    assert not there, "kvshift can be imported"

    def load(path: Any) -> Any:
        return AutoModelForCausalLM.from_pretrained(path, trust_remote_code=True).eval()

    model = load(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
    found = inference(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("shift.alpha"):
                parameter.mul_(1.5)
    model.save_pretrained(out / "saved")
    found["saved"] = inference(model)["packed by seq_idx"]
    found["saved, loaded"] = inference(load(out / "saved"))["packed by seq_idx"]
    known = pipeline("text-generation", model=folder, trust_remote_code=True, device="cpu")
    text = known(PROMPT, max_new_tokens=6, do_sample=False, return_full_text=False)[0]["generated_text"]
    found["losses"] = training(load(folder).train(), out / "trainer")
    found |= adapter(load(folder), out / "adapter")
    save_file({name: tensor.contiguous() for name, tensor in found.items()}, out / "tensors")
    facts = {
        "pipeline": text,
        "class": f"{type(model).__module__}.{type(model).__name__}",
        "config": type(AutoConfig.from_pretrained(folder, trust_remote_code=True)).__module__,
        "tokens": tokenizer(PROMPT)["input_ids"],
        "saved": sorted(path.name for path in (out / "saved").iterdir()),
        "kvshift": sorted(name for name in sys.modules if name.split(".")[0] == "kvshift"),
    }
    (out / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
