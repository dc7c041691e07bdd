"""`normscope claims [ID…]`: test the claims of the sources."""

import shlex
import sys
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from normscope.cli.options import Output, Text
from normscope.cli.output import chosen_format, emit, require_writable
from normscope.cli.progress import progress_bar, quiet_libraries
from normscope.errors import UsageError

if TYPE_CHECKING:
    from normscope.claims import Claim, ClaimResult, Setup

LEAST_TEXT = 10_000  # bytes; a shorter text would repeat the same training sequences


class Format(StrEnum):
    """Output formats of the results."""

    TEXT = "text"
    JSON = "json"
    HTML = "html"
    MARKDOWN = "markdown"
    CHINESE = "markdown-zh"


def command(
    context: typer.Context,
    ids: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ID…]",
            help="Claims to test: one (A7), a range (B3-B6), a group (A: the proof, B: Pre-LN against "
            "Post-LN, C: the long article) or an article (000 … 004). Default: all.",
            show_default=False,
        ),
    ] = None,
    long: Annotated[
        bool,
        typer.Option(
            "--long", help="Test deeper models with more steps. Without ids: every claim with a long form."
        ),
    ] = False,
    seeds: Annotated[int, typer.Option(min=1, max=100, help="Number of seeds, from 0; each adds cases.")] = 3,
    jobs: Annotated[int, typer.Option(min=1, help="Processes to run at once, one thread each.")] = 2,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again; do not read the cache.")] = False,
    text: Text = None,
    list_only: Annotated[bool, typer.Option("--list", help="List the claims and exit.")] = False,
    format: Annotated[
        Format,
        typer.Option(
            help="Format of the results. markdown: with ids, only the table. markdown-zh: in Chinese."
        ),
    ] = Format.TEXT,
    output: Output = None,
) -> int:
    """Test the claims of five articles about norms and residuals.

    Verdicts are computed from the measurements: a claim holds, holds under a
    condition, is refuted (with a counter-example), is undecided, or is not
    measured. One id shows that claim in full: normscope claims B7

    All claims with five seeds take about 15 minutes on two CPU cores. Results
    of the same code in the same environment are read from the cache.

    Exit status: 0 done; 1 the code of a claim raised an error; 2 the call
    cannot be used; 130 Ctrl-C, after the results so far were shown.
    """
    from normscope.claims import Setup, chosen, run_claims
    from normscope.claims.cache import default_folder

    claims = [claim for claim in chosen(ids or []) if ids or not long or claim.has_long]
    if list_only:
        for claim in claims:
            print(f"{claim.id:4} {claim.sentence.says}")
        return 0
    _require_long(claims, long)
    require_writable(output)
    format = chosen_format(context, Format)
    if text is not None:
        _require_text(text)
    setup = Setup(seeds=tuple(range(seeds)), long=long, text=text)
    ready: list[ClaimResult] = []
    began = time.perf_counter()
    interrupted = False
    try:
        with quiet_libraries(), progress_bar() as progress:
            run_claims(
                claims,
                setup,
                jobs=jobs,
                cache=default_folder(),
                fresh=fresh,
                progress=_counted(progress),
                on_ready=ready.append,
                on_trouble=lambda words: print(f"normscope: {words}", file=sys.stderr),
            )
    except KeyboardInterrupt:
        interrupted = True
        print(f"normscope: interrupted after {len(ready)} of {len(claims)} claims", file=sys.stderr)
    seconds = time.perf_counter() - began
    by_id = {tested.claim.id: tested for tested in ready}
    ready = [by_id[claim.id] for claim in claims if claim.id in by_id]
    missing = [claim.id for claim in claims if claim.id not in by_id]
    if format is Format.TEXT:
        emit(_text(ready, output is None), output)
    else:
        emit(_rendered(ready, missing, setup, format, seconds, whole=not ids), output)
    return 130 if interrupted else 1 if any(tested.error for tested in ready) else 0


def _counted(progress: Callable[[str, int, int], None]) -> Callable[[str, int, int], None]:
    """A callback that shows `12 of 75 done, A7 B3 running` beside the bar."""

    def show(running: str, done: int, total: int) -> None:
        progress(f"{done} of {total} done" + (f", {running} running" if running else ""), done, total)

    return show


def _require_text(text: Path) -> None:
    """Raise UsageError if the text is too short to train on."""
    from normscope.subjects.text import load_text

    size = len(load_text(text))
    if size < LEAST_TEXT:
        raise UsageError(f'text "{text}" ({size} bytes)', f"at least {LEAST_TEXT}", "give a longer one")


def _require_long(claims: "list[Claim]", long: bool) -> None:
    without = [claim.id for claim in claims if long and not claim.has_long]
    if without:
        raise UsageError(
            f"--long with {', '.join(without)}",
            "claims that have a long form",
            "leave --long out for these, or leave the ids out for all that have one",
        )


def _rendered(
    ready: "list[ClaimResult]",
    missing: list[str],
    setup: "Setup",
    format: Format,
    seconds: float,
    whole: bool,
) -> str:
    """Render the ready results and the missing ids; `whole` if no ids were given."""
    typed = shlex.join(["normscope", *sys.argv[1:]])
    if format is Format.JSON:
        from normscope.claims.words import to_json

        return to_json(ready, setup, typed, seconds, missing)
    from normscope.claims.page import render_page

    pages = {Format.HTML: "claims.html", Format.CHINESE: "claims.zh.md"}
    return render_page(pages.get(format, "claims.md" if whole else "table.md"), ready, setup, typed, seconds)


def _text(ready: "list[ClaimResult]", to_screen: bool) -> str:
    """The table; the claim in full if there is only one."""
    from rich.console import Console, RenderableType

    from normscope.claims.words import in_full, table, tally
    from normscope.report.console import as_text

    if not ready:  # interrupted before the first
        return ""
    if len(ready) == 1:
        return "\n".join(in_full(ready[0])) + "\n"
    parts: list[RenderableType] = [table(ready), "", tally(ready)]
    if not (to_screen and sys.stdout.isatty()):
        return as_text(lambda width: parts, Console().width if to_screen else 120)
    console = Console(force_terminal=True)
    with console.capture() as captured:
        for part in parts:
            console.print(part)
    return captured.get()
