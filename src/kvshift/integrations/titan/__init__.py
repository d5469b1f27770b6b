"""KV shift in torchtitan, for pre-training on many GPUs. See docs/torchtitan.md.

    torchrun ... -m torchtitan.train --module kvshift.integrations.titan --config llama3_debugmodel

The configurations are in `config_registry.py`. `with_kv_shift` makes others, of any Llama 3 or Qwen 3 of torchtitan.
"""
