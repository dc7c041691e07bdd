"""`normscope bench slopes`: figures of each scheme at initialisation, by depth, against its paper.

Each row has a figure, the mean of three seeds, and the interval in which it should lie. Weights are
Xavier-normal with the scheme's gains; ReLU, γ = 1, random ids. An exponent is the slope of a straight line
through log figure against log depth. The stream's RMS at its entry is measured with the scheme's own weights.

Shapes: B batch, T tokens, D width.
"""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.process import Row, row
from normscope.claims import at_start
from normscope.claims.at_start import (
    BATCH,
    DEPTHS,
    TOKENS,
    VOCAB,
    WIDTH,
    blocks_of,
    decoder,
    down_gradients,
    gradient_norm,
    sgd_move,
    stack_of,
)
from normscope.nn import SCHEMES, Block, Context, Decoder, build
from normscope.nn.stack import Stack

SEEDS = (0, 1, 2)
NOISE = 1e-2


def exponent(figure: Callable[[int], float], sizes: Sequence[int] = DEPTHS) -> float:
    """Exponent p of figure ≈ c·size^p, by least squares in logarithms."""
    return at_start.slope(sizes, [figure(size) for size in sizes])


@dataclass(frozen=True)
class Claim:
    """A figure of one seed, and the interval of its mean over seeds."""

    what: str
    low: float
    high: float
    measure: Callable[[int], float]
    source: str


def last_map_gradient(scheme: str, depth: int, seed: int, **options: Any) -> float:
    """‖∂loss/∂W₂‖ of the last feed-forward (Xiong et al. 2020, Theorem 1)."""
    return down_gradients(*decoder(scheme, depth, seed, **options))[-1]


def first_over_last(scheme: str, depth: int, seed: int) -> float:
    """‖∂loss/∂W₂‖ of the first block divided by that of the last."""
    gradients = down_gradients(*decoder(scheme, depth, seed))
    return gradients[0] / gradients[-1]


@torch.no_grad()
def variance(scheme: str, depth: int, seed: int) -> float:
    """Mean square of the stream after the last block, from x ~ N(0, 1)."""
    stack = stack_of(scheme, depth, seed, activation="relu", final_norm=False)
    _draw_xavier(stack)
    return float(stack.run(torch.randn(BATCH, TOKENS, WIDTH)).square().mean())


def _draw_xavier(stack: Stack) -> None:
    for module in stack.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_normal_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)


def starved(scheme: str, depth: int, seed: int, **options: Any) -> float:
    """‖∂loss/∂W_Q‖ / ‖∂loss/∂W_V‖ of the last attention, which rank collapse makes small."""
    model, ids, labels = decoder(scheme, depth, seed, **options)
    model(ids, labels).loss.backward()
    attention = blocks_of(model)[-1].attention
    return gradient_norm(attention.q) / gradient_norm(attention.v)


@torch.no_grad()
def noise_move(scheme: str, depth: int, seed: int, **options: Any) -> float:
    """Mean square change of the logits under 1 % weight noise (Liu et al. 2020, arXiv:2004.08249)."""
    model, ids, _ = decoder(scheme, depth, seed, **options)
    model = model.double()
    before = model(ids).logits
    for block in model.blocks:
        for module in block.modules():
            if isinstance(module, nn.Linear):
                module.weight.add_(NOISE * module.weight.std() * torch.randn_like(module.weight))
    return float((model(ids).logits - before).square().mean())


def crossed_decay(seed: int, depth: int = 32) -> float:
    """Gradient norm of the stream at a Post-LN block's entry over its exit, with cross-attention.

    The memory has identical tokens: such a branch adds the same to every token, and only its norm acts.
    """
    stack = stack_of("post", depth, seed, activation="relu", bias=False, cross=True)
    _draw_xavier(stack)
    memory = torch.randn(BATCH, 1, WIDTH).expand(-1, TOKENS, -1)
    states = [torch.randn(BATCH, TOKENS, WIDTH, requires_grad=True)]
    for block in stack.blocks:
        states.append(block(states[-1], Context(memory=memory)))
    weight = torch.randn_like(states[-1])
    gradients = torch.autograd.grad((states[-1] * weight).sum(), states)
    return float((gradients[0].norm() / gradients[-1].norm()) ** (1 / depth))


