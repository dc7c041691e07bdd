"""Tests of the first wrong value: a grid of injected faults, causes one by one, and an untouched model."""

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from wrong_steps import (
    ARCHITECTURES,
    VALUES,
    WIDTH,
    ByHand,
    Fault,
    Step,
    constant,
    grid,
    ids,
    in_activation,
    in_gradient,
    square,
    step_of,
)

from normscope.monitor.wrong.types import range_of
from normscope.monitor.wrong_value import Replay, WrongValue, first_wrong_value
from normscope.subjects.rng import take_random_state

GRID = list(grid())
SHARE = 0.98
"""Smallest share of faults of the grid with the right module and phase."""


def found_for(fault: Fault) -> WrongValue | None:
    step = step_of(fault.architecture)
    fault.put(step)
    torch.manual_seed(3)
    return first_wrong_value(step.replay())


def is_right(fault: Fault, found: WrongValue | None) -> bool:
    return (
        found is not None
        and (found.module, found.phase) == (fault.module, fault.phase)
        and fault.cause in found.cause
    )


RARE = ("data", "state")


def sampled(architecture: str, every: int) -> list[Fault]:
    """One of `every` faults of an architecture, other ones in the next, and all of the rare kinds."""
    faults = [fault for fault in GRID if fault.architecture == architecture]
    assert len(faults) >= 50
    first = list(ARCHITECTURES).index(architecture)
    return [fault for n, fault in enumerate(faults, first) if n % every == 0 or fault.what in RARE]


@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_module_and_phase_of_injected_faults(architecture: str, every: int) -> None:
    faults = sampled(architecture, every)
    wrong = [(fault, found) for fault in faults if not is_right(fault, found := found_for(fault))]
    for fault, found in wrong:
        print(
            f"{fault}: {fault.module} {fault.phase}, found {found and (found.site, found.phase, found.cause)}"
        )
    assert len(wrong) <= (1 - SHARE) * len(faults)


def test_the_grid_is_large() -> None:
    assert len(GRID) >= 600
    assert {fault.value for fault in GRID} >= {"NaN", "infinity", "garbage"}


def test_a_sample_of_the_grid_has_each_fault_with_each_value_and_in_each_architecture() -> None:
    few = [fault for architecture in ARCHITECTURES for fault in sampled(architecture, 3)]
    grid = [fault for fault in GRID if fault.what != "masked row"]  # two of them
    assert {(fault.what, fault.value) for fault in few} >= {(fault.what, fault.value) for fault in grid}
    assert {(fault.architecture, fault.phase) for fault in few} == {(f.architecture, f.phase) for f in GRID}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_a_healthy_step_has_none(architecture: str, autocast: torch.dtype | None) -> None:
    step = step_of(architecture)
    step.autocast = autocast
    step.optimizer = torch.optim.AdamW(step.model.parameters())
    assert first_wrong_value(step.replay()) is None


