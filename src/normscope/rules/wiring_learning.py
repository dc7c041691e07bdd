"""NS704 to NS707: weights that do not learn."""

from collections.abc import Iterable, Iterator

from normscope.rules.finding import Severity
from normscope.rules.rule import Case, Hit, figure, note_or_warning, rule

MOST_STARVED = 0.5
"""Share of the trained entries without gradient from which a run fails."""
LOST = 0.5
"""Share of the entries that a step leaves as they were from which the updates count as lost."""
_MOST_NAMED = 3


def named(sites: Iterable[str]) -> str:
    """The first sites, and the number of the others."""
    every = list(sites)
    more = f" and {len(every) - _MOST_NAMED} more" if len(every) > _MOST_NAMED else ""
    return ", ".join(every[:_MOST_NAMED]) + more


@rule(
    "NS704",
    summary="Trained weights get no gradient.",
    why="""A weight behind detach(), .data, torch.no_grad(), argmax or round, in a module that is never
        called, or beside factors that are all zero keeps its random start. The optimizer steps on, the
        loss falls by what the other weights learn, and nothing says that a part of the model is noise.
        Weight decay then shrinks it to zero.""",
    threshold=f"""Parameters whose gradient is missing or exactly zero on the fixed batch, in train mode
        on 3 more batches, and after tensors of zeros have left zero (ReZero, LoRA and zero output
        matrices are healthy). A warning where the loss changes when such a weight is replaced, and for a
        layer beside the blocks that is never called; an error from {MOST_STARVED:g} of the trained
        entries on; a note where the loss does not depend on it (a pooler or a head that is not used).""",
    source="""Exact: one backward, and forwards with other weights; PyTorch's documentation of autograd
        (detach and integer outputs end the graph).""",
    remedy="""Remove detach(), .data and no_grad() between the weight and the loss; replace argmax or
        round by a softmax or a straight-through estimate; call the layer, or leave it out of the model.""",
)
def no_gradient(case: Case) -> Iterator[Hit]:
    needed = case.finite("wiring/needed")
    rows = {
        row.site: row for row in case.table if row.quantity == "wiring/no-gradient" and row.site in needed
    }
    grave = [site for site, row in rows.items() if needed[site] or _beside_blocks(case, site, row.how)]
    unused = [site for site in rows if site not in grave]
    share = case.finite("wiring/needed-share").get("", 0.0)
    if grave:
        severity = Severity.ERROR if share >= MOST_STARVED else Severity.WARNING
        message = f"{len(grave)} trained parameters get no gradient: {named(grave)}."
        if share:
            message += f" The loss depends on them; they hold {figure(100 * share)} % of the trained entries."
        evidence = case.rows(grave, "wiring/no-gradient", "wiring/needed")
        yield Hit(severity, tuple(grave), message, evidence)
    if unused:
        message = f"{len(unused)} trained parameters are not used: {named(unused)}."
        yield Hit(Severity.NOTE, tuple(unused), message, case.rows(unused, "wiring/no-gradient"))


def _beside_blocks(case: Case, parameter: str, how: str) -> bool:
    """Whether a parameter belongs to a layer of the blocks' own list that is never called."""
    lists = {block.path.rpartition(".")[0] for block in case.anatomy.blocks if _is_numbered(block.path)}
    paths = tuple(f"{block.path}." for block in case.anatomy.blocks)
    inside = (parameter.removeprefix(f"{path}.") for path in lists if parameter.startswith(f"{path}."))
    in_list = any(part.split(".")[0].isdigit() for part in inside)
    return "never called" in how and in_list and not parameter.startswith(paths)


def _is_numbered(path: str) -> bool:
    return path.rpartition(".")[2].isdigit()


@rule(
    "NS705",
    summary="Branches have no trained weight, while others do.",
    why="""A frozen branch adds a fixed function. That is the purpose of fine-tuning with adapters or a
        new head, and a mistake where requires_grad=False was left behind or set by a name that matches
        too much: the model then trains with fewer layers than it has.""",
    threshold="""A branch whose matrices are all frozen while any parameter trains. A note where it looks
        like fine-tuning: parameters inside the frozen blocks train (adapters), all branches are frozen,
        or the frozen blocks are the lowest ones. A warning otherwise.""",
    source="""Exact; Hu et al. 2021 (LoRA), arXiv:2106.09685, and Howard and Ruder 2018, arXiv:1801.06146,
        on what fine-tuning freezes.""",
    remedy="""Print the names with requires_grad=False. To train them: for p in model.parameters():
        p.requires_grad_(True), before the optimizer is built.""",
)
def frozen(case: Case) -> Iterator[Hit]:
    shares = case.finite("wiring/frozen")
    whole = shares.get("")
    sites = [branch.site for branch in case.anatomy.branches if shares.get(branch.site) == 1.0]
    if whole is None or whole >= 1.0 or not sites:
        return
    count = len([site for site in shares if site])
    message = (
        f"{len(sites)} of {count} branches have no trained weight: {named(sites)}. "
        f"{figure(100 * whole)} % of all entries are frozen."
    )
    grave = not _looks_like_fine_tuning(case, set(sites))
    yield Hit(note_or_warning(grave), tuple(sites), message, case.rows(["", *sites], "wiring/frozen"))


