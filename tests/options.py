"""What is written from the tables of options and of refusals: tables of docs/api/backend.md and of
docs/combine.md.

python -m tests.options
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pycomm import _C
from pycomm.env import VARIABLES, Variable
from pycomm.reduction.refusals import ALL, REFUSALS

ROOT = Path(__file__).parents[1]
END = "The end of what it writes."


def rows() -> list[Variable]:
    """Return the rows of the core and of Python, in the order of the documentation."""
    return [*(Variable(**row) for row in _C.OPTIONS), *VARIABLES.values()]


def table(variables: Iterable[Variable]) -> str:
    """Return the table of docs/api/backend.md."""
    lines = ["", "| variable, option | meaning | default |", "| --- | --- | --- |"]
    for row in variables:
        option = f", `{row.option}=`" if row.option else ""
        same = "; equal on all ranks" if row.same else ""
        more = f" ([more](../{row.page}))" if row.page else ""
        cells = f"`{row.name}`{option}", row.meaning + same + more, row.default
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", ""])


def refusals() -> str:
    """Return the table of docs/combine.md: a row for each trainer."""
    lines = ["", "| trainer | not with (instead) |", "| --- | --- |"]
    for trainer, refused in REFUSALS.items():
        options: dict[str, list[str]] = {}
        for option, (_, instead) in refused.items():
            options.setdefault(instead, []).append(option)
        cells = [", ".join(some) + f" ({but})" * bool(but) for but, some in options.items()]
        lines.append(f"| {'all' if trainer == ALL else f'`{trainer}`'} | {'; '.join(cells)} |")
    return "\n".join([*lines, "", ""])


def written() -> dict[Path, str]:
    """Return the texts of the files as they should be."""
    made = {
        "docs/api/backend.md": table(rows()),
        "docs/combine.md": refusals(),
    }
    texts = {}
    for file, ours in made.items():
        text = (ROOT / file).read_text()
        before, mark, rest = text.partition("`python -m tests.options` writes")
        line, _, old = rest.partition("\n")
        _, end, after = old.partition(END)
        assert mark, f"{file} does not say where what is written begins"
        assert end, f"{file} does not say where what is written ends"
        opening = text[: text.index(END)].rpartition("\n")[2]  # what precedes the mark in its line
        texts[ROOT / file] = f"{before}{mark}{line}\n{ours}{opening}{END}{after}"
    return texts


if __name__ == "__main__":
    for file, text in written().items():
        file.write_text(text)
