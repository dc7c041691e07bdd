"""Replay: a part of a recorded forward gives the same values again, and says where it cannot."""

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normscope.anatomy.graph import Graph, Value
from normscope.anatomy.reading import record_forward
from normscope.anatomy.replay import CannotReplay, Replay

Part = Callable[[Tensor, Tensor], Tensor]


class Model(nn.Module):
    """A map, and a part behind it that is replayed."""

    def __init__(self, part: Part) -> None:
        super().__init__()
        self.map, self.gain, self.part = nn.Linear(6, 6, bias=False), nn.Parameter(torch.rand(6)), part

    def forward(self, x: Tensor) -> Tensor:
        return self.part(self.map(x), self.gain)


def masked(y: Tensor, gain: Tensor) -> Tensor:
    mask = torch.zeros(y.shape[0], 1)
    mask[0] = 2.0
    return y * mask + gain


def columns_written(y: Tensor, gain: Tensor) -> Tensor:
    out = torch.empty_like(y)
    out[:, ::2] = y[:, 1::2] * 2
    out[:, 1::2] = y[:, ::2] + gain[::2]
    return out


def written_over(y: Tensor, gain: Tensor) -> Tensor:
    """Writes that overlap, into views of views."""
    out = y * 2
    out[1:, 2:] = gain[2:]
    rows = out[:3]
    rows[:, ::3] += y[:3, 1:3]
    out.T[5] -= 1
    return out + out[:, :1]


def read_in_another_shape(y: Tensor, gain: Tensor) -> Tensor:
    out = torch.zeros(6, 5)
    view = out.view(-1)[6:]
    out.T.copy_(y * gain)
    return (out * 2).T + view.view(4, 6)[0]


PARTS: dict[str, Part] = {
    "quotients of integers": lambda y, g: torch.bmm(y[None], torch.arange(36).view(1, 6, 6) / 7)[0] + g,
    "columns written": columns_written,
    "written over": written_over,
    "read in another shape": read_in_another_shape,
    "addcmul": lambda y, g: torch.addcmul(y, y, g, value=0.5),
    "in place": lambda y, g: y.mul(2).add_(g).relu_(),
    "views": lambda y, g: (y.view(-1, 2, 3).transpose(1, 2) * 3).flatten(1) + g,
    "complex": lambda y, g: torch.view_as_real(torch.view_as_complex(y.view(-1, 3, 2)) * 1j).flatten(1),
    "cast": lambda y, g: F.gelu(y.float()).to(y.dtype) * torch.arange(6, dtype=torch.float32),
    "like": lambda y, g: y + torch.full_like(y, 2.0),
    "written in parts": masked,
}


def recorded(part: Part) -> tuple[Graph, Value, Value]:
    torch.manual_seed(0)
    graph = record_forward(Model(part), torch.randn(5, 6))
    start = next(v for v in graph.values if v.base == "mm")
    return graph, start, graph.outputs[0]


@pytest.mark.parametrize("name", PARTS)
def test_a_part_gives_the_same_again(name: str) -> None:
    _, start, end = recorded(PARTS[name])
    torch.manual_seed(0)
    model = Model(PARTS[name])
    y = torch.randn(5, 6)
    (found,) = Replay().run({start: y.double()}, [end])
    assert found.dtype in (torch.float64, torch.complex128)
    torch.testing.assert_close(found, PARTS[name](y, model.gain).double().detach(), rtol=1e-6, atol=1e-6)


def test_a_write_into_complex_numbers_by_their_parts_cannot_be_replayed() -> None:
    def write(y: Tensor, gain: Tensor) -> Tensor:
        out = torch.view_as_complex(torch.stack((y, y), -1)) * 2
        torch.view_as_real(out)[:, 0] = 1.0
        return out.real + gain

    _, start, end = recorded(write)
    with pytest.raises(CannotReplay):
        Replay().run({start: torch.zeros(5, 6)}, [end])


