"""Remarks on what a monitor does not see, and why."""

import logging
from collections.abc import Iterable

import numpy as np
from torch import nn

from normscope.anatomy import named_parameters
from normscope.monitor.journal import Journal
from normscope.monitor.plan import Plan
from normscope.monitor.streams import Part

LOG = logging.getLogger("normscope")


class Unwatched:
    """Remarks on what is not watched, each made once.

    Args:
        model: the model, without wrappers.
        journal: it gets the remarks.
    """

    def __init__(self, model: nn.Module, journal: Journal) -> None:
        self._model, self._journal = model, journal
        self._is_tested = self._has_new_weights = False

    def no_forward(self, step: int, *, is_entered: bool) -> None:
        """Warn that no forward was seen before the end of a step, and why that may be."""
        if self._is_tested:
            return
        self._is_tested = True
        sentence = (
            "no forward of the model was seen before the first step: nothing is watched"
            if is_entered
            else "the Monitor was not entered: write `with Monitor(…) as monitor:` around the loop"
        )
        self._journal.remark(sentence)
        LOG.warning("step %d: %s", step, sentence)

    def hooks(self, plan: Plan, parts: Iterable[Part], attentions: list[str], *, is_updated: bool) -> None:
        """Note the hooks that did not fire in the first step with all figures, and what that loses.

        Args:
            plan: what is watched.
            parts: sums of the step's streams.
            attentions: sites of the attentions that were not seen.
            is_updated: whether an optimizer stepped.
        """
        if self._is_tested:
            return
        self._is_tested = True
        wanted = np.array(sorted(plan.places), dtype=np.intp)
        columns = {column for part in parts for column in part.columns}
        seen = np.array([column in columns for column in wanted], dtype=bool)
        if not seen.all():
            lost = f"{(~seen).sum()} of {len(wanted)} hooks on modules did not fire"
            self._journal.remark(f"{lost} (compiled code runs none): the streams there are not watched")
        if attentions:
            lost = ", ".join(attentions)
            self._journal.remark(f"the attention figures of these branches cannot be measured: {lost}")
        if not is_updated:
            self._journal.remark(
                "no optimizer stepped before the first call of step(): gradients and updates are not watched"
            )

    def new_weights(self, plan: Plan) -> None:
        """Note weights that train by now and did not at the first forward, as unfrozen ones or a new head."""
        if self._has_new_weights:
            return
        watched = set(map(id, plan.groups.parameters))
        trained = (each for each in self._model.parameters() if each.requires_grad)
        new = {id(each) for each in trained if each.is_floating_point() and id(each) not in watched}
        if not new:
            return
        self._has_new_weights = True
        first, *rest = [name for name, each in named_parameters(self._model) if id(each) in new]
        self._journal.remark(
            "weights that train since a later step than the first one are not watched: "
            + (f"{first} and {len(rest)} more" if rest else first)
        )

    def missing_step(self, num_steps: int) -> None:
        """Note that optimizers stepped after the last of `num_steps` calls of `step`."""
        said = f"step() was called {num_steps} times, and the optimizer has stepped after the last call"
        sentence = f"{said}: call monitor.step(loss) at the end of each step"
        self._journal.remark(sentence)
        if not num_steps:
            LOG.warning(sentence)
