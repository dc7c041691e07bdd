"""`normscope anatomy MODEL`: only the reading."""

import json
import sys
from contextlib import redirect_stdout
from typing import Annotated

import typer

from normscope.cli.options import (
    BatchSize,
    Device,
    DType,
    Model,
    Output,
    Seed,
    SeqLen,
    Text,
    TextOrJson,
    Traceback,
    parse_dtype,
)
from normscope.cli.output import emit, require_writable
from normscope.cli.progress import quiet_libraries


def command(
    model: Model,
    batch_size: BatchSize = 1,
    seq_len: SeqLen = 64,
    text: Text = None,
    seed: Seed = 0,
    device: Device = "cpu",
    dtype: DType = None,
    format: Annotated[TextOrJson, typer.Option(help="How to show it.")] = TextOrJson.TEXT,
    output: Output = None,
    traceback: Traceback = False,
) -> None:
    """Show where the norms sit: stacks, blocks, branches and what could not be read. Nothing is measured.

    A model that does not fit into memory is read without its weights being made.
    """
    from normscope.anatomy import read_anatomy, require_residual_stream
    from normscope.report import print_anatomy, text_anatomy
    from normscope.subjects import load_to_read

    require_writable(output)
    with redirect_stdout(sys.stderr), quiet_libraries():
        subject = load_to_read(
            model,
            seed=seed,
            batch_size=batch_size,
            seq_len=seq_len,
            text=text,
            device=device,
            dtype=parse_dtype(dtype),
        )
        anatomy = read_anatomy(subject)
        require_residual_stream(anatomy, model)
    if format is TextOrJson.JSON:
        rendered = json.dumps({"model": model, **anatomy.to_dict()}, indent=2) + "\n"
    elif output is None:
        print_anatomy(anatomy)
        return
    else:
        rendered = text_anatomy(anatomy)
    emit(rendered, output)
