"""Quick maps over the arguments of ops are PyTorch's."""

from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

from normscope.anatomy.arguments import map_arguments

Named = namedtuple("Named", ["a", "b"])


@pytest.mark.parametrize(
    "arguments",
    [
        1,
        "text",
        None,
        (),
        (1, 2.0, None),
        [1, [2, (3, "x")]],
        {"a": 1, "b": [2, {"c": (3,)}]},
        Named(1, ("x", 2)),
        OrderedDict(a=1, b=[2]),
        (torch.Size([2, 3]), torch.float32, slice(1, 2)),
        ((Named([1], {"a": 2}),), {"dtype": torch.float32}),
    ],
    ids=str,
)
def test_a_map_has_the_leaves_and_containers_of_pytorchs(arguments: Any) -> None:
    found = map_arguments(int, lambda each: each + 10, arguments)
    expected = tree_map_only(int, lambda each: each + 10, arguments)
    assert found == expected
    assert type(found) is type(expected)
