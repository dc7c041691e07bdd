"""The batches and the loss of a stub, by what the forward takes."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from normscope.starter.rank import Candidate
from normscope.starter.values import LENGTH, VOCABULARY

_LABELS = ("targets", "labels", "target", "label", "y")
_IDS = re.compile(r"idx|ids?|\w+_ids|tokens?|src|tgt|trg|x|input|inputs|text|seq\w*")
_CAUSAL = re.compile(r"tril|triu|is_causal|causal|generate_square_subsequent_mask")
_MASKS = re.compile(r"\w*mask")

_BATCHES = '''\
def batches():
    """Batches without end: bytes of Python's own source. Replace them by those of your loader."""
    text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(len(text) - {length} - 1, ({size},), generator=generator)
        ids = torch.stack([text[start : start + {length} + 1] for start in starts]){modulo}
        yield {batch}
'''
_OWN_LOSS = '''\
def loss_fn(output, batch):
    """The loss that the model computes itself."""
    if isinstance(output, dict):
        return output["loss"]
    if isinstance(output, tuple):
        return next(part for part in output if part is not None and part.ndim == 0)
    return output if isinstance(output, torch.Tensor) else output.loss
'''
_NEXT_TOKEN = '''\
def loss_fn(output, batch):
    """Next-token loss: the logits at each position against the id that follows."""
    logits = output[0] if isinstance(output, tuple) else output
    ids = {ids}
    return functional.cross_entropy({logits}.flatten(0, 1), {targets}.flatten())
'''


@dataclass(frozen=True)
class Feed:
    """Text of a stub.

    Attributes:
        functions: the functions `batches` and `loss_fn`, as far as they are known.
        returned: what `build` returns.
        imports: lines that the functions need.
        about: what normscope does about the rest, as lines of a comment.
    """

    functions: tuple[str, ...]
    returned: str
    imports: tuple[str, ...] = ()
    about: tuple[str, ...] = ()


_NO_BATCH = Feed(
    (),
    "model",
    about=(
        "normscope finds an input that the model takes: byte ids, images or noise. To choose it yourself,",
        "return (model, batches, loss_fn): batches an iterator, loss_fn(output, batch) a scalar.",
    ),
)


def feed(candidate: Candidate, vocabulary: int | None, length: int | None) -> Feed:
    """The feed of a candidate. A model whose input is not of ids gets none: `check` tries what it takes."""
    forward = candidate.forward
    required = [argument.name for argument in forward if argument.default is None]
    names = [argument.name for argument in forward]
    reads_ids = "Embedding" in candidate.calls
    if not forward or not reads_ids or not _IDS.fullmatch(names[0]):
        return _NO_BATCH
    labels = next((name for name in names[1:] if name in _LABELS), None)
    masks = [name for name in required[1:] if _MASKS.fullmatch(name)]
    if set(required) - {names[0], labels, *masks}:
        return _NO_BATCH
    size = min(LENGTH, length or LENGTH)
    first = "TransformerEncoderLayer" in candidate.calls and "batch_first=True" not in candidate.text
    return _of_ids(candidate, names[0], labels, masks, _Sizes(size, vocabulary, first))


@dataclass(frozen=True)
class _Sizes:
    """Tokens of a sequence, ids of the vocabulary, and whether sequences run down the first axis."""

    length: int
    vocabulary: int | None
    length_first: bool


def _of_ids(
    candidate: Candidate, first: str, labels: str | None, masks: Sequence[str], sizes: _Sizes
) -> Feed:
    turned = ".T" if sizes.length_first else ""
    given = {first: f"ids[:, :-1]{turned}"}
    if labels is not None:
        given[labels] = f"ids[:, 1:]{turned}"
    for mask in masks:
        given[mask] = f"nn.Transformer.generate_square_subsequent_mask({sizes.length})"
    only = len(given) == 1
    batch = (
        given[first] if only else "{" + ", ".join(f'"{name}": {value}' for name, value in given.items()) + "}"
    )
    modulo = (
        f" % {sizes.vocabulary}" if sizes.vocabulary is not None and sizes.vocabulary < VOCABULARY else ""
    )
    functions = [_BATCHES.format(length=sizes.length, size=4, modulo=modulo, batch=batch)]
    imports = ["import argparse", "from pathlib import Path", "import torch"]
    imports += ["from torch import nn"] if masks else []
    if labels is not None:
        return Feed((*functions, _OWN_LOSS), "model, batches(), loss_fn", tuple(imports))
    if not _CAUSAL.search(candidate.text) and not masks:
        about = (
            "normscope looks for a loss: the model's own, or next-token where no token sees a later one.",
            "For another loss return (model, batches(), loss_fn); loss_fn(output, batch) gives a scalar.",
        )
        return Feed(tuple(functions), "model, batches()", tuple(imports), about)
    along = ("logits[:-1]", "ids[1:]") if sizes.length_first else ("logits[:, :-1]", "ids[:, 1:]")
    ids = "batch" if only else f'batch["{first}"]'
    functions.append(_NEXT_TOKEN.format(ids=ids, logits=along[0], targets=along[1]))
    imports.append("from torch.nn import functional")
    return Feed(tuple(functions), "model, batches(), loss_fn", tuple(imports))
