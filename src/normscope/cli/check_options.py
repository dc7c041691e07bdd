"""Options of `check`: where each goes, and what is made of them."""

import shlex
from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any

import typer

from normscope.capture.launch import command_to_start
from normscope.cli.options import typed, words_of
from normscope.cli.script_words import SCRIPT
from normscope.errors import UsageError
from normscope.option_values import parse_formats, rates, require_longer

if TYPE_CHECKING:
    from normscope.subjects import Run

OF_CHECK = ("steps", "refine", "try_remedies", "budget", "quantise", "seed", "select", "ignore")
"""Options that go to `normscope.check`; those of `options.OF_LOAD` go to `load`."""
OF_RECIPE = (
    *("optimizer", "lr", "warmup", "schedule", "run_steps", "weight_decay"),
    *("eps", "beta1", "beta2", "clip", "accumulation", "precision"),
)
"""Options that say what a step of the intended run is; a Run has its own."""
OF_SHOWING = {"format", "output", "fail_on", "traceback", "quiet_script"}
"""Options that change nothing in the report."""
SETTINGS_OF_SCRIPT = (
    *("steps", "refine", "try_remedies", "budget", "quantise"),
    *("select", "ignore", "module", "traceback"),
)
"""Options that go to the process of a training script as they are."""
OF_SCRIPT = {"model", "forecast", "rates", *SETTINGS_OF_SCRIPT, *OF_SHOWING}
"""Parameters that the check of a script takes; the script sets the others."""
MOST_RATES = 100
"""Most learning rates of a range: each takes up to 36 training steps."""


def refuse_others(context: typer.Context, allowed: Set[str], beside: str, expected: str, do: str) -> None:
    """Raise UsageError for an option on the command line that is not one of `allowed`.

    Args:
        context: the command's.
        allowed: names of the parameters that may be given.
        beside: what was given that the others do not go with.
        expected, do: of the error.
    """
    given = typed(context)
    for parameter in context.command.params:
        if parameter.name in given and parameter.name not in allowed:
            raise UsageError(f"{parameter.opts[0]} with {beside}", expected, do)


def require_usable(context: typer.Context, words: Sequence[str]) -> None:
    """Raise UsageError for a script `words` that cannot be started, or options that do not go with it.

    This imports no PyTorch.
    """
    given, command = context.params, shlex.join(words)
    refuse_others(
        context, OF_SCRIPT, "a training script", "the script's own setting", f"set it in `{command}`"
    )
    if given["model"] != words[0] or context.args != words[1:]:
        both = f'MODEL "{given["model"]}" and `{command}` after --'
        raise UsageError(both, "one of the two", "leave one out")
    if given["steps"] == 0:
        raise UsageError("--steps 0 with a training script", "1 or more", "leave --steps out")
    command_to_start(words)


def require_values(given: Mapping[str, Any]) -> None:
    """Raise UsageError for values of `--rates`, `--refine` and `--quantise` that cannot be used.

    This imports no PyTorch, and therefore leaves out whether torchao is installed.
    """
    tries_rates = given["rates"] is not None and bool(rates_given(given["rates"]))
    tries_rates = tries_rates or given["forecast"] or bool(given["refine"])
    require_longer(given["refine"], given["steps"], tries_rates=tries_rates)
    parse_formats(given["quantise"])


def recipe_options(context: typer.Context, run: "Run | None") -> dict[str, Any]:
    """The options of `OF_RECIPE` by name; beside a Run, only those that stand on the command line."""
    names = OF_RECIPE if run is None else [name for name in OF_RECIPE if name in typed(context)]
    return {name: context.params[name] for name in names}


def rates_given(text: str) -> list[float]:
    """The learning rates that `--rates` names."""
    return rates(text, "--rates", MOST_RATES)


def rates_around_run(run: "Run | None", settings: dict[str, Any]) -> list[float]:
    """The learning rates around that of the intended run."""
    from normscope.forecast import rates_around
    from normscope.train import Recipe

    of_recipe = {name: value for name, value in settings.items() if name in OF_RECIPE}
    return rates_around(Recipe.asked_for(run, steps=0, seed=0, **of_recipe).lr)


def command_of(context: typer.Context) -> str:
    """The command that repeats the measurements; it includes options set by pyproject.toml."""
    words, script = ["normscope", "check"], context.meta.get(SCRIPT)
    left_out = {"model", *OF_SHOWING}
    if script:
        left_out |= {str(each.name) for each in context.command.params} - OF_SCRIPT
    else:
        words.append(context.params["model"])
    words += words_of(context, left_out)
    return shlex.join(words + (["--", *script] if script else []))
