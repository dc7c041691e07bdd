"""`normscope anatomy MODEL`: the anatomy of a model, without measurements."""

import json
import sys
from contextlib import redirect_stdout
from typing import Annotated

import typer

from normscope.cli import options
from normscope.cli.output import chosen_format, emit, require_writable
from normscope.cli.progress import quiet_libraries

SCHEMA = "normscope.anatomy/1"


def command(
    context: typer.Context,
    model: options.Model,
    batch_size: options.BatchSize = 1,
    seq_len: options.SeqLen = 64,
    text: options.Text = None,
    seed: options.Seed = 0,
    device: options.Device = "cpu",
    dtype: options.DType = None,
    format: Annotated[
        options.TextOrJson, typer.Option(help="Format of the anatomy.")
    ] = options.TextOrJson.TEXT,
    output: options.Output = None,
    expect: Annotated[
        str | None,
        options.option(
            "Exit with status 1 if a branch has another placement, or a part cannot be read: pre, post, "
            "res-post, peri, none, or the name of a scheme.",
            metavar="PLACEMENT",
        ),
    ] = None,
    traceback: options.Traceback = False,
) -> int:
    """Show where the norms sit: stacks, blocks, branches, and parts that cannot be read. Nothing is measured.

    Example: normscope anatomy hf:gpt2,n_layer=24 --expect pre

    Weights that do not fit into memory are not created.

    Exit status: 0 done; 1 --expect is not met; 2 the call or the model cannot be used.
    """
    from normscope.anatomy import departures, read_anatomy, require_residual_stream
    from normscope.report import print_anatomy, text_anatomy
    from normscope.subjects import load_to_read

    require_writable(output)
    format = chosen_format(context, options.TextOrJson)
    with redirect_stdout(sys.stderr), quiet_libraries():
        anatomy = read_anatomy(load_to_read(model, **options.loading(context)))
        require_residual_stream(anatomy, model)
        differing = departures(anatomy, expect) if expect is not None else []
    if format is options.TextOrJson.JSON:
        emit(json.dumps({"schema": SCHEMA, "model": model, **anatomy.to_dict()}, indent=2) + "\n", output)
    elif output is None:
        print_anatomy(anatomy)
    else:
        emit(text_anatomy(anatomy), output)
    for line in differing:
        print(f"normscope: {line}", file=sys.stderr)
    return int(bool(differing))
