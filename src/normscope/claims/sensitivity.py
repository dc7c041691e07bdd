"""How far an output moves when weights or inputs do, with norms and without.

Shapes: B batch, T tokens, D width.
"""

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional

from normscope.claims.at_start import blocks_of
from normscope.claims.form import Case, Evidence, Figure, Setup, Source, claim
from normscope.claims.norm_jacobian import distance
from normscope.claims.short_runs import small, train_changed
from normscope.nn import SCHEMES, Decoder, Slot, build, swap
from normscope.nn.models import Model
from normscope.nn.scheme import Role

BARE, NORMED = "residual-no-norm", ("pre", "post")
ROLES: tuple[Role, ...] = ("q", "k", "v", "o", "up", "down")
PLACED = ("post", "pre", "peri", "res-post", "olmo2")
NOISE = 0.01


@claim(
    "C12",
    Source("004", "§6.5", "LayerNorm会立即通过归一化操作将这种放大效应抵消"),
    says="A weight that is too large by a factor is cancelled by the norm at once.",
    asks="with one map of one block doubled the logits change by at most 1 %: every map, five "
    "placements and none, 6 blocks, Xavier weights, ReLU; with each weight off by 1 % they change less than "
    "those of the same weights without norms",
    condition="a norm reads the map's output before anything is added to it",
    parts={"damped": "With norms small errors of all weights move the output less than without."},
)
def scaled_weights(setup: Setup) -> Evidence:
    """Doubled maps, one by one, in each placement; all weights a little off."""
    found = {seed: dict(_models(seed, setup.sizes(6, 4))) for seed in setup.seeds}
    cases = [case for seed, models in found.items() for case in _doubled_cases(seed, models)]
    if not setup.fresh:  # that part has no condition
        cases += setup.cases(_damped_cases)
    own = [case for case in cases if not case.part]
    post = {
        seed: max(c.value for c in own if c.seed == seed and c.where.startswith("post,"))
        for seed in setup.seeds
    }
    bare = [c.value for c in own if c.where.startswith(BARE)]
    return Evidence(
        cases,
        Figure("largest relative change of Post-LN's logits by one doubled map", post),
        notes=[f"Without norms a doubled map changes the logits by up to {max(bare):.3g} of their norm."],
    )


def _models(seed: int, depth: int = 6) -> Iterator[tuple[str, Model]]:
    """One set of weights without norms and in each placement, with its ids."""
    torch.manual_seed(seed)
    bare = build(
        "decoder", scheme=BARE, depth=depth, width=32, heads=2, vocab=64, context=16, activation="relu"
    )
    yield BARE, bare.double()
    for name in PLACED:
        yield name, swap(bare, name).double()


def _ids(seed: int) -> Tensor:
    return torch.randint(64, (4, 16), generator=torch.Generator().manual_seed(seed))


def is_read_by_norm(name: str, role: Role) -> bool:
    """Whether a norm reads what a map makes, by way of maps and ReLUs alone."""
    if role in ("q", "k"):
        return SCHEMES[name].inside.qk_norm is not None
    placement = SCHEMES[name].placement
    return not callable(placement) and Slot.BRANCH_OUT in placement


@torch.no_grad()
def _doubled_cases(seed: int, models: Mapping[str, Model]) -> Iterator[Case]:
    ids = _ids(seed)
    for name, model in models.items():
        before = model(ids).logits
        block = blocks_of(model)[2]
        for role in ROLES:
            module = getattr(block.attention, role, None) or getattr(block.feed_forward, role)
            module.weight.mul_(2)
            change = distance(model(ids).logits, before)
            module.weight.div_(2)
            where, met = f"{name}, {role} doubled", is_read_by_norm(name, role)
            yield Case(seed, where, change, change <= 0.01, met=met)


@torch.no_grad()
def _damped_cases(seed: int) -> Iterator[Case]:
    """Geometric means over four sets of weights."""
    logs: dict[str, float] = dict.fromkeys(PLACED, 0.0)
    for draw in range(4):
        moves = {name: _noise_move(model, seed) for name, model in _models(100 * seed + draw)}
        for name in PLACED:
            logs[name] += math.log(moves[name] / moves[BARE]) / 4
    for name, log in logs.items():
        where = f"{name}, change over that without norms"
        yield Case(seed, where, math.exp(log), log < 0, "damped")


