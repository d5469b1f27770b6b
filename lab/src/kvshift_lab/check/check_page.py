"""The tables of docs/check.md, made from the rows that `kvshift_lab.check.stock_models` writes.

    python -m kvshift_lab.check.check_page [--check]

writes the part of docs/check.md behind its marker, relative to the working directory. With --check, the command writes
nothing and fails if the page does not match the rows.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvshift_lab.analysis.generated_page import write_or_check
from kvshift_lab.analysis.tables import as_markdown
from kvshift_lab.check.stock_models import GROUPS
from kvshift_lab.core.json_lines import read_lines

MARKER = "<!-- From here on made from results/check by `make results`. -->\n"
PAGE, RESULTS = Path("docs/check.md"), Path("results/check/transformers.jsonl")

Row = Mapping[str, Any]


def render_tables(rows: Sequence[Row]) -> str:
    """Return the text behind the marker: a table for each group of models, distances from tolerances, and sources."""
    by_name = {row["name"]: row for row in rows}
    parts = []
    for title, names in GROUPS.items():
        lines = [("model", "right", "wrong", "refused", "not supported")]
        lines += [_line(by_name[name]) for name in names if name in by_name]
        parts += [f"### {title}\n", as_markdown(lines, left=None), ""]
    return "\n".join([*parts, _distances(rows), "", _provenance(rows), ""])


def main(arguments: Sequence[str]) -> int:
    """Write or check the page, and return the exit code."""
    return write_or_check(
        "python -m kvshift_lab.check.check_page",
        arguments,
        PAGE,
        RESULTS,
        [MARKER],
        lambda: render_tables([*read_lines(RESULTS)]),
    )


def _line(row: Row) -> tuple[str, ...]:
    found: dict[str, list[str]] = {"wrong": [], "refused": [], "not supported": []}
    for verdict in row["verdicts"]:
        if verdict["verdict"] != "right":
            found[verdict["verdict"]].append(f"{verdict['property']}{_detail(verdict, row['spread'])}")
    right = len(row["verdicts"]) - sum(map(len, found.values()))
    return f"{row['name']}", str(right), *("<br>".join(cell) or "-" for cell in found.values())


def _detail(verdict: Mapping[str, Any], spread: float) -> str:
    """Describe an error: its size and the first wrong position."""
    if verdict["verdict"] != "wrong":
        return ""
    first = verdict["first"]
    if first is None:
        _, raises, what = verdict["detail"].partition("raises ")
        return f": {raises}{what.partition(':')[0]}" if raises else f": {verdict['detail']}"
    if verdict["of"] == "gradients":
        return f": {first['case']} sees position {first['position']}, {verdict['error']:.2g} of the largest"
    case = f"{first['case']}, " if first["case"] else ""
    size = verdict["error"] / spread if isinstance(verdict["error"], float) else verdict["error"]
    return f": {case}position {first['position']}, {size:.2g}"


def _distances(rows: Sequence[Row]) -> str:
    """Describe how far errors of right and wrong results are from their tolerances."""
    ratios: dict[str, list[tuple[float, str]]] = {"right": [], "wrong": []}
    for row in rows:
        for verdict in row["verdicts"]:
            if (
                verdict["tolerance"]
                and isinstance(verdict["error"], float)
                and (verdict["first"] or not verdict["wrong"])
            ):
                ratios[verdict["verdict"]].append((verdict["error"] / verdict["tolerance"], row["name"]))
    right, wrong = ratios["right"], [found for found in ratios["wrong"] if found[0] > 1]
    close = [found for found in right if found[0] > 0.2] + [found for found in wrong if found[0] < 10]
    small, large = sum(ratio <= 0.2 for ratio, _ in right), sum(ratio >= 10 for ratio, _ in wrong)
    between = ", ".join(sorted({name for _, name in close}))
    return (
        f"{small} of the {len(right)} errors that count as right are less than a fifth of their tolerance; "
        f"{large} of the {len(wrong)} that count as wrong are more than ten times theirs. "
        f"The other {len(close)} occur in {between}."
    )


def _provenance(rows: Sequence[Row]) -> str:
    versions, hardware = rows[0]["versions"], rows[0]["hardware"]
    commits = sorted({str(row["commit"])[:8] for row in rows})
    days = sorted({row["started"][:10] for row in rows})
    return (
        f"{len(rows)} models, `python -m kvshift_lab.check.stock_models`, transformers {versions['transformers']}, "
        f"torch {versions['torch']}, in float32 on a CPU ({hardware['cpu']}), commit {', '.join(commits)}, "
        f"{' to '.join(sorted({days[0], days[-1]}))}. Neither causal_conv1d nor mamba_ssm nor flash-linear-attention "
        "was installed: with them, some of the refused properties may be right."
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
