"""Run folders as `kvshift train` leaves them, with numbers from a formula."""

import json
import math


def write_run(
    folder,
    *,
    seed=0,
    variant=None,
    shift_targets=("k", "v"),
    steps=60,
    gain=0.0,
    rows=7,
    heads=3,
    layers=2,
    parameters=5003,
):
    """Write a finished run, evaluated every 10 steps; with x = exp(-step / 20) its loss is 2 + 3 x - gain (1 - x)."""
    folder.mkdir(parents=True)
    shift_targets = shift_targets if variant is None else ()
    tokens_per_step = 352

    def loss_at(step):
        left = math.exp(-step / 20)
        return 2 + 3 * left - gain * (1 - left)

    metrics = []
    for step in range(5, steps + 1, 5):
        line = {"step": step, "tokens": step * tokens_per_step}
        rates = {"learning_rate": 2e-3, "grad_norm": 1.0, "step_seconds": 0.2, "seconds": 0.2 * step}
        metrics.append({"kind": "train", **line, "loss": loss_at(step) + 0.1 * math.sin(step), **rates})
        if step % 10 == 0:
            loss = loss_at(step)
            metrics.append(
                {"kind": "eval", **line, "loss": loss, "loss_stderr": 0.013, "perplexity": math.exp(loss), "rows": rows}
            )
            for layer in range(layers if shift_targets else 0):
                alpha = [[0.5 + 0.1 * head + 0.01 * step / steps, -0.25 * layer] for head in range(heads)]
                beta = [[1.0, 0.125 * head] for head in range(heads)]
                metrics.append({"kind": "coefficients", "step": step, "layer": layer, "alpha": alpha, "beta": beta})
    shift_parameters = layers * 4 * heads if shift_targets else 0
    per_row = [
        loss_at(steps) + 0.1 * (row - (rows - 1) / 2) + 0.001 * math.sin(7 * row * (1 + gain)) for row in range(rows)
    ]
    files = {
        "config.json": {
            "out": str(folder),
            "seed": seed,
            "steps": steps,
            "tokens_per_step": tokens_per_step,
            "model": {"hidden_size": 53, "variant": variant, "shift_targets": list(shift_targets)},
            "data": {"corpus": "tinyshakespeare"},
            "config_hash": f"0f3a{len(shift_targets)}",
            "data_facts": {"train_sample": "5e"},
        },
        "environment.json": {
            "commit": "abc1234",
            "cpu": "<a CPU>",
            "command": ["__main__.py", "train", "--seed", str(seed)],
        },
        "result.json": {
            "steps": steps,
            "tokens": steps * tokens_per_step,
            "seconds": 0.2 * steps,
            "parameters": parameters + shift_parameters,
            "shift_parameters": shift_parameters,
            "peak_memory_bytes": 500 * 2**20 + 2**20 * 5 * bool(shift_targets),
            "eval_loss": loss_at(steps),
            "eval_loss_stderr": 0.013,
            "eval_rows": rows,
            "eval_losses_per_row": per_row,
            "eval_tokens_per_row": [10] * rows,
        },
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in metrics), encoding="utf-8")
    return folder


def write_pair(out, *, seed=0, gain=0.1, **options):
    """Write the two runs of one seed in the folders that `kvshift compare` uses."""
    folder = out / f"seed-{seed}"
    vanilla = write_run(folder / "vanilla", seed=seed, shift_targets=(), **options)
    return vanilla, write_run(folder / "kvshift", seed=seed, gain=gain, **options)
