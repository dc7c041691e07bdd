"""Errors for users: what was given, what was expected, what to do."""

import difflib
from collections.abc import Iterable

_LONGEST_QUOTE = 300
_SAME = tuple(
    frozenset(names.split())
    for names in (
        "depth layers n_layer n_layers num_layers num_hidden_layers num_blocks encoder_layers decoder_layers",
        "width dim d_model n_embd n_embed embed_dim model_dim hidden_size",
        "heads nhead n_head n_heads num_heads num_attention_heads encoder_attention_heads",
        "kv_heads n_kv_head n_kv_heads num_kv_heads num_key_value_heads",
        "hidden d_ff dim_feedforward n_inner ffn_dim intermediate_size encoder_ffn_dim",
        "vocab n_vocab vocab_size num_embeddings",
        "context block_size n_ctx n_positions max_position_embeddings max_seq_len max_length "
        "seq_len seq_length sequence_length",
        "eps norm_eps layer_norm_eps layer_norm_epsilon rms_norm_eps",
        "lr learning_rate",
        "batch_size bs batch per_device_train_batch_size",
        "steps max_steps num_steps max_iters iterations",
        "warmup warmup_steps num_warmup_steps warmup_iters",
    )
)
"""Names that mean the same in different libraries."""


class NormscopeError(Exception):
    """Base class of normscope's errors."""


class UsageError(NormscopeError, ValueError):
    """The call or the model cannot be used; the command line prints it as one line and exits 2.

    Args:
        given: what the user gave, quoted if it is a value.
        expected: what is accepted.
        do: what the user can do.
    """

    def __init__(self, given: str, expected: str, do: str) -> None:
        self.given, self.expected, self.do = given, expected, do
        super().__init__(" ".join(f"{given}: expected {expected}; {do}.".split()))


class BatchesError(UsageError):
    """The user's batches cannot be used: drawing one raised an error, or it is empty.

    Code that goes on after an error of the model must not go on after this one.
    """


class CaptureError(NormscopeError):
    """A bug of normscope inside the script.

    Attributes:
        place: its file and line.
        trace: its traceback.
    """

    def __init__(self, error: str, place: str, trace: str) -> None:
        super().__init__(error)
        self.place, self.trace = place, trace


def nearest(name: str, choices: Iterable[str]) -> str | None:
    """The choice most similar to `name`, or None if none is similar.

    A choice that means the same is preferred ("n_layer" is "depth"), then one that `name` begins with:
    "prenorm" means "pre", though "deepnorm" is as similar.
    """
    by_lower = {choice.lower(): choice for choice in choices}
    plain = name.lower().replace("-", "_")
    same = next((names for names in _SAME if plain in names), frozenset())
    meant = [choice for choice in by_lower if choice.replace("-", "_") in same]
    if meant:
        return by_lower[
            max(sorted(meant), key=lambda each: difflib.SequenceMatcher(None, plain, each).ratio())
        ]
    begun = [choice for choice in by_lower if len(choice) > 2 and name.lower().startswith(choice)]
    if begun:
        return by_lower[max(begun, key=len)]
    found = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[found[0]] if found else None


def suggest(name: str, choices: Iterable[str], otherwise: str) -> str:
    """Advice for a mistyped `name`: the nearest of `choices`, or `otherwise` if none is near."""
    best = nearest(name, choices)
    return otherwise if best is None else f'the nearest name is "{best}"'


def describe(error: BaseException) -> str:
    """`Type: message` of an exception on one line, shortened to about 300 characters."""
    message = " ".join(str(error).split())
    if len(message) > _LONGEST_QUOTE:
        message = message[:_LONGEST_QUOTE] + "…"
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
