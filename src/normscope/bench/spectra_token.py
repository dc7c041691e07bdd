"""The part of `bench spectra` about one token: ∂(last token out)/∂(last token in) of GPT-2-small's stack."""

from typing import Any

import torch

from normscope.anatomy import measuring, read_anatomy
from normscope.bench.spectra_stack import MODEL, TOKENS, between, gpt2_stack
from normscope.linalg import JacobianOperator, singular_values
from normscope.probes._feeding import one_sequence
from normscope.probes._held import hold
from normscope.probes._one_token import OneToken
from normscope.subjects import load, untouched

NUM_ROWS = 4
"""Rows of the Jacobian that are compared with VJPs of the whole sequence."""


def token(model: str = MODEL, tokens: int = TOKENS) -> dict[str, Any]:
    """Its spectrum from nothing: reading where the blocks are is not timed, the held graph is."""
    subject = load(model, batch_size=1, seq_len=tokens)
    anatomy = read_anatomy(subject)
    found: list[tuple[OneToken, torch.Tensor]] = []

    def spectrum() -> None:
        feed = one_sequence(subject.model, subject.batch, anatomy)
        one = OneToken(subject.model, anatomy, feed, hold(subject.model, anatomy, feed, differences=False))
        jacobian = one.stack(anatomy.stacks[0])
        singular_values(jacobian)
        found.append((one, jacobian))

    with gpt2_stack(model, tokens) as (f, x):
        with untouched(subject.model), measuring(subject.model):
            spent = between(spectrum, f, x, 5)
        one, jacobian = found[0]
        d = len(jacobian)
        rows = torch.zeros(NUM_ROWS, x.numel())
        rows[range(NUM_ROWS), range(x.numel() - d, x.numel() - d + NUM_ROWS)] = 1
        expected = JacobianOperator(f, x).rmatmat(rows)[:, -d:]
    gap = float((jacobian[:NUM_ROWS] - expected).norm() / expected.norm())
    return {**spent, "d": d, "forwards": one.forwards, "gap": gap}
