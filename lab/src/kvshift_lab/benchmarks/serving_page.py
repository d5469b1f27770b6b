"""The tables of docs/performance.md on serving, from the rows that benchmarks/serving.py writes.

    python -m kvshift_lab.benchmarks.serving_page [--check]

writes the text between two markers of docs/performance.md in the working directory. With --check it writes nothing and
fails if the page differs from what the rows give.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvshift_lab.analysis.generated_page import write_or_check
from kvshift_lab.analysis.tables import as_markdown
from kvshift_lab.core.json_lines import read_lines

MARKERS = ("<!-- From here on made from results/serving by `make results`. -->\n", "<!-- Until here. -->\n")
PAGE, RESULTS = Path("docs/performance.md"), Path("results/serving")

Row = Mapping[str, Any]

BASELINE, CONTROL = "vLLM's Llama", "vLLM's Llama, a second engine"
_TIMES = (
    "The engines took turns. The last columns are ratios of times: median over rounds, and quartiles. The control, a "
    "second engine of vLLM's Llama beside the first, shows what differs between two engines of one model."
)


def render_tables(capacity: Sequence[Row], speed: Sequence[Row]) -> str:
    """Return the text between the markers: a table for each file, and the origin of its rows."""
    parts = []
    if capacity:
        parts += [_capacity(capacity), "", f"`python benchmarks/serving.py capacity`; {_provenance(capacity)}", ""]
    if speed:
        shape = speed[0]["shape"]
        heads = f"{shape['num_attention_heads']} heads on {shape['num_key_value_heads']}"
        size = f"{shape['num_hidden_layers']} layers of width {shape['hidden_size']}, {heads}, {shape['dtype']}"
        parts += [
            _TIMES,
            "",
            _speed(speed),
            "",
            f"`python benchmarks/serving.py speed`, {size}; {_provenance(speed)}",
            "",
        ]
    return "\n".join(parts)


def main(arguments: Sequence[str]) -> int:
    """Write or check the page and return the exit code."""
    return write_or_check(
        "kvshift_lab.benchmarks.serving_page",
        arguments,
        PAGE,
        RESULTS,
        MARKERS,
        lambda: render_tables(_rows("capacity"), _rows("speed")),
    )


def _rows(name: str) -> list[Row]:
    path = RESULTS / f"{name}.jsonl"
    return [*read_lines(path)] if path.exists() else []


def _speed(rows: Sequence[Row]) -> str:
    heading = ("", "requests", "tokens: prompt, new", BASELINE, "with shift", "time with shift", "of the control")
    lines: list[tuple[str, ...]] = [heading]
    found = {(row["part"], row["model"]): row for row in rows}
    for row in rows:
        theirs, control = found[row["part"], BASELINE], found.get((row["part"], CONTROL))
        if row is theirs or row is control:
            continue
        tokens = row["requests"] * (row["prompt_tokens"] if row["new_tokens"] == 1 else row["new_tokens"])
        rates = (
            (
                f"{one['seconds']:.3f} s"
                if row["requests"] == row["new_tokens"] == 1
                else f"{tokens / one['seconds']:,.0f} tokens/s"
            )
            for one in (theirs, row)
        )
        shape = f"{row['prompt_tokens']}, {row['new_tokens']}"
        lines.append((row["part"], str(row["requests"]), shape, *rates, _ratio(row), _ratio(control)))
    return as_markdown(lines, left=1)


def _ratio(row: Row | None) -> str:
    return "" if row is None else "{:.3f} ({:.3f} to {:.3f})".format(row["ratio"], *row["ratio_quartiles"])


def _capacity(rows: Sequence[Row]) -> str:
    lengths = sorted({row["tokens"] for row in rows})
    heading = ("block size", "bytes per token", "of them raw", "by hand", *(f"{length:,} tokens" for length in lengths))
    lines: list[tuple[str, ...]] = [("model", *heading)]
    for model, size in dict.fromkeys((row["model"], row["block_size"]) for row in rows):
        of_size = [row for row in rows if (row["model"], row["block_size"]) == (model, size)]
        here = {(row["tokens"], row["asynchronous"]): row for row in of_size}
        one = next(iter(here.values()))
        sizes = (f"{one[name]:,.0f}" for name in ("bytes_per_token", "state_bytes_per_token", "by_hand"))
        shares = (
            ", ".join(f"{100 * here[length, asynchronous]['share']:.2f} %" for asynchronous in (False, True))
            for length in lengths
        )
        lines.append((model, str(size), *sizes, *shares))
    return as_markdown(lines, left=1)


def _provenance(rows: Sequence[Row]) -> str:
    row = rows[-1]
    versions, hardware = row["versions"], row["hardware"]
    return (
        f"vLLM {versions['vllm']}, torch {versions['torch']}, {hardware['cpu']}, {hardware['cores']} cores, "
        f"commit {str(row['commit'])[:8]}, {row['started'][:10]}."
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
