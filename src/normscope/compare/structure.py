"""Structure of a model as places with facts, read from the dataflow of one forward.

`read_for_structure` gives the anatomy and keeps the recorded forward for `structure_of`. Facts come from the
recorded graph: which op reads what, and what a part of it computes (`normscope.anatomy.replay`). Names of
modules and classes play no part, except for the dropout rate of a fused attention.
"""

import math
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from normscope.anatomy import Anatomy, named_modules, named_parameters
from normscope.anatomy.assemble import assemble
from normscope.anatomy.axes import counted
from normscope.anatomy.branches import FoundBranch
from normscope.anatomy.graph import Graph, Op, Value
from normscope.anatomy.inside import entry_scale, inner_norm
from normscope.anatomy.ops import CONVOLUTIONS, weight_of
from normscope.anatomy.projections import parameter_of
from normscope.anatomy.reading import record_forward
from normscope.anatomy.replay import Replay
from normscope.anatomy.residual import Sum
from normscope.anatomy.types import Block, Branch, Site, Stack, at_call
from normscope.compare.activation import hidden_maps, read_activation
from normscope.compare.attention import attention_facts
from normscope.compare.differences import compare_structures as compare_structures
from normscope.compare.dropouts import dropout_facts
from normscope.compare.ends import entry_facts, head_facts
from normscope.compare.norms import bias_behind, bias_of, norm_facts
from normscope.compare.roles import (
    branch_parameters,
    entry_parameters,
    head_parameters,
    last_map,
    norm_parameters,
)
from normscope.compare.sources import final_norm_behind, residuals_of_norms
from normscope.compare.types import Place
from normscope.subjects import Subject
from normscope.subjects.found_loss import TIME_FIRST, fed_time_first

_REPORTED = ("kind", "placement", "norm", "join", "stream_scale", "branch_scale")
Facts = dict[str, Any]


_graphs: dict[int, Graph] = {}
"""Recorded forwards by the id of their anatomy, until the structure is read from them."""


def read_for_structure(subject: Subject) -> Anatomy:
    """The anatomy of a model; its recorded forward is kept for one `structure_of`.

    Raises:
        Exception: whatever the model's forward raises on the subject's batch.
    """
    graph = record_forward(subject.model, subject.batch, with_dropouts=True)
    anatomy = assemble(graph)
    if _mixes_sequences(graph) and TIME_FIRST not in subject.notes and fed_time_first(subject):
        return read_for_structure(subject)
    _graphs[id(anatomy)] = graph
    weakref.finalize(anatomy, _graphs.pop, id(anatomy), None)
    return anatomy


def _mixes_sequences(graph: Graph) -> bool:
    """Whether all attentions mix the first axis of the input: it is time, not the batch."""
    found = {
        a.probabilities
        for v in graph.values
        if v.sum is not None
        for b in v.sum.branches
        for a in b.attentions
    }
    return bool(found) and all(counted(value, [-1]) == {"batch"} for value in found)


def structure_of(subject: Subject, anatomy: Anatomy) -> Place:
    """The structure of a model from its reading.

    An anatomy that is not from `read_for_structure` has no recorded forward, so that another one is recorded.
    """
    graph = _graphs.pop(id(anatomy), None)
    if graph is None:
        graph = record_forward(subject.model, subject.batch, with_dropouts=True)
        assemble(graph)  # it writes norms and sums onto the values
    return _Reader(subject.model, anatomy, graph).model()


