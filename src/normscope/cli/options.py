"""Options and arguments that more than one command takes."""

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from normscope.errors import UsageError, suggest

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "bfloat16", "float16", "float64")

MODEL_HELP = (
    "[bold]hf:gpt2,n_layer=24[/bold] (a Hugging Face model type with options, random weights, never the "
    "network), [bold]hf:PATH[/bold] (a config.json, or a folder with model.safetensors), "
    "[bold]nn:decoder,scheme=post,depth=24,width=256[/bold] (ours; encoder, encoder-decoder and vision too), "
    "[bold]nn:PATH[/bold] (a folder that save_model wrote), [bold]path/to/file.py:factory[/bold] or "
    "[bold]package.module:factory[/bold] (yours; this runs your code, as `python file.py` would)."
)


class Format(StrEnum):
    """Output formats of a report."""

    TEXT = "text"
    JSON = "json"
    HTML = "html"


class TextOrJson(StrEnum):
    """Output formats of commands without an HTML page."""

    TEXT = "text"
    JSON = "json"


class Budget(StrEnum):
    """Names of the limits on what a check may spend on Jacobians."""

    FAST = "fast"
    STANDARD = "standard"
    DEEP = "deep"


class FailOn(StrEnum):
    """Minimum severity for exit status 1."""

    ERROR = "error"
    WARNING = "warning"
    NEVER = "never"


Model = Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP, show_default=False)]
Seed = Annotated[int, typer.Option(help="Set before the model is built.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Sequences a batch, where normscope makes the batch.")]
SeqLen = Annotated[int, typer.Option(min=2, help="Tokens a sequence, where normscope makes the batch.")]
Text = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH",
        help="Real text as input, a file or a folder of any size; the default is Python's standard library.",
        show_default=False,
    ),
]
Source = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="What an encoder-decoder reads, line by line; with --target.",
        show_default=False,
    ),
]
Target = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="What it should write: line i belongs to line i of --source.",
        show_default=False,
    ),
]
Images = Annotated[
    str | None,
    typer.Option(
        help="digits: small real images (scikit-learn's) for a model of images; the default is noise.",
        show_default=False,
    ),
]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, …")]
DType = Annotated[
    str | None,
    typer.Option(
        help="float32, bfloat16, float16 or float64; the model's own by default.", show_default=False
    ),
]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="PATH", help="Write there instead of the terminal.")
]
Traceback = Annotated[bool, typer.Option("--traceback", help="Show the whole traceback of an error.")]


def parse_dtype(name: str | None) -> "torch.dtype | None":
    """The torch dtype of `--dtype`; None stays None.

    Raises:
        UsageError: no floating-point type of that name.
    """
    import torch

    if name is None:
        return None
    if name not in DTYPES:
        raise UsageError(f"--dtype {name}", " or ".join(DTYPES), suggest(name, DTYPES, "choose one"))
    return getattr(torch, name)
