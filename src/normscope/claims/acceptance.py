"""The acceptance tests that 004 asks for, the NaN check and the gradient check, on every scheme.

Shapes: B batch, T tokens, D width.
"""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from normscope.anatomy import Anatomy, read_anatomy
from normscope.claims.claim import Sentence, claim
from normscope.claims.evidence import Case, Evidence, Figure
from normscope.claims.setup import Setup
from normscope.claims.sources import Source
from normscope.claims.training import RATE, Recipe, subjects
from normscope.errors import UsageError
from normscope.nn import SCHEMES, Block, Decoder, FeedForward, ModelConfig
from normscope.pipeline import check
from normscope.rules.finding import Severity

WIDTH, HEADS, VOCAB, BATCH, TOKENS = 16, 2, 32, 2, 8
FAULTS_FOUND = frozenset({"non-finite", "gradient-vanish", "gradient-explode", "dead-branch"})
"""Findings of `check` that are the two tests."""
RUNS = (Recipe(scheme="pre", depth=4), Recipe(scheme="post", depth=12))
USUAL = ("pre", "gpt2", "peri", "res-post", "rezero", "layerscale", "post", "deepnorm", "admin", "highway")
"""Whose derivatives are taken: one stream, as they start by themselves."""
SOUND = tuple(name for name in SCHEMES if name != "plain")
"""Every scheme that has residuals."""


@claim(
    "C33",
    Source("004", "§7", "检查输出是否包含`NaN`或`Inf`"),
    Source("004", "§7", "确保残差连接确实让梯度能够无损地回传至网络浅层"),
    Source("004", "§10", "确保残差连接路径的梯度导数接近 1.0"),
    says="A NaN check and a gradient check tell a broken Transformer from a sound one.",
    asks="`check` (one batch, no step) finds nothing of either kind in any scheme of 2 blocks, and "
    "something in each planted fault: a NaN, an infinite weight, a branch that is zero and cannot learn, "
    "24 blocks without residuals",
    parts={
        "nan": Sentence("The NaN check alone finds every fault."),
        "one": Sentence(
            "The derivative along a block's residual path, tr J/d, is close to 1.0 (within 0.1).",
            "no norm and no factor stands on the stream",
        ),
        "trains": Sentence(
            f"A model that passes both trains (4 blocks Pre-LN, 12 Post-LN; AdamW at {RATE:g}, no warm-up)."
        ),
    },
)
def acceptance(setup: Setup) -> Evidence:
    """Our `check` on every scheme and on planted faults; the mean derivative of blocks; two runs."""
    cases: list[Case] = []
    for position, seed in enumerate(setup.seeds):
        # Every scheme is checked once: each seed has its share of them.
        cases += [_sound(name, seed) for name in SOUND[position :: len(setup.seeds)]]
        for fault in FAULTS:
            cases += _faulty(fault, seed)
        cases += _derivatives(seed)
    cases += _runs(setup)
    return Evidence(
        cases=cases,
        figure=Figure.share("% of the models, sound and faulty, judged rightly", cases),
        notes=[
            f"{len(SOUND)} schemes, {len(FAULTS)} faults; the findings that count are "
            + ", ".join(sorted(FAULTS_FOUND))
            + "."
        ],
        of="models",
    )


def decoder(scheme: str, seed: int, **options: object) -> Decoder:
    """A small model at its start."""
    torch.manual_seed(seed)
    given = {"depth": 2, "width": WIDTH, "heads": HEADS, "vocab": VOCAB, "context": TOKENS} | options
    return Decoder(ModelConfig(scheme=scheme, **given))  # type: ignore[arg-type]


def found_by_tests(model: nn.Module, seed: int) -> list[str]:
    """What `check` of one random batch, without a step, finds of the two tests; notes do not count."""
    generator = torch.Generator().manual_seed(seed)
    ids, labels = torch.randint(VOCAB, (2, BATCH, TOKENS), generator=generator)
    batch = {"ids": ids, "labels": labels}
    try:
        report = check(model, batch, lambda output, batch: output.loss, steps=0, budget="fast", seed=seed)
    except UsageError as refusal:
        return [f"refused ({str(refusal).partition(':')[0]})"]
    counted = [f.name for f in report.findings if f.severity is not Severity.NOTE]
    return sorted({name for name in counted if name in FAULTS_FOUND})


