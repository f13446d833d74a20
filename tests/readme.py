"""The README's parts: files it prints, tables, links."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_NAME = re.compile(r"# (\S+\.(?:py|yaml))\n")


def blocks(language: str) -> list[str]:
    """All code blocks in a language."""
    return [text for found, text in _BLOCK.findall(TEXT) if found == language]


def files() -> dict[str, str]:
    """The files that the README prints: a block's first line names one, parts add up."""
    parts: dict[str, str] = {}
    for text in blocks("python") + blocks("yaml"):
        name = _NAME.match(text)
        if name:
            parts[name.group(1)] = parts.get(name.group(1), "") + text
    return parts


def write_files(folder: Path, *names: str) -> None:
    """Write files that the README prints, as they stand there."""
    for name in names:
        (folder / name).write_text(files()[name], encoding="utf-8")


def table(heading: str) -> list[list[str]]:
    """The cells of the first table below a heading, without its first two lines."""
    section = TEXT.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    rows = [line for line in section.split("\n\n|")[1].splitlines() if "|" in line]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


def links() -> list[str]:
    """Targets of all links and pictures."""
    return re.findall(r"\]\(([^)\s]+)\)", TEXT)
