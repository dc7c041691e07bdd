"""`normscope bench [NAME…]`: measure ourselves."""

import json
from typing import Annotated

import typer

from normscope.cli.options import TextOrJson
from normscope.cli.progress import quiet_libraries


def command(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[NAME…]", help="All when none is named.")
    ] = None,
    format: Annotated[TextOrJson, typer.Option(help="How to show it.")] = TextOrJson.TEXT,
) -> None:
    """Measure normscope against what a user would pick instead, as ratios in one run."""
    from rich.console import Console
    from rich.table import Table

    from normscope.bench import BENCHES, bench

    for name in names or list(BENCHES):
        with quiet_libraries():
            rows = bench(name)
        if format is TextOrJson.JSON:
            print(json.dumps({"bench": name, "rows": rows}, indent=2))
        else:
            table = Table(*rows[0], title=f"bench {name}", title_justify="left")
            for row in rows:  # a figure each
                table.add_row(*map(str, row.values()))
            Console().print(table)
