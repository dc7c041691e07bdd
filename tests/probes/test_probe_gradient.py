"""Tests of the gradient probe against plain autograd, dense left kernels and cases worked out by hand."""

import dataclasses
import math
from typing import Any

import pytest
import torch
from hand_read import ADD, EPS, PLACEMENTS, WIDTH, linear, next_token_loss, norm_of, subject_of, toy
from torch import Tensor, nn

from normscope.anatomy import Anatomy, Block, Branch, Norm, Projection, Site, Stack
from normscope.probes import Measurements
from normscope.probes.gradient import measure_gradient


def measured(subject: Any, anatomy: Anatomy) -> Measurements:
    return Measurements(measure_gradient(subject, anatomy))


def rms(tensor: Tensor) -> float:
    return float(tensor.pow(2).mean().sqrt())


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_values_are_those_of_plain_autograd(placement: str) -> None:
    subject, anatomy = toy(placement)
    rows, model = measured(subject, anatomy), subject.model
    streams: dict[str, Tensor] = {}
    for site, module in (
        ("decoder.input", model.embed),
        ("blocks.0", model.blocks[0]),
        ("blocks.1", model.blocks[1]),
    ):
        module.register_forward_hook(lambda m, i, output, site=site: streams.update({site: output}))
    loss = subject.loss()
    found = torch.autograd.grad(loss, [*model.parameters(), *streams.values()])
    of = dict(zip([*(name for name, _ in model.named_parameters()), *streams], found, strict=True))
    assert rows.of("gradient/stream") == pytest.approx({site: float(of[site].norm()) for site in streams})
    blocks = {
        f"blocks.{i}": [g for name, g in of.items() if name.startswith(f"blocks.{i}.")] for i in range(2)
    }
    assert rows.of("gradient/block") == pytest.approx(
        {site: math.sqrt(sum(float(g.pow(2).sum()) for g in grads)) for site, grads in blocks.items()}
    )
    total = math.sqrt(sum(float(of[name].pow(2).sum()) for name, _ in model.named_parameters()))
    assert rows.of("gradient/total") == pytest.approx({"": total})
    for i in range(2):
        v, q, k = of[f"blocks.{i}.0.f.vqk.weight"].chunk(3)
        kinds = {"q": q, "k": k, "v": v, "o": of[f"blocks.{i}.0.f.o.weight"]}
        for role, gradient in kinds.items():
            assert rows.of(f"gradient/{role}")[f"blocks.{i}.0.f"] == pytest.approx(rms(gradient)), role
        for role in ("up", "down"):
            gradient = of[f"blocks.{i}.1.f.{role}.weight"]
            assert rows.of(f"gradient/{role}")[f"blocks.{i}.1.f"] == pytest.approx(rms(gradient))
    assert set(rows.of("branch/trainable").values()) == {1.0}
    assert set(rows.of("branch/zero-output").values()) == {0.0}
    assert {row.how for row in rows} == {"exact"}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_erased_is_the_share_in_the_dense_left_kernel(placement: str) -> None:
    subject, anatomy = toy(placement)
    rows, model = measured(subject, anatomy), subject.model
    norms = {name: m for name, m in model.named_modules() if isinstance(m, nn.LayerNorm)}
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    for name, module in norms.items():
        module.register_forward_hook(lambda m, i, output, name=name: seen.update({name: (i[0], output)}))
    gradients = torch.autograd.grad(subject.loss(), [output for _, output in seen.values()])
    erased = {}
    for (name, (x, _)), gradient in zip(seen.items(), gradients, strict=True):
        inside = 0.0
        for token, g in zip(x.detach().reshape(-1, WIDTH), gradient.reshape(-1, WIDTH), strict=True):
            jacobian = torch.autograd.functional.jacobian(norms[name], token)
            left, values, _ = torch.linalg.svd(jacobian)
            kernel = left[:, values < 1e-3 * values[0]]
            assert kernel.shape[1] == 2
            inside += float((kernel.T @ g).pow(2).sum())
        erased[name] = inside / float(gradient.pow(2).sum())
    assert rows.of("gradient/erased") == pytest.approx(
        erased, rel=1e-4
    )  # ε leaves 1e-5 of the second direction


