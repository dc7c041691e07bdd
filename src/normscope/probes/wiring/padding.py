"""Padding: whether its content reaches real tokens, and whether it counts in the loss.

    wiring/padded            share of the batch's places that are padding
    wiring/padding-content   change of real tokens' outputs, over the largest output, when other ids fill the
                             padded places, or their embeddings where the ids say what is padding
    wiring/padding-in-loss   share of the counted targets that are padding
    wiring/masked-row        1 where a sample of nothing but padding gives NaN, 0 where its outputs are finite

Padding is what a mask of the batch says, or runs of the padding id at the ends of rows of different lengths.
A mask whose name says nothing must be such runs itself.

Shapes: B samples, T tokens.
"""

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normscope.probes.measurement import EXACT, Measurement, not_measured
from normscope.probes.wiring.flow import REFUSALS, Place
from normscope.probes.wiring.forward import run_without_graph
from normscope.probes.wiring.inputs import Input, with_tensors
from normscope.probes.wiring.targets import Targets, in_places, relation
from normscope.subjects import Subject
from normscope.subjects.memory import is_out_of_memory

BY_ID = "runs of the padding id"
_SHORTEST_RUN = 2


class Padding(NamedTuple):
    """Padded places (B, T) of ids, and the words for how they are known."""

    ids: Tensor
    is_padding: Tensor
    known_by: str

    @property
    def is_by_id(self) -> bool:
        """Whether only the ids themselves say what is padding."""
        return self.known_by == BY_ID

    @property
    def side(self) -> str:
        """The side on which rows are padded."""
        left, right = bool(self.is_padding[:, 0].any()), bool(self.is_padding[:, -1].any())
        return "on both sides" if left and right else "on the left" if left else "on the right"


def find_padding(subject: Subject, inputs: list[Input], targets: Targets | str) -> Padding | None:
    """The padding of the first ids that have one."""
    for ids in (i.tensor for i in inputs if i.kind == "ids"):
        for mask in (i for i in inputs if i.kind == "mask" and i.tensor.shape == ids.shape):
            padded = _in_mask(mask, ids)
            if padded is not None and (_is_named(mask) or _fills_rows(padded, ids, targets)):
                return Padding(ids, padded, f"the mask {mask.name}".rstrip())
        padded = _runs(ids, _padding_ids(subject))
        if padded is not None:
            return Padding(ids, padded, BY_ID)
    return None


def _is_named(mask: Input) -> bool:
    return mask.name.lower() == "attention_mask" or "padding" in mask.name.lower()


def _fills_rows(padded: Tensor, ids: Tensor, targets: Targets | str) -> bool:
    """Whether places are runs at the ends of rows of different lengths, and not what the loss asks for.

    The positions that a masked language model hides hold one id too, and its loss counts there, of other ids.
    """
    ends = padded.long().cumprod(1) | padded.flip(1).long().cumprod(1).flip(1)
    counts = padded.sum(1)
    if not torch.equal(ends.bool(), padded) or bool((counts == counts[0]).all()):
        return False
    laid = None if isinstance(targets, str) else in_places(targets.ids, ids)
    if laid is None:
        return True
    asked = padded & (laid >= 0) & (laid != ids)
    # In rows padded on the left, the last padded place predicts a token.
    return 2 * int(asked.sum()) < int(padded.sum())


def _in_mask(mask: Input, ids: Tensor) -> Tensor | None:
    """Padded places by a mask of zeros and ones; the side of it on which all ids are equal is padding."""
    ones = mask.tensor != 0
    if bool(((mask.tensor != 0) & (mask.tensor != 1)).any()) or bool(ones.all()) or not bool(ones.any()):
        return None
    if mask.name.lower() == "attention_mask":
        return ~ones
    if "padding" in mask.name.lower():
        return ones
    same = [side for side in (ones, ~ones) if ids[side].unique().numel() == 1]
    return same[0] if len(same) == 1 else None


def _padding_ids(subject: Subject) -> set[int]:
    found = {
        int(m.padding_idx)
        for m in subject.model.modules()
        if isinstance(m, nn.Embedding) and m.padding_idx is not None
    }
    own = getattr(getattr(subject.model, "config", None), "pad_token_id", None)
    return found | ({own} if isinstance(own, int) else set())


