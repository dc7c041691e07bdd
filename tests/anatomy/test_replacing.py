"""`replace`: the tensors at sites are other ones for everything that reads them later."""

import pytest
import torch
from torch import Tensor, nn

from normscope.anatomy import Site, measuring, replace


class Small(nn.Module):
    """h = 2x; y = h + 3h, in place or not."""

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__()
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        if self.in_place:
            h = x.clone()
            view = h[:1]
            h.mul_(2)
            return torch.cat([view, h[1:]]) + 3 * h
        h = x * 2
        return h + 3 * h


def run(model: nn.Module, site: Site) -> tuple[Tensor, set[Site]]:
    x = torch.ones(2)
    with measuring(model):
        return replace(model, lambda: model(x), {site: lambda h: h + 10})


def test_every_reader_sees_the_new_tensor() -> None:
    site = Site("", 0, "aten.mul.Tensor", 0)
    found, replaced = run(Small(), site)
    assert found.tolist() == [48.0, 48.0]  # 12 + 3 · 12
    assert replaced == {site}
    assert not found.requires_grad


def test_the_second_op_of_a_name_is_another_site() -> None:
    found, _ = run(Small(), Site("", 0, "aten.mul.Tensor", 1))
    assert found.tolist() == [18.0, 18.0]  # 2 + (6 + 10)


def test_an_op_in_place_changes_its_views_too() -> None:
    found, replaced = run(Small(in_place=True), Site("", 0, "aten.mul_.Tensor", 0))
    assert found.tolist() == [48.0, 48.0]
    assert len(replaced) == 1


def test_a_site_that_does_not_run_is_not_among_the_replaced() -> None:
    found, replaced = run(Small(), Site("", 1, "aten.mul.Tensor", 0))
    assert found.tolist() == [8.0, 8.0]
    assert replaced == set()


def test_an_output_among_several() -> None:
    norm = nn.LayerNorm(4)
    x = torch.randn(3, 4)
    with measuring(norm):
        site = Site("", 0, "aten.native_layer_norm.default", 0)
        found, _ = replace(norm, lambda: norm(x), {site: torch.zeros_like})
    assert not found.any()


def test_inputs_of_an_op_are_no_sites_of_it() -> None:
    with pytest.raises(AssertionError, match="other readers"):
        run(Small(), Site("", 0, "aten.mul.Tensor", 0, -1))