@torch.no_grad()
def at_entry(scheme: str, seed: int) -> tuple[float, float]:
    """RMS of the (first) stream at the entry of 4 blocks, and of what the first attention adds."""
    torch.manual_seed(seed)
    model = build("decoder", scheme=scheme, depth=4, width=WIDTH, heads=4, vocab=VOCAB, context=TOKENS)
    assert isinstance(model, Decoder)
    x_BTD = model.embedding(torch.randint(VOCAB, (BATCH, TOKENS)), torch.arange(TOKENS)[None])
    state, block = model.scheme.join.enter(x_BTD, model.entry_norm), model.blocks[0]
    assert isinstance(block, Block)
    added: list[torch.Tensor] = []
    block.attention_residual.norms["branch_out"].register_forward_hook(lambda *call: added.append(call[-1]))
    block(state)
    stream = state[0] if isinstance(state, tuple) else state
    stream = stream[..., 0, :] if stream.dim() == 4 else stream
    return tuple(float(x.square().mean().sqrt()) for x in (stream, added[0]))  # type: ignore[return-value]


NORMED = ("peri", "res-post", "swin-v2", "siamesenorm", "nanochat")
NORMAL = """
    pre pre-no-final gpt2 normformer layerscale mix-ln layernorm-scaling gpas hybridnorm keel parallel
    hyper-connections mhc mhc-lite kromhc attnres block-attnres dyt derf seednorm bhyt sigma-reparam depth-mup
"""
GLOROT = """
    plain residual-no-norm post deepnorm sub-ln admin rezero skipinit fixup residual-dual b2t gtrxl highway
    scalenorm
"""
OF_NORMAL, OF_GLOROT = "tokens and positions N(0, 0.02²)", "tokens and positions of variance 1/width"

ENTRIES: dict[str, tuple[float, str]] = {
    **dict.fromkeys(NORMED, (1.0, "the norm behind its embedding")),
    **dict.fromkeys(NORMAL.split(), (0.02 * 2**0.5, OF_NORMAL)),
    "olmo2": (0.02 * 2**0.5, f"{OF_NORMAL}, as in its code, which adds neither positions nor a norm there"),
    **dict.fromkeys(GLOROT.split(), ((2 / WIDTH) ** 0.5, OF_GLOROT)),
    "t-fixup": ((2 / WIDTH) ** 0.5 * 36**-0.25, f"{OF_GLOROT}, × (9N)^-¼ of N = 4 blocks"),
    "ngpt": (WIDTH**-0.5, "unit length"),
    "unit-scaling": (2**0.5, "tokens and positions N(0, 1)"),
    "dslm": (1.0, "tokens and positions N(0, ½)"),
}
"""Scheme → RMS of the stream at its entry by its source, and the reason."""


def _entries() -> list[Claim]:
    """Claims on each scheme's stream at its entry: its RMS, and the first attention's relative update."""

    def rms(name: str, expected: float, why: str) -> Claim:
        what = f"{name}: RMS of the stream at its entry"
        return Claim(what, 0.95 * expected, 1.05 * expected, lambda seed: at_entry(name, seed)[0], why)

    def ratio(name: str, low: float, high: float, why: str) -> Claim:
        def measure(seed: int) -> float:
            stream, added = at_entry(name, seed)
            return added / stream

        return Claim(f"{name}: RMS that the first attention adds, over the stream's", low, high, measure, why)

    return [
        *(rms(name, *ENTRIES[name]) for name in SCHEMES),
        ratio("peri", 0.95, 1.05, "the embedding and the branch both end in a norm"),
        ratio("res-post", 0.95, 1.05, "the embedding and the branch both end in a norm"),
        ratio("olmo2", 2, 40, "a norm after the branch alone: the first branches outweigh the embedding"),
    ]


