"""Parts of reports, whichever way they are shown: `terminal`, `html_pages` and `markdown` render them."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
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

    numbers: columns that are aligned on the right.
    whole: columns whose texts are not broken into lines, on a terminal.
    optional: columns that a narrow page leaves out.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    numbers: Collection[int] = ()
    whole: Collection[int] = ()
    optional: Collection[int] = ()

    def cells(self) -> Iterator[list[Cell]]:
        """The rows."""
        return ([one if isinstance(one, Cell) else Cell(one) for one in row] for row in self.rows)


@dataclass(frozen=True, slots=True)
class Shown:
    """Something that was found.

    title: what it is.
    facts: what is known of it, by name.
    named: what its example is called.
    example: the facts of that, or its text; "" = there is none.
    where: who found it.
    """

    title: str
    facts: Mapping[str, object]
    named: str
    example: Mapping[str, object] | str
    where: str = ""
