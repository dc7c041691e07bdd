"""Options and arguments that more than one command takes."""

from collections.abc import Set
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from normscope.completion import complete_model
from normscope.errors import UsageError, suggest

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "bfloat16", "float16", "float64")

MODEL_HELP = (
    "[bold]hf:gpt2,n_layer=24[/bold]: a Hugging Face model type with options of its config; random weights, "
    "nothing is downloaded. [bold]hf:PATH[/bold]: a config.json, or a folder with model.safetensors. "
    "[bold]nn:decoder,scheme=post,depth=24,width=256[/bold]: a model of normscope's; also encoder, "
    "encoder-decoder and vision. [bold]nn:PATH[/bold]: a folder that save_model wrote. "
    "[bold]path/to/file.py:factory[/bold] or [bold]package.module:factory[/bold]: your function that returns "
    "the model; this runs your code, as `python file.py` would."
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
    """Names of the limits on a check's Jacobian analysis."""

    FAST = "fast"
    STANDARD = "standard"
    DEEP = "deep"


class FailOn(StrEnum):
    """Minimum severity for exit status 1."""

    ERROR = "error"
    WARNING = "warning"
    NEVER = "never"


def option(help: str, **more: Any) -> Any:
    """An option whose help does not show the default."""
    return typer.Option(help=help, show_default=False, **more)


Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help=MODEL_HELP, show_default=False, autocompletion=complete_model),
]
Seed = Annotated[int, typer.Option(help="Random seed of weights, batches and dropout.")]
BatchSize = Annotated[
    int, typer.Option(min=1, help="Sequences per batch; unused if your model brings its own batches.")
]
SeqLen = Annotated[
    int, typer.Option(min=2, help="Tokens per sequence; unused if your model brings its own batches.")
]
Text = Annotated[
    Path | None,
    option(
        "Text to feed the model: a file or a folder of any size. Default: the source of Python's standard "
        "library.",
        metavar="PATH",
    ),
]
Source = Annotated[
    Path | None,
    option("Input lines of an encoder-decoder, for example en.txt; needs --target.", metavar="FILE"),
]
Target = Annotated[
    Path | None,
    option("Output lines of an encoder-decoder: line i answers line i of --source.", metavar="FILE"),
]
Images = Annotated[
    str | None,
    option("Images for a vision model: digits (8x8 pixels, from scikit-learn). Default: random noise."),
]
Device = Annotated[str, typer.Option(help="Device to run on: cpu, cuda, cuda:1, …")]
DType = Annotated[
    str | None,
    option("Floating-point type: float32, bfloat16, float16 or float64. Default: the model's own."),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="PATH",
        help="Write the result to this file, in the format of its ending. Default: stdout.",
    ),
]
Traceback = Annotated[bool, typer.Option("--traceback", help="Show the full Python traceback of an error.")]


OF_LOAD = ("seed", "batch_size", "seq_len", "text", "source", "target", "images", "device", "dtype")
"""Options that go to `load`."""


def loading(context: typer.Context) -> dict[str, Any]:
    """The command's options as arguments of `load`.

    Raises:
        UsageError: `--dtype` names no floating-point type.
    """
    given = {name: value for name, value in context.params.items() if name in OF_LOAD}
    return given | {"dtype": _dtype(given["dtype"])}


def _dtype(name: str | None) -> "torch.dtype | None":
    import torch

    if name is None:
        return None
    if name not in DTYPES:
        raise UsageError(f"--dtype {name}", " or ".join(DTYPES), suggest(name, DTYPES, "choose one"))
    return getattr(torch, name)


def typed(context: typer.Context) -> set[str]:
    """Names of the parameters that stand on the command line."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return {name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"}


def spelled(context: typer.Context, name: str) -> str:
    """The option of the parameter `name` as it is written: "--look-every"."""
    return next(each.opts[0] for each in context.command.params if each.name == name)


def words_of(context: typer.Context, left_out: Set[str]) -> list[str]:
    """The options that differ from their defaults, as words of a command line.

    Args:
        context: the command's.
        left_out: names of parameters that are left out.
    """
    words: list[str] = []
    for parameter in context.command.params:
        name, value = str(parameter.name), context.params.get(str(parameter.name))
        if name not in left_out and value is not None and value != parameter.default:
            number = str(value).removesuffix(".0") if isinstance(value, float) else str(value)
            words += [parameter.opts[0]] if value is True else [parameter.opts[0], number]
    return words
