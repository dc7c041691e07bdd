"""Values that code gives without being run: literals, constants of a file, defaults of argparse."""

import ast
import operator
from functools import lru_cache
from typing import Any

from normscope.starter.scan import Source, called

UNKNOWN = object()
"""A value that only running the code would give."""
_OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
}  # fmt: skip


def value_of(expression: ast.expr, source: Source) -> Any:
    """The value of an expression in a file, or `UNKNOWN`."""
    try:
        return ast.literal_eval(expression)
    except (ValueError, TypeError, SyntaxError, RecursionError):
        pass
    if isinstance(expression, ast.BinOp) and type(expression.op) in _OPERATORS:
        sides = value_of(expression.left, source), value_of(expression.right, source)
        if all(isinstance(side, int | float) for side in sides) and sides[1] != 0:
            return _OPERATORS[type(expression.op)](*sides)
    if isinstance(expression, ast.Name):
        return _constants(source).get(expression.id, UNKNOWN)
    if isinstance(expression, ast.Attribute) and isinstance(expression.value, ast.Name):
        return _options(source).get(expression.attr, UNKNOWN)
    return UNKNOWN


@lru_cache(maxsize=256)
def _constants(source: Source) -> dict[str, Any]:
    """Name → literal, of assignments anywhere in the file; names that get different ones are left out."""
    found: dict[str, Any] = {}
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id
            try:
                value = ast.literal_eval(node.value)
            except (ValueError, TypeError, SyntaxError):
                value = UNKNOWN
            found[name] = value if name not in found or found[name] == value else UNKNOWN
    return {name: value for name, value in found.items() if value is not UNKNOWN}


@lru_cache(maxsize=256)
def _options(source: Source) -> dict[str, Any]:
    """Name → default, of the options that argparse reads in the file."""
    found = {}
    for call in (node for node in ast.walk(source.tree) if isinstance(node, ast.Call)):
        names = [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        default = next((keyword.value for keyword in call.keywords if keyword.arg == "default"), None)
        if called(call) == "add_argument" and names and isinstance(default, ast.Constant):
            found[names[-1].lstrip("-").replace("-", "_")] = default.value
    return found


_VOCABULARY = {
    *("vocab_size", "n_vocab", "num_tokens", "ntoken", "ntokens", "n_tokens", "vocab", "num_embeddings"),
    *("src_vocab_size", "tgt_vocab_size", "src_vocab", "tgt_vocab"),
}
_LENGTHS = {
    *("block_size", "max_seq_len", "max_seq_length", "seq_len", "seq_length", "sequence_length", "context"),
    *("context_length", "context_size", "max_len", "max_length", "n_ctx", "n_positions"),
}
_NEUTRAL = {
    **dict.fromkeys(("dropout", "drop", "p", "embd_pdrop", "resid_pdrop", "attn_pdrop", "dropout_rate"), 0.0),
    **dict.fromkeys(("pad_id", "pad_idx", "pad_token_id", "padding_idx"), 0),
    **dict.fromkeys(("device",), "cpu"),
}  # fmt: skip
VOCABULARY, LENGTH = 256, 64


def neutral(name: str) -> Any:
    """A value that does not decide whether a model trains, by the name of an argument; else `UNKNOWN`.

    A vocabulary of bytes, a context of 64 tokens, no dropout. Depth, width and heads are not guessed: they
    decide.
    """
    if is_vocabulary(name):
        return VOCABULARY
    return LENGTH if is_length(name) else _NEUTRAL.get(name, UNKNOWN)


def is_vocabulary(name: str) -> bool:
    """True for the usual names of a vocabulary's size."""
    return name.lower() in _VOCABULARY


def is_length(name: str) -> bool:
    """True for the usual names of the longest sequence."""
    return name.lower() in _LENGTHS
