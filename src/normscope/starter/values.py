"""Values that code gives without being run: literals, names they are assigned to, defaults of argparse."""

import ast
import operator
import re
from typing import Any

from normscope.starter.scan import Source, assignments

UNKNOWN = object()
"""A value that only running the code would give."""
_OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
}  # fmt: skip
_DEEPEST = 5  # assignments that are followed
_NEUTRAL = {
    r"(\w+_)?voc(ab)?(_size)?|n_?tokens?|num_tokens|num_embeddings": 256,
    r"block_size|n_ctx|n_positions|context(_length|_size)?|(max|(max_)?seq(uence)?)_len(gth)?": 64,
    r"p|(\w+_)?p?drop(out)?(_rate|_prob|_p)?": 0.0,
    r"(\w+_)?pad(ding)?_(token_)?idx?": 0,
    r"device": "cpu",
}


def neutral(name: str) -> Any:
    """A value that does not decide whether a model trains, by the name of an argument; else `UNKNOWN`.

    A vocabulary of bytes, a context of 64 tokens, no dropout. Depth, width and heads are not guessed: they
    decide.
    """
    return next((value for names, value in _NEUTRAL.items() if re.fullmatch(names, name.lower())), UNKNOWN)


def value_of(expression: ast.expr, source: Source, depth: int = 0) -> Any:
    """The value of an expression in a file, or `UNKNOWN`."""
    try:
        return ast.literal_eval(expression)
    except (ValueError, TypeError, SyntaxError, RecursionError):
        pass
    if depth == _DEEPEST:
        return UNKNOWN
    if isinstance(expression, ast.BinOp) and type(expression.op) in _OPERATORS:
        sides = [value_of(side, source, depth + 1) for side in (expression.left, expression.right)]
        if all(isinstance(side, int | float) for side in sides) and sides[1] != 0:
            return _OPERATORS[type(expression.op)](*sides)
    values = [value_of(each, source, depth + 1) for each in assigned_to(expression, source)]
    return values[0] if values and all(value == values[0] for value in values) else UNKNOWN


def assigned_to(expression: ast.expr, source: Source) -> list[ast.expr]:
    """Values that the file assigns to a name, or to the attribute or option that an attribute reads."""
    if not isinstance(expression, ast.Name | ast.Attribute):
        return []
    whole = ast.unparse(expression)
    last = whole.split(".")[-1]
    found = assignments(source.tree)
    values = found.get(whole) or found.get(last, [])
    # `depth = args.depth` tells nothing beside the default of --depth
    return [each for each in values if ast.unparse(each).split(".")[-1] != last]
