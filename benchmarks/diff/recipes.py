"""Planted differences of training recipes, and pairs of one recipe in other words.

What is planted follows reports: weight decay on gains after a refactoring, an embedding that lost its own
rate, an optimizer's ε or its betas that were not passed on.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.diff.plants import Case, Truth
from benchmarks.diff.ports.blocks import Config
from benchmarks.diff.ports.decoder import Port
from benchmarks.diff.ports.styles import Nested
from benchmarks.miswired import text
from normscope import Run


def run(
    config: Config,
    *,
    style: type[nn.Module] = Port,
    no_decay: str = "norms",
    rates: dict[str, float] | None = None,
    warmup: int = 10,
    frozen: str = "",
    backwards: bool = False,
    clip: float | None = 1.0,
    precision: str = "float32",
    accumulation: int = 1,
    **options: Any,
) -> Run:
    """A training run with two groups or more.

    Args:
        no_decay: "norms" decays matrices alone, "embeddings" spares these as well, "" decays everything.
        rates: learning rates of parameters whose names contain a word.
        frozen: parameters whose names contain it are not trained.
        backwards: order of the groups.
    """
    model = style(config)
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if frozen and frozen in name:
            parameter.requires_grad_(False)
            continue
        is_spared = {"": False, "norms": parameter.dim() < 2}.get(
            no_decay, parameter.dim() < 2 or "tok" in name
        )
        rate = next((rate for word, rate in (rates or {}).items() if word in name), 1e-3)
        groups.setdefault((rate, 0.0 if is_spared else 0.1), []).append(parameter)
    made = [{"params": held, "lr": lr, "weight_decay": decay} for (lr, decay), held in groups.items()]
    optimizer = AdamW(made[::-1] if backwards else made, **{"betas": (0.9, 0.95), **options})
    schedule = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warmup))
    return Run(
        model=model,
        batches=text()[:, :32],
        loss=_loss,
        optimizer=optimizer,
        scheduler=schedule,
        clip=clip,
        precision=precision,
        accumulation=accumulation,
    )


def _loss(logits: Tensor, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def recipes(config: Config) -> Iterator[Case]:
    """Planted recipes."""

    def planted(name: str, kind: str, says: str = "", **changes: Any) -> Case:
        truth = Truth(kind, ((("*",), ("*",)),), says)
        return Case(
            f"recipe: {name}", "recipe", partial(run, config), partial(run, config, **changes), (truth,)
        )

    yield planted("decay on gains and biases", "weight decay", "gains", no_decay="")
    yield planted("no decay on the embedding", "weight decay", "embeddings", no_decay="embeddings")
    yield planted("rate of the embedding", "learning rate", "embeddings", rates={"tok": 1e-2})
    yield planted("betas", "betas", betas=(0.9, 0.999))
    yield planted("ε", "optimizer ε", eps=1e-6)
    yield planted("no clipping", "clipping", clip=None)
    yield planted("warm-up", "schedule", warmup=100)
    yield planted("accumulation", "accumulation", accumulation=2)
    yield planted("bfloat16", "precision", precision="bfloat16")
    yield planted("frozen head and embedding", "untrained", "embeddings", frozen="tok")


def same_recipes(config: Config) -> Iterator[Case]:
    """The same recipe in other words."""

    def pair(name: str, **changes: Any) -> Case:
        return Case(f"recipe: {name}", "recipe", partial(run, config), partial(run, config, **changes))

    yield pair("the same")
    yield pair("order of the groups", backwards=True)
    yield pair("one tensor at a time", foreach=False)
    yield pair("another style", style=Nested)
