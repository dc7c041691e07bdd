"""Blocks into stacks: what follows on one stream, or continues it after patch merging, is one stack.

A stack is a decoder when its attention is causal or it attends to another stack, else an encoder.
"""

from dataclasses import dataclass

from normscope.anatomy.blocks import Group, pattern
from normscope.anatomy.branches import Limb
from normscope.anatomy.graph import Gap, Value, ancestors
from normscope.anatomy.residual import Sum
from normscope.anatomy.streams import Link

_CAUSAL_OPS = frozenset({"cumsum", "cumprod", "logcumsumexp"})


@dataclass(eq=False)
class Strand:
    """The blocks of one stack."""

    groups: list[Group]


def strands(groups: list[Group], links: dict[Sum, Link], unread: list[Gap]) -> list[Strand]:
    """Stacks in order; long skips between stages and several streams in one block are said in `unread`."""
    found: list[Strand] = []
    of: dict[Sum, Strand] = {}
    for group in groups:
        here = links[group.sums[0]]
        strand = of.get(here.before) if here.before is not None else None
        if strand is not None and not here.direct and not _alike(strand.groups[-1], group):
            strand = None
        if strand is not None and not here.direct and any(of.get(s) is strand for s in here.others):
            words = f"{group.place[0]} reads more than one earlier point of the stream: a long skip"
            unread.append(Gap(words, group.sums[0].value))
        if any(links[s].before is not t for t, s in zip(group.sums, group.sums[1:], strict=False)):
            words = f"{group.place[0]} adds to more than one stream: they are not distinguished"
            unread.append(Gap(words, group.sums[0].value))
        if strand is None:
            strand = Strand([])
            found.append(strand)
        strand.groups.append(group)
        of.update(dict.fromkeys(group.sums, strand))
    return found


def _alike(a: Group, b: Group) -> bool:
    return pattern(a.place[0]) == pattern(b.place[0])


def name_stacks(found: list[Strand], limbs: dict[Sum, list[Limb]]) -> list[str]:
    """ "encoder", "decoder"; numbered where there are several of a kind."""
    names: list[str] = []
    for strand in found:
        parts = [limb for group in strand.groups for s in group.sums for limb in limbs[s]]
        name = "decoder" if _is_decoder(parts) else "encoder"
        taken = sum(n.split("-")[0] == name for n in names)
        names.append(name if not taken else f"{name}-{taken + 1}")
    return names


def _is_decoder(parts: list[Limb]) -> bool:
    if any(limb.kind == "cross-attention" for limb in parts):
        return True
    seen = [a.probabilities.causal for limb in parts for a in limb.attentions]
    if any(c is not None for c in seen):
        return all(c for c in seen if c is not None)
    if seen:
        return all(_is_masked(a.logits) for limb in parts for a in limb.attentions)
    return any(_looks_back(limb) for limb in parts)


def _is_masked(logits: Value) -> bool:
    """Without real tensors: whether a triangle was made for these logits."""
    fixed = (v for v in ancestors([logits], -1) if not v.learnt)
    return any(v.base in {"tril", "triu", "le"} for v in fixed)


def _looks_back(limb: Limb) -> bool:
    """Whether a branch without attention scans along the sequence."""
    bases = {v.base for v in limb.region}
    if bases & _CAUSAL_OPS:
        return True
    return any(v.base == "convolution" and v.op is not None and len(v.shape) == 3 for v in limb.region)
