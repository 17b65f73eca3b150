"""Writes the paper's lines beside the code into the methods' pages: python docs/lines.py

A page asks for this table with the line <!-- lines -->. On the left it has the listing in the
file's docstring, and on the right the statements with a comment such as `# line 9` or `# lines 7,
8`, which stands behind its statement or above it. Neighbours with the same code share a row. Line 4
of an Algorithm 1 that a second listing has is 1.4.
"""

import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parent.parent
MARK = "<!-- lines -->\n"
LINE = r"\d+(?:\.\d+)?"
ENTRY = rf"^ {{4}} ?({LINE})  (.*\n(?: {{8,}}.*\n)*)"


def build(method: str, page: str) -> str:
    """The page with its table. Raises ValueError if a line of the listing has no comment."""
    source = (ROOT / f"{method}.py").read_text().replace("|", r"\|")  # as a table wants it
    _, docstring, code = source.split('"""', 2)
    found_in, named = defaultdict(list), []
    for row in code.splitlines():
        statement, _, comment = row.partition("# ")
        if found := re.match(rf"lines? ({LINE}(?:(?:, | and ){LINE})*)", comment.lower()):
            named += re.findall(LINE, found[1])
        if statement.strip():
            for number in named:
                found_in[number].append(f"`{statement.strip()}`")
            named = []
    rows = []
    for number, entry in re.findall(ENTRY, docstring, re.M):
        if number not in found_in:
            raise ValueError(f"{method}.py has no comment for line {number}")
        text = " ".join(row.strip() for row in entry.splitlines())
        paper = "&emsp;" * ((len(entry) - len(entry.lstrip())) // 4) + f"`{text}`"
        code = "<br>".join(found_in[number])
        if rows and rows[-1][2] == code:
            rows[-1][0] += f", {number}"
            rows[-1][1] += f"<br>{paper}"
        else:
            rows.append([number, paper, code])
    table = "| line | the paper | the code |\n| --- | --- | --- |\n"
    table += "".join(f"| {' | '.join(row)} |\n" for row in rows)
    before, mark, after = page.partition(MARK)
    return before + mark + table + re.sub(r"\A(\|.*\n)*", "", after)


if __name__ == "__main__":
    for page in ROOT.glob("docs/*.md"):
        if MARK in page.read_text():
            page.write_text(build(page.stem, page.read_text()))
