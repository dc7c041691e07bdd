"""Planted recipes and recipes in other words: groups as nanoGPT, minGPT and the Trainer make them."""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.diff.plants import Case, Truth
from benchmarks.diff.third.base import ids
from benchmarks.diff.third.gpt import MinGPT, NanoGPT, V
from benchmarks.diff.third.gpt_annotated import Annotated
from normscope import Run

WARMUP, STEPS, RATE = 8, 60, 6e-4
Groups = list[dict[str, Any]]


def by_shape(model: nn.Module) -> Groups:
    """Matrices decay, vectors do not, as in nanoGPT."""
    held = list(model.parameters())
    return [
        {"params": [p for p in held if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in held if p.dim() < 2], "weight_decay": 0.0},
    ]


def by_name(model: nn.Module) -> Groups:
    """Biases and norms are spared by name, as in scripts for the Trainer."""
    spared = ("bias", "ln_", "norm", "a_2", "b_2")
    named = [(any(word in name for word in spared), p) for name, p in model.named_parameters()]
    return [
        {"params": [p for no, p in named if no], "weight_decay": 0.0},
        {"params": [p for no, p in named if not no], "weight_decay": 0.1},
    ]


def by_type(model: nn.Module) -> Groups:
    """Matrices of Linear decay, those of Embedding do not, as in minGPT."""
    spared: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            if name.endswith("bias") or isinstance(module, nn.LayerNorm | nn.Embedding):
                spared[id(p)] = p
    rest = [p for p in model.parameters() if id(p) not in spared]
    return [{"params": rest, "weight_decay": 0.1}, {"params": [*spared.values()], "weight_decay": 0.0}]


def together(model: nn.Module) -> Groups:
    """All parameters in one group."""
    return [{"params": [*model.parameters()], "weight_decay": 0.1}]


def one_each(model: nn.Module) -> Groups:
    """A group for each parameter."""
    return [{"params": [p], "weight_decay": 0.1 * (p.dim() > 1)} for p in model.parameters()]


def with_tables(model: nn.Module) -> Groups:
    """Tables with a larger learning rate, as in modded-nanogpt."""
    tables = {id(m.weight): m.weight for m in model.modules() if isinstance(m, nn.Embedding)}
    groups = by_shape(model)
    groups[0]["params"] = [p for p in groups[0]["params"] if id(p) not in tables]
    return [*groups, {"params": [*tables.values()], "weight_decay": 0.1, "lr": 10 * RATE}]


def cosine(step: int, floor: float = 0.1) -> float:
    """Linear warm-up, then half a cosine down to a share of the rate."""
    if step < WARMUP:
        return (step + 1) / (WARMUP + 1)
    ratio = min(1.0, (step - WARMUP) / (STEPS - WARMUP))
    return floor + 0.5 * (1.0 + math.cos(math.pi * ratio)) * (1 - floor)


def cosine_of_sines(step: int) -> float:
    """The same schedule in other words."""
    done = max(0.0, min(1.0, (step - WARMUP) / (STEPS - WARMUP)))
    return min(1.0, (step + 1) / (WARMUP + 1)) * (1 - 0.9 * math.sin(math.pi * done / 2) ** 2)


def flat(step: int) -> float:
    """Linear warm-up, then a constant rate."""
    return min(1.0, (step + 1) / (WARMUP + 1))


def loss(output: Any, batch: Tensor) -> Tensor:
    """Cross-entropy of the next token."""
    logits = output[0] if isinstance(output, tuple) else output
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())


def run(
    make: Callable[[], nn.Module] = NanoGPT,
    groups: Callable[[nn.Module], Groups] = by_shape,
    schedule: Callable[[int], float] = cosine,
    clip: float | None = 1.0,
    accumulation: int = 1,
    **options: Any,
) -> Run:
    """A training run."""
    model = make()
    optimizer = AdamW(groups(model), **{"lr": RATE, "betas": (0.9, 0.95), **options})
    return Run(
        model=model,
        batches=ids(V),
        loss=loss,
        optimizer=optimizer,
        scheduler=LambdaLR(optimizer, schedule),
        clip=clip,
        accumulation=accumulation,
    )


def planted() -> Iterator[Case]:
    """Recipes that differ."""

    def pair(name: str, kind: str, says: str = "", **changes: Any) -> Case:
        truth = Truth(kind, ((("*",), ("*",)),), says)
        return Case(f"recipe: {name}", "recipe", run, partial(run, **changes), (truth,))

    yield pair("groups of minGPT", "weight decay", "embeddings", groups=by_type, make=MinGPT)
    yield pair("one group", "weight decay", "gains", groups=together, make=MinGPT)
    yield pair("rate of the tables", "learning rate", "embeddings", groups=with_tables)
    yield pair("betas of torch", "betas", betas=(0.9, 0.999), make=MinGPT)
    yield pair("no clipping", "clipping", clip=None, groups=by_name)
    yield pair("no decay of the rate", "schedule", schedule=flat)
    yield pair("accumulation", "accumulation", accumulation=4)
    yield pair("ε of the optimizer", "optimizer ε", eps=1e-6, groups=one_each)


def same() -> Iterator[Case]:
    """One recipe in other words."""

    def pair(name: str, **changes: Any) -> Case:
        return Case(f"recipe: {name}", "recipe", run, partial(run, **changes))

    yield pair("groups by name", groups=by_name)
    yield pair("a group for each parameter, minGPT", groups=one_each, make=MinGPT)
    yield pair("a schedule by sines", schedule=cosine_of_sines)
    yield pair("the Annotated Transformer, groups by name", groups=by_name, make=Annotated)