class _Reader:
    """Reads the facts of one model from its graph."""

    def __init__(self, model: nn.Module, anatomy: Anatomy, graph: Graph) -> None:
        self.anatomy, self.graph = anatomy, graph
        self.parameters = dict(named_parameters(model, remove_duplicate=False))
        self.modules = dict(named_modules(model))
        self.replay = Replay()
        self.unread: dict[str, None] = {}
        self.from_norms: set[Sum] = set()
        sums = dict.fromkeys(v.sum for v in graph.values if v.sum is not None)
        branches = [branch for each in sums for branch in each.branches]
        self.found = {(b.sum.value.site, b.output.site): b for b in branches}
        self.at: dict[Site, Value] = {}
        for value in graph.values:
            if value.op is not None or (value.live and value.users):  # a weight is no place of a stream
                self.at.setdefault(value.site, value)
        self.tables: set[Value] = {
            v.inputs[0] for v in graph.values if v.base == "embedding" and v.inputs[0].is_weight
        }

    def model(self) -> Place:
        """The whole model."""
        stacks = tuple(map(self.stack, self.anatomy.stacks))
        facts: Facts = {}
        hidden = self.at.get(self.anatomy.stacks[-1].hidden) if self.anatomy.stacks else None
        if hidden is not None:
            facts |= self._read(lambda: head_facts(self.graph, hidden, self.tables, self.replay))
            facts |= self._read(lambda: {"parameters": head_parameters(self.graph.outputs, hidden)})
        if self.unread:
            facts["unread"] = list(self.unread)
        return Place("model", "", facts, stacks)

    def stack(self, stack: Stack) -> Place:
        """A stack, from its embeddings to its final norm."""
        facts: Facts = {"role": stack.name.split("-")[0], "long_skips": len(stack.long_skips)}
        known: Facts = {}
        blocks = [self._sums(block) for block in stack.blocks]
        sums = [total for block in blocks for total in block]
        moved = residuals_of_norms(blocks, stack.blocks[0].path)
        self.from_norms |= moved
        entry = self.at.get(stack.blocks[0].entry)
        if sums and sums[0] in moved:
            entry = sums[0].branches[0].norms_in[0].input
        if entry is not None:
            facts["width"] = entry.shape[-1]
            facts |= self._read(lambda: entry_facts(entry, self.parameters, self.replay))
            facts["embedding_dropout"] = self._dropout_at(entry)
            known = self._read(lambda: dict(entry_parameters(entry, facts.get("context"))))
        final = stack.final_norm
        norm = self.at[final.output].norm if final is not None and final.output in self.at else None
        if moved and final is None:
            norm = final_norm_behind(sums)
        facts["has_final_norm"] = final is not None or norm is not None
        if final is None or norm is not None:
            facts |= norm_facts([norm] if norm is not None else [], self.parameters, "final_norm")
        facts["parameters"] = known | norm_parameters(norm, "the final norm")
        return Place("stack", stack.name, facts, tuple(map(self.block, stack.blocks)))

    def block(self, block: Block) -> Place:
        """A block with its branches."""
        sums = [branch.sum for branch in block.branches]
        facts: Facts = {"parallel": len(set(sums)) < len(sums)} if len(sums) > 1 else {}
        branches = (Place("branch", branch.site, self.branch(branch)) for branch in block.branches)
        return Place("block", block.site, facts, tuple(branches))

    def _sums(self, block: Block) -> list[Sum]:
        """The residual sums of a block."""
        found = (self.found.get((branch.sum, branch.output)) for branch in block.branches)
        return list(dict.fromkeys(branch.sum for branch in found if branch is not None))

    def branch(self, branch: Branch) -> Facts:
        """Facts of a branch."""
        facts: Facts = {fact: getattr(branch, fact) for fact in _REPORTED}
        found = self.found.get((branch.sum, branch.output))
        if found is None:
            return facts
        names = {projection.parameter: projection.roles for projection in branch.projections}
        roles = {op: names.get(_name(op), ()) for op in found.mixers}
        facts |= norm_facts(found.norms, self.parameters, "norm")
        facts["placement"] = found.placement
        facts["residual_source"] = "norm" if found.sum in self.from_norms else "stream"
        facts["entry_scale"] = entry_scale(found)
        facts["inner_norm"] = inner_norm(found)
        facts["bias"] = _biases(roles, found)
        facts |= self._read(lambda: {"parameters": branch_parameters(found, roles)})
        facts |= self._read(lambda: attention_facts(found, roles, self.modules, self.replay))
        facts |= self._read(lambda: dropout_facts(found, self.graph, self.modules))
        if branch.kind == "feed-forward":
            facts |= self._read(lambda: self._feed_forward(found, roles))
        return facts

    def _read(self, facts: Callable[[], Facts]) -> Facts:
        """Facts of one kind; where the reading of them fails, the error is a note and they are unknown."""
        try:
            return facts()
        except Exception as error:  # any model must get a structure
            frame = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{frame.name} ({Path(frame.filename).name}:{frame.lineno})"
            self.unread[f"normscope's {where} cannot read a fact: {type(error).__name__}: {error}"] = None
            return {}

    def _feed_forward(self, found: FoundBranch, roles: dict[Op, tuple[str, ...]]) -> Facts:
        maps = hidden_maps(found, roles)
        if maps is None:
            return {}
        starts, end, down = maps
        width = end.shape[1 if down.base in CONVOLUTIONS else -1]
        downs = [op for op, each in roles.items() if "down" in each]
        facts: Facts = {"hidden_width": width, "experts": _experts(down, downs)}
        read = read_activation(starts, end, self.replay)
        return facts if read is None else facts | {"activation": read[0], "gated": read[1]}

    def _dropout_at(self, entry: Value) -> float:
        """The largest rate before the first block."""
        return max(
            (rate for value, rate, _ in self.graph.dropouts if value.index <= entry.index), default=0.0
        )


def _name(op: Op) -> str:
    parameter = parameter_of(op)
    return (parameter.name or "") if parameter is not None else ""


def _experts(down: Op, downs: Sequence[Op]) -> int:
    """The number of experts, of which one has `down` as its last map."""
    weight, parameter = weight_of(down), parameter_of(down)
    is_packed = parameter is not None and len(parameter.shape) == 3 and down.base not in CONVOLUTIONS
    is_one = weight is not None and math.prod(weight.shape[:-2]) == 1
    is_layer = is_one and len(downs) == 1  # of the stacked ones
    if parameter is not None and is_packed and not is_layer:
        return parameter.shape[0]
    return len({_name(op) for op in downs})


def _biases(roles: Mapping[Op, tuple[str, ...]], branch: FoundBranch) -> list[str]:
    """Roles of the projections that add a bias."""
    order = ("q", "k", "v", "o", "gate", "up", "down", "other")
    found = {role for op, each in roles.items() if bias_of(op) is not None for role in each}
    if roles and bias_behind(branch) is not None:
        found.update(last_map(roles)[1])
    return [role for role in order if role in found]


def structure_of_report(report: Mapping[str, Any]) -> Place:
    """The structure in a saved report: placements, kinds, joins and scales; the other facts are unknown."""
    stacks = report.get("anatomy", {}).get("stacks", [])
    return Place("model", "", {}, tuple(map(_reported_stack, stacks)))


def _reported_stack(stack: Mapping[str, Any]) -> Place:
    facts: Facts = {"role": stack["name"].split("-")[0], "long_skips": len(stack.get("long_skips", []))}
    blocks = (
        Place(
            "block",
            at_call(block["path"], block["call"]),
            {},
            tuple(map(_reported_branch, block["branches"])),
        )
        for block in stack["blocks"]
    )
    facts["has_final_norm"] = stack["final_norm"]
    return Place("stack", stack["name"], facts, tuple(blocks))


def _reported_branch(branch: Mapping[str, Any]) -> Place:
    return Place("branch", branch["path"], {fact: branch[fact] for fact in _REPORTED})
