"""The call that constructs a class, with the values that the code gives."""

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from normscope.starter.rank import Candidate
from normscope.starter.scan import Argument, Class, Source, called
from normscope.starter.values import UNKNOWN, is_length, is_vocabulary, neutral, value_of

_CONFIGS = {"config", "cfg", "conf", "args", "hparams", "params", "configuration", "model_args", "hp"}
_CONFIG_NAME = re.compile(r"Config|Args|Arguments|HParams|Params|Options$")


@dataclass
class Construction:
    """Lines of code that construct the model.

    Attributes:
        lines: the lines, of which the last binds `model`.
        classes: classes to import.
        vocabulary, length: size of the vocabulary and longest sequence, where they are known.
        unknown: arguments that are left to do.
    """

    lines: list[str] = field(default_factory=list)
    classes: list[Class] = field(default_factory=list)
    vocabulary: int | None = None
    length: int | None = None
    unknown: list[str] = field(default_factory=list)


def construct(candidate: Candidate, sources: Sequence[Source]) -> Construction:
    """The construction of a candidate; arguments that have defaults and are given nowhere are left out."""
    root = candidate.root
    made = Construction(classes=[root])
    given = _given(candidate.made_at, root.arguments)
    arguments = []
    for argument in root.arguments:
        config = _config_of(argument, root, sources)
        if config is not None:
            _add_config(made, config, sources)
            arguments.append("config" if argument == root.arguments[0] else f"{argument.name}=config")
        elif argument.name in _CONFIGS and root.method("get_default_config") is not None:
            _add_default_config(made, candidate)
            arguments.append("config")
        elif (words := _argument(made, argument, given, f"{root.name}(…)")) is not None:
            arguments.append(words)
    made.lines += _call("model = ", root.name, arguments)
    return made


def _argument(made: Construction, argument: Argument, given: dict[str, Any], of: str) -> str | None:
    """`name=value`, or a call of TODO where no value is known; None where the default will do."""
    value = given.get(argument.name, UNKNOWN)
    if value is UNKNOWN and argument.default is not None:
        _remember(made, argument.name, _literal(argument.default))
        return None
    comment = ""
    if value is UNKNOWN:
        value, comment = neutral(argument.name), "  # not found in the code"
    if value is UNKNOWN:
        made.unknown.append(argument.name)
        return f'{argument.name}=TODO("write {argument.name} of {of}"),'
    _remember(made, argument.name, value)
    return f"{argument.name}={value!r},{comment}"


def _remember(made: Construction, name: str, value: Any) -> None:
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        if is_vocabulary(name) and made.vocabulary is None:
            made.vocabulary = value
        if is_length(name) and made.length is None:
            made.length = value


def _literal(default: str) -> Any:
    try:
        return ast.literal_eval(default)
    except (ValueError, SyntaxError):
        return UNKNOWN


def _call(bound: str, name: str, arguments: Sequence[str]) -> list[str]:
    """`bound name(arguments)`, on one line where every argument is a bare name."""
    if all(argument.isidentifier() or re.fullmatch(r"\w+=config", argument) for argument in arguments):
        return [f"{bound}{name}({', '.join(arguments)})"]
    inside = [f"    {argument}" + ("" if "," in argument else ",") for argument in arguments]
    return [f"{bound}{name}(", *inside, ")"]


def _given(calls: Sequence[tuple[Source, ast.Call]], arguments: Sequence[Argument]) -> dict[str, Any]:
    """Values that the calls give, by argument; the first that is known."""
    found: dict[str, Any] = {}
    for source, call in calls:
        positional = [(a.name, value) for a, value in zip(arguments, call.args, strict=False)]
        if any(isinstance(value, ast.Starred) for value in call.args):
            positional = []
        named = [(keyword.arg, keyword.value) for keyword in call.keywords if keyword.arg is not None]
        for name, expression in [*positional, *named]:
            value = value_of(expression, source)
            if value is not UNKNOWN:
                found.setdefault(name, value)
    return found


def _config_of(argument: Argument, root: Class, sources: Sequence[Source]) -> Class | None:
    """The class of a configuration that an argument takes: by its annotation, else by its name."""
    classes = [each for source in sources for each in source.classes]
    annotated = re.findall(r"\w+", argument.annotation)
    if (found := next((each for each in classes if each.name in annotated), None)) is not None:
        return found
    if argument.name not in _CONFIGS or argument.default is not None:
        return None
    configs = [each for each in classes if _CONFIG_NAME.search(each.name) and each.name != root.name]
    order = sorted(configs, key=lambda c: (c.name != f"{root.name}Config", c.source is not root.source))
    near = [each for each in order if each.name == f"{root.name}Config" or each.source is root.source]
    return near[0] if near else order[0] if len(order) == 1 else None


def _add_config(made: Construction, config: Class, sources: Sequence[Source]) -> None:
    """`config = Config(…)` with what the code gives; the defaults that remain stand in a comment."""
    calls = [(s, c) for s in sources for c in s.calls_outside if called(c) == config.name]
    given = _given(calls, config.arguments)
    arguments = [
        words
        for each in config.arguments
        if (words := _argument(made, each, given, f"{config.name}(…)")) is not None
    ]
    left = [
        f"{each.name}={each.default}" for each in config.arguments if each.default and each.name not in given
    ]
    if left:
        made.lines.append(f"# {config.name} has the defaults {', '.join(left)}")
        made.lines.append("# Write the values of your run where it has others.")
    made.classes.append(config)
    made.lines += _call("config = ", config.name, arguments)


def _add_default_config(made: Construction, candidate: Candidate) -> None:
    """`config = Model.get_default_config()` with what scripts set on it, as minGPT has it."""
    root = candidate.root
    method = root.method("get_default_config")
    assert method is not None
    defaults = {name: value for name, value, _ in _set_on(ast.walk(method), root.source)}
    given: dict[str, Any] = {}
    for source, call in candidate.made_at:
        variable = ast.unparse(call.args[0]) if call.args else ""
        for name, value, target in _set_on(ast.walk(source.tree), source):
            if target.split(".")[-1] == variable.split(".")[-1] and value is not UNKNOWN:
                given.setdefault(name, value)
    made.lines.append(f"config = {root.name}.get_default_config()")
    whole = "model_type" in defaults and isinstance(given.get("model_type"), str)
    for name, default in defaults.items():
        value = given.get(name, default)
        _remember(made, name, value)
        if name in given:
            made.lines.append(f"config.{name} = {given[name]!r}")
        elif default is None and (guess := neutral(name)) is not UNKNOWN:
            _remember(made, name, guess)
            made.lines.append(f"config.{name} = {guess!r}  # not found in the code")
        elif default is None and not whole:
            made.unknown.append(name)
            made.lines.append(f'config.{name} = TODO("write {name} of the config of {root.name}")')


def _set_on(nodes: Any, source: Source) -> list[tuple[str, Any, str]]:
    """(attribute, value or `UNKNOWN`, object) of each assignment to an attribute."""
    found = []
    for node in nodes:
        if (
            isinstance(node, ast.Assign)
            and len(node.targets) == 1
            and isinstance(node.targets[0], ast.Attribute)
        ):
            target = node.targets[0]
            found.append((target.attr, value_of(node.value, source), ast.unparse(target.value)))
    return found
