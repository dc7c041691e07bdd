"""How one token goes through matrix products: maps of its features, its logits, what it reads of the others.

Keys and values of the other tokens are those of the forward of the whole sequence. For its own, the token has
its slice; where a product needs all tokens at once, its slice takes its place among theirs.

    n rows, m contracted, p columns, H heads or other batch axes
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from normscope.probes._token_rules import OpCall, at_token
from normscope.probes._token_tape import Tape, Track, Unfollowed, joined

Operand = tuple[Tensor, Track | None]
"""A factor of the product, and what it has of the token."""


def product(op: OpCall) -> list[Track]:
    """mm and bmm."""
    a, b = (op.args["self"], op.args["mat2"])
    return [_product(op.tape, (a, op.track(a)), (b, op.track(b)))]


def product_and_sum(op: OpCall) -> list[Track]:
    """addmm and baddbmm: β·c + α·a b."""
    names = ("mat1", "mat2") if op.base == "addmm" else ("batch1", "batch2")
    a, b = (op.args[name] for name in names)
    c, added = op.args["self"], op.track(op.args["self"])
    alpha, beta = op.args.get("alpha", 1), op.args.get("beta", 1)
    if op.track(a) is None and op.track(b) is None:
        raise Unfollowed(f"{op.base} adds the token to a constant product")
    track = _product(op.tape, (a, op.track(a)), (b, op.track(b)))
    reached = track.reached
    other: Any
    if added is None:
        other = at_token(c, track, op.results[0].dim(), op.tape.token)
    elif (added.axis + op.results[0].dim() - c.dim(), added.width) != (track.axis, track.width):
        raise Unfollowed(f"{op.base} lets tokens meet one another")
    else:
        other, reached = added.slot, reached | added.reached
    slot = op.tape.call(
        lambda c, ab: (c if beta == 1 else beta * c) + (ab if alpha == 1 else alpha * ab), other, track.slot
    )
    return [replace(track, slot=slot, reached=reached)]


def _product(tape: Tape, a: Operand, b: Operand) -> Track:
    """Of (…, n, m) and (…, m, p), whichever way round the tokens are."""
    rule = _rule(a, b)
    if rule is not None:
        return rule(tape, a, b)
    a, b = _turned(tape, b), _turned(tape, a)
    rule = _rule(a, b)
    if rule is None:
        raise Unfollowed("a product mixes the tokens with weights that are not read from them")
    return _turned_track(tape, rule(tape, a, b), a[0].dim())


def _rule(a: Operand, b: Operand) -> Callable[[Tape, Operand, Operand], Track] | None:
    rows, columns = a[0].dim() - 2, a[0].dim() - 1
    if a[1] is None or a[1].axis != rows:
        together = a[1] is not None and b[1] is not None and a[1].axis == b[1].axis < rows
        return _each if together or _leads(a, b, rows) else None
    if b[1] is None:
        return _mapped if a[1].keys is None else _read_constant
    if b[1].axis == columns and b[1].keys is None and a[1].keys is None:
        return _logits
    return _read if b[1].axis == rows and a[1].keys == columns else None


def _leads(a: Operand, b: Operand, rows: int) -> bool:
    return any(x is not None and y is None and x.axis < rows for x, y in ((a[1], b[1]), (b[1], a[1])))


def _each(tape: Tape, a: Operand, b: Operand) -> Track:
    """Tokens count the products: each has its own."""
    track = a[1] or b[1]
    assert track is not None
    if track.keys is not None:
        raise Unfollowed("a product over heads of attention weights")
    slots = [own.slot if own else at_token(x, track, x.dim(), tape.token) for x, own in (a, b)]
    reached = joined(own.reached for _, own in (a, b) if own)
    return replace(track, slot=tape.call(torch.matmul, *slots), reached=reached)


def _mapped(tape: Tape, a: Operand, b: Operand) -> Track:
    """Features by a matrix, or queries by keys that the token does not reach."""
    track = _required(a)
    return replace(track, slot=tape.call(row_by_matrix, track.slot, b[0]))


def _read_constant(tape: Tape, a: Operand, b: Operand) -> Track:
    """Weights over tokens by values that do not depend on the token."""
    return replace(_mapped(tape, a, b), keys=None, keys_reached=None, zeros_cut=False)


def _logits(tape: Tape, a: Operand, b: Operand) -> Track:
    """The token's query by all keys: rows are over tokens from here on."""
    queries, keys = _single(a), _single(b)
    t, all_keys = tape.token, b[0]

    def logits(query: Tensor, key: Tensor) -> Tensor:
        row = row_by_matrix(query, all_keys)
        return torch.cat([row[..., :t], query @ key, row[..., t + 1 :]], -1)

    return Track(
        tape.call(logits, queries.slot, keys.slot),
        queries.axis,
        queries.reached,
        keys=a[0].dim() - 1,
        keys_reached=keys.reached,
    )


def _read(tape: Tape, a: Operand, b: Operand) -> Track:
    """The token's weights by all values. Other tokens that it reads must not have read it before."""
    weights, values = _single(a), _single(b)
    t, all_values = tape.token, b[0]
    read = _read_by_each(a[0], weights)
    assert weights.keys_reached is not None
    reached = weights.keys_reached | values.reached
    others = read[t] & reached
    others[t] = False
    if bool(others.any()):
        raise Unfollowed(
            f"the token reads {int(others.sum())} tokens that have read it in an earlier sublayer"
        )

    def sum_of_values(weight: Tensor, value: Tensor) -> Tensor:
        moved = value - all_values.narrow(-2, t, 1)
        return row_by_matrix(weight, all_values) + weight[..., t : t + 1] * moved

    return Track(
        tape.call(sum_of_values, weights.slot, values.slot),
        weights.axis,
        weights.reached | (read & reached).any(-1),
    )


def _read_by_each(weights: Tensor, track: Track) -> Tensor:
    """(T, S) bool: which tokens each token reads, by any head."""
    if not track.zeros_cut:
        return torch.ones(weights.shape[-2:], dtype=torch.bool, device=weights.device)
    return (weights != 0).flatten(0, -3).any(0) if weights.dim() > 2 else weights != 0


def row_by_matrix(row: Tensor, matrix: Tensor) -> Tensor:
    """(…, 1, m) by (…, m, p), head by head: a batched VJP of each is one matrix product, where that of bmm
    would copy the matrices for every cotangent."""
    if matrix.dim() == 2:
        return row @ matrix
    pairs = zip(row.flatten(0, -3), matrix.flatten(0, -3), strict=True)
    return torch.stack([a @ b for a, b in pairs]).unflatten(0, matrix.shape[:-2])


def _turned(tape: Tape, operand: Operand) -> Operand:
    tensor, track = operand
    return tensor.mT, None if track is None else _turned_track(tape, track, tensor.dim())


def _turned_track(tape: Tape, track: Track, ndim: int) -> Track:
    order = [*range(ndim - 2), ndim - 1, ndim - 2]
    return replace(track.moved(order.index), slot=tape.call(lambda x: x.mT, track.slot))


def _required(operand: Operand) -> Track:
    assert operand[1] is not None
    return operand[1]


def _single(operand: Operand) -> Track:
    track = _required(operand)
    if track.width != 1:
        raise Unfollowed("attention between streams that are folded into the tokens")
    return track


PRODUCTS = {"mm": product, "bmm": product, "addmm": product_and_sum, "baddbmm": product_and_sum}
