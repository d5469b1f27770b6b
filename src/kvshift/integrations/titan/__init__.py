"""KV shift in torchtitan, for pre-training on many GPUs. See docs/torchtitan.md.

    torchrun ... -m torchtitan.train --module kvshift.integrations.titan --config llama3_debugmodel

The configurations are in `config_registry.py`. `with_kv_shift` creates others from any of torchtitan's for Llama 3 or
dense Qwen 3.
"""