class Twice(nn.Module):
    """Two maps of the same input, each with its own gain and a part behind it."""

    def __init__(self, *parts: Part) -> None:
        super().__init__()
        self.maps = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in parts)
        self.gains = nn.ParameterList(torch.ones(6) for _ in parts)
        self.parts = parts

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        each = zip(self.parts, self.maps, self.gains, strict=True)
        return tuple(part(layer(x), gain) for part, layer, gain in each)


def read_once(model: nn.Module) -> list[Tensor]:
    """The result of each part for threes; of like parts, one tensor."""
    graph, replay = record_forward(model, torch.randn(5, 6)), Replay()
    starts = [v for v in graph.values if v.base == "mm"]

    def read(starts: Sequence[Value], ends: Sequence[Value], replay: Replay) -> Tensor:
        return replay.run({starts[0]: torch.full((5, 6), 3.0, dtype=torch.float64)}, ends)[0]

    return [replay.once(read, [start], [end]) for start, end in zip(starts, graph.outputs, strict=True)]


@pytest.mark.parametrize("name", PARTS)
def test_parts_that_are_alike_are_read_once(name: str) -> None:
    one, two = read_once(Twice(PARTS[name], PARTS[name]))
    assert one is two


UNLIKE: dict[str, tuple[Part, Part]] = {
    "number": (lambda y, g: y * 2 + g, lambda y, g: y * 3 + g),
    "second number": (lambda y, g: (y + g).clamp(0, 1), lambda y, g: (y + g).clamp(0, 2)),
    "op": (lambda y, g: F.relu(y) + g, lambda y, g: F.silu(y) + g),
    "order": (lambda y, g: (y + g) * y, lambda y, g: (y * g) + y),
    "operands": (lambda y, g: (y + 1) - g, lambda y, g: g - (y + 1)),
    "constant": (lambda y, g: y + g * torch.arange(6.0), lambda y, g: y + g * torch.arange(6.0).flip(0)),
    "order of elements": (
        lambda y, g: y * torch.tensor([1.0, 2, 3, 4, 5, 6]) + g,
        lambda y, g: y * torch.tensor([1.0, 3, 2, 4, 5, 6]) + g,
    ),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_parts_that_are_not_alike_are_read_each(name: str) -> None:
    one, two = read_once(Twice(*UNLIKE[name]))
    assert not torch.equal(one, two)


def test_other_arguments_and_ends_in_another_order_are_read_each() -> None:
    graph, replay = record_forward(Twice(PARTS["in place"]), torch.randn(5, 6)), Replay()
    (start,) = (v for v in graph.values if v.base == "mm")
    (end,) = graph.outputs
    found: list[tuple[object, ...]] = []

    def read(starts: Sequence[Value], ends: Sequence[Value], number: int, replay: Replay) -> None:
        found.append((tuple(ends), number))

    wanted = [((end,), 1), ((end,), 2), ((start, end), 1), ((end, start), 1)]
    for ends, number in (*wanted, *wanted):
        replay.once(read, [start], ends, number)
    assert found == wanted


def test_parts_with_other_parameters_are_read_each() -> None:
    model = Twice(PARTS["in place"], PARTS["in place"])
    nn.init.constant_(model.gains[1], 2.0)
    one, two = read_once(model)
    assert not torch.equal(one, two)


def test_a_constant_made_inside_is_float64_and_gradients_pass() -> None:
    class Mean(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x @ torch.full((5, 1), 0.2)

    x = torch.randn(2, 3, 5)
    graph = record_forward(Mean(), x)
    given = x.double().requires_grad_()
    start = next(v for v in graph.values if v.origin == "input")
    (mean,) = Replay().run({start: given}, graph.outputs)
    (gradient,) = torch.autograd.grad(mean.sum(), given)
    assert torch.allclose(mean, x.double().mean(-1, keepdim=True), atol=1e-15)
    assert torch.equal(gradient, torch.full_like(given, 0.2))