def _looks_like_fine_tuning(case: Case, sites: set[str]) -> bool:
    if any(site for site in case.finite("wiring/adapted") if site in sites):
        return True
    if any(0 < share < 1 for site, share in case.finite("wiring/frozen").items() if site):
        return True  # small matrices beside the frozen ones of a branch
    for stack in case.anatomy.stacks:
        still = [all(branch.site in sites for branch in block.branches) for block in stack.blocks]
        some = [any(branch.site in sites for branch in block.branches) for block in stack.blocks]
        if some != still or still != sorted(still, reverse=True):
            return False
    return True


@rule(
    "NS706",
    summary="The optimizer does not hold the weights that train.",
    why="""An optimizer steps the tensors that it was given. If it is built before .to(), before tying or
        wrapping, or from a part of the model, weights get gradients that nothing applies; a weight held
        twice is stepped twice; tensors of another model are stepped in vain.""",
    threshold="""From the user's own optimizers only. A warning for trained parameters that no optimizer
        holds, unless the loss does not depend on them (a moving average of the model inside it), for
        parameters held twice, and for tensors that are no parameters of the model and that the
        loss does not train (a note where it is not known whether it does); an error where no trained
        parameter is held.""",
    source="""Exact, by identity; PyTorch's documentation of torch.optim (move the model before its
        optimizer is built).""",
    remedy="""Build the optimizer last: after .to(), tying, wrapping and adding adapters, from
        model.parameters() of the model that trains. A parameter that shall not train gets
        requires_grad=False.""",
)
def not_in_optimizer(case: Case) -> Iterator[Hit]:
    share = case.finite("wiring/held-share").get("")
    unused = {site for site, needed in case.finite("wiring/needed").items() if not needed}
    missing = [site for site in case.finite("wiring/not-held") if site not in unused]
    twice = case.finite("wiring/held-twice")
    foreign = case.finite("wiring/foreign").get("", 0.0)
    if missing:
        severity = Severity.ERROR if share == 0 else Severity.WARNING
        held = (
            "" if share is None else f" The optimizers hold {figure(100 * share)} % of the trainable entries."
        )
        message = f"{len(missing)} trainable parameters are in no optimizer: {named(missing)}.{held}"
        yield Hit(severity, tuple(missing), message, case.rows(missing, "wiring/not-held"))
    if twice:
        message = f"{len(twice)} parameters are held twice and stepped twice: {named(twice)}."
        yield Hit(Severity.WARNING, tuple(twice), message, case.rows(twice, "wiring/held-twice"))
    if foreign:
        rows = case.rows([""], "wiring/foreign")
        known = not any("; " in row.how for row in rows)
        message = f"{figure(foreign)} tensors in the optimizers are no parameters of the model"
        message += (
            ", and the loss does not train them."
            if known
            else "; nothing shows whether the loss trains them."
        )
        yield Hit(note_or_warning(known), (), message, rows)


@rule(
    "NS707",
    summary="Updates are lost: half-precision weights round back to what they were.",
    why="""bfloat16 has 8 significant bits: the numbers next to 1 are 0.0039 and 0.0078 away, and a
        smaller step than half of that rounds back to 1. Norm gains start at 1, so under Adam at 3e-4 they
        never move; a weight w needs a step of about w/512. The optimizer's moments are right, and the
        weights stand still.""",
    threshold=f"""A warning where one step at the full learning rate leaves at least {LOST:g} of all
        entries with a gradient as they were; a note where it does so in some tensors. Only for float16
        and bfloat16 weights; the step is taken on a copy.""",
    source="""IEEE 754 rounding, exact; Zamirai et al. 2020, arXiv:2010.06192 (training with 16-bit
        weights only); our own step.""",
    remedy="""Keep the weights in float32 and run under torch.autocast, or keep a float32 copy in the
        optimizer; or round stochastically, or sum the lost parts (Kahan).""",
)
def updates_lost(case: Case) -> Iterator[Hit]:
    shares = case.finite("wiring/update-lost")
    tensors = {site: share for site, share in shares.items() if site and share >= LOST}
    if not tensors:
        return
    whole = shares.get("", 0.0)
    worst = sorted(tensors, key=lambda site: -tensors[site])
    message = (
        f"A step leaves {figure(100 * whole)} % of the half-precision entries as they were. "
        f"{len(tensors)} tensors keep half or more, first {named(worst)}."
    )
    evidence = case.rows(["", *tensors], "wiring/update-lost")
    yield Hit(note_or_warning(whole >= LOST), tuple(worst), message, evidence)
