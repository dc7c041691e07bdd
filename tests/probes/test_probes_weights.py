"""Tests of copied blocks: copies are detected; shared modules and constants are not copies."""

import torch
from torch import nn

from normscope.anatomy import Anatomy, Block, Site, Stack
from normscope.probes.weights import identical_blocks, measure_weights
from normscope.subjects import Subject

SITE = Site("", 0, "aten.add.Tensor", 0)


def anatomy_of(*calls: tuple[str, int]) -> Anatomy:
    blocks = tuple(Block(path, call, (), SITE, SITE) for path, call in calls)
    return Anatomy((Stack("layers", blocks, None, SITE),))


def encoder(depth: int) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)


def test_a_transformer_encoder_deep_copies_its_layer() -> None:
    anatomy = anatomy_of(("layers.0", 0), ("layers.1", 0), ("layers.2", 0))
    assert identical_blocks(encoder(3), anatomy) == {"layers.1": True, "layers.2": True}


def test_one_parameter_drawn_again_makes_it_no_copy() -> None:
    model = encoder(3)
    with torch.no_grad():
        model.layers[1].linear1.weight[0, 0] += 1e-6  # type: ignore[union-attr, operator, index]
    anatomy = anatomy_of(("layers.0", 0), ("layers.1", 0), ("layers.2", 0))
    assert identical_blocks(model, anatomy) == {"layers.1": False, "layers.2": False}


def test_a_shared_module_is_not_a_copy() -> None:
    layer = nn.Linear(4, 4)
    model = nn.ModuleDict({"layers": nn.ModuleList([layer, layer])})
    assert identical_blocks(model, anatomy_of(("layers.0", 0), ("layers.0", 1))) == {"layers.0@1": False}
    assert identical_blocks(model, anatomy_of(("layers.0", 0), ("layers.1", 0))) == {"layers.1": False}


def test_constant_weights_are_equal_without_being_copies() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.LayerNorm(4), nn.LayerNorm(4)])})
    assert identical_blocks(model, anatomy_of(("layers.0", 0), ("layers.1", 0))) == {"layers.1": False}


def test_the_rows_say_one_for_a_copy_and_zero_for_the_rest() -> None:
    model = encoder(3)
    with torch.no_grad():
        model.layers[2].linear1.bias[0] += 1e-6  # type: ignore[union-attr, operator, index]
    subject = Subject(model, torch.zeros(1), None, lambda: iter(()), 0, "encoder", "zeros")
    rows = measure_weights(subject, anatomy_of(("layers.0", 0), ("layers.1", 0), ("layers.2", 0)))
    assert [(m.quantity, m.site, m.value) for m in rows] == [
        ("weights/identical", "layers.1", 1.0),
        ("weights/identical", "layers.2", 0.0),
    ]
