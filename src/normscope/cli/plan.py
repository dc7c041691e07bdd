"""`normscope plan MODEL --memory 16GB`: the memory of a training step, and what to recompute to fit."""

import json
import shutil
import sys
from contextlib import redirect_stdout
from typing import Annotated

import typer

from normscope.cli import options
from normscope.cli.output import chosen_format, emit, require_writable
from normscope.cli.progress import progress_bar, quiet_libraries

SCHEMA = "normscope.plan/1"


def command(
    context: typer.Context,
    model: options.Model,
    memory: Annotated[
        str | None,
        options.option(
            "Memory that a training step may take: 16GB, 500MB, 24GiB. Default: no limit; the step is only "
            "measured.",
            metavar="SIZE",
        ),
    ] = None,
    batch_size: options.BatchSize = 4,
    seq_len: options.SeqLen = 64,
    optimizer: Annotated[
        str, typer.Option(help="Optimiser: adamw, adam, sgd (momentum 0.9), muon or adafactor.")
    ] = "adamw",
    precision: Annotated[
        str, typer.Option(help="float32 (the model's own type), or autocast to bfloat16 or float16.")
    ] = "float32",
    text: options.Text = None,
    seed: options.Seed = 0,
    device: options.Device = "cpu",
    dtype: options.DType = None,
    format: Annotated[options.TextOrJson, typer.Option(help="Format of the plan.")] = options.TextOrJson.TEXT,
    output: options.Output = None,
    traceback: options.Traceback = False,
) -> None:
    """Show the memory of a training step, and which blocks and branches to recompute so that it fits.

    Example: normscope plan hf:gpt2 --memory 12GB --batch-size 8 --seq-len 1024

    Tensors have shapes and no values here: no weights are created for nn: and hf: models of any size.

    To apply the plan, in Python: normscope.plan(…).apply(model)

    Exit status: 0 done; 2 the call or the model cannot be used, or no choice of modules fits.
    """
    from normscope.planning import plan
    from normscope.planning.words import text as in_text

    require_writable(output)
    format = chosen_format(context, options.TextOrJson)
    with redirect_stdout(sys.stderr), quiet_libraries(), progress_bar() as progress:
        made = plan(
            model,
            memory,
            optimizer=optimizer,
            precision=precision,
            progress=progress,
            **{name: value for name, value in options.loading(context).items() if name in OF_PLAN},
        )
    if format is options.TextOrJson.JSON:
        rendered = json.dumps({"schema": SCHEMA, **made.to_dict()}, indent=2) + "\n"
    else:
        to_screen = output is None and sys.stdout.isatty()
        rendered = in_text(made, shutil.get_terminal_size().columns if to_screen else None)
    emit(rendered, output)


OF_PLAN = ("batch_size", "seq_len", "text", "seed", "device", "dtype")
"""Options of `loading` that the plan takes."""
