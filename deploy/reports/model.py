"""Reports and their parts, whichever way they are shown: `terminal`, `html_pages` and `markdown` render them."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["ok", "bad", "unclear", "none", ""]
"""Result of a check that a text reports; "" = none."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A text that is shown as what it says."""

    text: str
    kind: Kind = ""
    detail: str = ""  # shown below it where there is room


@dataclass(frozen=True, slots=True)
class ReportTable:
    """A table of texts."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    numbers: Collection[int] = ()  # columns that are aligned on the right, and whole
    whole: Collection[int] = ()  # other columns whose texts are not broken into lines, on a terminal

    def cells(self) -> Iterator[list[Cell]]:
        """The rows."""
        return ([one if isinstance(one, Cell) else Cell(one) for one in row] for row in self.rows)


@dataclass(frozen=True, slots=True)
class Shown:
    """Something that was found."""

    title: str  # what it is
    facts: Mapping[str, object]  # what is known of it, by name
    named: str = ""  # what its example is called
    example: Mapping[str, object] = field(default_factory=dict)  # the facts of that; {} = there is none
    where: str = ""  # who found it


@dataclass(frozen=True, slots=True)
class Timeline:
    """A line through points (time, value), and the band in which each should lie; a terminal leaves it out."""

    label: str
    points: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float]]  # lowest and highest value for each point
    first: str  # what the axis says at its beginning
    last: str  # at its end


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
    """A whole report."""

    title: str
    verdict: Cell  # in a sentence
    about: str  # of what it is
    notes: Sequence[str]  # what a reader of the verdict must know besides
    sections: Sequence[ReportSection]
