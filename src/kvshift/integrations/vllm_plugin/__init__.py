"""KV shift in vLLM: models whose raw keys and values are paged beside the KV cache. See docs/serving.md.

vLLM finds `register` by the entry point "kvshift" of "vllm.general_plugins" and calls it in each of its processes.
"""


def register() -> None:
    """Make the configurations known to transformers' Auto classes, of which vLLM asks for them."""
    import kvshift.models.baichuan_m1
    import kvshift.models.llama
    import kvshift.models.retrofit  # noqa: F401
