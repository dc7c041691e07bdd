"""Batch norms that have seen no batch are measured with the statistics of the fixed one."""

import torch
from torch import Tensor, nn

from normscope import check
from normscope.anatomy import measuring
from normscope.probes import settled_batch_norms
from normscope.subjects import Subject, make_subject

CHANNELS, DEPTH = 8, 6


class Block(nn.Module):
    """x + BatchNorm(conv(x)), with weights so small that only the norm keeps the branch alive."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1), nn.BatchNorm2d(CHANNELS)
        nn.init.normal_(self.conv.weight, std=3e-2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.conv(x))


class Net(nn.Module):
    """A convolution, six blocks, a norm, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, CHANNELS, 3, padding=1)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.end = nn.BatchNorm2d(CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.end(x)


def subject(size: int = 8) -> Subject:
    torch.manual_seed(0)
    return make_subject(Net(), torch.randn(4, 3, size, size))


def test_each_norm_normalises_within_the_block_and_is_restored() -> None:
    given = subject()
    before = {name: value.clone() for name, value in given.model.state_dict().items()}
    outputs: list[Tensor] = []
    norms = [m for m in given.model.modules() if isinstance(m, nn.BatchNorm2d)]
    with settled_batch_norms(given) as number, measuring(given.model), torch.no_grad():
        assert number == DEPTH + 1
        hooks = [m.register_forward_hook(lambda m, i, output: outputs.append(output)) for m in norms]
        given.forward()
        for hook in hooks:
            hook.remove()
    for output in outputs:
        torch.testing.assert_close(
            output.var((0, 2, 3), correction=0), torch.ones(CHANNELS), rtol=1e-2, atol=0
        )
        assert output.mean((0, 2, 3)).abs().max() < 1e-4
    after = given.model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_norm_that_has_seen_a_batch_is_left_alone() -> None:
    given = subject()
    given.model.train()
    given.forward()
    kept = [m.running_var.clone() for m in given.model.modules() if isinstance(m, nn.BatchNorm2d)]
    with settled_batch_norms(given) as number:
        assert number == 0
        now = [m.running_var for m in given.model.modules() if isinstance(m, nn.BatchNorm2d)]
        assert all(map(torch.equal, kept, now))


def test_one_value_a_channel_has_no_variance() -> None:
    torch.manual_seed(0)
    given = make_subject(Net(), torch.randn(1, 3, 1, 1))
    with settled_batch_norms(given) as number:
        assert number == 0


def test_a_check_measures_the_branches_as_training_sees_them() -> None:
    report = check(subject(), steps=0, budget="fast")
    ratios = [m.value for m in report.measurements if m.quantity == "branch/rms"]
    assert len(ratios) == DEPTH
    assert min(float(value) for value in ratios if value is not None) > 0.9
    assert any("BatchNorms that have seen no batch" in note for note in report.notes)
