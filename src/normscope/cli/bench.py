"""`normscope bench [NAME…]`: benchmarks of normscope against its alternatives."""

import json
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer

import normscope
from normscope.cli.options import TextOrJson
from normscope.cli.output import emit
from normscope.cli.progress import quiet_libraries
from normscope.errors import UsageError

SCHEMA = "normscope.bench/1"


def command(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME…]", help="Benchmarks to run, such as spectra or train. Default: all."),
    ] = None,
    format: Annotated[TextOrJson, typer.Option(help="Format of the results.")] = TextOrJson.TEXT,
) -> None:
    """Benchmark normscope against its alternatives. Needs a clone of the repository.

    Figures are ratios of times that were measured in turns, in one run on this machine.
    """
    benches = _benches()
    for name in names or list(benches.BENCHES):
        with quiet_libraries():
            rows = benches.bench(name)
        if format is TextOrJson.JSON:
            emit(json.dumps({"schema": SCHEMA, "bench": name, "rows": rows}, indent=2) + "\n", None)
        else:
            _print_rows(name, rows)


def _print_rows(name: str, rows: list[dict[str, Any]]) -> None:
    from normscope.report.console import show
    from normscope.report.figure_table import FigureTable

    columns = list(dict.fromkeys(column for row in rows for column in row))
    table = FigureTable(*columns, title=f"bench {name}")
    for row in rows:
        table.add_row(*(str(row.get(column, "")) for column in columns))
    show(lambda _: [table])


def _benches() -> ModuleType:
    """Import the benchmarks from the repository that holds the sources, or from the current folder.

    Raises:
        UsageError: neither place has them; an installed package has none.
    """
    for root in (Path(normscope.__file__).parents[2], Path.cwd()):
        if (root / "benchmarks" / "benches.py").is_file():
            sys.path.insert(0, str(root))
            return import_module("benchmarks.benches")
    raise UsageError(
        "the installed package holds no benchmarks",
        "the folder benchmarks/ of normscope's repository",
        "clone the repository and run normscope bench in its root",
    )
