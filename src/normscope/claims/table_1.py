"""Table 1 of 000, cell by cell.

Shapes: B batch, T tokens, D width.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from normscope.claims import real_blocks
from normscope.claims.experiments import ROUND_OFF, distance, gaussian, jacobian
from normscope.claims.form import Case, Evidence, Figure, Setup, claim
from normscope.claims.one_layer import residual
from normscope.claims.real_blocks import INITS, Layer
from normscope.linalg import left_kernel, numerical_rank, singular_values


@claim("A12")
def table_1(setup: Setup) -> Evidence:
    """Each cell of the table, a case each."""
    rows = setup.cases(_table_cases)
    kept = [case for case in rows if case.part != "unconditional"]
    whole = [replace(case, part="", where=f"{case.part}: {case.where}") for case in kept]
    ranks = [case for case in rows if case.part == "rank" and not case.within]
    full = sum(case.holds for case in ranks)
    return Evidence(
        [*whole, *rows],
        Figure.share("% of the table's cells that are right", whole),
        notes=[f"Of {len(ranks)} Pre-LN Jacobians with ‖A‖ ≥ 1, {full} have full rank all the same."],
    )


def _table_cases(seed: int) -> Iterator[Case]:
    for width in (16, 64):
        for init, words in INITS.items():
            for scheme, column in (("post", "Post-LN"), ("pre", "Pre-LN")):
                model, ids = real_blocks.started(scheme, init=init, depth=4, width=width, seed=seed, eps=0)
                found = real_blocks.sublayers(model, ids)
                for each in (*found[:2], *found[-2:]):
                    where = f"{column}, {words}, d = {width}, {each.name}"
                    yield from _rows(each, seed, where)
        yield from _rows(_cancelling(width, seed), seed, f"Pre-LN, F(u) = −σ(x) u, d = {width}")


def _cancelling(width: int, seed: int) -> Layer:
    """A Pre-LN sublayer whose F takes away what it is given, at this one x."""
    x = gaussian(seed, 1, width, width)[:, :1]
    sigma = x.std(correction=0)
    return Layer("feed-forward", x, lambda u: -sigma * u, residual("pre", width, eps=0))


def _rows(layer: Layer, seed: int, where: str) -> Iterator[Case]:
    """The five rows of one column."""
    whole, width = real_blocks.step_jacobian(layer), layer.x.shape[-1]
    post = where.startswith("Post-LN")
    form, bare, norm = _post_form(layer) if post else _pre_form(layer)
    met = post or norm < 1
    identity_path = jacobian(*real_blocks.at_last_token(partial(layer, cut=True), layer.x))
    yield Case.at_most(seed, where, distance(form, whole), ROUND_OFF, "form")
    yield Case.at_most(seed, where, distance(identity_path, bare), ROUND_OFF, "identity")
    values = singular_values(whole)
    rank = numerical_rank(values, 1e-12)[0]
    yield Case(seed, where, rank, rank <= width - 2 if post else rank == width, "rank", within=met)
    yield Case(seed, where, width - rank, rank <= width - 2 if post else rank == width, "kernel", within=met)
    if post:
        basis = left_kernel(layer(layer.x)[0, -1].detach(), None, centred=True)[0]
        passed = float((whole.T @ basis).norm(dim=0).max()) / float(values[0])
        erased = passed <= ROUND_OFF and bool((basis.norm(dim=0) > 0.5).all())
        yield Case(seed, where, passed, erased, "erased")
    else:
        full = bool(values[-1] > 1e-12 * values[0])
        yield Case(seed, where, float(values[-1]), full, "erased", within=met)
        yield Case(seed, where, float(values[-1]), full, "unconditional")


def _post_form(layer: Layer) -> tuple[Tensor, Tensor, float]:
    """J_LN(z)(I + J_F), J_LN(z), and ‖J_F‖."""
    of_branch, of_norm = real_blocks.plain_branch_jacobian(layer), layer.norm_jacobians(layer.joined)[-1]
    form = of_norm @ (torch.eye(len(of_norm), dtype=real_blocks.F64) + of_branch)
    return form, of_norm, float(torch.linalg.matrix_norm(of_branch, 2))


def _pre_form(layer: Layer) -> tuple[Tensor, Tensor, float]:
    """I + J_F J_LN(x), I, and ‖A‖."""
    a = real_blocks.branch_jacobian(layer)
    eye = torch.eye(len(a), dtype=real_blocks.F64)
    return eye + a, eye, float(torch.linalg.matrix_norm(a, 2))
