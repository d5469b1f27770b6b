"""Part "sweep": cost as a function of T, B, G, D and dtype, and a line fit, as cost must be linear in the bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvshift_lab.benchmarks.cases import Case, Row, Session
from kvshift_lab.benchmarks.operator import shift_case

_AXES = "BTGD"


def sweep_cases(session: Session) -> Iterator[Case]:
    """Yield cases of forward and backward of `kv_shift` against a copy, changing one axis at a time."""
    sweep = session.preset.sweep
    for dtype in sweep.dtypes:
        for axis, values in sweep.axes.items():
            for value in values:
                at = _AXES.index(axis)
                batch, length, heads, size = (*sweep.base[:at], value, *sweep.base[at + 1 :])
                shape = (batch, length, heads, size)
                case = shift_case(
                    session, "sweep", shape, dtype, "forward and backward", only_kv_shift=True, axis=axis, value=value
                )
                yield replace(case, name=f"{axis}: {case.name}")  # the base shape occurs once for each axis


@dataclass(frozen=True)
class Line:
    """The line t = overhead + slope * bytes.

    Attributes:
        overhead: seconds, 0 or more.
        slope: seconds per byte, 0 or more.
        worst: the largest |t / (overhead + slope * bytes) - 1| over the points.
    """

    overhead: float
    slope: float
    worst: float

    def seconds(self, size: float) -> float:
        """Return the time of the line at `size` bytes."""
        return self.overhead + self.slope * size


def fit_line(sizes: Sequence[float], seconds: Sequence[float]) -> Line:
    """Fit a line with nonnegative overhead and slope by least squares of the relative errors.

    With u = 1 / t it minimises the sum of (u (overhead + slope n - t))^2.
    """
    if len(sizes) != len(seconds) or len(set(sizes)) < 2:
        raise ValueError(f"a line needs two points of different size, got sizes {list(sizes)}")
    u, n = 1 / np.asarray(seconds), np.asarray(sizes)
    slope, overhead = map(float, np.polyfit(n, seconds, 1, w=u))
    if overhead < 0:
        overhead, slope = 0.0, float((u * n).sum() / (u * n @ (u * n)))
    elif slope < 0:
        overhead, slope = float(u.sum() / (u @ u)), 0.0
    worst = max(abs(t / (overhead + slope * n) - 1) for n, t in zip(sizes, seconds, strict=True))
    return Line(overhead, slope, worst)


def lines(rows: Sequence[Row]) -> dict[tuple[str, str, str], tuple[Line, list[tuple[float, float]]]]:
    """Return the line and its points (bytes, seconds) for each (implementation, dtype, axis) of a sweep's rows."""
    points: dict[tuple[str, str, str], list[tuple[float, float]]] = {}
    for row in rows:
        if row["part"] == "sweep" and "milliseconds" in row:
            key = (row["contestant"], row["dtype"], row["axis"])
            points.setdefault(key, []).append((row["moved_bytes"], row["milliseconds"] / 1e3))
    found = {}
    for key, pairs in points.items():
        if len({size for size, _ in pairs}) > 1:
            found[key] = (fit_line(*zip(*pairs, strict=True)), sorted(pairs))
    return found
