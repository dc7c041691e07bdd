"""Compare recipes: what a step of training does to the parameters of each role.

Groups of an optimizer are not compared one by one: a refactoring may order or split them in another way. The
settings are compared that the parameters of a role have, weighted by the number of parameters. Roles come
from the dataflow where both models are here, else from modules and shapes as a report has them.
"""

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from normscope.anatomy import Anatomy, named_parameters
from normscope.compare.facts import same_value
from normscope.compare.outcome import Outcome
from normscope.compare.types import Compared, Difference, Pair, Part, Place
from normscope.errors import UsageError
from normscope.subjects import Subject
from normscope.train import Recipe, described
from normscope.train.live import LONGEST_WARMUP, LiveOptimizers
from normscope.train.roles import ROLES, parameter_roles

Data = Mapping[str, Any]
LEAST_SHARE = 0.02
"""Difference in the share of a role's parameters that is no difference: a fused layout has other sizes."""
_FIELDS = {
    "optimizer": ("optimizer", "The optimizer of {roles} is"),
    "lr": ("learning-rate", "The learning rate of {roles} is"),
    "weight_decay": ("weight-decay", "The weight decay of {roles} is"),
    "betas": ("betas", "Adam's betas for {roles} are"),
    "eps": ("optimizer-eps", "The optimizer's ε for {roles} is"),
    "momentum": ("momentum", "The momentum for {roles} is"),
}
_STEPS = {
    "warmup": ("warmup", "The warm-up in steps is"),
    "run_steps": ("run-steps", "The length of the run in steps is"),
    "clip": ("clip", "The largest gradient norm is"),
    "accumulation": ("accumulation", "The number of batches per step is"),
    "precision": ("precision", "The precision is"),
}


def recipe_of(subject: Subject, anatomy: Anatomy) -> Data | None:
    """The recipe of a model's run as plain data; None where the factory gave no optimizer.

    It is the data of `described` with further keys: `names`, parameters by optimizer and group; `kinds` and
    `sizes` of all parameters by name; `rates`, shares of the full learning rate by step.
    """
    run = subject.run
    if run is None or not run.optimizers:
        return None
    recipe = Recipe.of(run)
    data = described(recipe, run.model)
    named = list(named_parameters(run.model))
    names, kinds = {id(p): name for name, p in named}, parameter_roles(run.model)
    live = recipe.optimizer
    assert isinstance(live, LiveOptimizers), "a run with optimizers has live ones"
    return data | {
        "names": [
            [[names[id(p)] for p in group["params"] if id(p) in names] for group in optimizer.param_groups]
            for optimizer in run.optimizers
        ],
        "kinds": {name: kinds[id(p)] for name, p in named},
        "sizes": {name: p.numel() for name, p in named},
        "rates": _rates(live),
    }


def _rates(live: LiveOptimizers) -> dict[int, float] | None:
    """Share of the full learning rate at some steps; None where it always is the full one."""
    wanted = {round(1.5**k) - 1 for k in range(1, 25)} | {0, 1, 2}
    try:
        factors = itertools.islice(live.factors(), LONGEST_WARMUP)
        found = {step: factor for step, factor in enumerate(factors) if step in wanted}
    except UsageError:
        return None
    return found or None


def recipe_of_report(report: Data) -> Data | None:
    """The recipe in a report of a check, or in the store of a run; None where it has none."""
    found = report.get("recipe")
    return found if isinstance(found, Mapping) else None


def compare(a: Data, b: Data, rows: Pair) -> Outcome:
    """Differences between two recipes of aligned models."""
    by_name = "names" in a and "names" in b
    roles = [_roles(each, place) for each, place in zip((a, b), (rows.a, rows.b), strict=True)]
    sides = [_settings(each, role if by_name else None) for each, role in zip((a, b), roles, strict=True)]
    whole = any(None in side for side in sides)
    if whole:
        sides = [_together(side) for side in sides]
    found = [*_by_role(*sides), *([] if whole else _untrained(a, b, roles, by_name, sides)), *_of_steps(a, b)]
    why = []
    if whole:
        why.append("a report does not say which parameters are in which group")
    if any(each.get("own") is False for each in (a, b)):
        why.append("the recipe of a check without a run of the user's is that of its options")
    said = "" if found else "the same recipe"
    return Outcome(Compared(Part.RECIPE, "partly" if why else "whole", tuple(why), said), tuple(found))