class Branches(nn.Module):
    """x + gain · relu(x U) D, the stream written over the term or not."""

    def __init__(self, in_place: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gain = nn.Parameter(torch.ones(()))
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        term = self.gain * self.down(self.up(x).relu())
        if self.in_place:
            term += x
            return term
        return term + x


class Deep(nn.Module):
    def __init__(self, in_place: bool = False, shared: bool = False) -> None:
        super().__init__()
        self.inlet = nn.Linear(WIDTH, WIDTH, bias=False)
        first = Branches(in_place)
        self.blocks = nn.ModuleList([first] if shared else [first, Branches(in_place)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for block in [*self.blocks, *self.blocks][:2]:
            x = block(x)
        return x


def deep_anatomy(op: str = ADD, shared: bool = False) -> Anatomy:
    blocks = []
    for i in range(2):
        path, call = ("blocks.0", i) if shared else (f"blocks.{i}", 0)
        entry, term, total = Site(path, call, op, 0, -2), Site(path, call, op, 0, -1), Site(path, call, op, 0)
        made = tuple(
            dataclasses.replace(p, output=dataclasses.replace(p.output, call=call))
            for p in (linear(f"{path}.up", "up"), linear(f"{path}.down", "down"))
        )
        branch = Branch(
            "feed-forward", "none", "none", f"{path}.f", call, "add", None, None, None, entry, term, total
        )
        blocks.append(Block(path, call, (dataclasses.replace(branch, projections=made),), entry, total))
    return Anatomy((Stack("encoder", tuple(blocks), None, blocks[-1].exit),))


def summed(output: Tensor, batch: Any) -> Tensor:
    return output.sum()


def test_a_stream_written_in_place_has_the_same_gradients() -> None:
    models = {in_place: Deep(in_place) for in_place in (False, True)}
    models[True].load_state_dict(models[False].state_dict())
    x = torch.randn(2, 3, WIDTH)
    plain, in_place = (
        measured(subject_of(models[flag], x, summed), deep_anatomy("aten.add_.Tensor" if flag else ADD))
        for flag in (False, True)
    )
    assert [row.to_dict() for row in plain] == [row.to_dict() for row in in_place]
    exit_gradient = plain.of("gradient/stream")["blocks.1"]
    assert exit_gradient == pytest.approx(math.sqrt(x.numel()))  # the loss is the sum


class Normed(nn.Module):
    """norm(x W) + x, the sum written over the norm's output or not."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.f, self.norm = nn.Linear(WIDTH, WIDTH, bias=False), nn.LayerNorm(WIDTH, eps=EPS)
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        term = self.norm(self.f(x))
        return (term.add_(x) if self.in_place else term + x).sin()


def test_a_norm_whose_output_is_overwritten_has_the_same_gradient() -> None:
    rows = []
    for in_place, op in ((False, ADD), (True, "aten.add_.Tensor")):
        torch.manual_seed(0)
        model, x = Normed(in_place), torch.randn(2, 3, WIDTH)
        entry, term, total = Site("", 0, op, 0, -2), Site("", 0, op, 0, -1), Site("", 0, op, 0)
        branch = Branch("other", "res-post", "layernorm", "f", 0, "add", None, None, None, entry, term, total)
        branch = dataclasses.replace(branch, norms=(norm_of("norm"),))
        anatomy = Anatomy((Stack("s", (Block("", 0, (branch,), entry, total),), None, total),))
        rows.append(measured(subject_of(model, x, summed), anatomy))
    assert rows[0].of("gradient/erased")["norm"] > 0
    assert [row.to_dict() for row in rows[0]] == [row.to_dict() for row in rows[1]]


class Scaled(nn.Module):
    """x + ScaleNorm(x W): one gain for all features."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.f, self.gain = nn.Linear(WIDTH, WIDTH, bias=False), nn.Parameter(torch.tensor(gain))

    def forward(self, x: Tensor) -> Tensor:
        y = self.f(x)
        return x + self.gain * (y / y.norm(dim=-1, keepdim=True))


@pytest.mark.parametrize("gain", [3.0, 0.0])
def test_scalenorm_erases_one_direction_and_with_a_gain_of_zero_everything(gain: float) -> None:
    model, x = Scaled(gain).double(), torch.randn(2, 3, WIDTH, dtype=torch.float64)
    entry, term, total = (Site("", 0, ADD, 0, output) for output in (-1, -2, 0))
    entering = Site("", 0, "aten.linalg_vector_norm.default", 0, -1)
    norm = Norm("l2norm", "", entering, Site("", 0, "aten.mul.Tensor", 0), 0.0, "gain")
    branch = Branch("other", "res-post", "l2norm", "f", 0, "add", None, None, None, entry, term, total)
    branch = dataclasses.replace(branch, norms=(norm,))
    anatomy = Anatomy((Stack("s", (Block("", 0, (branch,), entry, total),), None, total),))
    rows = measured(subject_of(model, x, summed), anatomy)
    unit = torch.nn.functional.normalize(model.f(x), dim=-1)  # ∂loss/∂y is a vector of ones
    expected = float(unit.detach().sum(-1).square().mean()) / WIDTH if gain else 1.0
    assert rows.of("gradient/erased") == pytest.approx({"": expected})


class Overwriting(nn.Module):
    """x += f(x) twice, f in another precision: what it keeps for the backward is not overwritten."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = 2 * x
        for f in (self.first, self.second):
            x += f(x.double()).float()
        return x


def test_a_dead_branch_behind_a_live_one_is_dead_where_the_stream_is_written_in_place() -> None:
    model, x = Overwriting(), torch.randn(2, 3, WIDTH)
    model.double()
    nn.init.zeros_(model.second.weight).requires_grad_(False)
    branches = []
    for i, path in enumerate(("first", "second")):
        entry, term, total = (Site("", 0, "aten.add_.Tensor", i, output) for output in (-1, -2, 0))
        branches.append(Branch("other", "none", "none", path, 0, "add", None, None, None, entry, term, total))
    stack = Stack("s", (Block("", 0, tuple(branches), branches[0].entry, total),), None, total)
    rows = measured(subject_of(model, x, summed), Anatomy((stack,)))
    assert rows.of("branch/trainable") == {"first": 1.0}
    assert "no parameter of the branch is trained" in rows.find("branch/trainable", "second").how


def test_a_dead_branch_beside_a_live_one_is_dead() -> None:
    subject, anatomy = toy()
    for weight in subject.model.blocks[0][1].f.parameters():
        nn.init.zeros_(weight)
    rows = measured(subject, anatomy)
    dead = {site for site, value in rows.of("branch/trainable").items() if value == 0}
    assert dead == {"blocks.0.1.f"}
    assert rows.of("branch/zero-output")["blocks.0.1.f"] == 1.0


@pytest.mark.parametrize(
    ("up", "down", "gain", "zero_output", "trainable"),
    [
        (1, 1, 1, 0.0, 1.0),
        (1, 0, 1, 1.0, 1.0),  # a zero initialisation that learns: W_down gets a gradient
        (1, 1, 0, 1.0, 1.0),  # ReZero: the gain gets one
        (0, 0, 1, 1.0, 0.0),  # dead
        (1, 0, 0, 1.0, 0.0),  # dead
        (0, 1, 1, 1.0, 0.0),  # relu'(0) = 0: dead
    ],
)
def test_dead_and_zero_branches(up: int, down: int, gain: int, zero_output: float, trainable: float) -> None:
    model = Deep()
    with torch.no_grad():
        for tensor, factor in ((model.blocks[0].up.weight, up), (model.blocks[0].down.weight, down)):
            tensor.mul_(factor)
        model.blocks[0].gain.mul_(gain)
    rows = measured(subject_of(model, torch.randn(2, 3, WIDTH), summed), deep_anatomy())
    assert rows.of("branch/zero-output") == {"blocks.0.f": zero_output, "blocks.1.f": 0.0}
    assert rows.of("branch/trainable") == {"blocks.0.f": trainable, "blocks.1.f": 1.0}


class TwoExperts(Branches):
    """x + relu(x U) D + x D₂."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()) + self.other(x) + x


@pytest.mark.parametrize(("zeros", "zero_output"), [(("down",), 0.0), (("down", "other"), 1.0)])
def test_one_expert_that_adds_zero_is_no_zero_branch(zeros: tuple[str, ...], zero_output: float) -> None:
    model = Deep()
    model.blocks[0] = TwoExperts()
    for name in zeros:
        nn.init.zeros_(getattr(model.blocks[0], name).weight)
    first, second = deep_anatomy().blocks
    path = first.path
    entry, term, total = Site(path, 0, ADD, 1, -1), Site(path, 0, ADD, 1, -2), Site(path, 0, ADD, 1)
    projections = (linear(f"{path}.down", "down"), linear(f"{path}.other", "down"))
    branch = dataclasses.replace(
        first.branches[0], entry=entry, output=term, sum=total, projections=projections
    )
    blocks = (Block(path, 0, (branch,), entry, total), second)
    rows = measured(
        subject_of(model, torch.randn(2, 3, WIDTH), summed), Anatomy((Stack("s", blocks, None, second.exit),))
    )
    assert rows.of("branch/zero-output") == {"blocks.0.f": zero_output, "blocks.1.f": 0.0}


def test_shared_weights_are_named_as_shared() -> None:
    model, x = Deep(shared=True), torch.randn(2, 3, WIDTH)
    rows = measured(subject_of(model, x, summed), deep_anatomy(shared=True))
    model(x).sum().backward()
    value = math.sqrt(sum(float(p.grad.pow(2).sum()) for p in model.blocks.parameters()))
    assert rows.of("gradient/block") == pytest.approx({"blocks.0": value, "blocks.0@1": value}, rel=1e-6)
    assert {
        row.how for row in rows if row.quantity in ("gradient/block", "gradient/up", "gradient/down")
    } == {"exact; summed over the 2 calls that share these weights"}
    assert len(set(rows.of("gradient/stream").values())) == 3


def test_without_a_loss_a_random_functional_says_so() -> None:
    subject, anatomy = toy()
    subject.loss_fn = None
    rows = measured(subject, anatomy)
    generator = torch.Generator().manual_seed(subject.seed)
    output = subject.model.eval()(subject.batch)
    weights = torch.randn(output.shape, generator=generator, dtype=torch.float64)
    ((output * weights).sum() / math.sqrt(output.numel())).backward()
    total = math.sqrt(sum(float(p.grad.pow(2).sum()) for p in subject.model.parameters()))
    row = rows.find("gradient/total")
    assert row is not None
    assert row.value == pytest.approx(total)
    assert row.how == "exact, of a random linear functional of the output in place of a loss"


def test_frozen_parameters_count_only_where_everything_is_frozen() -> None:
    subject, anatomy = toy()
    everything = measured(subject, anatomy).of("gradient/block")
    for parameter in subject.model.blocks[0].parameters():
        parameter.requires_grad_(False)
    rows = measured(subject, anatomy)
    row = rows.find("gradient/block", "blocks.0")
    assert row is not None
    assert row.how == "not measured: no parameter here is trained"
    assert rows.of("gradient/block") == {"blocks.1": everything["blocks.1"]}
    assert "blocks.0" in rows.of("gradient/stream"), "gradients still pass"
    subject.model.requires_grad_(False)
    rows = measured(subject, anatomy)
    assert rows.of("gradient/block") == everything
    assert "every parameter is frozen" in rows.find("gradient/total").how


def test_everything_comes_back() -> None:
    subject, anatomy = toy()
    model, deep, batch = subject.model.train(), Deep(), torch.randn(2, 3, WIDTH)
    frozen, held = model.head.weight.requires_grad_(False), model.embed.weight
    held.grad = torch.ones_like(held)
    gradient, state = held.grad, torch.get_rng_state()
    measured(subject, anatomy)
    measured(subject_of(deep, batch, summed), deep_anatomy())
    assert model.training
    assert not frozen.requires_grad
    assert held.grad is gradient
    assert bool((gradient == 1).all())
    assert not batch.requires_grad
    assert torch.equal(torch.get_rng_state(), state)
    assert all(p.grad is None for p in [*model.blocks.parameters(), *deep.parameters()])


def test_a_loss_that_depends_on_nothing_has_reasons_and_no_holes() -> None:
    subject, anatomy = toy()
    everything = {(row.quantity, row.site) for row in measured(subject, anatomy)}
    subject.loss_fn = lambda output, batch: output.detach().sum()
    rows = measured(subject, anatomy)
    found = {(row.quantity, row.site) for row in rows}
    assert everything <= found
    assert all(quantity.startswith("wiring/") for quantity, _ in found - everything)
    assert not rows.of("gradient/stream")
    assert "the loss does not depend on it" in rows.find("gradient/q", "blocks.0.0.f").how


def test_a_site_that_does_not_come_by_and_a_norm_that_is_not_tokenwise_have_reasons() -> None:
    subject, anatomy = toy()
    lost = dataclasses.replace(norm_of("final"), output=Site("final", 0, ADD, 7))
    stack = dataclasses.replace(anatomy.stacks[0], final_norm=lost)
    assert (
        "this forward did not run"
        in measured(subject, Anatomy((stack,))).find("gradient/erased", "final").how
    )
    stack = dataclasses.replace(anatomy.stacks[0], final_norm=norm_of("final", kind="batchnorm"))
    assert "batchnorm" in measured(subject, Anatomy((stack,))).find("gradient/erased", "final").how


def test_a_fused_weight_that_no_operand_tells_apart_is_given_whole_and_says_so() -> None:
    subject, anatomy = toy()
    block = anatomy.blocks[0]
    fused = Projection(
        "blocks.0.1.f.up.weight", ("gate", "up"), Site("blocks.0.1.f.up", 0, "aten.mm.default", 0), 0
    )
    branch = dataclasses.replace(block.branches[1], projections=(fused,))
    block = dataclasses.replace(block, branches=(block.branches[0], branch))
    stack = dataclasses.replace(anatomy.stacks[0], blocks=(block, anatomy.blocks[1]))
    rows = measured(subject, Anatomy((stack,)))
    loss = next_token_loss(subject.forward(), subject.batch)
    (gradient,) = torch.autograd.grad(loss, subject.model.blocks[0][1].f.up.weight)
    for role in ("gate", "up"):
        row = rows.find(f"gradient/{role}", "blocks.0.1.f")
        assert row is not None
        assert row.value == pytest.approx(rms(gradient))
        assert row.how == "exact; over the whole fused weight of gate+up"


class Packed(nn.Module):
    """Cross-attention multiplies with slices of one packed weight, as `nn.MultiheadAttention` does."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.Parameter(torch.randn(3 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        w_q, w_kv = self.packed.split([WIDTH, 2 * WIDTH])
        q, (k, v) = x @ w_q.T, (x @ w_kv.T).chunk(2, -1)
        return x + (q @ k.T).softmax(-1) @ v


def test_slices_of_a_packed_weight_are_told_apart() -> None:
    from normscope.anatomy import AttentionSites

    mm, total = "aten.mm.default", Site("", 0, ADD, 0)
    seen = AttentionSites(
        Site("", 0, mm, 2, -1),
        Site("", 0, "aten.split.Tensor", 0, 0),
        Site("", 0, "aten.split.Tensor", 0, 1),
        total,
        total,
    )
    made = (
        Projection("packed", ("q",), Site("", 0, mm, 0), 0),
        Projection("packed", ("k", "v"), Site("", 0, mm, 1), 0),
    )
    entry, term = Site("", 0, ADD, 0, -1), Site("", 0, ADD, 0, -2)
    branch = Branch("attention", "none", "none", "f", 0, "add", None, None, None, entry, term, total)
    branch = dataclasses.replace(branch, projections=made, attention=(seen,))
    anatomy = Anatomy((Stack("s", (Block("", 0, (branch,), entry, total),), None, total),))
    model, x = Packed(), torch.randn(5, WIDTH)
    loss = lambda output, batch: output.pow(2).sum()  # noqa: E731
    rows = measured(subject_of(model, x, loss), anatomy)
    loss(model(x), x).backward()
    for role, gradient in zip("qkv", model.packed.grad.chunk(3), strict=True):
        row = rows.find(f"gradient/{role}", "f")
        assert row is not None
        assert row.value == pytest.approx(rms(gradient), rel=1e-5), role
        assert row.how == "exact"


assert EPS == 1e-5, "the tolerance of the dense left kernel rests on it"


def test_a_backward_that_fails_says_nothing_about_what_can_learn() -> None:
    subject, anatomy = toy("pre")
    subject.model.blocks[1].register_forward_hook(lambda module, given, output: output.exp().mul_(2.0))
    rows = measured(subject, anatomy)
    found = [row for row in rows if row.quantity in {"branch/trainable", "gradient/total"}]
    assert len(found) == 5
    for row in found:
        assert "the backward fails in eval mode: " in row.how
        assert not row.measured
