"""`Scheme`: placement, join and initialisation under a name, with changes inside the branches."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal

from normscope.errors import UsageError
from normscope.nn.joins import Join, Scaled
from normscope.nn.placement import NeedsDepth, Placement, Rule, Slot, Where, one

QKNorm = Literal["head", "full", "cosine", "unit"]
AttentionGate = Literal["head", "element"]
ValueResidual = Literal["half", "learnt"]
Role = Literal["q", "k", "v", "o", "up", "gate", "down"]


@dataclass(frozen=True)
class Initialisation:
    """Initialisation of the weights; biases start at zero.

    Attributes:
        weights: a name of `WEIGHTS`.
        gains: factor on the weights of a role, by place; factor 0 makes them start at zero.
        embedding: factor on the embeddings.
        norms: initial value of γ in a slot; 1 elsewhere.
    """

    weights: str = "normal"
    gains: Mapping[Role, Rule] = field(default_factory=lambda: MappingProxyType({}))
    embedding: Rule = one
    norms: Mapping[Slot, float] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True)
class Inside:
    """Changes that a scheme makes inside the branches.

    Attributes:
        qk_norm: None, "head" (a norm on each head's q and k), "full" (one over all heads, OLMo 2), "cosine"
            (unit q and k, learnt temperature ≤ 100, Swin v2), or "unit" (nGPT).
        v_norm: a norm on each head's v, together with those on q and k (HybridNorm).
        before_o: a norm before the output projection of self-attention (Sub-LN).
        before_down: a norm before `down` in the feed-forward (Sub-LN, NormFormer).
        head_gain: a learnt gain for each head (NormFormer).
        hidden_gain: a learnt gain for each hidden unit of the feed-forward, times √width (nGPT).
        attention_gate: None, or what σ(W x) multiplies between the attention and `o`, with x the branch's
            input: each head ("head") or each feature ("element"; Qiu et al. 2025, arXiv:2505.06708).
        value_residual: None, or how the values of block 2 and later contain those of block 1 (ResFormer, Zhou
            et al. 2024, arXiv:2410.17897): "half" is ½v + ½v₁, "learnt" is (1 − λ)v + λv₁, λ from ½.
        linear: class of the branches' linear maps, a name of `LINEARS`.
    """

    qk_norm: QKNorm | None = None
    v_norm: bool = False
    before_o: bool = False
    before_down: bool = False
    head_gain: bool = False
    hidden_gain: bool = False
    attention_gate: AttentionGate | None = None
    value_residual: ValueResidual | None = None
    linear: str = "plain"


@dataclass(frozen=True)
class Scheme:
    """Placement, join and initialisation under a name.

    Attributes:
        formula: update of one sublayer; N is a norm, F the branch, l the block, L the number of blocks.
        placement: the slots, or a rule for schemes that change with depth or kind.
        norm: the kind of norm that belongs to the scheme; None if any can be used.
        entry_scale: factor on a branch's input, after its norm (LayerNorm Scaling).
        depth_exponent: a of depth-μP, with which `param_groups` sets learning rates; None for other schemes.
        on_sphere: whether vectors along the width have unit length (nGPT): the model's `after_step`
            normalises its matrices, and its logits have a learnt scale.
        reads_as: name in an anatomy: the scheme's own, or that of the class with the same dataflow.
    """

    name: str
    formula: str
    placement: Placement | Callable[[Where], Placement]
    source: str
    join: Join = field(default_factory=Scaled)
    initialisation: Initialisation = Initialisation()
    inside: Inside = Inside()
    norm: str | None = None
    entry_scale: Rule = one
    depth_exponent: float | None = None
    on_sphere: bool = False
    reads_as: str = ""

    def __post_init__(self) -> None:
        if not self.reads_as:
            object.__setattr__(self, "reads_as", self.name)

    @contextmanager
    def asking_for_depth(self) -> Iterator[None]:
        """Raise UsageError if a rule of the scheme needs a depth and none was given."""
        try:
            yield
        except NeedsDepth:
            raise UsageError(
                f'scheme "{self.name}" without depth',
                "depth, the number of blocks, because the scheme depends on it",
                "set depth, for example depth=24",
            ) from None

    def placement_at(self, where: Where) -> Placement:
        """The slots of one sublayer; at the last one, also the slot at the stack's end."""
        return self.placement if isinstance(self.placement, Placement) else self.placement(where)
