"""Pre-LN unrolled: the sum of its branches, the gradient's path along the identity, and 002's recursions.

Shapes: T tokens, D width, L layers (sublayers).
"""

import itertools
from collections.abc import Iterator, Sequence
from functools import partial, reduce

import torch
from torch import Tensor
from torch.nn import functional

from normscope.claims import real_blocks
from normscope.claims.experiments import distance, gaussian, jacobian, spread
from normscope.claims.form import Case, Evidence, Figure, Setup, claim, lines_at, plots
from normscope.claims.real_blocks import Layer, product, started, walk
from normscope.nn import Decoder

ROUND_OFF = {torch.float64: 1e-12, torch.float32: 1e-4}
"""Relative error that the precision explains, over up to 128 additions."""


@claim("B1")
def unrolled_sum(setup: Setup) -> Evidence:
    """The blocks' last state against the sum of their branches."""
    grid = itertools.product(setup.seeds, ("xavier", "normal", "gpt2"), (1, 8, 64), ROUND_OFF)
    cases = [_sum_case(init, depth, dtype, seed) for seed, init, depth, dtype in grid]
    in_double = [case for case in cases if "float64" in case.where]
    return Evidence(cases, Figure.largest("largest relative error, float64", in_double))


def _sum_case(init: str, depth: int, dtype: torch.dtype, seed: int) -> Case:
    model, ids = started("pre", init=init, depth=depth, width=32, seed=seed, dtype=dtype)
    start = real_blocks.embedded(model, ids)
    layers, end = walk(model, start)
    total = start
    with torch.no_grad():
        for layer in layers:
            total = total + _normed(layer, total)
    error = distance(total, end)
    where = f"{init}, {depth} blocks, {str(dtype).removeprefix('torch.')}"
    return Case(seed, where, error, error <= ROUND_OFF[dtype])


DEPTHS = (1, 4, 16, 64)


@claim("B2")
def identity_path(setup: Setup) -> Evidence:
    """The gradient split into the identity path and the branches."""
    cases: list[Case] = []
    shares: list[tuple[str, float, float]] = []
    lasts: dict[int, float] = {}
    for seed, depth in itertools.product(setup.seeds, DEPTHS):
        whole, _ = _pre_cases(depth, True, seed)
        found, lasts[seed] = _pre_cases(depth, False, seed)
        case, share_of_post = _post_case(depth, seed)
        cases += [*whole, *found, case]
        shares += [("Pre-LN", depth, lasts[seed]), ("Post-LN", depth, share_of_post)]
    return Evidence(
        cases,
        Figure(f"‖identity path‖ / ‖gradient at x_0‖, Pre-LN, {DEPTHS[-1]} blocks", lasts),
        plots=plots("B2", lines_at(shares)),
    )


def _gradients(model: Decoder, start: Tensor, cut: bool) -> list[Tensor]:
    """Gradients of a random linear loss of what the head reads: there, at the last block's output and at each
    layer's input from the last to the first (T, D); `cut` lets nothing back through the branches.
    """
    layers = walk(model, start)[0]
    states = [start.clone().requires_grad_()]
    for layer in layers:
        states.append(layer(states[-1], cut=cut))
    read = model.final_norm(states[-1])
    weight = gaussian(1, *read.shape)
    found = torch.autograd.grad((read * weight).sum(), states)
    return [weight[0], *(gradient[0] for gradient in reversed(found))]


def _pre_cases(depth: int, final: bool, seed: int) -> tuple[list[Case], float]:
    model, ids = started("pre", init="xavier", depth=depth, width=32, seed=seed, final_norm=final)
    start = real_blocks.embedded(model, ids)
    read, end, *_, cut = _gradients(model, start, cut=True)
    whole = _gradients(model, start, cut=False)
    where = f"{depth} blocks, {'its final norm' if final else 'no final norm'}"
    errors = {"": distance(cut, end)} | ({"head": distance(cut, read)} if final else {})
    branches = reduce(torch.add, _through_branches(walk(model, start)[0], whole[1:]))
    errors["sum"] = distance(cut + branches, whole[-1])
    cases = [Case(seed, where, error, error <= 1e-12, part) for part, error in errors.items()]
    return cases, float(cut.norm() / whole[-1].norm())


