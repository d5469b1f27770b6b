"""These tests need vLLM, which has an environment of its own: `make test-vllm` runs them, `make test` does not."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("vllm") else ["*.py"]
