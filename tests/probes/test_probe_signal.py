"""Tests of the signal probe against cases worked out by hand, and plain forward hooks in every placement."""

import dataclasses
import math

import pytest
import torch
from hand_read import ADD, PLACEMENTS, subject_of, toy
from torch import Tensor, nn

from normscope.anatomy import Anatomy, Block, Branch, Site, Stack
from normscope.probes import Measurements
from normscope.probes.signal import central_moments, diversity, measure_signal
from normscope.probes.token_axes import sequences

STREAM = torch.tensor([[[3.0, -1.0], [1.0, 1.0]]], dtype=torch.float64)  # B=1, T=2, d=2


class Add(nn.Module):
    """α·x + x W, the whole model one block of one branch."""

    def __init__(self, alpha: float = 1.0, weight: float = 1.0) -> None:
        super().__init__()
        self.alpha = alpha
        self.weight = nn.Parameter(weight * torch.eye(2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.add(x @ self.weight, x, alpha=self.alpha)


def add_anatomy(**changes: object) -> Anatomy:
    total, term, x = Site("", 0, ADD, 0), Site("", 0, ADD, 0, -1), Site("", 0, ADD, 0, -2)
    branch = Branch("other", "none", "none", "f", 0, "add", None, None, None, x, term, total)
    block = Block("block", 0, (dataclasses.replace(branch, **changes),), x, total)
    return Anatomy((Stack("encoder", (block,), None, total),))


def test_every_statistic_of_a_stream_worked_out_by_hand() -> None:
    rows = Measurements(measure_signal(subject_of(Add(), STREAM), add_anatomy()))
    # deviations from the mean 1 are 2, -2, 0, 0; tokens differ from their mean (2, 0) by ±(1, -1)
    expected = {"mean": 1, "rms": math.sqrt(3), "max": 3, "kurtosis": 8 / 2**2, "diversity": 4 / 12}
    for stat, value in expected.items():
        row = rows.find(f"stream/{stat}", "encoder.input")
        assert row is not None
        assert row.value == pytest.approx(value, rel=1e-14), stat
    assert rows.of("stream/rms") == pytest.approx(
        {"encoder.input": math.sqrt(3), "block": 2 * math.sqrt(3), "encoder.hidden": 2 * math.sqrt(3)}
    )
    assert rows.of("branch/rms") == pytest.approx({"f": math.sqrt(3)})
    assert rows.of("branch/update-ratio") == pytest.approx({"f": 1.0})


@pytest.mark.parametrize(("join", "scale"), [("scaled", 4.0), ("learnt", "learnt")])
def test_the_stream_that_is_added_to_counts_with_its_scale(join: str, scale: object) -> None:
    model, anatomy = Add(alpha=4.0, weight=0.5), add_anatomy(join=join, stream_scale=scale)
    rows = Measurements(measure_signal(subject_of(model, STREAM), anatomy))
    assert rows.of("branch/update-ratio") == pytest.approx({"f": 0.5 / 4})


def test_diversity_sees_tokens_that_differ_in_the_last_bit() -> None:
    tokens = torch.tensor([[1.0], [1.0 + 2.0**-50]], dtype=torch.float64)
    assert diversity(tokens) == pytest.approx(2.0**-102, rel=1e-10, abs=0)  # 2e-31
    thirds = torch.full((1000, 1), 1 / 3, dtype=torch.float64)
    thirds[0] += (
        2.0**-54
    )  # one unit in the last place, less than the error of the rounded mean of 1000 thirds
    assert diversity(thirds) == pytest.approx(2.0**-108 * 999 / 1000 / (1000 / 9), rel=1e-6, abs=0)  # 3e-35
    assert diversity(torch.full((7, 3), 0.1)) == 0.0
    assert diversity(torch.zeros(2, 3)) is None


def test_diversity_is_taken_within_sequences() -> None:
    constant_in_each = torch.tensor([1.0, -2.0]).reshape(2, 1, 1).expand(2, 5, 3)
    rows = Measurements(measure_signal(subject_of(nn.Identity(), constant_in_each), add_anatomy()))
    assert not rows.of("stream/diversity"), "no add ran"
    values = [diversity(sequence) for sequence in sequences(constant_in_each, (2, 5), 5)[0]]
    assert values == [0.0, 0.0]


def test_moments_against_a_dense_reference() -> None:
    x = torch.randn(3, 700, 400, dtype=torch.float64) + 5  # more than one piece
    second, fourth = central_moments(x)
    centred = x - x.mean()
    assert second == pytest.approx(float(centred.pow(2).mean()), rel=1e-12)
    assert fourth == pytest.approx(float(centred.pow(4).mean()), rel=1e-12)


B, T, D = 3, 8, 5
LAYOUTS = {
    "(B, T, d)": (lambda x: x, ((B, T), T)),
    "(B, T, d), no attention": (lambda x: x, ((B, T), None)),
    "(T, B, d)": (lambda x: x.transpose(0, 1), ((B, T), T)),
    "(T, B, d), fed so": (lambda x: x.transpose(0, 1), ((T, B), T)),
    "(T, B, d), no attention": (lambda x: x.transpose(0, 1), ((B, T), None)),
    "(B, H, W, d)": (lambda x: x.unflatten(1, (2, 4)), ((B, 3, 16, 16), 4)),
    "(B, T, d), windows as long as the batch": (lambda x: x, ((B, 3, 16, 16), B)),
    "(B·T, d)": (lambda x: x.flatten(0, 1), ((B, T), T)),
    "(B·T, d), no attention": (lambda x: x.flatten(0, 1), ((B, T), None)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_gives_the_same_sequences(name: str) -> None:
    lay_out, axes = LAYOUTS[name]
    x = torch.randn(B, T, D)
    found, remark = sequences(lay_out(x), *axes)
    assert torch.equal(found, x)
    assert (remark == "") == name.startswith("(B, T, d)")


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_values_are_those_of_plain_forward_hooks(placement: str) -> None:
    subject, anatomy = toy(placement)
    rows = Measurements(measure_signal(subject, anatomy))
    seen: dict[str, Tensor] = {}
    for name, module in subject.model.named_modules():
        module.register_forward_hook(lambda m, i, output, name=name: seen.update({name: output.detach()}))
    subject.model.eval()(subject.batch)
    streams = {
        "decoder.input": "embed",
        "blocks.0": "blocks.0",
        "blocks.1": "blocks.1",
        "decoder.hidden": "final",
    }
    for site, module in streams.items():
        x = seen[module]
        centred = x - x.mean(1, keepdim=True)
        share = (centred.pow(2).sum((1, 2)) / x.pow(2).sum((1, 2))).mean()
        kurtosis = (x - x.mean()).pow(4).mean() / x.var(correction=0) ** 2
        figures = {"mean": x.mean(), "rms": x.pow(2).mean().sqrt(), "max": x.abs().max()}
        figures |= {"kurtosis": kurtosis, "diversity": share}
        for stat, value in figures.items():
            row = rows.find(f"stream/{stat}", site)
            assert row is not None
            assert row.value == pytest.approx(float(value), rel=1e-12), (stat, site)
            assert row.how == "exact"
    stream = seen["embed"]
    for i, f in ((i, f) for i in range(2) for f in range(2)):
        name = f"blocks.{i}.{f}"
        term = seen[f"{name}.branch_out" if placement in ("res-post", "peri") else f"{name}.f"]
        ratio = term.norm() / stream.norm()
        assert rows.of("branch/rms")[f"{name}.f"] == pytest.approx(
            float(term.pow(2).mean().sqrt()), rel=1e-12
        )
        assert rows.of("branch/update-ratio")[f"{name}.f"] == pytest.approx(float(ratio), rel=1e-12)
        stream = seen[name]


def test_a_site_that_does_not_come_by_has_a_reason() -> None:
    subject, anatomy = toy()
    lost = dataclasses.replace(anatomy.stacks[0], hidden=Site("elsewhere", 0, ADD, 0))
    rows = Measurements(measure_signal(subject, Anatomy((lost,))))
    row = rows.find("stream/rms", "decoder.hidden")
    assert row is not None
    assert row.value is None
    assert "this forward did not run aten.add.Tensor number 0 of elsewhere" in row.how


def test_a_stream_of_nans_has_a_reason_and_the_blocks_before_it_have_figures() -> None:
    subject, anatomy = toy()
    with torch.no_grad():
        subject.model.blocks[1][0].f.o.weight[0, 0] = torch.nan
    rows = Measurements(measure_signal(subject, anatomy))
    assert set(rows.of("stream/rms")) == {"decoder.input", "blocks.0"}
    row = rows.find("stream/diversity", "blocks.1")
    assert row is not None
    assert "not finite" in row.how


def test_one_token_has_no_diversity() -> None:
    rows = Measurements(measure_signal(subject_of(Add(), STREAM[:, :1]), add_anatomy()))
    row = rows.find("stream/diversity", "block")
    assert row is not None
    assert row.how == "not measured: a sequence of one token has no diversity"


class Part(Add):
    """`Add` whose last norm, here −x, reads the first `count` tokens."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, : self.count].neg()


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_final_norm_of_a_part_of_the_tokens_leaves_the_diversity_of_all(count: int) -> None:
    x = torch.tensor([[[1.0, 2.0], [1.0, 2.0], [3.0, -1.0]]], dtype=torch.float64)  # two equal group tokens
    reading = add_anatomy()
    stack = dataclasses.replace(reading.stacks[0], hidden=Site("", 0, "aten.neg.default", 0))
    rows = Measurements(measure_signal(subject_of(Part(count), x), Anatomy((stack,))))
    kept = rows.find("stream/diversity", "encoder.hidden")
    assert kept is not None
    assert kept.value == pytest.approx(diversity(x[0]), rel=1e-12)
    assert ("reads" in kept.how) == (count < 3)
