"""Diversity of the tokens without dropout's noise, at the steps with all figures.

Dropout gives equal tokens different masks: a run whose tokens have all become equal showed a diversity of
0.09 with a dropout of 0.1, and 3e-15 without. So the diversity is taken as the trial of a forecast takes it:
from a further forward of the same arguments in eval mode, without gradients. Thresholds for noisy figures
would be no help, because the noise does not depend on what the tokens still have in common.

Whether there is noise is told by the random generators: a forward that has drawn from them is noisy, however
its dropout is written (a module, a function, fused attention, whole layers left out). The further forward
comes after the backward and before the update, so that it has the weights of the step and meets no graph that
a backward still needs. It costs a forward at these steps, and nothing at the others.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from normscope.capture.alone import alone, require_no_sync
from normscope.capture.apart import apart
from normscope.errors import describe
from normscope.monitor.in_place import is_compiled
from normscope.monitor.sites import Sites
from normscope.monitor.streams import Streams
from normscope.monitor.wrong_value import Replay
from normscope.subjects import untouched
from normscope.subjects.rng import draws_since

_DROPOUTS = {
    functional.dropout,
    functional.dropout1d,
    functional.dropout2d,
    functional.dropout3d,
    functional.alpha_dropout,
    functional.feature_alpha_dropout,
    torch.dropout,
    torch.dropout_,
}


class Noise:
    """Judge of the noise in the forwards of a run, and remover of it from the diversities.

    Args:
        model: the module without wrappers.
        called: the module that the loop calls.
        is_sharded: whether its weights are spread over processes.

    Attributes:
        reason: why the noise stays in the diversities, "" where it does not, or is not known to be there.
    """

    def __init__(self, model: nn.Module, called: nn.Module, *, is_sharded: bool) -> None:
        self._model = model
        self._obstacle = _obstacle(model, called, is_sharded=is_sharded)
        self._has_drawn: Callable[[], bool] | None = None
        self._is_there = False
        self._batch: tuple[int, ...] = ()
        self.reason = ""

    def open(self) -> None:
        """A forward begins whose streams are all measured."""
        self._has_drawn = draws_since()

    def close(self, batch: tuple[int, ...]) -> None:
        """It ends; `batch` is the shape of the first tensor of its batch."""
        self._is_there = self._has_drawn is not None and self._has_drawn()
        self._has_drawn, self._batch = None, batch

    def remove(self, streams: Streams, sites: Sites, replay: Replay) -> bool:
        """Measure the diversities of the last forward again, without noise if there was any.

        Returns:
            whether the noise has stayed in them, for the first time; see `reason`.
        """
        is_there, self._is_there = self._is_there, False
        if not is_there or self.reason or not sites.has_diversity:
            return False
        self.reason = self._obstacle or self._removed(streams, sites, replay)
        return bool(self.reason)

    def _removed(self, streams: Streams, sites: Sites, replay: Replay) -> str:
        """Remove the noise; "", or why it stays."""
        try:
            with _without_noise(self._model, replay.autocast):
                held = streams.of(lambda: self._model(*replay.args, **replay.kwargs))
                is_whole = sites.see_diversity(held, self._batch)
        except Exception as error:  # in eval mode a model may raise anything
            return f"a forward in eval mode failed ({describe(error)})"
        return "" if is_whole else "a forward in eval mode does not run the same modules"


def _obstacle(model: nn.Module, called: nn.Module, *, is_sharded: bool) -> str:
    """Why the model cannot be run once more; "" where it may be."""
    if is_sharded:
        return "one process cannot run a sharded model alone"
    modules = [called, *model.modules()]
    if any(is_compiled(each) or hasattr(each, "_orig_mod") for each in modules):
        return "a compiled model is not run in eval mode, which would compile it again"
    return ""


@contextmanager
def _without_noise(model: nn.Module, autocast: torch.dtype | None) -> Iterator[None]:
    """Context in which the model runs in eval mode, without gradients and without any dropout.

    The model, the generators and the settings are as before after it.
    """
    require_no_sync(model)
    fast_path = torch.backends.mha.get_fastpath_enabled()
    with ExitStack() as held:
        held.enter_context(apart(model, autocast))
        held.enter_context(alone())
        held.enter_context(untouched(model))
        held.enter_context(torch.no_grad())
        held.enter_context(torch.compiler.set_stance("force_eager"))  # functions that the model has compiled
        held.callback(torch.backends.mha.set_fastpath_enabled, fast_path)
        torch.backends.mha.set_fastpath_enabled(False)  # it runs no modules
        for module in model.modules():
            module.training = False  # not eval(), in which a module may merge weights
        held.enter_context(_WithoutDropout())
        yield


class _WithoutDropout(TorchFunctionMode):
    """Mode in which dropout does nothing, also that of a function which was not told of eval mode."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0] if args else given["input"]
        if func is functional.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                given["dropout_p"] = 0.0
        return func(*args, **given)
