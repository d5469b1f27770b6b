"""Measure the rows per second that one core makes of each task, and a training step of a small induction model.

    python benchmarks/tasks.py [--rounds N]

The step (forward, backward, AdamW) trains one layer with KV shift and width 64 on a batch of the first task, on the
same single core. In each round all run one after the other; the table gives medians over rounds of CPU time, which does
not include waiting for other work on the machine.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import torch

from kvshift.models.llama import KVShiftLlamaConfig, KVShiftLlamaForCausalLM
from kvshift_lab.tasks import (
    CFG3S,
    CFGConfig,
    CFGTask,
    HopConfig,
    HopTask,
    IGSMConfig,
    IGSMTask,
    InductionConfig,
    InductionTask,
    MQARConfig,
    MQARTask,
    NGramConfig,
    NGramTask,
    Task,
    TaskBatches,
)

FIRST = (InductionTask(InductionConfig(length=48, vocab_size=256)), 64)
TASKS: dict[str, tuple[Task, int]] = {
    "induction script, 48 letters": FIRST,
    "induction script, small": (InductionTask(InductionConfig(length=128, vocab_size=1024)), 256),
    "induction script": (InductionTask(InductionConfig()), 512),
    "induction script, paper's batch": (InductionTask(InductionConfig()), 4096),
    "induction latest": (InductionTask(InductionConfig(mode="latest")), 512),
    "induction raw": (InductionTask(InductionConfig(mode="raw")), 512),
    "induction single": (InductionTask(InductionConfig(mode="single")), 512),
    "mqar, 4 pairs": (MQARTask(MQARConfig()), 512),
    "mqar, 16 pairs": (MQARTask(MQARConfig(length=256, pairs=16)), 256),
    "hop, k to 16": (HopTask(HopConfig()), 32),
    "ngram": (NGramTask(NGramConfig()), 512),
    "ngram, packed": (NGramTask(NGramConfig(length=510)), 512),
    "cfg, small": (CFGTask(CFGConfig(grammar=CFG3S, length=48, prefix=8)), 32),
    "cfg": (CFGTask(CFGConfig()), 96),
    "igsm, kamino": (IGSMTask(IGSMConfig()), 64),
    "igsm, igsm": (IGSMTask(IGSMConfig(generator="igsm", ops=15)), 64),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    implementations = {name: batch_function(task, rows) for name, (task, rows) in TASKS.items()}
    implementations["training step, 48 letters"] = step_function(*FIRST)
    seconds: dict[str, list[float]] = {name: [] for name in implementations}
    for at in range(rounds + 1):
        for name, run in implementations.items():
            start = time.process_time()
            run()
            if at:  # the first round warms up
                seconds[name].append(time.process_time() - start)

    print(f"{platform.processor() or platform.machine()}, one core, torch {torch.__version__}, {rounds} rounds\n")
    print("| | T | sequences in a batch | ms per batch | sequences per second |\n|---|---|---|---|---|")
    for name, times in seconds.items():
        task, rows = TASKS.get(name, FIRST)
        median = statistics.median(times)
        print(f"| {name} | {task.length} | {rows} | {1000 * median:.2f} | {rows / median:,.0f} |")


def batch_function(task: Task, rows: int) -> Callable[[], object]:
    """Return a function that makes the next batch."""
    numbers = iter(range(2**31))
    batches = TaskBatches(task, split="training", seed=0, batch_size=rows, batches=2**31)
    return lambda: batches[next(numbers)]


def step_function(task: Task, rows: int) -> Callable[[], object]:
    """Return a function that takes a training step on a fixed batch."""
    torch.manual_seed(0)
    model = KVShiftLlamaForCausalLM(
        KVShiftLlamaConfig(
            vocab_size=task.vocab_size,
            hidden_size=64,
            intermediate_size=176,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=4,
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batch = TaskBatches(task, split="training", seed=0, batch_size=rows, batches=1)[0]

    def step() -> None:
        loss = model(input_ids=batch.input_ids, labels=batch.labels).loss
        assert loss is not None
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    main()
