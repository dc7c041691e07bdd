"""NS710 and NS711: what the user's own clipping and weight decay do."""

import math
from collections.abc import Iterator

from normscope.probes.wiring.optimizers import LITTLE
from normscope.rules.finding import Severity
from normscope.rules.rule import Case, Hit, figure, rule
from normscope.rules.wiring_learning import named

OWNS = 0.99
"""Share of the squared gradient norm that one tensor must own."""
RUN_STEPS = 10_000
LOSES = 0.1
"""Share of its value that a vector loses in `RUN_STEPS` by decay alone."""


@rule(
    "NS710",
    summary="One tensor owns the gradient norm, and clipping by it takes the others to nothing.",
    why="""Clipping divides all gradients by one number, the norm of all of them. Where one tensor makes
        up that norm, the others shrink with it. Adam divides by its own second moment and hides that
        until a gradient is near ε: at ε its step is half as long. SGD shrinks at once, until a step
        rounds to nothing.""",
    threshold=f"""From the user's own clipping only. A warning where one tensor has over {OWNS:g} of the
        squared norm, the norm is over the limit, and the RMS gradient of the others after clipping is at
        most Adam's ε; or, without an ε, their step is at most half the spacing of their values.""",
    source="""Kingma and Ba 2014, arXiv:1412.6980 (the step is m/(√v + ε)); Pascanu et al. 2013,
        arXiv:1211.5063; closed form.""",
    remedy="""Clip that tensor by itself (one call of clip_grad_norm_ for each group), lower ε to 1e-12,
        or find out with NS302 and NS708 why its gradient is that large.""",
)
def clip_starves(case: Case) -> Iterator[Hit]:
    factor = case.finite("wiring/clip-factor").get("")
    rest = case.finite("wiring/clipped-rest").get("")
    owner = next(iter(case.finite("wiring/norm-share").items()), None)
    if factor is None or rest is None or owner is None:
        return
    site, share = owner
    if factor < 1 and share > OWNS and rest <= 1:
        message = (
            f"{site} has {figure(100 * share, 4)} % of the squared gradient norm; clipping multiplies all "
            f"gradients by {figure(factor)}. The others are then {figure(rest)} {_times(case)}."
        )
        rows = case.rows(["", site], "wiring/clip-factor", "wiring/norm-share", "wiring/clipped-rest")
        yield Hit(Severity.WARNING, (site,), message, rows)


def _times(case: Case) -> str:
    row = case.table.find("wiring/clipped-rest")
    return row.how.partition("; ")[2] if row is not None and "; " in row.how else "times what moves them"


@rule(
    "NS711",
    summary="Weight decay shrinks norm gains, biases or scalars.",
    why="""Decay multiplies a weight by 1 − ηλ at every step. For matrices that norms follow it only sets
        an effective learning rate. A gain, a bias or the scalar of a join has no such invariance: decay
        pulls a gain of 1 towards 0, by e^(−ηλn) after n steps where no gradient holds it.""",
    threshold=f"""From the user's own optimizers only. A note where decay alone takes over {LOSES:g} of a
        trained vector or scalar within {RUN_STEPS} steps at the full learning rate. Only where decay is
        decoupled from the gradient: AdamW, Lion, Muon and their like with a decay over {LITTLE:g}, AdamW's
        default, and SGD without momentum.""",
    source="""Loshchilov and Hutter 2017, arXiv:1711.05101 (decoupled decay); closed form 1 − e^(−ηλn);
        minGPT's and nanoGPT's own practice of two groups. A decay of 0.01 takes little: after 2000 steps
        at 3e-3 the mean gain was 0.93 without decay, 0.89 with 0.01, and 0.62 with 0.1 (Pre-LN, 3 blocks,
        width 32, bytes, seed 0).""",
    remedy="""Two parameter groups: weight_decay for p.ndim >= 2, and 0 for gains, biases and scalars.""",
)
def decayed_gains(case: Case) -> Iterator[Hit]:
    losses = {site: 1 - math.exp(-rate * RUN_STEPS) for site, rate in case.finite("wiring/decay").items()}
    sites = [site for site, loss in losses.items() if loss > LOSES]
    if not sites:
        return
    worst = max(sites, key=lambda site: losses[site])
    rate = case.finite("wiring/decay")[worst]
    message = (
        f"{len(sites)} vectors or scalars decay: {named(sites)}. Decay alone takes "
        f"{figure(100 * losses[worst])} % of {worst} in {RUN_STEPS} steps, and half in "
        f"{figure(math.log(2) / rate)} steps."
    )
    yield Hit(Severity.NOTE, tuple(sites), message, case.rows(sites, "wiring/decay"))