def _claims() -> list[Claim]:
    """The papers' claims, in their order of appearance."""
    lemma = "Xiong et al. 2020, arXiv:2002.04745"
    deepnet = "Wang et al. 2022, arXiv:2203.00555"
    admin = "Liu et al. 2020, arXiv:2004.08249"
    collapse = "Noci et al. 2022, arXiv:2206.03126"

    def slope(name: str, low: float, high: float, source: str, **options: Any) -> Claim:
        def measure(seed: int) -> float:
            return exponent(lambda depth: last_map_gradient(name, depth, seed, **options))

        return Claim(f"{name}: gradient of the last W₂, exponent in L", low, high, measure, source)

    def grows(name: str, depth: int, low: float, high: float, source: str) -> Claim:
        what = f"{name}: mean square of the stream after {depth} blocks"
        return Claim(what, low, high, partial(variance, name, depth), source)

    def hungry(name: str, low: float, high: float) -> Claim:
        what = f"{name}: ‖∇W_Q‖/‖∇W_V‖ of the last of 32 blocks"
        return Claim(what, low, high, partial(starved, name, 32), collapse)

    def tilted(name: str, low: float, high: float, source: str) -> Claim:
        what = f"{name}: ‖∇W₂‖ of the first of 64 blocks over the last"
        return Claim(what, low, high, partial(first_over_last, name, 64), source)

    def moves(name: str, measure: Callable[..., float], low: float, high: float, source: str) -> Claim:
        what = (
            "logits' change by one SGD step" if measure is sgd_move else "logits' change² under weight noise"
        )

        def exponent_of_move(seed: int) -> float:
            return exponent(lambda depth: measure(name, depth, seed))

        return Claim(f"{name}: {what}, exponent in L", low, high, exponent_of_move, source)

    return [
        slope("post", -0.15, 0.3, lemma),
        slope("pre", -0.65, -0.4, lemma),
        slope("peri", -0.6, -0.35, "Kim et al. 2025, arXiv:2502.02732"),
        slope("gpt2", -0.15, 0.15, "W_O and W₂ × 1/√(2L): the stream's variance does not grow", init=None),
        slope("deepnorm", -0.6, -0.4, deepnet),
        slope("keel", -1.15, -0.85, "arXiv:2601.19895"),
        slope("depth-mup", -1.15, -0.85, "Dey et al. 2025, arXiv:2505.01618"),
        grows("pre", 64, 33, 97, f"{lemma}, Lemma 2: from 1 + L/2 to 1 + 3L/2"),
        grows("post", 64, 0.99, 1.01, lemma),
        grows("peri", 64, 110, 148, "1 + 2L: each branch adds its norm's 1"),
        grows("layernorm-scaling", 8, 2.7, 3.3, "Sun et al. 2025, arXiv:2502.05795; 1 + Σ 1/l at the start"),
        grows("layernorm-scaling", 32, 3.8, 4.6, "the same"),
        grows("layernorm-scaling", 128, 4.6, 5.7, "the same"),
        hungry("post", 0, 1e-3),
        hungry("pre", 3e-3, 0.3),
        hungry("deepnorm", 0.05, 0.6),
        tilted("res-post", 100, 1e8, "attention reads a stream without a norm, and its logits grow with it"),
        tilted("olmo2", 2, 30, "OLMo team 2025, arXiv:2501.00656: norms on q and k prevent that growth"),
        tilted("pre", 2, 30, lemma),
        Claim(
            "post: gradient norm at a block's entry over its exit, with cross-attention to identical tokens",
            0.66,
            0.77,
            crossed_decay,
            "2^-½: the branch passes no gradient back, and its norm halves the variance",
        ),
        moves("deepnorm", sgd_move, -0.15, 0.15, f"{deepnet}, Theorem 4.2"),
        moves("post", sgd_move, 0.8, 2.0, deepnet),
        moves("post", noise_move, 0.7, 1.6, admin),
        moves("pre", noise_move, -0.1, 0.6, admin),
    ]


CLAIMS = [*_claims(), *_entries()]


def measured(claim: Claim, seeds: Sequence[int] = SEEDS) -> float:
    """The claim's figure, a mean over the seeds."""
    return statistics.fmean(claim.measure(seed) for seed in seeds)


def bench_slopes() -> list[Row]:
    """Rows with claim, figure, interval and source."""
    return [
        row(claim.what, f"{measured(claim):.3g}", f"{claim.low:.3g} … {claim.high:.3g}", claim.source)
        for claim in CLAIMS
    ]
