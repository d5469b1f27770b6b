"""examples/vllm_generate.py continues prompts as the model in transformers does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from kvshift.models.llama import KVShiftLlamaConfig, KVShiftLlamaForCausalLM

EXAMPLE = Path(__file__).parents[2] / "examples/vllm_generate.py"


def test_the_example_writes_the_greedy_tokens_of_transformers(tmp_path: Path) -> None:
    bytes_alone = ByteLevelBPETokenizer()
    bytes_alone.train_from_iterator([], vocab_size=256)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_alone._tokenizer)
    tokenizer.save_pretrained(tmp_path)
    torch.manual_seed(7)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    KVShiftLlamaForCausalLM(KVShiftLlamaConfig(vocab_size=256, **sizes)).save_pretrained(tmp_path)
    command = [sys.executable, str(EXAMPLE), str(tmp_path), "to be", "or", "--tokens", "5", "--dtype", "float32"]
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    done = subprocess.run(command, capture_output=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr.decode()
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    for prompt in ("to be", "or"):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        answer = model.generate(ids, max_new_tokens=5, min_new_tokens=5, do_sample=False, pad_token_id=0)
        expected = tokenizer.decode(answer[0], clean_up_tokenization_spaces=False)
        expected = expected.rstrip("\ufffd")  # vLLM leaves out the bytes of a character that is not complete
        assert len(expected) > len(prompt)
        assert expected in done.stdout.decode()
