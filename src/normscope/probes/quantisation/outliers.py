"""Outlier channels: features whose values are far larger than those of the others.

ratio rule   the channel's largest |x| is at least 6 times that of the median channel. It does not depend on
             the size of the whole tensor.
LLM.int8()   |x| ≥ 6 in at least 25 % of the layers and in at least 6 % of the tokens (Dettmers et al. 2022,
             arXiv 2208.07339, section 4). Here a layer is a norm's output, which a branch reads; a channel
             counts in a layer where its |x| reaches 6 in at least one token, and the share of tokens is the
             mean over those layers.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from normscope.anatomy import Stack
from normscope.probes.measurement import EXACT, Measurement, not_measured
from normscope.probes.quantisation.look import Look, unfit
from normscope.probes.rows import UNDEFINED

RATIO = 6.0
"""Least ratio of a channel's largest |x| to that of the median channel."""
MAGNITUDE, LAYERS, TOKENS = 6.0, 0.25, 0.06
"""Least |x|, share of layers and share of tokens of LLM.int8()."""


def outlier_channels(x: Tensor) -> tuple[list[int], float | None]:
    """Channels of x (…, d) by the ratio rule, and the largest ratio; None where the median one is zero."""
    peaks = x.detach().abs().reshape(-1, x.shape[-1]).amax(0).double()
    middle = float(peaks.quantile(0.5))
    channels = (peaks >= RATIO * middle) & (peaks > 0)
    return channels.nonzero().flatten().tolist(), float(peaks.max()) / middle if middle else None


def llm_int8_channels(layers: Sequence[Tensor]) -> list[int]:
    """Channels by the rule of LLM.int8(), over layers (…, d) of one width."""
    shares = torch.stack(
        [(x.detach().abs() >= MAGNITUDE).reshape(-1, x.shape[-1]).double().mean(0) for x in layers]
    )
    touched = shares > 0  # (layers, d)
    share = shares.sum(0) / touched.sum(0).clamp_min(1)
    found = (touched.double().mean(0) >= LAYERS) & (share >= TOKENS)
    return found.nonzero().flatten().tolist()


def outlier_rows(look: Look) -> Iterator[Measurement]:
    """Outlier channels of the stream, of norms and of whole stacks."""
    for place in look.places:
        if place.part not in ("stream", "norm"):
            continue
        channels, ratio = (f"quantisation/{place.part}-outlier-{stat}" for stat in ("channels", "ratio"))
        tensors = look.tensors(place)
        if isinstance(tensors, str) or not tensors[0][0].ndim:
            reason = tensors if isinstance(tensors, str) else "it has no axis of features"
            yield from (not_measured(quantity, place.site, reason) for quantity in (channels, ratio))
            continue
        found, largest = outlier_channels(tensors[0][0])
        yield Measurement(channels, place.site, tuple(map(float, found)))
        if largest is None:
            yield not_measured(ratio, place.site, UNDEFINED)
        else:
            yield Measurement(ratio, place.site, largest)
    yield from (_llm_int8_row(look, stack) for stack in look.anatomy.stacks)


def _llm_int8_row(look: Look, stack: Stack) -> Measurement:
    quantity = "quantisation/llm-int8-channels"
    sites = dict.fromkeys(norm.output for branch in stack.branches for norm in branch.norms)
    layers = [look.captured[site] for site in sites if site in look.captured]
    layers = [layer for layer in layers if layer.ndim and not unfit(layer)]
    if not layers or len({layer.shape[-1] for layer in layers}) > 1:
        return not_measured(quantity, stack.name, "its branches have no norms of one width")
    channels = tuple(map(float, llm_int8_channels(layers)))
    return Measurement(
        quantity, stack.name, channels, how=f"{EXACT}; over the outputs of {len(layers)} norms"
    )
