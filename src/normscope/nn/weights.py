"""Initialisations by name.

An initialisation gives the standard deviation of linear maps and of embeddings, and factors on the maps of
the branches. The scheme's own factors (DeepNorm's β) apply in addition.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from normscope.nn.placement import Rule, Where, zero
from normscope.nn.scheme import Role

NORMAL_STD = 0.02


@dataclass(frozen=True)
class Draw:
    """Standard deviation of a linear map by (in, out), of an embedding by its width.

    Attributes:
        uniform: uniform weights of that standard deviation instead of normal ones.
    """

    linear: Callable[[int, int], float]
    embedding: Callable[[int], float]
    uniform: bool = False


@dataclass(frozen=True)
class Weights:
    """An initialisation.

    Attributes:
        words: short description for the catalogue.
        draw: distribution of the weights; "torch" keeps the initialisation of PyTorch's modules, "scheme"
            uses the scheme's.
        gains: factor on the weights of a role, by place; with factor 0 the bias starts at zero too.
        mup: whether μP applies: the maps of the branches are scaled by √(base_width/width), output logits
            are divided by width/base_width, and attention logits by K.
    """

    words: str
    draw: Draw | str
    gains: Mapping[Role, Rule] = field(default_factory=lambda: MappingProxyType({}))
    mup: bool = False


def depth_scaled(where: Where) -> float:
    """GPT-2's 1/√N, N the number of branches that add to the stream."""
    return where.num_sublayers**-0.5


def _xavier(num_in: int, num_out: int) -> float:
    return (2 / (num_in + num_out)) ** 0.5


def _small(num_in: int, num_out: int) -> float:
    return (2 / (5 * min(num_in, num_out))) ** 0.5


def _one_over_root(width: int) -> float:
    return width**-0.5


def _last_maps(rule: Rule) -> Mapping[Role, Rule]:
    return MappingProxyType({"o": rule, "down": rule})


_NORMAL = Draw(lambda num_in, num_out: NORMAL_STD, lambda width: NORMAL_STD)

WEIGHTS: Mapping[str, Weights] = MappingProxyType(
    {
        "xavier": Weights("Xavier-normal", Draw(_xavier, _one_over_root)),
        "xavier-uniform": Weights("Xavier-uniform", Draw(_xavier, _one_over_root, uniform=True)),
        "normal": Weights("N(0, 0.02²)", _NORMAL),
        "gpt2": Weights("N(0, 0.02²), o and down × 1/√(2L)", _NORMAL, _last_maps(depth_scaled)),
        "small": Weights("variance 2/(5d)", Draw(_small, _one_over_root)),
        "fan-in": Weights("variance 1/in", Draw(lambda num_in, num_out: num_in**-0.5, lambda width: 1.0)),
        "mup": Weights("N(0, 0.02²) at the base width, by μP from there", _NORMAL, mup=True),
        "zero-output": Weights("the last map of each branch zero", "scheme", _last_maps(zero)),
        "torch": Weights("as PyTorch draws them", "torch"),
    }
)
"""Name → initialisation.

- "xavier", "xavier-uniform": variance 2/(in + out), embeddings N(0, 1/width) (Glorot and Bengio 2010).
- "gpt2": "normal" (GPT, BERT) with `o` and `down` × 1/√N, N = 2L branches (Radford et al. 2019; Megatron-LM).
- "small": variance 2/(5d), that of a Xavier map between d and 4d (Nguyen and Salazar 2019, arXiv:1910.05895).
- "fan-in": variance 1/in, embeddings N(0, 1): inputs of unit variance give outputs of unit variance.
- "mup": "normal" at base_width, scaled from there by Yang et al. 2022 (arXiv:2203.03466); see `param_groups`.
- "zero-output": the scheme's weights with the last map of each branch zero, so that branches add nothing.
"""
