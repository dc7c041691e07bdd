"""Own decoders with planted mistakes: refactorings with fresh weights, starts and recipes."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from benchmarks.diff.fresh.attention import Opt
from benchmarks.diff.fresh.decoders import Decoder
from benchmarks.diff.fresh.mistakes import M
from benchmarks.diff.fresh.planting import Mistake, options_of, own_places, truth
from benchmarks.diff.plants import Case, Truth
from normscope import Run

FRESH = Opt(40, 3, 4, 2, 10, 72, 256, turned=10, eps=1e-5)
PLAIN = Opt(48, 4, 6, 6, 8, 88, 256, norm="ln", norm_bias=True, eps=1e-5, gated=False, act="gelu")
PLAIN = replace(PLAIN, table=0, tied=True, qkv_bias=True, o_bias=True, mlp_bias=True)


def drawn(opt: Opt, style: str, *laws: Callable[[str, nn.Parameter], None]) -> nn.Module:
    """A fresh decoder, its weights drawn again by the laws."""
    model = Decoder(opt, style)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            for law in laws:
                law(name, parameter)
    return model


def rewrite(a: str, b: str, opt: Opt, *mistakes: Mistake, second: Opt | None = None) -> Case:
    """Two fresh decoders of two styles, the second one with mistakes."""
    pair = (own_places(a), own_places(b))
    truths = tuple(truth(m, opt.depth, lambda w: (pair[0](w), pair[1](w))) for m in mistakes)
    changed = replace(second or opt, **options_of(mistakes))
    label = " + ".join(f"{m.kind} at {m.where}" for m in mistakes)
    return Case(
        f"rewrite, {a} as {b}: {label}", "own", partial(drawn, opt, a), partial(drawn, changed, b), truths
    )


def rewrites() -> Iterator[Case]:
    """Refactorings that went wrong, with fresh weights on both sides."""
    yield rewrite(
        "fused",
        "split",
        FRESH,
        M("ε", "all", {"eps": 1e-6}, None, "foundation-model-stack/foundation-model-stack/pull/99"),
    )
    yield rewrite(
        "split",
        "einsum",
        FRESH,
        M("rotary base", "all attention", {"base": 5e5}, None, "huggingface/nanotron/pull/173"),
    )
    yield rewrite(
        "einsum",
        "fused",
        FRESH,
        M("logit cap", "all attention", {"cap": 0.05}, None, "vllm-project/vllm-metal/issues/665"),
    )
    yield rewrite("fused", "einsum", PLAIN, M("activation", "all mlp", {"act": "relu"}))
    yield rewrite(
        "split",
        "fused",
        PLAIN,
        M("attention scale", "all attention", {"scale": 48**-0.5}, None, "karpathy/ng-video-lecture/pull/6"),
    )
    yield rewrite("einsum", "split", PLAIN, M("final norm", "last", {"final": False}))
    yield rewrite("split", "split", PLAIN, M("parallel", "layers", {"parallel": True}), second=PLAIN)
    yield rewrite(
        "fused",
        "split",
        FRESH,
        M("window", "attention 1", {"window": 20}),
        M("branch scale", "layer 2", {"branch": 0.5}),
    )


Law = Callable[[str, nn.Parameter], None]


def normal(std: float, *ends: str) -> Law:
    """Draw the matrices whose names end so, all without an end."""

    def law(name: str, parameter: nn.Parameter) -> None:
        if parameter.dim() > 1 and (not ends or name.endswith(ends)):
            nn.init.normal_(parameter, std=std)

    return law


def torch_default(name: str, parameter: nn.Parameter) -> None:
    """PyTorch's law of linear layers."""
    if parameter.dim() > 1 and "wte" not in name:
        nn.init.kaiming_uniform_(parameter, a=5**0.5)


def cut_off(name: str, parameter: nn.Parameter) -> None:
    """timm's law with bounds of two deviations."""
    if parameter.dim() > 1:
        nn.init.trunc_normal_(parameter, std=0.02, a=-0.04, b=0.04)


