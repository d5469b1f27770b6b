"""Add KV shift to a pretrained model, tune its coefficients and LoRA by PEFT, and save and load the adapter.

pip install '.[peft]'
python examples/lora.py OUT [MODEL]      for example: python examples/lora.py runs/lora
"""

import argparse

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("out", metavar="OUT", help="folder of the adapter")
parser.add_argument("model", metavar="MODEL", nargs="?", help="a folder or a name on the hub; without: a tiny Llama")
parser.add_argument("--steps", type=int, default=50, help="of training")
args = parser.parse_args()  # before the imports below, which take seconds

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from kvshift.models.retrofit import add_kv_shift


def pretrained():
    """Return the model without shift, always with the same weights."""
    if args.model:
        return AutoModelForCausalLM.from_pretrained(args.model)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))


shifted = add_kv_shift(pretrained())  # before PEFT wraps the model; its outputs are still those of the pretrained one
# `modules_to_save` trains all coefficients beside the LoRA matrices, and saves them with the adapter.
model = get_peft_model(shifted, LoraConfig(r=8, target_modules="all-linear", modules_to_save=["shift"]))
model.print_trainable_parameters()

optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2)
for step in range(1, args.steps + 1):
    row = torch.rand(8, 64).argsort(dim=1)[:, :20]
    tokens = torch.cat([row, row], dim=1)  # your own text here
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 25 == 0:
        print(f"step {step}, loss {loss:.2f}")
model.eval().save_pretrained(args.out)

again = PeftModel.from_pretrained(add_kv_shift(pretrained()), args.out).eval()
with torch.no_grad():
    assert torch.equal(again(tokens).logits, model(tokens).logits)
print(f"saved in {args.out}, and loaded again with the same outputs")
