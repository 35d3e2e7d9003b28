"""Draws docs/speed.svg, the speed in each regime, from the tables of docs/benchmarks.md.

`python -m tools.speed_picture` writes it; `--check` fails if it is out of date.
"""

import math
import re
import sys
from dataclasses import dataclass
from html import escape

import click

from tools.site import ROOT

PAGE, PICTURE = ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "speed.svg"
_TABLE = re.compile(
    r"^\*\*(?P<machine>[^*]+)\*\*[^|]*?^\| regime \| ratio, T = 0 \|.*\n\|[-:| ]+\n(?P<rows>(?:\|.*\n)+)", re.M
)
_LINK = re.compile(r"\[([^\]]+)\]\([^)]+\)")
_LEFT, _WIDTH, _ROW = 500, 400, 26  # pixels
_LOWEST, _HIGHEST = 0.125, 8.0  # of the logarithmic axis
_STYLE = """
    .page { fill: #ffffff } text { fill: #1f2328; font-size: 13px } .head { font-weight: 600; font-size: 14px }
    .end { text-anchor: end } .mid { text-anchor: middle } .grid { stroke: #d0d7de } .one { stroke: #57606a }
    .faster { fill: #1a7f37; stroke: #1a7f37 }
    .slower { fill: #cf222e; stroke: #cf222e }
    @media (prefers-color-scheme: dark) {
      .page { fill: #0d1117 } text { fill: #e6edf3 } .grid { stroke: #30363d } .one { stroke: #9da7b3 }
      .faster { fill: #3fb950; stroke: #3fb950 } .slower { fill: #f85149; stroke: #f85149 }
    }
"""


@dataclass(frozen=True, slots=True)
class Regime:
    """A row of a table: its words, the speed relative to a peer, and the bounds of its interval where it has one."""

    words: str
    ratio: float
    bounds: tuple[float, float]


def regimes(page: str) -> dict[str, list[Regime]]:
    """Read the tables whose first columns are `regime` and `ratio, T = 0`, by the bold words above each."""
    return {table["machine"]: [_regime(row) for row in table["rows"].splitlines()] for table in _TABLE.finditer(page)}


def _regime(row: str) -> Regime:
    words, ratio, *rest = (cell.strip() for cell in row.strip("|").split("|"))
    low, _, high = (rest[0] if rest else "").partition(" to ")
    bounds = (float(low), float(high)) if high else (float(ratio), float(ratio))
    return Regime(_LINK.sub(r"\1", words).replace("`", ""), float(ratio), bounds)


def picture(page: str) -> str:
    """Draw a page's tables as SVG: a dot for each regime, and a line for its interval, on a logarithmic axis."""
    drawn, y = list[str](), 40
    for machine, rows in regimes(page).items():
        drawn.append(f'  <text class="head" x="16" y="{y}">{escape(machine)}</text>')
        for row in rows:
            y += _ROW
            shade = "faster" if row.ratio >= 1 else "slower"
            drawn += [
                f'  <text class="end" x="{_LEFT - 12}" y="{y + 4}">{escape(row.words.split(": ")[0])}</text>',
                f'  <path class="{shade}" stroke-width="3" d="M{_x(row.bounds[0])} {y} H{_x(row.bounds[1])}"/>',
                f'  <circle class="{shade}" cx="{_x(row.ratio)}" cy="{y}" r="4.5"/>',
                f'  <text x="{_LEFT + _WIDTH + 14}" y="{y + 4}">{row.ratio:.2f}</text>',
            ]
        y += _ROW + 14
    bottom = y - 20
    axis = [
        f'  <path class="{"one" if tick == 1 else "grid"}" d="M{_x(tick)} 30 V{bottom}"/>'
        f'<text class="mid" x="{_x(tick)}" y="{bottom + 18}">{tick:g}</text>'
        for tick in (0.125, 0.25, 0.5, 1, 2, 4, 8)
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 {bottom + 32}" role="img" aria-labelledby="t d" '
            "font-family=\"system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif\">",
            '  <title id="t">Speed by regime, relative to a peer</title>',
            '  <desc id="d">Dots right of 1 are faster than the peer, dots left of it slower. Lines are 95 % '
            "intervals. The figures are those of the tables of benchmarks.md, at temperature 0.</desc>",
            f"  <style>{_STYLE}  </style>",
            f'  <rect class="page" width="960" height="{bottom + 32}" rx="8"/>',
            f'  <text class="mid" x="{_x(1)}" y="20">slower than the peer | faster</text>',
            *axis,
            *drawn,
            "</svg>\n",
        ]
    )


def _x(ratio: float) -> float:
    share = math.log(ratio / _LOWEST) / math.log(_HIGHEST / _LOWEST)
    return round(_LEFT + _WIDTH * share, 1)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--check", is_flag=True, help="Write nothing; fail if the picture is out of date.")
def main(check: bool) -> None:
    """Draw the speeds of docs/benchmarks.md."""
    drawn = picture(PAGE.read_text(encoding="utf-8"))
    if not check:
        PICTURE.write_text(drawn, encoding="utf-8")
    elif not PICTURE.is_file() or PICTURE.read_text(encoding="utf-8") != drawn:
        click.echo("docs/speed.svg is out of date; run python -m tools.speed_picture.")
        sys.exit(1)


if __name__ == "__main__":
    main()
