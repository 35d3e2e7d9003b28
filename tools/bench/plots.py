"""The speeds as bars, one figure a temperature, as PNG and SVG."""

import importlib
from pathlib import Path
from typing import Any

from tools.bench.figures import ALL_KINDS, SpeedRow, rows
from tools.bench.rounds import BenchResult


def write_plots(found: BenchResult, folder: Path, stem: str = "speed") -> list[Path]:
    """The files written; none without matplotlib."""
    try:
        figures = importlib.import_module("matplotlib.figure")
    except ImportError:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for temperature in found.plan.temperatures:
        chosen = [row for row in rows(found) if row.case.temperature == temperature and row.case.kind != ALL_KINDS]
        if not chosen:
            continue
        figure = _draw(figures, chosen, temperature)
        for suffix in (".png", ".svg"):
            path = folder / f"{stem}-t{temperature:g}{suffix}"
            figure.savefig(path, dpi=150)
            written.append(path)
    return written


def _draw(figures: Any, chosen: list[SpeedRow], temperature: float) -> Any:
    """Panels side by side, one a number of streams; bars grouped by engine, coloured by kind of prompts."""
    streams = sorted({row.case.streams for row in chosen})
    engines = list(dict.fromkeys(row.engine for row in chosen))
    kinds = list(dict.fromkeys(row.case.kind for row in chosen))
    height = 1.2 + 0.22 * len(engines) * (len(kinds) + 1)
    figure = figures.Figure(figsize=(2.5 + 3.5 * len(streams), height), layout="constrained")
    figure.suptitle(f"Tokens a second, T = {temperature:g} (median; line: lowest to highest)")
    for panel, number in zip(figure.subplots(1, len(streams), squeeze=False, sharey=True)[0], streams, strict=True):
        for offset, kind in enumerate(kinds):
            shown = [row for row in chosen if (row.case.streams, row.case.kind) == (number, kind)]
            places = [engines.index(row.engine) * (len(kinds) + 1) + offset for row in shown]
            medians = [row.speed.median for row in shown]
            below = [row.speed.median - row.speed.low for row in shown]
            above = [row.speed.high - row.speed.median for row in shown]
            panel.barh(places, medians, xerr=(below, above), label=kind, error_kw={"elinewidth": 0.8})
        middle = (len(kinds) - 1) / 2
        panel.set_yticks([index * (len(kinds) + 1) + middle for index in range(len(engines))], engines)
        panel.set_title(f"{number} stream{'s' if number > 1 else ''}")
        panel.grid(axis="x", alpha=0.3)
    panel.invert_yaxis()
    figure.legend(*panel.get_legend_handles_labels(), loc="outside lower center", ncols=len(kinds))
    return figure
