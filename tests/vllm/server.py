"""vLLM's server in a separate process, and requests to it."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import requests

# A server takes long to answer if it compiles or if the machine is busy. Tests wait until it ends, or for this time.
SECONDS = 420.0
FAULTS = re.compile(r"\b(ERROR|CRITICAL)\b|Traceback|Exception ignored")


class Server:
    """A server run by `command` with output in `log`. As a context it answers on entry and is stopped on exit."""

    def __init__(self, command: Sequence[str], log: Path, port: int) -> None:
        self.command, self.log, self.url = list(command), log, f"http://127.0.0.1:{port}"
        self.process: subprocess.Popen[bytes] | None = None
        self.session = requests.Session()

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.kill()

    def start(self) -> None:
        """Start the server and wait until it answers."""
        environment = {**os.environ, "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                self.command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            if self.process.poll() is not None:
                raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.said()[-8000:]}")
            try:
                if self.session.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return
            except requests.RequestException:
                pass
            time.sleep(0.5)
        self.kill()
        raise AssertionError(f"the server did not answer within {SECONDS:.0f} s:\n{self.said()[-8000:]}")

    def kill(self) -> None:
        """Kill the server and the processes that it has started."""
        assert self.process is not None
        for process in psutil.Process(self.process.pid).children(recursive=True):
            process.kill()
        self.process.kill()
        self.process.wait(60)

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def faults(self) -> list[str]:
        """Return the lines of the log that report an error."""
        return [line for line in self.said().splitlines() if FAULTS.search(line)]

    def metrics(self) -> dict[str, float]:
        """Return metrics by name, summed over labels; a label `finished_reason` is appended to the name instead."""
        found: dict[str, float] = {}
        for line in self.session.get(f"{self.url}/metrics", timeout=60).text.splitlines():
            if line.startswith("vllm:"):
                name, value = line.rsplit(" ", 1)
                reason = re.search(r'finished_reason="(\w+)"', name)
                key = name.partition("{")[0].removeprefix("vllm:") + (f"/{reason[1]}" if reason else "")
                found[key] = found.get(key, 0.0) + float(value)
        return found

    def post(self, path: str, **kwargs: Any) -> requests.Response:
        return self.session.post(f"{self.url}{path}", timeout=SECONDS, **kwargs)

    def answer(self, model: str, prompt: Sequence[int], tokens: int) -> list[int]:
        """Return the tokens of one greedy answer that is not streamed."""
        response = self.post("/v1/completions", json=body(model, prompt, tokens))
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["token_ids"]


def body(model: str, prompt: Sequence[int], tokens: int, **options: Any) -> dict[str, Any]:
    """Return a request for exactly `tokens` greedy tokens, answered with token ids."""
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **options,
    }


async def stream(session: aiohttp.ClientSession, url: str, request: dict[str, Any]) -> AsyncIterator[list[int]]:
    """Yield the tokens of each event of a streamed answer. Closing the iterator early disconnects."""
    async with session.post(f"{url}/v1/completions", json={**request, "stream": True}) as response:
        assert response.status == 200, await response.text()
        async for line in response.content:
            event = line.decode().strip().removeprefix("data: ")
            if event and event != "[DONE]":
                for choice in json.loads(event)["choices"]:
                    yield choice["token_ids"] or []
        # The response has been read to its end, so the connection can be used again.


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def serve(model: Path, port: int, *options: str) -> list[str]:
    """Return the command line of vLLM's server for a model, with the options that all tests of servers share.

    The command `vllm serve` of the build for CPUs looks for a distribution of another name, and fails at once.
    """
    common = ["--host=127.0.0.1", f"--port={port}", "--dtype=float32", "--enforce-eager"]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={model}", *common, *options]
