"""Run every check of the theory and print its numbers; `--out FILE` also writes them as JSON.

    python -m kvshift_lab.theory [--draws 200] [--monte-carlo-draws 100] [--width 4096] [--seed 0] [--out FILE]

This takes about fifteen seconds on one core. It produces results/theory/checks.json, which docs/theory.md quotes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kvshift_lab.core.atomic import write_json
from kvshift_lab.core.environment import environment
from kvshift_lab.theory import checks
from kvshift_lab.theory.gradient_flow import Trajectory, take_steps
from kvshift_lab.theory.limit_loss import exact


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the arguments (None for those of the command line), run all checks and print the results."""
    parser = argparse.ArgumentParser(
        prog="python -m kvshift_lab.theory", description="Run every check of the theory and print its numbers."
    )
    parser.add_argument(
        "--draws", type=int, default=200, help="number of random settings for Theorems 3.2 and 3.3 (default: 200)"
    )
    parser.add_argument(
        "--monte-carlo-draws", type=int, default=100, help="number of embeddings for Theorem 3.4 (default: 100)"
    )
    parser.add_argument("--width", type=int, default=4096, help="width d of these embeddings (default: 4096)")
    parser.add_argument("--steps", type=int, default=20_000, help="steps of plain gradient descent (default: 20000)")
    parser.add_argument("--seed", type=int, default=0, help="random seed (default: 0)")
    parser.add_argument("--out", type=Path, help="also write the numbers to this JSON file")
    options = parser.parse_args(arguments)
    record: dict[str, Any] = {
        "environment": environment(torch.device("cpu"), 1),
        "options": {name: value for name, value in vars(options).items() if name != "out"},
        "one_layer": checks.check_one_layer(options.draws, options.seed),
        "match": checks.check_match((1.0, 0.3, 0.1, 0.03, 0.01, 0.003), options.seed),
        "two_layers": checks.check_two_layers(options.draws, seed=options.seed),
        "orthonormal": [
            {"tokens": tokens, "coefficients": coefficients, **checks.check_orthonormal(tokens, coefficients)}
            for tokens in (4, 5, 8, 12, 32)
            for coefficients in checks.COEFFICIENTS
        ],
        "places": [
            {"coefficients": coefficients, "loss": checks.check_positions(8, coefficients)}
            for coefficients in checks.COEFFICIENTS
        ],
        "monte_carlo": checks.check_monte_carlo(options.monte_carlo_draws, options.width, seed=options.seed),
        "figure2": checks.check_figure2(),
        "flow": checks.check_flow(),
        "descent": {"tokens": 32, "learning_rate": 0.5, **_last(take_steps(exact(32), steps=options.steps))},
    }
    print(json.dumps(record, indent=1))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_json(options.out, record)


def _last(trajectory: Trajectory) -> dict[str, Any]:
    return {"coefficients": trajectory.coefficients[-1].tolist(), "loss": float(trajectory.loss[-1])}


if __name__ == "__main__":
    main()
