"""Wiring: what a training run connects wrongly, in facts that a few forwards show."""

from collections.abc import Iterator

from normscope.anatomy import Anatomy
from normscope.probes.measurement import Measurement
from normscope.probes.objective import everything_requires_grad
from normscope.probes.parameters import Parameters
from normscope.probes.wiring.flow import find_fed_labels, find_place, flow_rows
from normscope.probes.wiring.forward import forwards, run
from normscope.probes.wiring.frozen import frozen_rows
from normscope.probes.wiring.halves import loss_rows, update_rows
from normscope.probes.wiring.inputs import inputs_of
from normscope.probes.wiring.optimizers import foreign_rows, optimizer_rows
from normscope.probes.wiring.padding import padding_rows
from normscope.probes.wiring.targets import find_targets, first_loss_rows, target_rows
from normscope.probes.wiring.values import value_rows
from normscope.subjects import Subject
from normscope.train import Recipe


def measure_wiring(subject: Subject, anatomy: Anatomy, recipe: Recipe | None = None) -> Iterator[Measurement]:
    """Values of the weights, the user's optimizers, targets, flow between tokens and samples, padding.

    Two forwards of the fixed batch; more only where something shows, the batch has padding, or the run is in
    half precision. `recipe` is the step whose updates may be lost; None is the default one.
    """
    recipe = Recipe() if recipe is None else recipe
    parameters = Parameters(subject.model, anatomy)
    yield from value_rows(anatomy, parameters)
    yield from frozen_rows(anatomy, parameters)
    yield from optimizer_rows(subject, parameters)
    yield from _flow(subject)
    yield from update_rows(subject, parameters, recipe)
    yield from loss_rows(subject, recipe)


def _flow(subject: Subject) -> Iterator[Measurement]:
    """Measure the fixed batch and copies of it with other contents by their forwards."""
    with forwards(subject):
        inputs = inputs_of(subject)
        with everything_requires_grad(subject.model, subject.batch):
            forward = run(subject)
            targets = find_targets(forward)
            foreign = list(foreign_rows(subject, forward.loss))
        output, width = None if forward.main is None else forward.main.detach(), forward.width
        del forward  # frees the graph
        yield from foreign
        place = find_place(targets, inputs)
        yield from target_rows(targets, inputs, None if place is None else (place.targets_BT, place.ids_BT))
        yield from first_loss_rows(targets, width)
        yield from padding_rows(subject, inputs, output, targets, place)
        if place is None or not place.asked:
            place = find_fed_labels(targets, inputs) or place
        yield from flow_rows(subject, output, place, targets)
