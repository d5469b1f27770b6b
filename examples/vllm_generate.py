"""Generate with vLLM, which finds kvshift's plugin by itself. It needs an environment of its own: docs/serving.md.

pip install '.[vllm]'
python examples/vllm_generate.py MODEL PROMPT ...      such as: python examples/vllm_generate.py runs/demo/model ROMEO:
On a CPU, add --dtype float32: in bfloat16, vLLM may end with an illegal instruction.
"""

import argparse

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", metavar="MODEL", help="folder of a model with KV shift and its tokenizer")
parser.add_argument("prompts", metavar="PROMPT", nargs="+", help="texts to continue, together in one batch")
parser.add_argument("--tokens", type=int, default=40, help="new tokens for each prompt")
parser.add_argument("--dtype", default="auto", help="auto: bfloat16 for weights in float32; coefficients stay float32")
args = parser.parse_args()  # before the imports below, which take seconds

from vllm import LLM, SamplingParams

if __name__ == "__main__":  # vLLM may start its engine in a process that imports this file
    engine = LLM(args.model, dtype=args.dtype, gpu_memory_utilization=0.3, enforce_eager=True)
    greedy = SamplingParams(temperature=0.0, max_tokens=args.tokens)
    for result in engine.generate(args.prompts, greedy, use_tqdm=False):
        print(result.prompt + result.outputs[0].text)