class Around(nn.Module):
    """A model whose middle is a function: h ↦ function(linear(x), x), between two linear maps."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.entry, self.exit = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.exit(self.function(self.entry(x)))


def found_around(function: Callable[[Tensor], Tensor]) -> WrongValue:
    torch.manual_seed(0)
    step = Step(Around(function), (torch.randn(4, WIDTH),), {}, square)
    found = first_wrong_value(step.replay())
    assert found is not None
    assert found.module == ""
    return found


def by_hand(x: Tensor) -> Tensor:
    x = x.masked_fill(torch.arange(4)[:, None] == 2, -math.inf)
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def zero(x: Tensor) -> Tensor:
    return x - x


CAUSES: list[tuple[Callable[[Tensor], Tensor], str, str, str, str]] = [
    (lambda x: x / zero(x).detach(), "forward", "infinity", "div", "division by zero"),
    (lambda x: zero(x) / zero(x), "forward", "NaN", "div", "division by zero"),
    (lambda x: zero(x).abs().log(), "forward", "infinity", "log", "log of zero"),
    (lambda x: (-1 - x.abs()).log(), "forward", "NaN", "log", "log of a negative number"),
    (lambda x: (-1 - x.abs()).sqrt(), "forward", "NaN", "sqrt", "square root of a negative number"),
    (lambda x: x + zero(x).sqrt(), "backward", "infinity", "sqrt", "derivative of a square root at 0"),
    (lambda x: x + zero(x).pow(0.5), "backward", "infinity", "pow", "derivative of a power at 0"),
    (lambda x: x + torch.acos(zero(x) + 1), "backward", "infinity", "acos", "infinite derivative of acos"),
    (lambda x: (x.abs() + 100).exp(), "forward", "infinity", "exp", "overflow of exp"),
    (lambda x: (x * 1e6).half().float(), "forward", "infinity", "half", "overflow of float16"),
    (lambda x: (x * 1e15) ** 2, "forward", "garbage", "pow", "growth"),
    (lambda x: (x * 1e10) @ (x * 1e10).mT @ x, "forward", "garbage", "matmul", "growth"),
    (lambda x: x.bfloat16().mul(1e17).mul(1e17).float(), "forward", "garbage", "mul", "growth"),
    (lambda x: (x.abs() * 0 + 50).exp(), "forward", "garbage", "exp", "growth"),
    (
        lambda x: torch.linalg.vector_norm((x * 0 + 6e4).half(), 2, -1, keepdim=True) + x,
        "forward",
        "infinity",
        "vector_norm",
        "overflow of float16",
    ),
    (by_hand, "forward", "NaN", "sub", "fully masked row"),
    (lambda x: x + x[:0].mean(), "forward", "NaN", "mean", "mean of no value"),
    (lambda x: x + x[0, 0].var(), "forward", "NaN", "var", "var of one value"),
    (
        lambda x: x + F.cross_entropy(x, torch.full((4,), -100)),
        "forward",
        "NaN",
        "cross_entropy",
        "every target is ignored",
    ),
    (lambda x: F.layer_norm(zero(x), (WIDTH,), eps=0.0), "forward", "NaN", "layer_norm", "zero variance"),
    (lambda x: x.masked_fill(x > 0, math.nan), "forward", "NaN", "masked_fill", "written by this line"),
]


@pytest.mark.filterwarnings("ignore:var.*degrees of freedom")
@pytest.mark.parametrize(("function", "phase", "kind", "op", "cause"), CAUSES, ids=[c[4] for c in CAUSES])
def test_causes(function: Any, phase: str, kind: str, op: str, cause: str) -> None:
    found = found_around(function)
    assert (found.phase, found.kind) == (phase, kind)
    assert found.op.removeprefix("backward of ").split(".")[-1].strip("_") == op
    assert cause in found.cause
    assert cause in found.sentence
    assert found.source.startswith("test_wrong_value.py:")
    assert found.source.split(": ")[0] in found.sentence


def test_a_value_that_the_forward_discards_and_the_backward_does_not_need_is_no_fault() -> None:
    model = Around(lambda x: torch.where(x > 0, x.log(), x))
    assert first_wrong_value(Step(model, (torch.randn(4, WIDTH),), {}, square).replay()) is None


class Unseen(torch.autograd.Function):
    """A function whose backward PyTorch does not see."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(x.detach().numpy() * 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return torch.from_numpy(gradient.numpy() * float("nan"))


def test_a_wrong_backward_that_pytorch_does_not_see_is_in_the_module_that_calls_it() -> None:
    found = found_around(Unseen.apply)
    assert (found.phase, found.cause, found.op) == ("backward", "wrong backward of Unseen", "Unseen.backward")


@pytest.mark.parametrize(
    ("loss", "cause"), [(Tensor.log, "log of zero"), (Tensor.sqrt, "derivative of a square root at 0")]
)
def test_a_loss_that_can_be_run_again_names_its_op(loss: Callable[[Tensor], Tensor], cause: str) -> None:
    torch.manual_seed(0)
    step = Step(nn.Linear(WIDTH, 4), (torch.randn(3, WIDTH),), {}, lambda y: loss(y * 0).sum())
    found = first_wrong_value(Replay(**{**vars(step.replay()), "loss_fn": step.loss_of}))
    assert found is not None
    assert (found.phase, found.cause) == ("loss", cause)
    assert found.source.startswith("test_wrong_value.py:")


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_sparse_gradients_are_read(value: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, WIDTH, sparse=True), nn.Linear(WIDTH, 4))
    step = Step(model, (torch.arange(4),), {}, square)
    assert first_wrong_value(step.replay()) is None
    in_gradient(step, "0", value)
    found = first_wrong_value(step.replay())
    assert found is not None
    assert (found.module, found.phase, found.cause) == ("0", "backward", "gradient hook")


def test_reentrant_checkpoints_are_run_with_a_whole_backward() -> None:
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    model = Around(lambda x: checkpoint(lambda y: y + (y - y).sqrt(), x, use_reentrant=True))
    found = first_wrong_value(Replay(model, (torch.randn(4, WIDTH),), cotangents=[torch.ones(4, WIDTH)]))
    assert found is not None
    assert (found.phase, found.kind) == ("backward", "infinity")
    assert all(p.grad is None for p in model.parameters())


def test_a_reentrant_checkpoint_behind_an_outer_module_leaves_that_module_alone() -> None:
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    outer = nn.Linear(WIDTH, WIDTH)
    x = outer(torch.randn(4, WIDTH)).tanh()
    model = Around(lambda h: checkpoint(lambda y: y + (y - y).sqrt(), h, use_reentrant=True))
    first_wrong_value(Replay(model, (x,), cotangents=[torch.ones(4, WIDTH)]))
    assert outer.weight.grad is None
    x.sum().backward()


