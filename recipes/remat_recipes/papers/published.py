"""What the papers print, from `figures.csv`: every row names its paper and the table, figure or section."""

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Figure:
    """One printed figure.

    Attributes:
        paper: Its key, as `kusumoto2019`.
        place: Table, figure or section.
        network: As the paper names it.
        batch_size: Of the experiment, as text; empty where none is named.
        input: Shape of one sample, as `3x224x224`.
        method: As the paper names it; empty for what belongs to the network.
        quantity: What is printed.
        value: As printed, with the sign of a bound (`>=11.4`).
        unit: `GB`, `MB`, `s`, `%`, or `1` for a count or a ratio.
    """

    paper: str
    place: str
    network: str
    batch_size: str
    input: str
    method: str
    quantity: str
    value: str
    unit: str

    @property
    def number(self) -> float:
        """The value without the sign of a bound."""
        return float(self.value.lstrip("<>="))

    def __str__(self) -> str:
        return self.value if self.unit == "1" else f"{self.value} {self.unit}"


def figures(paper: str, place: str) -> Iterator[Figure]:
    """What is printed at one place of a paper, in its order."""
    with (Path(__file__).parent / "figures.csv").open() as lines:
        for row in csv.DictReader(lines):
            if (row["paper"], row["place"]) == (paper, place):
                yield Figure(**row)


def printed(paper: str, place: str, quantity: str) -> dict[tuple[str, str], Figure]:
    """(network, method) -> the figure of that quantity, in the paper's order.

    Raises:
        LookupError: Nothing of the kind is printed there.
    """
    found = {(f.network, f.method): f for f in figures(paper, place) if f.quantity == quantity}
    if not found:
        raise LookupError(f"figures.csv has no {quantity!r} of {paper}, {place}")
    return found
