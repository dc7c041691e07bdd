"""`normscope demo`: the effect in two minutes."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from normscope.cli.progress import progress_bar, quiet_libraries

if TYPE_CHECKING:
    from normscope.bench.demo import Case
    from normscope.report import Report


def command(
    folder: Annotated[Path, typer.Option("--output", "-o", help="Where the two pages go.")] = Path("out"),
) -> None:
    """Two real models read, measured and judged: one that will train (GPT-2) and one that will not."""
    from normscope.bench import demo
    from normscope.report import print_report

    def show(case: "Case", report: "Report", page: Path) -> None:
        print(f"\n{case.title}\n$ {case.command}\n", flush=True)
        print_report(report)
        print(f"The page: {page}", flush=True)

    with quiet_libraries(), progress_bar() as progress:
        demo.run(show, folder, progress)
