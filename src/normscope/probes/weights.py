"""Weights: blocks that start as copies of the block before them.

weights/identical   1 where every parameter of a block equals its counterpart in the block before it,
                    bit for bit; else 0
"""

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor, nn

from normscope.anatomy import Anatomy, Block, named_parameters
from normscope.probes.measurement import Measurement
from normscope.subjects import Subject

Weights = Mapping[str, Tensor]


def measure_weights(subject: Subject, anatomy: Anatomy) -> list[Measurement]:
    """`weights/identical` at every block from the second of each stack on; no forward."""
    identical = identical_blocks(subject.model, anatomy)
    return [Measurement("weights/identical", site, float(same)) for site, same in identical.items()]


def identical_blocks(model: nn.Module, anatomy: Anatomy) -> dict[str, bool]:
    """Block site → whether the block is a copy of the one before it in its stack.

    A module that is called again (ALBERT) shares its weights and is not a copy. Blocks whose weights are all
    constant (zeros, ones) are not copies either: they are equal without having been drawn.
    """
    named = dict(named_parameters(model, remove_duplicate=False))
    return {
        block.site: _copies(_of(named, before), _of(named, block))
        for stack in anatomy.stacks
        for before, block in pairwise(stack.blocks)
    }


def _of(named: Weights, block: Block) -> Weights:
    prefix = block.path + "."
    return {name.removeprefix(prefix): p for name, p in named.items() if name.startswith(prefix)}


def _copies(first: Weights, second: Weights) -> bool:
    if first.keys() != second.keys():
        return False
    drawn = [name for name, p in second.items() if p is not first[name] and not _constant(p)]
    return bool(drawn) and all(torch.equal(first[name], second[name]) for name in second)


def _constant(weight: Tensor) -> bool:
    return bool((weight == weight.reshape(-1)[0]).all()) if weight.numel() else True
