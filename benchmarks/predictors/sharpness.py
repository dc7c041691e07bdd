"""λ_max of the loss's Hessian times the learning rate, plain and preconditioned by Adam.

Scores are the ratio to the bound of stability, 2 and (2 + 2β₁)/(1 − β₁); `normscope.probes.sharpness` has the
formulas and their sources.
"""

import torch

from benchmarks.predictors.setting import Cost, Prediction, Setting
from normscope.probes.next_step import at_start, loss_gradients
from normscope.probes.sharpness import Largest, loss_eigenvalue, preconditioner, stable_below


def sharpness(setting: Setting) -> list[Prediction]:
    """η λ_max(H)/2, and η λ_max(P⁻¹H)(1 − β₁)/(2 + 2β₁) for Adam and AdamW; on the first batch."""
    subject, recipe = setting.subject, setting.recipe
    with at_start(subject) as model:
        _, weights, gradients = loss_gradients(subject, model, keep_graph=True)
        flat = torch.cat([g.reshape(-1) for g in gradients])
        found = [_prediction("λ_max·lr", loss_eigenvalue(flat, weights), 2.0, setting)]
        if recipe.optimizer in ("adam", "adamw"):
            adam = loss_eigenvalue(flat, weights, preconditioner(flat.detach(), recipe))
            found.append(_prediction("λ_max(P⁻¹H)·lr", adam, stable_below(recipe), setting))
    return found


def _prediction(name: str, found: Largest, bound: float, setting: Setting) -> Prediction:
    scores = tuple(rate * found.value / bound for rate in setting.rates)
    largest = bound / found.value if found.value > 0 else None
    facts = {"λ_max": found.value, "residual": found.residual}
    return Prediction(name, scores, Cost(gradients=1, products=found.products), largest, None, facts)
