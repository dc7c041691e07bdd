"""A recipe as plain data and in words, for reports."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from normscope.train.live import LiveOptimizers
from normscope.train.optim import build_optimizers
from normscope.train.recipe import OWN, Recipe
from normscope.train.roles import ROLES, parameter_roles

MOST_GROUPS = 3
"""Parameter groups of an optimizer that are listed; of more, only the ranges."""
_OF_GROUP = ("lr", "weight_decay", "betas", "eps", "momentum")


def described(recipe: Recipe, model: nn.Module) -> dict[str, Any]:
    """Everything that a step of `recipe` does to `model`, as plain data for JSON.

    Keys: `own` (live objects of the user's, not options); `optimizers`, each with its class `name` and its
    `groups`: the number of `tensors` and of `parameters`, `roles` (role → number of parameters, see
    `parameter_roles`), the full `lr`, and `weight_decay`, `betas`, `eps` and `momentum` where the group has
    them; `untrained`, the roles of the parameters that no optimizer has; `schedule`, `warmup` and `run_steps`
    in steps, `clip`, `accumulation` in batches, `precision`.

    Raises:
        UsageError: the optimizer cannot be built for this model, see `build_optimizers`.
    """
    live = recipe.optimizer if isinstance(recipe.optimizer, LiveOptimizers) else None
    optimizers: Sequence[Any] = build_optimizers(model, recipe) if live is None else live.optimizers
    rates = iter(() if live is None else live.full_rates)
    scale = 1.0 if live is None or recipe.lr == live.lr else recipe.lr / live.lr
    roles = parameter_roles(model if live is None else live.model)
    taken = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    left = [p for p in (model if live is None else live.model).parameters() if id(p) not in taken]
    return {
        "own": live is not None,
        "optimizers": [
            {
                "name": type(optimizer).__name__,
                "groups": [
                    _group(group, group["lr"] if live is None else scale * next(rates), recipe, roles)
                    for group in optimizer.param_groups
                ],
            }
            for optimizer in optimizers
        ],
        "untrained": _counted(left, roles),
        "schedule": _schedule(recipe, live),
        "warmup": recipe.warmup,
        "run_steps": recipe.run_steps,
        "clip": recipe.clip,
        "accumulation": recipe.accumulation,
        "precision": recipe.precision,
    }


def _group(group: Mapping[str, Any], lr: float, recipe: Recipe, roles: Mapping[int, str]) -> dict[str, Any]:
    found = {name: _number(group[name]) for name in _OF_GROUP if name in group} | {"lr": float(lr)}
    if "betas" in found and "eps" in found and recipe.eps is not None:
        found["eps"] = recipe.eps
    sizes = [parameter.numel() for parameter in group["params"]]
    return {
        "tensors": len(sizes),
        "parameters": sum(sizes),
        "roles": _counted(group["params"], roles),
        **found,
    }


def _counted(parameters: Sequence[nn.Parameter], roles: Mapping[int, str]) -> dict[str, int]:
    """Number of parameters by role."""
    counts = dict.fromkeys(ROLES, 0)
    for parameter in parameters:
        if id(parameter) in roles:
            counts[roles[id(parameter)]] += parameter.numel()
    return {role: number for role, number in counts.items() if number}


def _number(value: Any) -> Any:
    """Numbers as Python's, tuples of them as lists; None for what is neither."""
    if isinstance(value, list | tuple):
        return [_number(part) for part in value]
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _schedule(recipe: Recipe, live: LiveOptimizers | None) -> str:
    if recipe.schedule != OWN or live is None:
        return recipe.schedule
    names = dict.fromkeys(type(scheduler).__name__ for scheduler in live.schedulers)
    return "recorded" if live.rates else " + ".join(names) or "constant"


def recipe_in_words(recipe: Mapping[str, Any]) -> str:
    """The data of `described` on one line.

    Such as "AdamW, betas 0.9, 0.95: 26 tensors at 0.0006, decay 0.1; 50 tensors at 0.0006, decay 0 · schedule
    LambdaLR · clipped to 1 · 8 batches per step · bfloat16". The type of `weights` is named where it is not
    float32, and no autocast sets the type that counts.
    """
    steps = recipe["accumulation"]
    parts = [_optimizer_in_words(each) for each in recipe["optimizers"]]
    schedule = "constant rate" if recipe["schedule"] == "constant" else f"schedule {recipe['schedule']}"
    schedule += f" over {recipe['run_steps']} steps" if recipe["run_steps"] else ""
    schedule += f" after a warm-up of {recipe['warmup']} steps" if recipe["warmup"] else ""
    clip = "no clipping" if recipe["clip"] is None else f"clipped to {recipe['clip']:g}"
    batches = [] if steps == 1 else [f"{steps} batches per step"]
    precision, weights = recipe["precision"], recipe.get("weights")
    if weights is not None and precision == "float32":
        precision = f"{weights} weights"
    return " · ".join([*parts, schedule, clip, *batches, precision])


def _optimizer_in_words(optimizer: Mapping[str, Any]) -> str:
    groups = optimizer["groups"]
    betas = {tuple(group["betas"]) for group in groups if group.get("betas")}
    name = optimizer["name"]
    name += f", betas {', '.join(f'{beta:g}' for beta in betas.pop())}" if len(betas) == 1 else ""
    has_momentum = all(group.get("momentum") for group in groups)
    name += f", momentum {_range(groups, 'momentum')}" if has_momentum else ""
    if len(groups) > MOST_GROUPS:
        tensors = sum(group["tensors"] for group in groups)
        return f"{name}: {tensors} tensors in {len(groups)} groups at {_range(groups, 'lr')}" + (
            f", decay {_range(groups, 'weight_decay')}" if _has_decay(groups) else ""
        )
    listed = "; ".join(_group_in_words(group) for group in groups)
    return f"{name}: {listed}"


def _group_in_words(group: Mapping[str, Any]) -> str:
    decay = f", decay {group['weight_decay']:g}" if _has_decay([group]) else ""
    return f"{group['tensors']} tensor{'s' if group['tensors'] != 1 else ''} at {group['lr']:g}{decay}"


def _has_decay(groups: Sequence[Mapping[str, Any]]) -> bool:
    return all(group.get("weight_decay") is not None for group in groups)


def _range(groups: Sequence[Mapping[str, Any]], name: str) -> str:
    values = [group[name] for group in groups]
    low, high = min(values), max(values)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"
