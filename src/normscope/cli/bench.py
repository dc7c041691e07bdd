"""`normscope bench [NAME…]`: measure ourselves."""

import json
from typing import Annotated, Any

import typer

from normscope.cli.options import Format
from normscope.cli.progress import quiet_libraries
from normscope.errors import UsageError


def command(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME…]", help="All when none is named.")
    ] = None,
    format: Annotated[Format, typer.Option(help="text or json.")] = Format.TEXT,
) -> None:
    """Measure normscope against what a user would pick instead, as ratios in one run."""
    from normscope.bench import BENCHES, bench

    if format is Format.HTML:
        raise UsageError("--format html", "text or json", "drop it")
    for name in names or list(BENCHES):
        with quiet_libraries():
            rows = bench(name)
        if format is Format.JSON:
            print(json.dumps({"bench": name, "rows": rows}, indent=2))
        else:
            _print(name, rows)


def _print(name: str, rows: list[dict[str, Any]]) -> None:
    """One line a figure; the columns are the keys of the first row."""
    from rich.console import Console
    from rich.table import Table

    table = Table(*rows[0], title=f"bench {name}", title_justify="left")
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console().print(table)
