"""Tables of what is compared: facts of a structure, and the names of all differences.

A fact that is not in `FACTS` is kept in a place but never compared. Names of differences are frozen: users
write them into scripts, and `NAMES` explains them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from normscope.compare.types import Level

REL_TOL = 1e-4
"""Two numbers that differ by less, relative to the larger, are one: float32 tables round to 1e-7."""


@dataclass(frozen=True)
class Fact:
    """Words for a fact.

    Attributes:
        level: the level of the places that have it.
        subject: beginning of the sentence, with its verb: "The norms' ε is".
        values: words for values; others are said by `in_words`.
        needs: facts that must agree before this one is compared: the ε of two different norms is no
            difference of its own, and neither is the width of a head where the number of heads differs.
        alike: values whose difference another fact says: a scaled add has a scale.
    """

    level: Level
    subject: str
    values: Mapping[Any, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    alike: frozenset[Any] = frozenset()

    @property
    def is_late(self) -> bool:
        """True of what comes after the parts of its place in the forward: the final norm, the head."""
        return self.level == "model" or "final norm" in self.subject


_GAIN = {True: "learnt", False: "fixed"}
_HAS = {True: "present", False: "absent"}
_OFFSET = {0.0: "w", 1.0: "1 + w"}

FACTS: dict[str, Fact] = {
    "outputs": Fact("model", "The number of outputs of the head is"),
    "tied_head": Fact("model", "The head's weight is", {True: "the embedding's", False: "its own"}),
    "head_maps": Fact("model", "The number of linear maps after the last block is", needs=("outputs",)),
    "head_norms": Fact("model", "The number of norms in the head is", needs=("outputs",)),
    "head_norm_eps": Fact("model", "The ε of the norm in the head is", needs=("head_norms",)),
    "head_activation": Fact("model", "The activation in the head is", needs=("head_maps",)),
    "head_bias": Fact("model", "The head's bias is", _HAS, needs=("outputs",)),
    "head_scale": Fact("model", "The factor on the output logits is"),
    "head_cap": Fact("model", "The soft cap of the output logits is"),
    "width": Fact("stack", "The width of the stream is"),
    "vocabulary": Fact("stack", "The number of token embeddings is"),
    "embedding_width": Fact("stack", "The width of the token embeddings is"),
    "embedding_maps": Fact("stack", "The number of linear maps after the embeddings is"),
    "patch": Fact("stack", "The size of a patch is"),
    "token_types": Fact("stack", "The number of token types is"),
    "positions": Fact("stack", "The position embeddings at the input are"),
    "position_offset": Fact("stack", "The number of the first position is", needs=("positions",)),
    "position_scale": Fact("stack", "The factor on the position embeddings is", needs=("positions",)),
    "context": Fact("stack", "The number of position embeddings is", needs=("positions",)),
    "embedding_scale": Fact("stack", "The factor on the token embeddings is"),
    "embedding_norm": Fact("stack", "The norm after the embeddings is"),
    "embedding_norm_eps": Fact(
        "stack", "The ε of the norm after the embeddings is", needs=("embedding_norm",)
    ),
    "embedding_norm_gain": Fact(
        "stack", "The gain of the norm after the embeddings is", _GAIN, needs=("embedding_norm",)
    ),
    "embedding_norm_bias": Fact(
        "stack", "The bias of the norm after the embeddings is", _HAS, needs=("embedding_norm",)
    ),
    "embedding_norm_offset": Fact(
        "stack", "The norm after the embeddings multiplies by", _OFFSET, needs=("embedding_norm",)
    ),
    "embedding_dropout": Fact("stack", "The dropout rate after the embeddings is"),
    "long_skips": Fact("stack", "The number of long skips is"),
    "final_norm": Fact("stack", "The final norm is"),
    "final_norm_eps": Fact("stack", "The final norm's ε is", needs=("final_norm",)),
    "final_norm_gain": Fact("stack", "The final norm's gain is", _GAIN, needs=("final_norm",)),
    "final_norm_bias": Fact("stack", "The final norm's bias is", _HAS, needs=("final_norm",)),
    "final_norm_offset": Fact("stack", "The final norm multiplies by", _OFFSET, needs=("final_norm",)),
    "has_final_norm": Fact("stack", "The final norm is", _HAS, needs=("final_norm",)),
    "parallel": Fact("block", "The branches are", {True: "parallel", False: "one after the other"}),
    "kind": Fact("branch", "The branch is"),
    "placement": Fact("branch", "The placement of the norms is"),
    "norm": Fact("branch", "The norm is"),
    "norm_eps": Fact("branch", "The norms' ε is", needs=("norm",)),
    "norm_gain": Fact("branch", "The norms' gain is", _GAIN, needs=("norm",)),
    "norm_bias": Fact("branch", "The norms' bias is", _HAS, needs=("norm",)),
    "norm_offset": Fact("branch", "The norms multiply by", _OFFSET, needs=("norm",)),
    "residual_source": Fact(
        "branch",
        "The residual is taken from",
        {"norm": "the output of the branch's norm", "stream": "the stream"},
    ),
    "entry_scale": Fact("branch", "The factor after the norm at the entry is"),
    "inner_norm": Fact("branch", "A norm before the last map is", _HAS),
    "join": Fact("branch", "The branch joins the stream by", alike=frozenset({"add", "scaled"})),
    "stream_scale": Fact("branch", "The factor on the stream is", needs=("join",)),
    "branch_scale": Fact("branch", "The factor on the branch is", needs=("join",)),
    "heads": Fact("branch", "The number of heads is"),
    "kv_heads": Fact("branch", "The number of key and value heads is", needs=("heads",)),
    "head_width": Fact("branch", "The width of a head is", needs=("heads",)),
    "value_width": Fact("branch", "The width of a head's values is", needs=("heads", "head_width")),
    "qk_norm": Fact(
        "branch",
        "The norm on queries and keys is",
        {
            "head": "of each head",
            "full": "of the full width",
            "head, behind the rotation": "of each head, behind the rotation",
            "full, behind the rotation": "of the full width, behind the rotation",
        },
    ),
    "qk_norm_kind": Fact("branch", "The norm on queries and keys is of the kind", needs=("qk_norm",)),
    "qk_norm_eps": Fact("branch", "The ε of the norm on queries and keys is", needs=("qk_norm",)),
    "qk_norm_gain": Fact(
        "branch", "The gain of the norm on queries and keys is", _GAIN, needs=("qk_norm", "qk_norm_kind")
    ),
    "qk_norm_offset": Fact(
        "branch", "The norm on queries and keys multiplies by", _OFFSET, needs=("qk_norm", "qk_norm_kind")
    ),
    "value_norm": Fact("branch", "The norm on the values is", _HAS),
    "causal": Fact("branch", "The attention is", {True: "causal", False: "bidirectional"}),
    "own_key": Fact("branch", "A token", {True: "sees itself", False: "does not see itself"}),
    "window": Fact("branch", "The attention's window in tokens is", needs=("causal",)),
    "attention_scale": Fact(
        "branch", "The factor on the attention's logits is", needs=("heads", "head_width")
    ),
    "logit_cap": Fact("branch", "The soft cap of the attention's logits is"),
    "attention_positions": Fact("branch", "The positions in the attention are"),
    "rotary_base": Fact("branch", "The base of the rotary positions is", needs=("attention_positions",)),
    "rotary_layout": Fact("branch", "The rotary positions turn", needs=("attention_positions",)),
    "rotary_width": Fact(
        "branch", "The rotated width of a head is", needs=("attention_positions", "heads", "head_width")
    ),
    "rotary_scaling": Fact(
        "branch", "The scaling of the rotary positions is", needs=("attention_positions",)
    ),
    "sinks": Fact("branch", "A learnt sink in the attention's softmax is", _HAS),
    "hidden_width": Fact("branch", "The hidden width is"),
    "gated": Fact("branch", "The hidden layer is", {True: "gated", False: "not gated"}),
    "activation": Fact("branch", "The activation is"),
    "experts": Fact("branch", "The number of experts is"),
    "bias": Fact("branch", "The projections with a bias are"),
    "attention_dropout": Fact("branch", "The dropout rate of the attention weights is"),
    "hidden_dropout": Fact("branch", "The dropout rate inside the branch is"),
    "output_dropout": Fact("branch", "The dropout rate at the branch's end is"),
}
"""Fact → how it is compared and said, in the order in which differences of one place are listed."""

NAMES: dict[str, str] = {
    "stack": "One side has a stack, such as an encoder, that the other one lacks.",
    "blocks": "One side has blocks that the other one lacks.",
    "branch": "One side has a branch, such as an attention, that the other one lacks.",
    **{
        name.replace("_", "-"): f"{fact.subject.rstrip(':')} different in the two models."
        for name, fact in FACTS.items()
    },
    "function": "The two compute different tensors at a place, for no reason that is known.",
    "gradient": "The values agree, but the gradients part at a place.",
    "gradient-cut": "The values agree, but a gradient is zero on one side, as after detach().",
    "gradient-scale": "The values agree, but a gradient has another factor.",
    "norm-gradient": "The backward pass of a norm treats its statistics as constants on one side.",
    "mask": "A query sees other keys.",
    "padding-mask": "A query sees other keys, because one side masks padding in another way.",
    "softmax": "The attention weights are another function of the logits, as with one more key.",
    "rotary-offset": "The rotary positions begin at another number.",
    "rotary-direction": "The rotary positions turn in opposite directions.",
    "head-split": "The output of a projection is split into heads in another way.",
    "head-merge": "The heads are merged in another way.",
    "head-order": "The heads stand in another order.",
    "kv-groups": "The heads read other heads of keys and values, such as repeated instead of tiled ones.",
    "gate-up": "The gate and the up projection of a feed-forward are swapped.",
    "residual-source": "The branch is added to another tensor, such as the norm's output.",
    "value-scale": "The values of the attention have another factor.",
    "expert-weights": "A token's experts are summed with other weights, such as normalised ones.",
    "pooling": "The head reads another hidden state, such as the mean of all tokens.",
    "qkv-clip": "Queries, keys and values are clipped at another value, or on one side alone.",
    "hidden-scale": "The output of the activation has another factor.",
    "weight-scale": "The output of a projection has another factor.",
    "feature-order": "The features of a projection stand in another order.",
    "dropout-left-on": "Dropout is left on in eval mode on one side.",
    "weights": "Given weights differ.",
    "weights-order": "Given weights are the same in another order: rows, columns, heads, or q, k and v.",
    "weights-rounded": "Given weights are the same, rounded to a narrower type.",
    "weights-scaled": "Given weights differ by a factor.",
    "weights-shifted": "Given weights differ by a number that is added, such as a gain's 1.",
    "weights-transposed": "A given square weight is transposed.",
    "init-scale": "Fresh weights of a role have another standard deviation.",
    "init-mean": "Fresh weights of a role have another mean, such as norm gains of 0 instead of 1.",
    "init-law": "Fresh weights of a role have another law, such as uniform instead of normal.",
    "init-depth": "The scale of fresh weights changes with depth in another way.",
    "init-zeros": "Another share of fresh weights is exactly zero.",
    "optimizer": "Parameters of a role are trained by another optimizer.",
    "learning-rate": "The learning rate of a role's parameters differs.",
    "weight-decay": "The weight decay of a role's parameters differs.",
    "betas": "Adam's decay rates of the moments differ.",
    "optimizer-eps": "The optimizer's ε differs.",
    "momentum": "The momentum differs.",
    "untrained": "One side trains parameters of a role, the other does not.",
    "schedule": "The learning rate's schedule differs.",
    "warmup": "The length of the warm-up differs.",
    "run-steps": "The length of the run differs.",
    "clip": "The clipping of the gradient differs.",
    "accumulation": "The number of batches per step differs.",
    "batch-tokens": "The number of tokens per step differs.",
    "precision": "The precision of training differs.",
    "verdict": "The two checks end in different verdicts.",
    "finding-gained": "B's check has a finding that A's lacks.",
    "finding-lost": "A's check has a finding that B's lacks.",
    "finding-severity": "A finding of both checks has another severity.",
    "measurement": "A measurement differs by more than seeds explain.",
}
"""Name of a difference → its meaning. Differences of the function part have the name of the fact that
explains them where there is one ("norm-eps")."""


def name_of(fact: str) -> str:
    """Name of the difference in a fact: "norm-eps" for "norm_eps"."""
    return fact.replace("_", "-")


_SCALES = ("attention", "embedding", "position", "entry", "stream", "branch", "head")
MADE_UP_FOR = frozenset(
    {
        "rotary-layout",
        *(f"{what}-scale" for what in _SCALES),
        *(name_of(name) for name in FACTS if name.endswith("norm_offset")),
    }
)
"""Differences that weights can make up for: q and k permuted for another layout, gains shifted by one."""
_UNSEEN = (
    "context",
    "window",
    "rotary_scaling",
    *(name for name in FACTS if "dropout" in name or name.endswith("norm_offset")),
)
_OF_WEIGHTS = (
    "outputs",
    "tied_head",
    "vocabulary",
    "token_types",
    "experts",
    "bias",
    *(name for name in FACTS if name.endswith(("_gain", "_bias"))),
)


def computed(*, same_weights: bool) -> frozenset[str]:
    """Names of the differences that two models cannot have if they compute the same with any weights.

    Left out is what one batch does not show in eval mode (dropout, a window or a table of positions that is
    longer than the batch), and that a gain is held as 1 + w, which changes its weight decay.

    Args:
        same_weights: whether both train as many numbers; else they may differ in which weights are tied,
            learnt or there at all.
    """
    left = {*_UNSEEN, *(() if same_weights else _OF_WEIGHTS)}
    return frozenset({name_of(name) for name in FACTS if name not in left} | {"stack", "blocks", "branch"})


def same_value(a: Any, b: Any) -> bool:
    """Whether two values of a fact are one; numbers agree to `REL_TOL`."""
    if isinstance(a, bool) or isinstance(b, bool):
        return a == b
    if isinstance(a, int | float) and isinstance(b, int | float):
        return math.isclose(a, b, rel_tol=REL_TOL, abs_tol=1e-30) or (a != a and b != b)  # both NaN
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same_value, a, b))
    return bool(a == b)


def differing(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[str]:
    """The facts that both have and in which they differ, in the order of `FACTS`.

    A fact that needs another one to agree is left out where that one differs or is unknown to one side.
    """
    known = [name for name in FACTS if name in a and name in b]
    apart = [name for name in known if not _same(FACTS[name], a[name], b[name])]
    return [name for name in apart if not any(needed in apart for needed in FACTS[name].needs)]


def _same(fact: Fact, a: Any, b: Any) -> bool:
    return same_value(a, b) or bool(fact.alike and {a, b} <= fact.alike)


def in_words(fact: str, value: Any) -> str:
    """A value of a fact, in words."""
    words = FACTS[fact].values if fact in FACTS else {}
    if isinstance(value, bool | int | float | str) and value in words:
        return words[value]
    if value is None or value in ([], ()):
        return "none"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return ", ".join(in_words("", each) for each in value)
    return str(value)


def sentence(fact: str, a: Any, b: Any) -> str:
    """The difference of two values in a sentence: "The norms' ε is 1e-05 in A and 1e-06 in B."."""
    return f"{FACTS[fact].subject} {in_words(fact, a)} in A and {in_words(fact, b)} in B."
