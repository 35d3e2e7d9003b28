"""Reports and their parts, whichever way they are shown: `terminal`, `html_pages` and `markdown` render them."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["ok", "bad", "unclear", "none", ""]
"""Result of a check that a text reports; "" = none."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A text that is shown as what it says.

    detail: shown below it where there is room.
    """

    text: str
    kind: Kind = ""
    detail: str = ""


@dataclass(frozen=True, slots=True)
class ReportTable:
    """A table of texts.

    numbers: columns that are aligned on the right, and whole.
    whole: other columns whose texts are not broken into lines, on a terminal.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    numbers: Collection[int] = ()
    whole: Collection[int] = ()

    def cells(self) -> Iterator[list[Cell]]:
        """The rows."""
        return ([one if isinstance(one, Cell) else Cell(one) for one in row] for row in self.rows)


@dataclass(frozen=True, slots=True)
class Shown:
    """Something that was found.

    title: what it is.
    facts: what is known of it, by name.
    named: what its example is called.
    example: the facts of that; {} = there is none.
    where: who found it.
    """

    title: str
    facts: Mapping[str, object]
    named: str = ""
    example: Mapping[str, object] = field(default_factory=dict)
    where: str = ""


@dataclass(frozen=True, slots=True)
class Timeline:
    """A line through points (time, value), and the band in which each should lie; a terminal leaves it out.

    band: lowest and highest value for each point.
    first: what the axis says at its beginning.
    last: at its end.
    """

    label: str
    points: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float]]
    first: str
    last: str


Facts = Mapping[str, object]
"""Names with their values."""

Block = ReportTable | Shown | Timeline | Facts


@dataclass(frozen=True, slots=True)
class ReportSection:
    """Blocks under a heading; none = it is left out."""

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True, slots=True)
class Document:
    """A whole report.

    verdict: in a sentence.
    about: of what it is.
    notes: what a reader of the verdict must know besides.
    """

    title: str
    verdict: Cell
    about: str
    notes: Sequence[str]
    sections: Sequence[ReportSection]