def _noise_move(model: Model, seed: int) -> float:
    """Relative change of the logits by errors of 1 % in each weight of the blocks; rms of four draws."""
    ids, squares = _ids(seed), []
    before = model(ids).logits
    weights = [m.weight for b in blocks_of(model) for m in b.modules() if isinstance(m, nn.Linear)]
    for draw in range(4):
        generator = torch.Generator().manual_seed(100 * seed + draw)
        kept = [weight.clone() for weight in weights]
        for weight in weights:
            weight.mul_(1 + NOISE * torch.randn(weight.shape, generator=generator, dtype=weight.dtype))
        squares.append(distance(model(ids).logits, before) ** 2)
        for weight, old in zip(weights, kept, strict=True):
            weight.copy_(old)
    return float((sum(squares) / len(squares)) ** 0.5)


STEPS = 100


@claim(
    "C13",
    Source("004", "§6.5", "它对输入数据中的离群点具有一定的平滑作用"),
    Source("004", "§6.5", "原始的信号特征依然有大概率保留在输出中"),
    says="Noise in the input is tolerated.",
    asks="the stack's output changes by no larger a share than its input, within 5 %: embeddings with 1 % "
    "and 10 % noise, one token in sixteen misspelt; Pre-LN and Post-LN of 6 blocks after 100 steps",
    hypothesis="the model is trained",
    parts={
        "outlier": "One feature at ten times its σ is smoothed: the same for it.",
        "drawn": "The same at the start, before any training.",
        "better": "At the start the output changes less than without norms.",
    },
)
def noisy_inputs(setup: Setup) -> Evidence:
    """Relative change of the output over that of the input, by kind of noise."""
    drawn = {seed: {name: m for name, m in _models(seed) if name in (BARE, *NORMED)} for seed in setup.seeds}
    trained = {name: train_changed(setup, small(name, steps=STEPS, lr=1e-3)) for name in NORMED}
    cases: list[Case] = []
    for seed in setup.seeds:
        gains = {name: _gains(model, seed) for name, model in drawn[seed].items()}
        for name in NORMED:
            cases += _noise_cases(seed, f"{name}, drawn", gains[name], drawn=True)
            cases += _better_cases(seed, name, gains)
            model = trained[name][seed].model.double()
            cases += _noise_cases(seed, f"{name}, trained", _gains(model, seed), drawn=False)
    return Evidence(
        cases,
        Figure.largest("largest change of the output over that of the input", cases),
        notes=[
            f"{name}: at most {max(c.value for c in cases if c.where.startswith(name)):.3g}."
            for name in ("pre, drawn", "pre, trained", "post, drawn", "post, trained")
        ],
    )


@torch.no_grad()
def _gains(model: nn.Module, seed: int) -> dict[str, float]:
    """Share by which the output changes over that by which the input does, by kind of noise."""
    assert isinstance(model, Decoder)
    ids, generator = _ids(seed), torch.Generator().manual_seed(seed)
    at = torch.arange(ids.shape[1])[None]
    x_BTD = model.embedding(ids, at)
    y_BTD = functional.normalize(model.run(x_BTD), dim=-1)
    noise = torch.randn(x_BTD.shape, generator=generator, dtype=x_BTD.dtype) * x_BTD.std()
    outlier = x_BTD.clone()
    outlier[..., 0] += 10 * x_BTD.std()
    wrong = ids.clone()
    wrong[:, 5] = (wrong[:, 5] + 1 + seed) % model.config.vocab
    noisy = {
        "1 % noise": x_BTD + 0.01 * noise,
        "10 % noise": x_BTD + 0.1 * noise,
        "an outlier": outlier,
        "a wrong token": model.embedding(wrong, at),
    }
    return {
        name: distance(functional.normalize(model.run(x), dim=-1), y_BTD) / distance(x, x_BTD)
        for name, x in noisy.items()
    }


def _noise_cases(seed: int, where: str, gains: Mapping[str, float], *, drawn: bool) -> Iterator[Case]:
    for kind, gain in gains.items():
        part = "drawn" if drawn else "outlier" if kind == "an outlier" else ""
        yield Case(seed, f"{where}, {kind}", gain, gain <= 1.05, part)


def _better_cases(seed: int, name: str, gains: Mapping[str, Mapping[str, float]]) -> Iterator[Case]:
    for kind, gain in gains[name].items():
        ratio = gain / gains[BARE][kind]
        where = f"{name}, {kind}, change over that without norms"
        yield Case(seed, where, ratio, ratio < 1, "better")
