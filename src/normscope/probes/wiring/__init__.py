"""Wiring: what the training run connects wrongly, in facts that a few forwards show."""

from collections.abc import Iterator

import torch

from normscope.anatomy import Anatomy
from normscope.probes.measurement import Measurement
from normscope.probes.objective import everything_requires_grad
from normscope.probes.wiring.flow import find_fed_labels, find_place, flow_rows
from normscope.probes.wiring.forward import forwards, run
from normscope.probes.wiring.inputs import inputs_of
from normscope.probes.wiring.targets import find_targets, first_loss_rows, target_rows
from normscope.probes.wiring.values import value_rows
from normscope.subjects import Subject


def measure_wiring(subject: Subject, anatomy: Anatomy) -> Iterator[Measurement]:
    """Targets and their places, the first loss, flow between tokens and samples, and the weights' values.

    Two forwards of the fixed batch, more only where something shows.
    """
    yield from value_rows(subject, anatomy)
    with forwards(subject):
        inputs = inputs_of(subject)
        with everything_requires_grad(subject.model, subject.batch):
            forward = run(subject)
            targets = find_targets(forward)
        output, width = None if forward.main is None else forward.main.detach(), forward.width
        del forward  # frees the graph
        place = find_place(targets, inputs)
        yield from target_rows(targets, inputs, None if place is None else (place.targets_BT, place.ids_BT))
        yield from first_loss_rows(targets, width)
        with torch.no_grad():
            if place is None or not place.asked:
                place = find_fed_labels(targets, inputs) or place
            yield from flow_rows(subject, output, place)
