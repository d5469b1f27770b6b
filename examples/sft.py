"""Fine-tune a model with KV shift in TRL: LoRA and the coefficients, with several conversations in each sequence.

pip install '.[trl]'
python examples/sft.py OUT [MODEL]      for example: python examples/sft.py runs/sft
"""

import argparse

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("out", metavar="OUT", help="folder of the result")
parser.add_argument("model", metavar="MODEL", nargs="?", help="a folder or a name on the hub; without: a tiny Llama")
args = parser.parse_args()  # before the imports below, which take seconds

import warnings

import datasets
import torch
import transformers
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from kvshift.models.retrofit import add_kv_shift, load_kv_shift

warnings.simplefilter("ignore", FutureWarning)  # TRL uses names of transformers that will change
datasets.disable_progress_bars()
transformers.utils.logging.disable_progress_bar()

sums = [(a, b) for a in range(12) for b in range(12)]
examples = [{"prompt": f"What is {a} plus {b}?", "completion": f" {a} plus {b} is {a + b}."} for a, b in sums]
if args.model:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(args.model), AutoTokenizer.from_pretrained(args.model)
else:  # randomly initialised, with a token for each byte
    letters = ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    encoding = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    encoding.pre_tokenizer, encoding.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=encoding, bos_token="<|end|>", eos_token="<|end|>")
    sizes = {"hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), bos_token_id=0, eos_token_id=0, **sizes))
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
add_kv_shift(model)  # before PEFT wraps the model

gpu = torch.cuda.is_available()
options = SFTConfig(
    f"{args.out}/checkpoints", max_length=128, per_device_train_batch_size=2, max_steps=20, learning_rate=1e-3,
    packing=True,  # neither shift nor attention crosses from one conversation to the next
    bf16=gpu, dataloader_pin_memory=gpu, logging_steps=5, disable_tqdm=True, save_strategy="no", report_to="none",
)  # fmt: skip
lora = LoraConfig(r=8, target_modules="all-linear", modules_to_save=["shift"])  # all coefficients, beside LoRA
data = datasets.Dataset.from_list(examples)
trainer = SFTTrainer(model, options, train_dataset=data, processing_class=tokenizer, peft_config=lora)
trainer.train()
out = f"{args.out}/model"
trainer.model.merge_and_unload().save_pretrained(out)  # merges LoRA into the projections that the shift wraps
tokenizer.save_pretrained(out)
print(f"saved in {out}, and loaded again: {type(load_kv_shift(out)).__name__}")