def test_weights_of_multihead_attention_over_padding_alone() -> None:
    torch.manual_seed(0)
    model, x = nn.MultiheadAttention(WIDTH, 2, batch_first=True), torch.randn(2, 6, WIDTH)
    padding = torch.zeros(2, 6, dtype=torch.bool)
    step = Step(model, (x, x, x), {"key_padding_mask": padding}, square)
    assert first_wrong_value(step.replay()) is None
    padding[1] = True
    found = first_wrong_value(step.replay())
    assert found is not None
    assert (found.phase, found.kind, found.cause) == ("forward", "NaN", "fully masked row")
    assert "12 of 24 rows are masked throughout" in found.sentence


def test_the_loss_is_wrong_and_the_output_is_good() -> None:
    torch.manual_seed(0)
    step = Step(nn.Linear(WIDTH, 4), (torch.randn(3, WIDTH),), {}, lambda y: (y.square() * 0).log().mean())
    found = first_wrong_value(step.replay())
    assert found is not None
    assert (found.phase, found.kind, found.module) == ("loss", "infinity", "")
    assert "outputs are good" in found.sentence


def test_a_parameter_that_exploded_is_the_cause_of_an_overflow() -> None:
    step = step_of("hand")
    with torch.no_grad():
        step.model.blocks[1].wo.weight.mul_(1e8)
    step.autocast = torch.float16
    found = first_wrong_value(step.replay())
    assert found is not None
    assert (found.module, found.phase, found.cause) == ("blocks.1.wo", "forward", "parameter that exploded")
    assert "blocks.1.wo.weight" in found.sentence


def test_ranges_of_the_inputs_name_parameters_also_under_autocast() -> None:
    step = step_of("hand")
    step.autocast = torch.float16
    step.model.blocks[1].wo.register_forward_pre_hook(lambda m, a: (torch.full_like(a[0], 6e4),))
    with torch.no_grad():
        step.model.blocks[1].wo.weight.fill_(2.0)
    found = first_wrong_value(step.replay())
    assert found is not None
    names = {each.name: (each.low, each.high) for each in found.inputs}
    assert names["blocks.1.wo.weight"] == (2.0, 2.0)
    assert names[""] == (6e4, 6e4) or names[""][1] == pytest.approx(6e4, rel=1e-3)


def test_names_of_batch_parameter_and_state() -> None:
    step = step_of("torch")
    step.args[0][1, 2, 3] = math.nan
    found = first_wrong_value(step.replay())
    assert found is not None
    assert (found.phase, found.tensor, found.cause) == ("data", "src", "NaN in the batch")
    assert "1 of its 192 entries, the first at [1, 2, 3]" in found.sentence
    step = step_of("torch")
    with torch.no_grad():
        step.model.layers[0].linear1.weight[2, 5] = -math.inf
    found = first_wrong_value(step.replay())
    assert found is not None
    assert (found.tensor, found.kind) == ("layers.0.linear1.weight", "infinity")
    assert "[2, 5]" in found.sentence


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_an_infinity_in_a_weight_is_found_in_every_precision(dtype: torch.dtype) -> None:
    model = nn.Linear(WIDTH, 4).to(dtype)
    with torch.no_grad():
        model.weight[2, 5] = math.inf
    found = first_wrong_value(Replay(model, (torch.randn(3, WIDTH, dtype=dtype),)))
    assert found is not None
    assert (found.phase, found.kind, found.tensor) == ("parameter", "infinity", "weight")
    assert "entries, the first at [2, 5]" in found.sentence


def test_a_sparse_argument_with_a_wrong_value_is_named_with_its_index() -> None:
    x = torch.sparse_coo_tensor([[0, 2], [1, 3]], [1.0, math.nan], (4, WIDTH), check_invariants=True)
    found = first_wrong_value(Replay(nn.Identity(), (x,)))
    assert found is not None
    assert (found.phase, found.kind) == ("data", "NaN")
    assert "the first at [2, 3]" in found.sentence


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr])
@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_compressed_sparse_tensors_are_read(layout: torch.layout, value: float) -> None:
    dense = torch.zeros(4, WIDTH)
    dense[0, 1], dense[2, 3] = 2.0, value
    x = dense.to_sparse(layout=layout, blocksize=(2, 2) if layout is torch.sparse_bsr else None)
    found = first_wrong_value(Replay(nn.Identity(), (x,)))
    assert found is not None
    assert found.phase == "data"
    assert "the first at [2, 3]" in found.sentence
    assert range_of(x).shape == (4, WIDTH)


