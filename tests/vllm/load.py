"""Many concurrent clients, a third of which disconnect: their requests, and the state of the server afterwards."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any, NamedTuple

import aiohttp
import torch
from torch import Tensor

from kvshift.models.versions import CACHE

from .server import SECONDS, Server, body, stream

CLIENTS, TOKENS, CONTEXT = 32, 24, 512
LENGTHS = (1, 2, 7, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 200, 255, 257)
FINISHED = "request_success_total/length"


class Prompt(NamedTuple):
    """A prompt and the tokens with which the model itself continues it."""

    tokens: list[int]
    answer: list[int]


@torch.no_grad()
def continued(model: Any, prompts: Tensor, tokens: int = TOKENS) -> tuple[Tensor, Tensor]:
    """Return the greedy tokens after prompts of one length, and each answer's smallest lead over the second token."""
    ids, cache, lead = prompts, None, torch.full((len(prompts),), float("inf"))
    for step in range(tokens):
        output = model(input_ids=ids if step == 0 else ids[:, -1:], **{CACHE: cache}, use_cache=True)
        best = output.logits[:, -1].topk(2)
        cache, lead = output.past_key_values, torch.minimum(lead, best.values[:, 0] - best.values[:, 1])
        ids = torch.cat([ids, best.indices[:, :1]], dim=1)
    return ids[:, prompts.shape[1] :], lead


def prompts_for(model: Any, number: int, margin: float, each: int = 16, tokens: int = TOKENS) -> list[Prompt]:
    """Return `number` prompts in random order; in their answers every token leads by more than `margin`.

    Args:
        each: Number of prompts drawn for each length.
        tokens: Length of an answer.
    """
    chance = torch.Generator().manual_seed(0)
    found: list[Prompt] = []
    for length in LENGTHS:
        ids = torch.randint(1, model.config.vocab_size, (each, length), generator=chance)
        answers, lead = continued(model, ids, tokens)
        triples = zip(ids.tolist(), answers.tolist(), lead.tolist(), strict=True)
        found += [Prompt(prompt, answer) for prompt, answer, least in triples if least > margin]
    assert len(found) >= number
    random.Random(0).shuffle(found)
    return found[:number]


def withstand(server: Server, asked: Sequence[tuple[str, Prompt]]) -> dict[int, list[int]]:
    """Send requests, assert that they leave nothing behind, and return the wrong answers by number of the request.

    Args:
        asked: For each request, the name of a model and a prompt.
    """
    before = server.metrics()
    wrong, left = asyncio.run(_load(server.url, asked))
    assert left == (len(asked) + 2) // 3
    after = _settled(server, before, len(asked))
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert after[gauge] == before[gauge] == 0, gauge
    assert after[FINISHED] - before[FINISHED] == len(asked) - left
    # The answers to clients that left are not read, and they were not computed to the end.
    generated = after["generation_tokens_total"] - before["generation_tokens_total"]
    read = sum(len(prompt.answer) for number, (_, prompt) in enumerate(asked) if number % 3)
    assert 0 < generated - read < left * (CONTEXT - max(LENGTHS)) / 2
    assert server.faults() == []
    return wrong


async def _load(url: str, asked: Sequence[tuple[str, Prompt]]) -> tuple[dict[int, list[int]], int]:
    """Return the wrong answers, and the number of requests whose client left before the end of the answer."""
    waiting = list(enumerate(asked))[::-1]
    wrong: dict[int, list[int]] = {}
    left = 0
    chance = random.Random(0)
    limit = aiohttp.ClientTimeout(total=SECONDS)

    async def client() -> None:
        nonlocal left
        async with aiohttp.ClientSession(timeout=limit) as session:
            while waiting:
                number, (name, prompt) = waiting.pop()
                leaves_after = chance.randrange(1, 9) if number % 3 == 0 else None
                answer = prompt.answer
                tokens = len(answer) if leaves_after is None else CONTEXT - len(prompt.tokens)
                got: list[int] = []
                async with aclosing(stream(session, url, body(name, prompt.tokens, tokens))) as events:
                    async for event in events:
                        got += event
                        if leaves_after is not None and len(got) >= leaves_after:
                            left += 1
                            break
                whole = leaves_after is not None or len(got) == len(answer)
                if not whole or got[: len(answer)] != answer[: len(got)]:
                    wrong[number] = got

    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return wrong, left


def _settled(server: Server, before: dict[str, float], requests: int) -> dict[str, float]:
    """Return the metrics once nothing runs: the server notices that a client has left when it sends to it."""
    end = time.monotonic() + 60
    while True:
        now = server.metrics()
        idle = now["num_requests_running"] == now["num_requests_waiting"] == 0
        if (idle and now[FINISHED] - before[FINISHED] > requests // 2) or time.monotonic() > end:
            return now
        time.sleep(1)
