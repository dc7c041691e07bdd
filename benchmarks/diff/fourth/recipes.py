"""Recipes of the fourth set: a training script's groups, rates, schedule and clipping, with mistakes."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.diff.fourth.base import VOCABULARY, ids
from benchmarks.diff.fourth.gpt import nano
from benchmarks.diff.plants import Case, Truth
from normscope import Run

ANYWHERE = ((("*",), ("*",)),)
STEPS = 24


def loss(output: Tensor, batch: Tensor) -> Tensor:
    """Next-token loss."""
    return F.cross_entropy(output[:, :-1].reshape(-1, VOCABULARY), batch[:, 1:].reshape(-1))


def by_dimension(model: nn.Module, decay: float, *, on_vectors: float = 0.0) -> list[dict[str, Any]]:
    """Groups of nanoGPT: matrices decay, vectors do not."""
    named = dict(model.named_parameters())
    matrices = [p for p in named.values() if p.dim() >= 2]
    vectors = [p for p in named.values() if p.dim() < 2]
    return [{"params": matrices, "weight_decay": decay}, {"params": vectors, "weight_decay": on_vectors}]


def by_name(model: nn.Module, decay: float) -> list[dict[str, Any]]:
    """Groups of minGPT's style: one group a parameter, chosen by its name."""
    groups = []
    for name, parameter in reversed(list(model.named_parameters())):
        is_plain = name.endswith("bias") or ".ln_" in name
        groups.append({"params": [parameter], "weight_decay": 0.0 if is_plain else decay})
    return groups


def of_trainer(model: nn.Module, decay: float) -> list[dict[str, Any]]:
    """Groups of a trainer: no decay for biases only, so that the gains decay."""
    named = list(model.named_parameters())
    plain = [p for name, p in named if name.endswith("bias")]
    rest = [p for name, p in named if not name.endswith("bias")]
    return [{"params": rest, "weight_decay": decay}, {"params": plain, "weight_decay": 0.0}]


def warm(step: int, steps: int = 4, total: int = 20) -> float:
    """Linear warm-up, then linear decay."""
    return min(1.0, (step + 1) / steps, max(0.1, (total - step) / total))


def run(
    groups: Any = by_dimension,
    *,
    rate: float = 6e-4,
    decay: float = 0.1,
    betas: tuple[float, float] = (0.9, 0.95),
    eps: float = 1e-8,
    clip: float | None = 1.0,
    warmup: int = 4,
    accumulation: int = 1,
    table_rate: float | None = None,
    is_sequence: bool = False,
) -> Run:
    """A run of nanoGPT's style."""
    torch.manual_seed(3)
    model = nano()
    made = groups(model, decay)
    if table_rate is not None:
        table = next(p for name, p in model.named_parameters() if "wte" in name or "lm_head" in name)
        for group in made:
            group["params"] = [p for p in group["params"] if p is not table]
        made.append({"params": [table], "weight_decay": decay, "lr": table_rate})
    optimizer = torch.optim.AdamW(made, lr=rate, betas=betas, eps=eps)
    step = partial(warm, steps=warmup)
    scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, [step] * len(made) if is_sequence else step)
    batches = [ids(), ids().flip(0), ids().flip(1)]
    return Run(
        model=model,
        batches=batches,
        loss=loss,
        optimizer=optimizer,
        scheduler=scheduler,
        clip=clip,
        accumulation=accumulation,
    )


EVERY = partial(by_dimension, on_vectors=0.1)
PLANTS: tuple[tuple[str, str, str, dict[str, Any], str], ...] = (
    ("all vectors decay", "weight decay", "gain", {"groups": EVERY}, "ServiceNow/Fast-LLM/issues/542"),
    ("gains decay", "weight decay", "gain", {"groups": of_trainer}, "oumi-ai/oumi/pull/341"),
    ("second beta of PyTorch", "betas", "", {"betas": (0.9, 0.999)}, ""),
    ("no clipping", "clipping", "", {"clip": None}, "karpathy/nanoGPT/issues/168"),
    ("shorter warm-up", "schedule", "", {"warmup": 1}, ""),
    ("the table's own rate", "learning rate", "embedding", {"table_rate": 6e-3}, ""),
    ("larger ε of Adam", "optimizer ε", "", {"eps": 1e-5}, ""),
    ("two batches a step", "accumulation", "", {"accumulation": 2}, "axolotl-ai-cloud/axolotl/issues/1100"),
)
"""Mistakes of recipes: name, kind, what the message says, options, report on GitHub."""
SAME: tuple[tuple[str, dict[str, Any]], ...] = (
    ("a group for each parameter", {"groups": by_name}),
    ("a schedule for each group", {"is_sequence": True}),
)


def planted() -> Iterator[Case]:
    """Recipes with a mistake."""
    for name, kind, says, options, _ in PLANTS:
        truth = Truth(kind, ANYWHERE, says)
        yield Case(f"recipe: {name}", "recipe", run, partial(run, **options), (truth,))


def same() -> Iterator[Case]:
    """Recipes that are the same."""
    for name, options in SAME:
        yield Case(f"recipe: {name}", "recipe", run, partial(run, **options))


def facts(made: Run) -> dict[str, Any]:
    """All that a recipe says, by parameter and step."""
    optimizer, scheduler = made.optimizer, made.scheduler
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler)
    names = {id(p): name for name, p in made.model.named_parameters()}
    found: dict[str, Any] = {
        "clip": made.clip,
        "accumulation": made.accumulation,
        "precision": made.precision,
    }
    for step in range(STEPS):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                settings = [group[key] for key in ("lr", "weight_decay", "betas", "eps")]
                found[f"{names[id(parameter)]} at step {step}"] = settings
        optimizer.step()
        scheduler.step()
    return found


def checked() -> Iterator[tuple[str, str]]:
    """Each recipe's name, and what is wrong with its truth."""
    for case in (*planted(), *same()):
        a, b = (build() for build in (case.a, case.b))  # type: ignore[operator]
        states = [side.model.state_dict() for side in (a, b)]
        is_same = facts(a) == facts(b)
        if any(not torch.equal(states[0][key], states[1][key]) for key in states[0]):
            yield case.name, "the models differ"
        elif is_same == bool(case.truths):
            yield case.name, f"the recipes are {'the same' if is_same else 'not the same'}"
        else:
            yield case.name, ""
