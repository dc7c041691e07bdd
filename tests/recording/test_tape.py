"""A recorded loss has the value and the gradient of the code that was recorded, on other outputs too."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normscope.recording.tape import Tape

B, T, V = 2, 5, 11
IDS = torch.randint(0, V, (B, T), generator=torch.Generator().manual_seed(1))
LABELS = IDS.roll(-1, 1).masked_fill(torch.arange(T) == T - 1, -100)


def model() -> nn.Module:
    return nn.Sequential(nn.Embedding(V, 8), nn.Linear(8, V))


def in_place(logits: Tensor) -> Tensor:
    scaled = logits * 2
    scaled[:, 0] = 0.0
    scaled += 1.0
    return F.cross_entropy(scaled.flatten(0, 1), LABELS.flatten(), ignore_index=-100)


def by_hand(logits: Tensor) -> Tensor:
    picked = logits.log_softmax(-1)[:, :-1].gather(-1, IDS[:, 1:, None]).squeeze(-1)
    keep = LABELS[:, :-1] != -100
    return -(picked * keep).sum() / keep.sum()


def summed_up(logits: Tensor) -> Tensor:
    total = torch.zeros(())
    for part in logits.unbind():
        total += part.logsumexp(-1).mean()
    return total / B


def with_a_refilled_buffer(logits: Tensor) -> Tensor:
    shift, total = torch.ones(T, V), logits.new_zeros(())
    for place in range(2):
        shift.zero_()[:, place] = 3.0
        total = total + (logits + shift).logsumexp(-1).mean()
    shift.zero_()
    return total


def in_place_by_keyword(logits: Tensor) -> Tensor:
    scaled = logits * 2
    return torch.relu_(input=scaled).square().mean()


def in_place_in_a_list(logits: Tensor) -> Tensor:
    shift, scaled = torch.ones(T, V), logits * 2
    before = (logits + shift).square().mean()
    torch._foreach_add_([scaled, shift], 1.0)
    return before + scaled.square().mean()


LOSSES = {
    "in place by keyword": in_place_by_keyword,
    "in place in a list": in_place_in_a_list,
    "summed up in place": summed_up,
    "a buffer that is refilled": with_a_refilled_buffer,
    "cross entropy": lambda z: F.cross_entropy(z.view(-1, V), LABELS.view(-1), ignore_index=-100),
    "module": lambda z: nn.CrossEntropyLoss(label_smoothing=0.1)(z[:, :-1].transpose(1, 2), IDS[:, 1:]),
    "by hand": by_hand,
    "in place": in_place,
    "two parts": lambda z: F.mse_loss(z.mean(-1), IDS.float()) + 0.1 * z.logsumexp(-1).square().mean(),
    "functions of tuples": lambda z: torch.stack([z.max(-1).values, z.min(-1).values]).square().mean(),
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_recorded_loss_is_the_loss(loss) -> None:
    first, other = model(), model()
    output = first(IDS)
    tape = Tape(output)
    tape.start()
    found = loss(output)
    assert tape.stop()
    recording = tape.recording(found)
    assert recording is not None
    assert recording.program.is_whole
    for each in (first, other, first):
        replayed, expected = recording.program(each(IDS), recording.given), loss(each(IDS))
        torch.testing.assert_close(replayed, expected)
        pairs = (torch.autograd.grad(value, list(each.parameters())) for value in (replayed, expected))
        for a, b in zip(*pairs, strict=True):
            torch.testing.assert_close(a, b)


def test_scalings_at_the_end_are_known_and_no_other_is_taken_for_one() -> None:
    output = model()(IDS)
    tape = Tape(output)
    tape.start()
    mean = LOSSES["cross entropy"](output) / 3
    scaled = torch.tensor(1024.0) * (mean / 4)
    tape.stop()
    recording = tape.recording(scaled)
    assert recording is not None
    assert [factor for _, factor in recording.scales] == pytest.approx([1024, 1 / 4, 1 / 3])
    assert float(recording.without([1 / 4, 1024.0]).value) == pytest.approx(mean.item())
    assert float(recording.without([1 / 4]).value) == pytest.approx(scaled.item()), "1024 came later"
    assert float(recording.without([1 / 4, 1024.0, 1 / 4]).value) == pytest.approx(mean.item())


def test_a_penalty_on_weights_is_kept_as_a_value_and_said() -> None:
    module = model()
    output = module(IDS)
    tape = Tape(output)
    tape.start()
    loss = LOSSES["cross entropy"](output) + sum(p.square().sum() for p in module.parameters())
    tape.stop()
    recording = tape.recording(loss)
    assert recording is not None
    assert not recording.program.is_whole
    torch.testing.assert_close(recording.program(module(IDS), recording.given), loss)


def test_a_loss_of_something_else_is_not_recorded() -> None:
    output = model()(IDS)
    tape = Tape(output)
    tape.start()
    other, vector = (torch.ones(3, requires_grad=True) * 2).sum(), output.sum(-1)
    tape.stop()
    assert tape.recording(other) is None
    assert tape.recording(vector) is None


def test_a_scaling_in_place_is_undone() -> None:
    first, other = model(), model()
    output = first(IDS)
    tape = Tape(output)
    tape.start()
    loss = LOSSES["cross entropy"](output)
    before = loss.item()
    loss /= 4
    loss *= 1024
    tape.stop()
    recording = tape.recording(loss)
    assert recording is not None
    whole = recording.without([1 / 4, 1024.0])
    assert float(whole.value) == pytest.approx(before)
    torch.testing.assert_close(whole.program(first(IDS), whole.given).item(), before)
    expected = LOSSES["cross entropy"](other(IDS))
    torch.testing.assert_close(whole.program(other(IDS), whole.given), expected)


def test_a_multiplied_recording_has_multiplied_values() -> None:
    module = model()
    output = module(IDS)
    tape = Tape(output)
    tape.start()
    mean = LOSSES["cross entropy"](output)
    loss = mean / 4
    tape.stop()
    recording = tape.recording(loss)
    assert recording is not None
    for twice in (recording.times(2.0), recording.times(4.0).times(0.5)):
        assert twice.value.item() == pytest.approx(2 * loss.item())
        assert twice.without([1 / 4]).value.item() == pytest.approx(2 * mean.item())
        torch.testing.assert_close(twice.program(module(IDS), twice.given).item(), twice.value.item())
