"""Remedies that do not change the model: learning rate, warm-up, clipping and Adam's ε."""

import dataclasses

from normscope.rules.remedies.remedy import NotApplicable, run_remedy
from normscope.train import Recipe

WARMUP = 100
"""Steps of the suggested warm-up."""
CLIP = 1.0
ADAM_EPS = 1e-6


@run_remedy(
    "warm-up",
    summary=f"A linear warm-up over {WARMUP} steps.",
    code=f"torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1, (step + 1) / {WARMUP}))",
    cost=f"about {WARMUP // 2} steps' worth of progress, once",
    source="Xiong et al. 2020, arXiv:2002.04745; Liu et al. 2020 (Admin), arXiv:2004.08249",
)
def warm_up(config: Recipe) -> Recipe:
    if config.warmup >= WARMUP:
        raise NotApplicable(f"the run warms up over {config.warmup} steps already")
    return config.with_warmup(WARMUP)


STABLE = "stability needs learning rate × curvature under a constant: Cohen et al. 2022, arXiv:2207.14484"

LOWER_RATES = {
    "lower-rate": ("A third", 3),
    "much-lower-rate": ("A tenth", 10),
    "far-lower-rate": ("A thirtieth", 30),
}
"""Remedies that lower the learning rate: its share, in words and as a divisor."""


def _lower_rate(name: str, share: str, times: int) -> None:
    """Enter the remedy that divides the learning rate by `times`."""

    @run_remedy(
        name,
        summary=f"{share} of the learning rate.",
        code=f"lr = lr / {times}",
        cost=f"slower progress per step, up to {times} times",
        source=STABLE,
    )
    def lower(config: Recipe) -> Recipe:
        return dataclasses.replace(config, lr=config.lr / times)


for _name, (_share, _times) in LOWER_RATES.items():
    _lower_rate(_name, _share, _times)


@run_remedy(
    "clip",
    summary=f"Gradients clipped to norm {CLIP:g}.",
    code=f"torch.nn.utils.clip_grad_norm_(model.parameters(), {CLIP:g})  # before optimizer.step()",
    cost="one pass over the gradients per step",
    source="Pascanu et al. 2013, arXiv:1211.5063; Adam's step hardly depends on the gradient's size",
)
def clip(config: Recipe) -> Recipe:
    if config.clip is not None and config.clip <= CLIP:
        raise NotApplicable(f"gradients are clipped to {config.clip:g} already")
    return dataclasses.replace(config, clip=CLIP)


@run_remedy(
    "adam-eps",
    summary=f"Adam's ε at {ADAM_EPS:g}, so that gradients of that size make only small steps.",
    code=f"torch.optim.AdamW(model.parameters(), lr=lr, eps={ADAM_EPS:g})",
    cost="nothing",
    source="1e-8 is zero in float16; Wortsman et al. 2023, arXiv:2309.14322, on ε beside small gradients",
)
def adam_eps(config: Recipe) -> Recipe:
    eps = config.adam_eps
    if eps is None:
        raise NotApplicable(f"{config.optimizer_name} has no ε")
    if eps >= ADAM_EPS:
        raise NotApplicable(f"ε is {eps:g} already")
    return dataclasses.replace(config, eps=ADAM_EPS)
