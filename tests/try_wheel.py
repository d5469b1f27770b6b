"""Check an installed wheel, away from the repository. `make dist` runs: python -I try_wheel.py kernel|pure

The first example of README.md runs unchanged. The pretrained model that it names, a folder or a name on the Hub, is
not downloaded: a small Qwen3 with random weights is saved in a folder of that name below the current directory.
"""

import os
import re
import sys
from importlib import import_module
from importlib.metadata import metadata
from importlib.util import find_spec
from pathlib import Path
from pkgutil import walk_packages

os.environ["HF_HUB_OFFLINE"] = "1"  # must be set before transformers is imported

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

import kvshift
from kvshift.ops.cpu.kernel import cpu_unsupported_reason

README = Path(__file__).parents[1] / "README.md"
TINY = Qwen3Config(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
)


def run_example() -> None:
    example = re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)[0]
    for name in re.findall(r'from_pretrained\(\s*"([^"]+)"', example):
        Qwen3ForCausalLM(TINY).save_pretrained(name)
    names = {}
    exec(compile(example, str(README), "exec"), names)
    models = [value for value in names.values() if isinstance(value, PreTrainedModel)]
    assert models, f"README's first example leaves no model behind, but {sorted(names)}"
    for model in models:
        assert model.generate(torch.tensor([[3, 5, 3]]), max_new_tokens=2, min_new_tokens=2).shape == (1, 5)


def check_operator(kind: str) -> None:
    k, v, alpha, beta = (torch.randn(shape) for shape in ((2, 7, 3, 8), (2, 7, 3, 8), (3, 2), (3, 2)))
    refusal = cpu_unsupported_reason(k, window=2)
    assert (refusal is None) if kind == "kernel" else ("was not built" in str(refusal)), f"CPU kernel: {refusal}"
    expected = kvshift.kv_shift(k, v, alpha, beta, backend="reference")
    shifted = kvshift.kv_shift(k, v, alpha, beta, backend="cpu" if kind == "kernel" else "auto")
    torch.testing.assert_close(shifted[:2], expected[:2])


def import_every_module() -> None:
    """The library alone is installed: every module must be importable without the lab."""
    assert find_spec("kvshift_lab") is None
    hosts = {"vllm_plugin": "vllm", "titan": "torchtitan", "lens": "transformer_lens"}  # which integrations import
    for module in walk_packages(kvshift.__path__, "kvshift."):
        parts = module.name.split(".")
        if not any(part in parts and find_spec(host) is None for part, host in {**hosts, "triton": "triton"}.items()):
            import_module(module.name)


def check_index_page() -> None:
    """The description on the package index must not have links relative to README.md."""
    page = str(metadata("kvshift").get_payload())
    assert page.startswith("# kvshift\n"), f"the description begins with {page[:40]!r}"
    relative = re.findall(r'\]\((?!https?:|#)[^)]*|(?:src|href)="(?!https?:|#)[^"]*', page)
    assert not relative, f"the description has relative links: {relative}"


if __name__ == "__main__":
    (kind,) = sys.argv[1:]
    assert kind in ("kernel", "pure"), f"which wheel is tried is {kind!r}, should be 'kernel' or 'pure'"
    assert Path(kvshift.__file__).is_relative_to(sys.prefix), f"kvshift comes from {kvshift.__file__}, not the wheel"
    import_every_module()
    check_index_page()
    check_operator(kind)
    run_example()
    print(f"the {kind} wheel of kvshift {kvshift.__version__} runs README's first example")