def started(name: str, kind: str, roles: tuple[str, ...], a: tuple[Law, ...], b: tuple[Law, ...]) -> Case:
    """Two laws of one decoder; `roles` are the modules of a layer in which they differ, "*" is any module."""
    paths = ("*",) if "*" in roles else tuple(f"blocks.{i}.{r}" for i in range(FRESH.depth) for r in roles)
    truths = (Truth(kind, ((paths, paths),)),) if kind else ()
    return Case(
        f"start: {name}",
        "start",
        partial(drawn, FRESH, "split", *a),
        partial(drawn, FRESH, "split", *b),
        truths,
    )


def starts() -> Iterator[Case]:
    """Fresh weights of another law."""
    deep = 0.02 / (2 * FRESH.depth) ** 0.5
    gpt = (normal(0.02), normal(deep, "out_lin.weight", "w2.weight"))
    # huggingface/transformers/issues/47458
    yield started("residual projections not scaled", "init depth", ("sa", "ff"), gpt, gpt[:1])
    # karpathy/llama2.c/issues/579
    third = (normal(0.02), normal(deep, "out_lin.weight", "w3.weight"))
    yield started("up scaled, not down", "init scale", ("ff",), gpt, third)
    # facebookresearch/lingua/issues/39
    all_four = (*gpt, normal(deep, "q_lin.weight", "k_lin.weight", "v_lin.weight"))
    yield started("queries scaled as well", "init scale", ("sa",), gpt, all_four)
    # Modalities/modalities/pull/460
    yield started("PyTorch's law kept", "init law", ("*",), gpt[:1], (torch_default,))
    # huggingface/transformers/issues/19305
    yield started("truncated", "init law", ("*",), gpt[:1], (cut_off,))


def run(
    style: str = "split", *, decay_all: bool = False, lr: float = 6e-4, warmup: int = 8, **options: Any
) -> Run:
    """A training run with groups as in nanoGPT, a warm-up and a cosine."""
    model = drawn(FRESH, style)
    frozen = options.pop("frozen", "")
    named = [(n, p) for n, p in model.named_parameters() if not frozen or frozen not in n]
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen or frozen not in name)
    plain = [p for n, p in named if decay_all or (p.dim() > 1 and not n.endswith("bias"))]
    spared = [p for n, p in named if all(p is not each for each in plain)]
    groups = [{"params": plain, "weight_decay": 0.05}, {"params": spared, "weight_decay": 0.0}]
    keep = {k: options.pop(k) for k in ("clip", "accumulation", "precision") if k in options}
    optimizer = AdamW([g for g in groups if g["params"]], lr=lr, **{"betas": (0.9, 0.98), **options})
    ramp = LinearLR(optimizer, 1 / warmup, total_iters=warmup)
    schedule = SequentialLR(optimizer, [ramp, CosineAnnealingLR(optimizer, 100)], [warmup])
    ids = torch.randint(0, FRESH.vocab, (16, 32), generator=torch.Generator().manual_seed(2))
    batches = list(ids.view(4, 4, 32))
    return Run(model=model, batches=batches, loss=_loss, optimizer=optimizer, scheduler=schedule,
               **{"clip": 1.0, **keep})  # fmt: skip


def _loss(logits: Tensor, ids: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def recipes() -> Iterator[Case]:
    """Other recipes of one decoder."""

    def planted(name: str, kind: str, says: str = "", **changes: Any) -> Case:
        found = Truth(kind, ((("*",), ("*",)),), says)
        return Case(f"recipe: {name}", "recipe", run, partial(run, **changes), (found,))

    # ServiceNow/Fast-LLM/issues/542
    yield planted("norms decay after a refactoring", "weight decay", "gains", decay_all=True)
    yield planted("betas of the library", "betas", betas=(0.9, 0.999))
    yield planted("clipping lost", "clipping", clip=None)
    yield planted("a frozen embedding", "untrained", "embeddings", frozen="wte")