def _sound(scheme: str, seed: int) -> Case:
    found = found_by_tests(decoder(scheme, seed), seed)
    where = f"{scheme}: {', '.join(found) or 'nothing'}"
    return Case(seed=seed, where=where, value=float(len(found)), holds=not found)


def _with_nan(seed: int) -> Decoder:
    model = decoder("pre", seed)
    _down(model).weight.data[0, 0] = torch.nan
    return model


def _with_infinity(seed: int) -> Decoder:
    model = decoder("pre", seed)
    _down(model).weight.data[0, 0] = torch.inf
    return model


def _with_dead_branch(seed: int) -> Decoder:
    """Both maps of a feed-forward are zero: it adds nothing and no gradient reaches it."""
    model = decoder("pre", seed)
    branch = next(module for module in model.modules() if isinstance(module, FeedForward))
    for parameter in branch.parameters():
        nn.init.zeros_(parameter)
    for parameter in branch.parameters():
        parameter.requires_grad_(False)
    return model


def _without_residuals(seed: int) -> Decoder:
    return decoder("plain", seed, depth=24)


def _down(model: Decoder) -> nn.Linear:
    module = next(module for module in model.modules() if isinstance(module, FeedForward)).down
    assert isinstance(module, nn.Linear)
    return module


FAULTS: Mapping[str, Callable[[int], Decoder]] = {
    "a NaN in a weight": _with_nan,
    "an infinite weight": _with_infinity,
    "a dead branch": _with_dead_branch,
    "24 blocks without residuals": _without_residuals,
}


def _faulty(fault: str, seed: int) -> Iterator[Case]:
    model = FAULTS[fault](seed)
    found = found_by_tests(model, seed)
    where = f"{fault}: {', '.join(found) or 'nothing'}"
    yield Case(seed=seed, where=where, value=float(len(found)), holds=bool(found))
    with torch.no_grad():
        finite = bool(model(torch.randint(VOCAB, (BATCH, TOKENS))).logits.isfinite().all())
    yield Case(seed=seed, where=fault, value=float(not finite), holds=not finite, part="nan")


def _derivatives(seed: int) -> Iterator[Case]:
    for scheme in USUAL:
        model = decoder(scheme, seed, depth=1, width=64)
        x_D = torch.randn(64, generator=torch.Generator().manual_seed(seed))
        block = model.blocks[0]
        assert isinstance(block, Block)
        mean = _mean_derivative(block, x_D)
        anatomy = read_anatomy(model, torch.randint(VOCAB, (BATCH, TOKENS)))
        met, holds = _is_bare(anatomy), abs(mean - 1) <= 0.1
        yield Case(seed=seed, where=scheme, value=mean, holds=holds, met=met, part="one")


def _mean_derivative(block: Block, x_D: Tensor) -> float:
    """tr(∂y/∂x)/D of one token: how much of each coordinate comes through to itself."""

    def through(x_D: Tensor) -> Tensor:
        y_BTD = block(x_D[None, None])
        assert isinstance(y_BTD, Tensor)
        return y_BTD[0, 0]

    jacobian_DD = torch.autograd.functional.jacobian(through, x_D)
    assert isinstance(jacobian_DD, Tensor)
    return float(jacobian_DD.diagonal().mean())


def _is_bare(anatomy: Anatomy) -> bool:
    """Whether the stream passes every add of the blocks as it is."""
    return bool(anatomy.branches) and all(
        branch.placement != "post" and branch.stream_scale in (None, 1.0) and branch.join != "gate"
        for branch in anatomy.branches
    )


def _runs(setup: Setup) -> Iterator[Case]:
    for recipe in RUNS:  # those of the claims on warm-up, so that they are trained once
        starts, configs = subjects(setup, recipe), [recipe.config(seed) for seed in setup.seeds]
        for seed, result in zip(setup.seeds, setup.train(configs), strict=True):
            passed = not found_by_tests(starts[seed].model, seed)
            trains, last = result.verdict == "trains", result.losses[-1]
            said = "passes" if passed else "is refused"
            where = f"{recipe.depth} blocks {recipe.scheme}: {said}, {result.verdict}, last loss"
            yield Case(seed=seed, where=where, value=last, holds=trains or not passed, part="trains")