def _through_branches(layers: Sequence[Layer], gradients: Sequence[Tensor]) -> Iterator[Tensor]:
    """The part that each branch adds to the gradient (T, D): (J_F J_LN)ᵀ of the gradient after its layer."""
    for layer, gradient in zip(reversed(layers), gradients, strict=False):
        x = layer.x.clone().requires_grad_()
        y = _normed(layer, x)
        yield torch.autograd.grad(y, x, gradient[None])[0][0]


def _post_case(depth: int, seed: int) -> tuple[Case, float]:
    model, ids = started("post", init="xavier", depth=depth, width=32, seed=seed)
    start = real_blocks.embedded(model, ids)
    expected = _gradients(model, start, cut=True)
    path = expected[1]
    for layer in reversed(walk(model, start)[0]):
        path = (layer.norm_jacobians(layer.joined).mT @ path[..., None])[..., 0]
    error = distance(path, expected[-1])
    share = float(expected[-1].norm() / _gradients(model, start, cut=False)[-1].norm())
    where = f"Post-LN, {depth} blocks"
    return Case(seed, where, error, error <= 1e-10, "post"), share


@claim("B9")
def printed_recursions(setup: Setup) -> Evidence:
    """Both forms against autograd of the stack."""
    cases = setup.cases(_recursion_cases)
    first = [case.value for case in cases if not case.part and case.at["above"] != 1]
    return Evidence(
        cases,
        Figure.largest("largest relative error of the first form", cases),
        notes=[
            f"With more than one layer above, the first form is off by {spread(first, '.3g')} of the matrix."
        ],
    )


def _recursion_cases(seed: int) -> Iterator[Case]:
    eye = torch.eye(16, dtype=torch.float64)
    for depth in (1, 4, 16):
        layers = _layers("post", depth, seed)
        plain = [eye + real_blocks.plain_branch_jacobian(layer) for layer in layers]
        norms = [layer.norm_jacobians(layer.joined)[0] for layer in layers]
        for first in sorted({0, depth, 2 * depth - 1}):
            both = [norm @ step for norm, step in zip(norms[first:], plain[first:], strict=True)]
            once = norms[first] @ product(plain[first:])
            forms = {
                "": product([both[0], *plain[first + 1 :]]),
                "letter": product([once, *both[1:]]),
                "second": product(both),
                "order": product(both[::-1]),
            }
            where = f"layer {first + 1} of {len(layers)}"
            for part, form in forms.items():
                yield _form_case(form, layers[first:], seed, where, part)
        layers = _layers("pre", depth, seed)
        factors = [eye + jacobian(partial(_normed, layer), layer.x) for layer in layers]
        yield _form_case(product(factors), layers, seed, f"Pre-LN, {len(layers)} layers", "pre")


def _form_case(form: Tensor, layers: Sequence[Layer], seed: int, where: str, part: str) -> Case:
    """The form against autograd of all layers at once."""
    whole = jacobian(lambda x: reduce(lambda state, layer: layer(state), layers, x), layers[0].x)
    return Case.at_most(seed, where, distance(form, whole), 1e-10, part, at={"above": len(layers)})


def _layers(scheme: str, depth: int, seed: int) -> list[Layer]:
    """The layers of a stack that one token goes through by itself."""
    model, _ = started(scheme, init="xavier", depth=depth, width=16, seed=seed)
    return real_blocks.one_token(model, 16, seed)[0]


def _normed(layer: Layer, x_BTD: Tensor) -> Tensor:
    """F(LN(x))."""
    return layer.apply(functional.layer_norm(x_BTD, x_BTD.shape[-1:], eps=1e-5))
