"""Curves as small pictures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Curve:
    """Points of one name."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


def draw(path: Path, *, title: str, x: str, y: str, curves: Sequence[Curve]) -> None:
    """Write curves over one logarithmic axis.

    Args:
        path: Of an SVG.
        title: Above.
        x: What grows.
        y: What is measured.
        curves: At least one.
    """
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "growth"}):
        figure = Figure(figsize=(6, 3.5), layout="constrained")
        axes = figure.add_subplot()
        for curve in curves:
            axes.plot(curve.x, curve.y, marker="o", label=curve.name)
        axes.set(title=title, xlabel=x, ylabel=y, xscale="log", ylim=(0, None))
        axes.set_xticks(curves[0].x, [f"{tick:g}" for tick in curves[0].x], minor=False)
        axes.minorticks_off()
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
        figure.savefig(path, metadata={"Date": None})
