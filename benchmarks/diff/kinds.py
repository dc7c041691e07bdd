"""Kinds of planted differences, and the names that are right for them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """A kind of difference.

    Attributes:
        names: the right names of it.
        also: names of what follows from it and is not false: a dropped bias changes the fresh weights as
            well.
        part: the part that must name it first.
        of_block: whether it concerns both branches of a block, and may be named by the block.
        backwards: whether only gradients part, which may do so first at any of the planted places.
    """

    names: tuple[str, ...]
    also: tuple[str, ...] = ()
    part: str = "function"
    of_block: bool = False
    backwards: bool = False


_PLACEMENT = ("norm", "norm-eps", "norm-gain", "norm-bias", "norm-offset", "final-norm", "inner-norm")
KINDS: dict[str, Kind] = {
    "ε": Kind(("norm-eps", "final-norm-eps", "embedding-norm-eps", "head-norm-eps", "qk-norm-eps")),
    "gain + 1": Kind(("norm-offset", "final-norm-offset", "qk-norm-offset"), ("init-mean", "init-zeros")),
    "branch scale": Kind(("branch-scale",), ("join",)),
    "hidden scale": Kind(("hidden-scale",), ("activation",)),
    "attention scale": Kind(("attention-scale",)),
    "embedding scale": Kind(("embedding-scale",)),
    "head scale": Kind(("head-scale",)),
    "rotary layout": Kind(("rotary-layout",)),
    "rotary base": Kind(("rotary-base",)),
    "placement": Kind(("placement",), _PLACEMENT),
    "norm kind": Kind(("norm", "final-norm", "qk-norm-kind"), ("norm-bias", "final-norm-bias")),
    "causal mask": Kind(("causal", "mask"), ("own-key",)),
    "window": Kind(("window", "mask")),
    "bias": Kind(("bias",), ("init-zeros", "init-scale", "init-mean")),
    "activation": Kind(("activation", "head-activation")),
    "order of q, k, v": Kind(("weights-order",)),
    "order of heads": Kind(("weights-order", "head-order", "head-split", "head-merge")),
    "groups of heads": Kind(("kv-groups",)),
    "number of heads": Kind(
        ("heads",), ("kv-heads", "head-width", "value-width", "attention-scale", "rotary-width")
    ),
    "logit cap": Kind(("logit-cap",)),
    "output cap": Kind(("head-cap",)),
    "QK-norm": Kind(("qk-norm",), ("qk-norm-kind", "qk-norm-eps")),
    "dropout": Kind(("dropout-left-on",), ("attention-dropout", "output-dropout")),
    "positions": Kind(("position-offset", "positions"), ("context",)),
    "positions missing": Kind(("positions",), ("context", "position-offset")),
    "position table": Kind(("attention-positions", "position-bias")),
    "tied head": Kind(("tied-head",), ("init-scale",)),
    "final norm": Kind(("final-norm",), ("placement", "final-norm-eps")),
    "gate and up": Kind(("gate-up", "weights-order"), ("weights",)),
    "residual": Kind(("residual-source",), ("stream-scale", "join", "placement"), of_block=True),
    "parallel": Kind(("parallel",), ("placement",), of_block=True),
    "stop-gradient": Kind(("gradient-cut",), ("gradient",), backwards=True),
    "gradient": Kind(("gradient-scale",), backwards=True),
    "weights": Kind(("weights",)),
    "gain of the checkpoint": Kind(("weights-shifted", "norm-offset")),
    "rotary layout of the checkpoint": Kind(("rotary-layout", "weights-order")),
    "scaled weights": Kind(("weights-scaled",)),
    "transposed weights": Kind(("weights-transposed",)),
    "embedding part": Kind(("embedding", "embedding-types", "token-types"), ("context",)),
    "pooling": Kind(("pooling",)),
    "rotary width": Kind(("rotary-width",), ("attention-positions",)),
    "no rotation": Kind(("attention-positions",), ("rotary-base", "rotary-width", "rotary-layout")),
    "slopes": Kind(("attention-positions", "position-bias")),
    "layer scale": Kind(("join", "branch-scale")),
    "norm and rotation": Kind(("qk-norm",), ("qk-norm-gain",)),
    "embedding norm": Kind(
        ("embedding-norm",), ("embedding-norm-eps", "embedding-norm-gain", "embedding-norm-bias")
    ),
    "head bias": Kind(("head-bias",), ("bias", "weights")),
    "init scale": Kind(("init-scale",), ("init-law",), "start"),
    "init law": Kind(("init-law",), ("init-scale",), "start"),
    "init depth": Kind(("init-depth", "init-scale"), ("init-law",), "start"),
    "init mean": Kind(("init-mean",), ("init-scale", "init-law", "init-zeros"), "start"),
    "init zeros": Kind(("init-zeros", "init-scale", "init-law"), ("init-depth",), "start"),
    "weight decay": Kind(("weight-decay",), (), "recipe"),
    "learning rate": Kind(("learning-rate",), (), "recipe"),
    "betas": Kind(("betas",), (), "recipe"),
    "optimizer ε": Kind(("optimizer-eps",), (), "recipe"),
    "clipping": Kind(("clip",), (), "recipe"),
    "schedule": Kind(("schedule", "warmup"), ("learning-rate", "run-steps"), "recipe"),
    "accumulation": Kind(("accumulation",), (), "recipe"),
    "precision": Kind(("precision",), (), "recipe"),
    "untrained": Kind(("untrained",), (), "recipe"),
}
"""Kinds of differences, with the names in normscope.compare.facts.NAMES."""