Shares = dict[str, dict[Any, int]]
"""Field → value → number of parameters."""


def _roles(data: Data, model: Place | None) -> dict[str, str]:
    """Role of every parameter by name: from the dataflow, else from modules and shapes."""
    known = dict(data.get("kinds", {}))
    if model is None:
        return known
    blocks = [branch for stack in model.parts for block in stack.parts for branch in block.parts]
    for place in (model, *blocks, *model.parts):  # the stack's last: a tied head is an embedding
        for name, roles in place.facts.get("parameters", {}).items():
            if name in known and roles:
                known[name] = _kind(roles[0])
    return known


def _kind(role: str) -> str:
    """The role of a recipe for a role of the dataflow: "norm gains" for "gain of norm 0"."""
    if role.startswith("gain of"):
        return "norm gains"
    if role.startswith("bias of"):
        return "norm biases" if "norm" in role else "biases"
    if role.endswith("embeddings"):
        return "embeddings"
    return {"scale": "scales", "head": "head"}.get(role, "matrices")


def _settings(data: Data, roles: Mapping[str, str] | None) -> dict[str | None, Shares]:
    """Settings by role; under None where the groups' roles are unknown."""
    found: dict[str | None, Shares] = defaultdict(lambda: defaultdict(lambda: defaultdict(int)))
    for number, optimizer in enumerate(data["optimizers"]):
        for which, group in enumerate(optimizer["groups"]):
            values = {"optimizer": optimizer["name"]} | {k: group.get(k) for k in _FIELDS if k in group}
            if roles is not None:
                names = data["names"][number][which]
                counts = [(roles.get(name), data["sizes"][name]) for name in names]
            else:
                counts = list(group.get("roles", {None: group["parameters"]}).items())
            for role, count in counts:
                for field, value in values.items():
                    found[role][field][_hashable(value)] += count
    return {role: {f: dict(v) for f, v in each.items()} for role, each in found.items()}


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _together(side: Mapping[str | None, Shares]) -> dict[str | None, Shares]:
    """All roles as one."""
    total: Shares = defaultdict(lambda: defaultdict(int))
    for shares in side.values():
        for field, values in shares.items():
            for value, count in values.items():
                total[field][value] += count
    return {None: {field: dict(values) for field, values in total.items()}}


def _by_role(a: Mapping[str | None, Shares], b: Mapping[str | None, Shares]) -> Iterator[Difference]:
    """One difference for all the roles in which a field differs in the same way."""
    for field, (name, words) in _FIELDS.items():
        apart: dict[str, tuple[Any, Any, list[str | None]]] = {}
        for role in sorted({*a} & {*b}, key=lambda role: ROLES.index(role) if role in ROLES else -1):
            values = [_value(side[role].get(field, {})) for side in (a, b)]
            if not _same(a[role].get(field, {}), b[role].get(field, {})):
                apart.setdefault(repr(values), (*values, []))[2].append(role)
        for x, y, roles in apart.values():
            is_all = None in roles or (len(roles) > 2 and len(roles) == len({*a} & {*b}))
            listed = "all parameters" if is_all else _listed([str(role) for role in roles])
            message = f"{words.format(roles=listed)} {_in_words(x)} in A and {_in_words(y)} in B."
            yield Difference(Part.RECIPE, name, (("", ""),), x, y, message)


def _same(a: Mapping[Any, int], b: Mapping[Any, int]) -> bool:
    """Whether the same values hold for the same shares of the parameters."""
    if not a or not b:
        return not a and not b
    shares = [[(value, n / sum(each.values())) for value, n in each.items()] for each in (a, b)]
    for here, there in (shares, shares[::-1]):
        for value, share in here:
            other = sum(s for v, s in there if same_value(v, value))
            own = sum(s for v, s in here if same_value(v, value))
            if other == 0 or abs(other - own) > LEAST_SHARE:
                return bool(share < 1e-6)
    return True


def _value(values: Mapping[Any, int]) -> Any:
    """The value of all parameters, else the values with their shares in percent."""
    if not values:
        return None
    if len(values) == 1:
        (value,) = values
        return list(value) if isinstance(value, tuple) else value
    total = sum(values.values())
    ordered = sorted(values.items(), key=lambda pair: -pair[1])
    return [f"{_in_words(value)} ({100 * number / total:.3g} %)" for value, number in ordered]


