"""Tables of results: printed, as CSV and as Markdown, and the page that shows them with their plots."""

import csv
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table


@dataclass(slots=True)
class Sheet:
    """A table under a title; cells are text or numbers, None where there is nothing to say.

    Attributes:
        name: Of its CSV file.
        title: Above it.
        columns: Headings, with units.
        rows: The cells.
        note: A paragraph below it.
        is_on_page: Whether the page shows it; a long one is in its CSV file alone.
    """

    name: str
    title: str
    columns: Sequence[str]
    rows: list[Sequence[object]] = field(default_factory=list)
    note: str = ""
    is_on_page: bool = True

    def markdown(self) -> str:
        """The table for a README."""
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        table = "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)
        return "\n\n".join(filter(None, [f"## {self.title}", table, self.note]))

    def show(self) -> None:
        """Prints the table."""
        table = Table(*map(str, self.columns), title=self.title)
        for row in self.rows:
            table.add_row(*map(_cell, row))
        Console(width=180).print(table)

    def write_csv(self, folder: Path) -> None:
        """`NAME.csv`, with six digits of each number."""
        with (folder / f"{self.name}.csv").open("w", newline="") as lines:
            writer = csv.writer(lines, lineterminator="\n")
            writer.writerow(self.columns)
            writer.writerows([f"{cell:.6g}" if isinstance(cell, float) else cell for cell in row] for row in self.rows)


def publish(folder: Path, title: str, introduction: str, sheets: Sequence[Sheet], pictures: Sequence[str]) -> None:
    """Writes `README.md`, its plots named first, and one CSV file a sheet.

    Called again and again while the rows grow, so that an experiment that is cut short leaves what it has.

    Args:
        folder: Made if it is not there; holds the pictures already.
        title: Heading of the page.
        introduction: How the figures came about, with the command.
        sheets: In the order of the page.
        pictures: File names in the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for sheet in sheets:
        sheet.write_csv(folder)
    made_with = f"torch {torch.__version__.split('+')[0]}, Python {platform.python_version()}."
    shown = [f"![{Path(name).stem.replace('_', ' ')}]({name})" for name in pictures]
    parts = [
        f"# {title}",
        f"{introduction} {made_with}",
        *shown,
        *(sheet.markdown() for sheet in sheets if sheet.is_on_page),
    ]
    parts += [f"{sheet.title}: [{sheet.name}.csv]({sheet.name}.csv)." for sheet in sheets if not sheet.is_on_page]
    (folder / "README.md").write_text("\n\n".join(parts) + "\n")


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)
