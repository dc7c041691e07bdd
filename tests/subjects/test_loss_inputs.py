"""Targets that only the loss reads: a batch of the user's own that holds them, and what is said without."""

import pytest
import torch
from torch import Tensor, nn

from normscope import UsageError
from normscope.subjects import make_subject

X, Y = torch.randn(2, 6, 8), torch.randn(2, 6, 8)


def squares(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return (output - batch["loss inputs"]).square().mean()


def test_the_forward_does_not_get_them_and_the_loss_does() -> None:
    model = nn.Linear(8, 8)
    subject = make_subject(model, {"input": X, "loss inputs": Y}, squares)
    assert torch.equal(subject.forward(), model(X))
    assert torch.equal(subject.loss(subject.batch), (model(X) - Y).square().mean())


@pytest.mark.parametrize("batch", [(X, Y), {"input": X, "labels": Y}], ids=["tuple", "dict"])
def test_a_forward_that_does_not_take_them_is_told_where_they_stand(batch: object) -> None:
    with pytest.raises(UsageError, match='targets that only the loss reads under "loss inputs"'):
        make_subject(nn.Linear(8, 8), batch, squares)


def test_without_a_loss_nothing_is_said_of_targets() -> None:
    with pytest.raises(UsageError) as raised:
        make_subject(nn.Linear(8, 8), (X, Y))
    assert "loss inputs" not in str(raised.value)