def _runs(ids: Tensor, padding: set[int]) -> Tensor | None:
    """Runs of one padding id at the same end of rows of different lengths."""
    for value in sorted(padding):
        is_value = ids == value
        for flip in (False, True):
            run = (is_value if flip else is_value.flip(1)).long().cumprod(1).bool()
            run = run if flip else run.flip(1)
            lengths = run.sum(1)
            if int(lengths.max()) >= _SHORTEST_RUN and int(lengths.max()) != int(lengths.min()):
                return run
    return None


def padding_rows(
    subject: Subject, inputs: list[Input], output: Tensor | None, targets: Targets | str, place: Place | None
) -> Iterator[Measurement]:
    """Rows of the batch's padding; one forward, and only where there is padding. Call inside `forwards`."""
    padding = find_padding(subject, inputs, targets)
    if padding is None:
        yield not_measured("wiring/padded", "", "the batch has no padding that could be found")
        return
    how = f"{EXACT}; by {padding.known_by}, {padding.side}"
    yield Measurement("wiring/padded", "", float(padding.is_padding.double().mean()), how=how)
    try:
        yield from _content_rows(subject, padding, output, how)
    except REFUSALS as error:
        if is_out_of_memory(error):
            raise
        reason = f"the model refuses other padding: {' '.join(str(error).split())[:160]}"
        yield not_measured("wiring/padding-content", "", reason)
    if not isinstance(targets, str):
        yield from _loss_row(padding, targets, place, how)


def _content_rows(
    subject: Subject, padding: Padding, output: Tensor | None, how: str
) -> Iterator[Measurement]:
    ids, padded = padding.ids, padding.is_padding
    if output is None or output.shape[: ids.ndim] != ids.shape:
        yield not_measured("wiring/padding-content", "", "no output has an axis of the batch's tokens")
        return
    after = _with_other_content(subject, padding)
    full = padded.all(1)
    if bool(full.any()):
        row = float(not bool(output[full].isfinite().all()))
        yield Measurement("wiring/masked-row", "", row, how=how)
    if after is None or after.shape != output.shape:
        yield not_measured("wiring/padding-content", "", "the outputs change their shape")
        return
    old, new = output.detach()[~padded], after[~padded]
    both = old.isfinite() & new.isfinite()
    scale = float(old[both].abs().max()) if bool(both.any()) else 0.0
    if scale == 0:
        yield not_measured("wiring/padding-content", "", "the outputs are not finite, or zero")
        return
    change = float((new - old)[both].abs().max()) / scale
    rounding = (4 if old.dtype in (torch.float16, torch.bfloat16) else 16) * torch.finfo(old.dtype).eps
    yield Measurement("wiring/padding-content", "", change if change > rounding else 0.0, how=how)


def _with_other_content(subject: Subject, padding: Padding) -> Tensor | None:
    """The main output with the content of real tokens in the padded places.

    A model that gets no mask may make its own from the padding id. There the ids stay, and the embeddings
    change in the padded places; the ids change where no embedding reads them as they are.
    """
    ids, padded = padding.ids, padding.is_padding
    count = torch.arange(int(padded.sum()), device=ids.device) % int((~padded).sum())
    if padding.is_by_id:
        is_embedded = False

        def replaced(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor | None:
            nonlocal is_embedded
            if not arguments or not torch.equal(arguments[0], ids):
                return None
            is_embedded, output = True, output.clone()
            output[padded] = output[~padded][count]
            return output

        with contextlib.ExitStack() as hooks:
            for module in subject.model.modules():
                if isinstance(module, nn.Embedding):
                    hooks.callback(module.register_forward_hook(replaced).remove)
            after = run_without_graph(subject, subject.batch)
        if is_embedded:
            return after
    filled = ids.clone()
    filled[padded] = ids[~padded][count]
    return run_without_graph(subject, with_tensors(subject.batch, {id(ids): filled}))


def _loss_row(padding: Padding, targets: Targets, place: Place | None, how: str) -> Iterator[Measurement]:
    laid = in_places(targets.ids, padding.ids)
    if laid is None:
        return
    shift = int(relation(laid, padding.ids, 1) > relation(laid, padding.ids, 0))
    padded = padding.is_padding.clone()
    if padding.is_by_id:  # the first of a run may be a true end
        starts = padded & ~torch.nn.functional.pad(padded[:, :-1], (1, 0), value=False)
        padded &= ~starts
    length = padded.shape[1] - shift
    counted = laid[:, :length] >= 0
    if bool(counted.any()):
        share = float(padded[:, shift:][counted].double().mean())
        yield Measurement("wiring/padding-in-loss", "", share, how=how)
