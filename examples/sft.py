"""Fine-tune a model with KV shift in TRL: LoRA and the coefficients, with several conversations in each sequence.

pip install '.[trl]'
python examples/sft.py OUT [MODEL]      for example: python examples/sft.py runs/sft
"""

import argparse

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("out", metavar="OUT", help="folder of the result")
parser.add_argument(
    "model",
    metavar="MODEL",
    nargs="?",
    help="a folder or a name on the hub; without: a randomly initialised tiny Llama",
)
args = parser.parse_args()  # before the imports below, which take seconds

import warnings

import datasets
import torch
import transformers
from peft import LoraConfig
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from kvshift.models.retrofit import add_kv_shift, load_kv_shift

warnings.simplefilter("ignore", FutureWarning)  # TRL uses names of transformers that will change
datasets.disable_progress_bars()
transformers.utils.logging.disable_progress_bar()

examples = [
    {"prompt": f"What is {a} plus {b}?", "completion": f" {a} plus {b} is {a + b}."}
    for a in range(12)
    for b in range(12)
]
if args.model:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(args.model), AutoTokenizer.from_pretrained(args.model)
else:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    bpe.train_from_iterator(
        (example["prompt"] + example["completion"] for example in examples),
        trainers.BpeTrainer(vocab_size=300, special_tokens=["<|end|>"], show_progress=False),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<|end|>", eos_token="<|end|>")
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=172,
            num_hidden_layers=2,
            num_attention_heads=4,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
    )
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
add_kv_shift(model)  # before PEFT wraps the model

trainer = SFTTrainer(
    model,
    SFTConfig(
        output_dir=f"{args.out}/checkpoints",
        packing=True,  # neither shift nor attention crosses from one conversation to the next
        max_length=128,
        per_device_train_batch_size=2,
        max_steps=20,
        bf16=torch.cuda.is_available(),
        dataloader_pin_memory=torch.cuda.is_available(),
        learning_rate=1e-3,
        logging_steps=5,
        disable_tqdm=True,
        save_strategy="no",
        report_to="none",
    ),
    train_dataset=datasets.Dataset.from_list(examples),
    processing_class=tokenizer,
    peft_config=LoraConfig(r=8, target_modules="all-linear", modules_to_save=["shift"]),  # all coefficients
)
trainer.train()
out = f"{args.out}/model"
trainer.model.merge_and_unload().save_pretrained(out)  # merges LoRA into the projections that the shift wraps
tokenizer.save_pretrained(out)
print(f"saved in {out}, and loaded again: {type(load_kv_shift(out)).__name__}")
