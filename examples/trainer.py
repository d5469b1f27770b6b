"""Train a Llama with KV shift by transformers' Trainer, on rows of random tokens that repeat, and load it again.

pip install . accelerate
python examples/trainer.py OUT      for example: python examples/trainer.py runs/trainer (takes half a minute)
"""

import argparse

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("out", metavar="OUT", help="folder of the result")
parser.add_argument("--steps", type=int, default=100, help="of training")
args = parser.parse_args()  # before the imports below, which take seconds

import torch
import transformers
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

from kvshift import param_groups
from kvshift.models.llama import KVShiftLlamaConfig, KVShiftLlamaForCausalLM

transformers.utils.logging.disable_progress_bar()


class Repeats(torch.utils.data.Dataset):
    """Rows of 48 tokens: random ones that repeat with a period of 5 to 24. Row `index` is always the same."""

    def __len__(self):
        return 32 * args.steps

    def __getitem__(self, index):
        random = torch.Generator().manual_seed(index)
        period = int(torch.randint(5, 25, (), generator=random))
        tokens = torch.randperm(64, generator=random)[torch.arange(48) % period]
        return {"input_ids": tokens, "labels": tokens}


torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 1, "num_attention_heads": 4}
model = KVShiftLlamaForCausalLM(KVShiftLlamaConfig(vocab_size=64, **sizes))
options = TrainingArguments(
    args.out, per_device_train_batch_size=32, max_steps=args.steps, logging_steps=25, save_strategy="no",
    report_to="none", disable_tqdm=True, lr_scheduler_type="linear", dataloader_pin_memory=torch.cuda.is_available(),
)  # fmt: skip
optimizer = torch.optim.AdamW(param_groups(model, lr=1e-2))  # coefficients without weight decay
Trainer(model, options, train_dataset=Repeats(), optimizers=(optimizer, None)).train()
model.save_pretrained(f"{args.out}/model")

copying = AutoModelForCausalLM.from_pretrained(f"{args.out}/model")
prompt = torch.tensor([[11, 5, 42, 7, 30, 11]])
answer = copying.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False)
print("11 5 42 7 30 11 continues with", *answer[0, 6:].tolist())
