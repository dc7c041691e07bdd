"""Group blocks into stacks: a stack follows one stream, also after patch merging.

A stack is a decoder when its attention is causal or it attends to another stack, else an encoder.
"""

from normscope.anatomy.blocks import Group
from normscope.anatomy.branches import FoundBranch
from normscope.anatomy.graph import Gap, Value, ancestors
from normscope.anatomy.ops import op_set
from normscope.anatomy.residual import Sum
from normscope.anatomy.streams import link

_CAUSAL_OPS = op_set("cumsum cumprod logcumsumexp")


def stack_blocks(groups: list[Group], unread: list[Gap]) -> list[list[Group]]:
    """Stacks in order; `unread` reports long skips between stages and several streams in one block."""
    found: list[list[Group]] = []
    stack_of: dict[Sum, list[Group]] = {}
    for group in groups:
        here, path = link(group.sums[0]), group.holder[0]
        stack = stack_of.get(here.before) if here.before is not None else None
        if stack is not None and not here.direct and stack[-1].pattern != group.pattern:
            stack = None
        if stack is not None and not here.direct and any(stack_of.get(s) is stack for s in here.others):
            words = f"{path} reads more than one earlier point of the stream: a long skip"
            unread.append(Gap(words, group.sums[0].value))
        if any(link(s).before is not t for t, s in zip(group.sums, group.sums[1:], strict=False)):
            words = f"{path} adds to more than one stream: they are not distinguished"
            unread.append(Gap(words, group.sums[0].value))
        if stack is None:
            stack = []
            found.append(stack)
        stack.append(group)
        stack_of.update(dict.fromkeys(group.sums, stack))
    return found


def name_stacks(found: list[list[Group]]) -> list[str]:
    """ "encoder", "decoder"; numbered where there are several of a kind."""
    names: list[str] = []
    for stack in found:
        branches = [branch for group in stack for s in group.sums for branch in s.branches]
        name = "decoder" if _is_decoder(branches) else "encoder"
        taken = sum(n.split("-")[0] == name for n in names)
        names.append(name if not taken else f"{name}-{taken + 1}")
    return names


def _is_decoder(branches: list[FoundBranch]) -> bool:
    if any(branch.kind == "cross-attention" for branch in branches):
        return True
    attentions = [a for branch in branches for a in branch.attentions]
    seen = [a.probabilities.causal for a in attentions if a.probabilities.causal is not None]
    if seen:
        return all(seen)
    if attentions:
        return all(_is_masked(a.logits) for a in attentions)
    return any(_looks_back(branch) for branch in branches)


def _is_masked(logits: Value) -> bool:
    """True where a triangle was made for these logits; used without real tensors."""
    fixed = (v for v in ancestors([logits], -1) if not v.learnt)
    return any(v.base in {"tril", "triu", "le"} for v in fixed)


def _looks_back(branch: FoundBranch) -> bool:
    """True where a branch without attention scans along the sequence."""
    return any(
        v.base in _CAUSAL_OPS or (v.base == "convolution" and len(v.shape) == 3) for v in branch.region
    )