@pytest.mark.filterwarnings("ignore:Sparse")
def test_an_op_on_a_compressed_sparse_tensor_is_named() -> None:
    graph = (torch.eye(4) * 1e17).to_sparse_csr()
    found = found_around(lambda h: graph @ (h * 1e17))
    assert (found.kind, found.op.split(".")[-1]) == ("garbage", "matmul")
    assert found.inputs[0].high == pytest.approx(1e17)


def test_a_range_holds_the_values_of_any_precision_and_layout() -> None:
    wide = range_of(torch.tensor([-1.0, 1e200], dtype=torch.float64))
    assert (wide.low, wide.high, wide.num_infinite) == (-1.0, 1e200, 0)
    sparse = range_of(torch.sparse_coo_tensor([[0, 2]], [2.0, math.inf], (4,), check_invariants=True))
    assert (sparse.shape, sparse.low, sparse.high, sparse.num_infinite) == ((4,), 2.0, 2.0, 1)
    conjugate = range_of(torch.tensor([1 + 3j, math.nan]).conj())
    assert (conjugate.low, conjugate.high, conjugate.num_nan) == (-3.0, 1.0, 1)
    assert range_of(torch.tensor([0.5, 2.0]).to(torch.float8_e4m3fn)).high == 2.0


def test_a_mask_in_the_batch_is_no_fault() -> None:
    step = step_of("torch")
    mask = torch.full((6, 6), -math.inf).triu(1)
    step.kwargs = {"mask": mask}
    assert first_wrong_value(step.replay()) is None
    step.kwargs = {"mask": mask.clamp(min=torch.finfo(torch.float32).min)}
    assert first_wrong_value(step.replay()) is None


def test_the_model_stays_as_it_was_and_dropout_draws_the_same() -> None:
    step = step_of("hand")
    step.model.register_buffer("count", torch.zeros(()))

    def counted(module: nn.Module, args: Any) -> None:
        module.count += 1

    step.model.register_forward_pre_hook(counted)
    drawn: list[Tensor] = []
    step.model.blocks[0].drop.register_forward_hook(lambda m, a, out: drawn.append(out.detach().clone()))
    replay = step.replay()
    step.loss_of(step.model(*step.args)).backward()
    before = {name: p.grad.clone() for name, p in step.model.named_parameters()}
    hooks = {path: len(m._forward_hooks) for path, m in step.model.named_modules()}
    state, count = take_random_state(), float(step.model.count)
    num = len(drawn)
    assert first_wrong_value(replay) is None
    assert torch.equal(drawn[0], drawn[num])
    assert float(step.model.count) == count
    assert all(torch.equal(state[key], value) for key, value in take_random_state().items())
    assert all(torch.equal(before[name], p.grad) for name, p in step.model.named_parameters())
    assert hooks == {path: len(m._forward_hooks) for path, m in step.model.named_modules()}


def test_a_compiled_model_is_run_bare() -> None:
    step = step_of("hand")
    in_activation(step, "blocks.1.wi", math.nan)
    replay = step.replay()
    found = first_wrong_value(Replay(torch.compile(step.model, backend="eager"), **_but_model(replay)))
    assert found is not None
    assert (found.module, found.phase) == ("blocks.1.wi", "forward")


def _but_model(replay: Replay) -> dict[str, Any]:
    return {name: value for name, value in vars(replay).items() if name != "model"}


def test_the_same_line_with_checkpointed_activations() -> None:
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    model = Around(lambda x: checkpoint(lambda y: y + (y - y).sqrt(), x, use_reentrant=False))
    found = first_wrong_value(Step(model, (torch.randn(4, WIDTH),), {}, square).replay())
    assert found is not None
    assert (found.phase, found.cause) == ("backward", "derivative of a square root at 0")


def test_a_second_call_of_a_module_is_named() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.linear(x))

    torch.manual_seed(0)
    model = Twice()
    with torch.no_grad():
        model.linear.weight.mul_(1e10)
    found = first_wrong_value(Step(model, (torch.randn(4, WIDTH),), {}, square).replay())
    assert found is not None
    assert (found.module, found.call, found.site) == ("linear", 1, "linear@1")


def test_the_answer_is_plain_data() -> None:
    step = step_of("hand")
    constant(step, "blocks.1.norm1")
    found = first_wrong_value(step.replay())
    assert found is not None
    data = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert data["module"] == "blocks.1.norm1"
    assert data["phase"] == "forward"
    assert data["sentence"] == found.sentence
    assert data["inputs"][0]["dtype"] == "float32"


def test_cotangents_must_fit_the_output() -> None:
    with pytest.raises(ValueError, match="2 cotangents were given for an output of 1"):
        first_wrong_value(Replay(ByHand(), (ids(),), cotangents=[None, None]))