def _untrained(
    a: Data,
    b: Data,
    roles: Sequence[Mapping[str, str]],
    by_name: bool,
    sides: Sequence[Mapping[str | None, Shares]],
) -> Iterator[Difference]:
    """Roles that one side trains wholly and the other side not at all or in part."""
    counts = [_left(data, role, by_name) for data, role in zip((a, b), roles, strict=True)]
    for role in ROLES:
        left = [count.get(role, 0) for count in counts]
        trained = [_number(side, role) for side in sides]
        shares = [n / (n + t) if n + t else None for n, t in zip(left, trained, strict=True)]
        if None not in shares and abs(shares[0] - shares[1]) > LEAST_SHARE:  # type: ignore[operator]
            words = [f"{100 * share:.3g} %" for share in shares if share is not None]
            message = f"No optimizer trains {words[0]} of the {role} in A and {words[1]} in B."
            yield Difference(Part.RECIPE, "untrained", (("", ""),), shares[0], shares[1], message)


def _left(data: Data, roles: Mapping[str, str], by_name: bool) -> Mapping[str, int]:
    if not by_name:
        found: Mapping[str, int] = data.get("untrained", {})
        return found
    taken = {name for optimizer in data["names"] for group in optimizer for name in group}
    counts: dict[str, int] = defaultdict(int)
    for name, size in data["sizes"].items():
        if name not in taken and name in roles:
            counts[roles[name]] += size
    return counts


def _number(side: Mapping[str | None, Shares], role: str) -> int:
    return sum(side.get(role, {}).get("optimizer", {}).values())


def _of_steps(a: Data, b: Data) -> Iterator[Difference]:
    """Schedule, warm-up, clipping, accumulation and precision."""
    schedule = _schedule(a, b)
    if schedule is not None:
        yield schedule
    for field, (name, words) in _STEPS.items():
        if field in a and field in b and not same_value(a[field], b[field]):
            message = f"{words} {_in_words(a[field])} in A and {_in_words(b[field])} in B."
            yield Difference(Part.RECIPE, name, (("", ""),), a[field], b[field], message)


def _schedule(a: Data, b: Data) -> Difference | None:
    """The schedules' difference: by the learning rates at some steps where both are known, else by name."""
    names = a.get("schedule"), b.get("schedule")
    if "rates" not in a or "rates" not in b:
        if names[0] == names[1]:
            return None
        message = f"The schedule is {names[0]} in A and {names[1]} in B."
        return Difference(Part.RECIPE, "schedule", (("", ""),), *names, message)
    x, y = (each["rates"] or {} for each in (a, b))
    steps = sorted({int(step) for step in (*x, *y)})
    apart = [step for step in steps if abs(_at(x, step) - _at(y, step)) > 0.01]
    if not apart or _is_only_warmup(a, b, x, y):
        return None
    step = max(apart, key=lambda step: abs(_at(x, step) - _at(y, step)))
    message = (
        f"The learning rate at step {step + 1} is {_at(x, step):.3g} of the full one in A ({names[0]}) "
        f"and {_at(y, step):.3g} in B ({names[1]})."
    )
    return Difference(Part.RECIPE, "schedule", (("", ""),), *names, message)


def _at(rates: Mapping[Any, float], step: int) -> float:
    """Share of the full learning rate at a step; constant after the last known one."""
    known = {int(key): share for key, share in rates.items()}
    if not known:
        return 1.0
    return known.get(step, known[max(known)] if step > max(known) else 1.0)


def _is_only_warmup(a: Data, b: Data, x: Mapping[Any, float], y: Mapping[Any, float]) -> bool:
    """Whether the schedules differ only during a warm-up whose length differs, which is said by itself."""
    longest = max(a.get("warmup") or 0, b.get("warmup") or 0)
    later = [int(step) for step in (*x, *y) if int(step) >= longest]
    is_apart = a.get("warmup") != b.get("warmup")
    return is_apart and all(abs(_at(x, step) - _at(y, step)) <= 0.01 for step in later)


def _listed(words: Iterable[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} and {last}" if most else last


def _in_words(value: Any) -> str:
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, list | tuple):
        return ", ".join(map(_in_words, value))
    return str(value)
