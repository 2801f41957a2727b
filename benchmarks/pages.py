"""Pages of the docs whose tables come from rows; the text around them is written by hand."""

from pathlib import Path


def table(header: list[str], body: list[list[str]]) -> str:
    """Markdown."""
    lines = [header, ["---"] * len(header), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def fill(page: Path, parts: dict[str, str]) -> None:
    """Put each text between `<!-- its name -->` and the `<!-- end -->` that follows."""
    text = page.read_text()
    for name, part in parts.items():
        before, mark, rest = text.partition(f"<!-- {name} -->\n")
        if not mark:
            raise SystemExit(
                f"{page} has no place for {name!r}: a line <!-- {name} -->, and <!-- end --> after it."
            )
        text = f"{before}{mark}\n{part}\n\n<!-- end -->{rest.partition('<!-- end -->')[2]}"
    page.write_text(text)
