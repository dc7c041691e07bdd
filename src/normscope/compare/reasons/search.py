"""Search for the reasons why B does not compute what A computes.

Each round is one forward of B in which every branch reads A's stream, so that a difference does not hide the
next one. What is found is undone by patches in the rounds after; then one forward of B on its own shows
whether the patches explain everything.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from normscope.anatomy import Site
from normscope.compare.keys import OUTPUT
from normscope.compare.patched_ops import Formula
from normscope.compare.patches import tensors_at
from normscope.compare.reasons import (
    activation,
    ends,
    experts,
    heads,
    joins,
    logits,
    mixing,
    norms,
    operands,
    parallel,
    placement,
    pooling,
    projections,
)
from normscope.compare.reasons.joins import NO_DROPOUT
from normscope.compare.reasons.scene import SAME, Reason, Reasons, Scene, distance, real_rows
from normscope.compare.reasons.scenes import Map, Number, Placed, Walked, scenes_of
from normscope.compare.step_names import name_of_step
from normscope.compare.types import Patch, Step
from normscope.errors import describe

Run = Callable[[Sequence[Patch]], Sequence[Step]]
ROUNDS = 4
UNKNOWN = "unknown"
NO_REASON = " for no known reason."

FILES: Mapping[str, tuple[Callable[[Scene], Reasons], ...]] = {
    "embedding": (norms.reasons, ends.embedding),
    "head": (norms.reasons, ends.head),
    "attention": (
        parallel.reasons,
        placement.reasons,
        norms.reasons,
        projections.reasons,
        heads.reasons,
        operands.reasons,
        logits.reasons,
        mixing.reasons,
        joins.reasons,
    ),
    "feed-forward": (
        parallel.reasons,
        placement.reasons,
        norms.reasons,
        projections.reasons,
        activation.reasons,
        experts.reasons,
        joins.reasons,
    ),
}
"""Kind of a scene → where its reasons are searched, in the order of the forward."""
OTHERS = tuple(dict.fromkeys((*FILES["attention"], *FILES["feed-forward"])))
TRIED = {
    "embedding": "the scale of the embedding, the positions, dropout",
    "head": "the final norm, scale, bias and cap of the logits, the head's table",
    "attention": "norms, projections, heads, rotation, QK-norm, scale, cap, bias and mask of the logits, "
    "softmax, dropout, the scales of the sum",
    "feed-forward": "norms, projections, the activation, gate and up, dropout, the scales of the sum",
}


@dataclass
class Found:
    """One reason at one place.

    Attributes:
        a, b: numbers of the branch or stack.
        reason: the reason; its name is "unknown" where none fits.
        is_confirmed: whether the difference at the step vanished once the reason was undone; None untried.
        relative: relative difference at the step.
    """

    a: Number
    b: Number
    reason: Reason
    is_confirmed: bool | None = None
    relative: float = 1.0


@dataclass
class Search:
    """Result of a search.

    Attributes:
        found: the reasons in the order of the forward.
        patches: all that undo them in B.
        is_explained: whether B with the patches computes what A does; None where it was not tried.
        steps: of the last forward of B, with the patches and without A's stream.
        forwards: number of forwards of B.
    """

    found: list[Found] = field(default_factory=list)
    patches: tuple[Patch, ...] = ()
    is_explained: bool | None = None
    steps: Sequence[Step] = ()
    forwards: int = 0


def search(
    a: Walked,
    map_b: Map,
    parameters_b: Mapping[str, Tensor],
    run: Run,
    to_a: Mapping[Number, Number],
    *,
    tolerance: float = SAME,
    last: Run | None = None,
    is_random: bool = False,
) -> Search:
    """Find the reasons why B parts from A; at most `ROUNDS` + 1 forwards of B.

    Args:
        a: A with its steps.
        map_b, parameters_b: B, and the parameters that it runs with.
        run: a forward of B with patches, without gradients.
        to_a: numbers of B's places → A's.
        tolerance: largest relative difference of equal tensors.
        is_random: whether B alone gives other values at another seed in eval mode.
        last: the last forward, which may have gradients; None takes `run`.
    """
    result = Search()
    held = _held(a, map_b, to_a)
    known: set[tuple[Number, str, str]] = set()
    for _ in range(ROUNDS):
        steps = run((*result.patches, *held))
        result.forwards += 1
        placed = list(scenes_of(a, Walked(map_b, steps, parameters_b), to_a, tolerance))
        _confirm(result, placed)
        new = [each for one in placed for each in _reasons(one, known, _elsewhere(result, one))]
        if is_random and not any(name == "dropout-left-on" for _, name, _ in known):
            new = [_as_dropout(each, known) for each in new]
        if any(each.reason.name != UNKNOWN or each.b[1] >= 0 for each in new):
            # The last block reaches the head, which is judged alone once the blocks agree.
            late = [each for each in new if each.reason.name == UNKNOWN and each.b[0] >= 0 > each.b[2]]
            known -= {(each.b, UNKNOWN, each.reason.step) for each in late}
            new = [each for each in new if each not in late]
        if not new:
            break
        result.found += new
        result.patches = (*result.patches, *(patch for each in new for patch in each.reason.patches))
    result.steps = (last or run)(result.patches)
    result.forwards += 1
    result.is_explained = explained(a, result.steps, to_a, tolerance)
    order = {one.b: n for n, one in enumerate(placed)}
    result.found.sort(key=lambda each: order.get(each.b, -1))
    return result


def _as_dropout(found: Found, known: set[tuple[Number, str, str]]) -> Found:
    """Dropout in the place of an unknown reason, in a model that is random in eval mode."""
    if found.reason.name != UNKNOWN:
        return found
    step = found.reason.step
    known.add((found.b, "dropout-left-on", step))
    message = "Dropout is left on in eval mode in B alone."
    reason = Reason("dropout-left-on", step, "none", "left on", message, NO_DROPOUT)
    return replace(found, reason=reason)


def _held(a: Walked, map_b: Map, to_a: Mapping[Number, Number]) -> tuple[Patch, ...]:
    """Patches that put A's stream into B: at the entries of branches, final norms and after the encoder."""
    values: dict[object, Patch] = {}
    steps = {step.key: step.value for step in a.steps}
    for number, partner in to_a.items():
        if _is_later(map_b, number) or _is_later(a.map, partner):
            continue  # it reads the entry of the first one, where the other side's may read another tensor
        names: tuple[str, ...] = (
            ("entry",) if number[2] >= 0 else ("final norm in",) if number[0] >= 0 > number[1] else ()
        )
        if names == ("final norm in",) and number[0] < len(map_b.anatomy.stacks) - 1:
            names = (*names, "hidden")  # cross-attention reads it
        for name in names:
            at, value = map_b.places.get((*number, name)), steps.get((*partner, name))
            if at is None or value is None:
                continue
            fits = at.layout is None or value.numel() == _size(at.layout.merged)
            if fits:
                values[at.site] = tensors_at({at.site: value}, at.layout)[0]
    return tuple(values.values())


def _is_later(side: Map, number: Number) -> bool:
    """Whether a branch is parallel to one before it."""
    s, i, n = number
    branches = side.anatomy.stacks[s].blocks[i].branches if min(number) >= 0 else ()
    return any(each.sum == branches[n].sum for each in branches[: max(n, 0)])


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for each in shape:
        size *= each
    return size


def _confirm(result: Search, placed: Sequence[Placed]) -> None:
    """Note whether the difference at each reason's step has vanished."""
    by_number = {one.b: one for one in placed}
    for each in result.found:
        one = by_number.get(each.b)
        if one is None or not each.reason.patches or is_given(each.reason):
            continue
        scene = one.scene
        if each.reason.name == "placement":
            if _site(scene, placement.end_of(scene.b)) in _elsewhere(result, one):
                continue
            is_same = placement.is_same_end(scene)
        else:  # queries and keys are judged by their product
            is_same = scene.is_same(_judged(scene, each.reason.step))
        # A reason that was found later may patch the same tensor for another scene.
        each.is_confirmed = each.is_confirmed or is_same


def is_given(reason: Reason) -> bool:
    """Whether a reason puts A's own tensor into B, after which they agree there whatever the reason is."""
    return any(
        patch.value.name == "set"
        if isinstance(patch.value, Formula)
        else patch.kind == "output" and isinstance(patch.value, tuple) and patch.value[0] == "set"
        for patch in reason.patches
    )


def _judged(scene: Scene, step: str) -> str:
    """The step by which a reason at `step` is judged: one that has the same shape on both sides."""
    step = "logits" if step in ("query", "key") else step
    both = scene.both(step)
    if step in ("logits", "probabilities") and both is not None and both[0][0].shape != both[1][0].shape:
        return "mixed"
    return step


def _elsewhere(result: Search, one: Placed) -> set[Site]:
    """Sites that are patched for reasons of other scenes: this scene is not judged by them."""
    others = (each.reason.patches for each in result.found if each.b != one.b)
    return {patch.value.site for patches in others for patch in patches if patch.kind == "site"}


def _reasons(one: Placed, known: set[tuple[Number, str, str]], elsewhere: set[Site]) -> Iterator[Found]:
    """The new reasons of a scene; "unknown" where a step parts for none of them."""
    scene = one.scene
    apart = first_apart(scene, elsewhere)
    if apart is None:
        return
    some, skipped = False, list[str]()
    for file in FILES.get(scene.kind, OTHERS):
        for reason in _tried(file, scene, skipped):
            key = (one.b, reason.name, reason.step)
            if key in known:
                continue
            known.add(key)
            some = True
            if not reason.patches and reason.name not in ("parallel", "placement"):
                reason = replace(reason, patches=_given(scene, reason.step))
            yield Found(one.a, one.b, reason, relative=relative(scene, reason.step))
            if reason.name in ("parallel", "placement", "heads"):
                return  # the steps of the two do not correspond before it is undone
    is_random = any(where == one.b and name == "dropout-left-on" for where, name, _ in known)
    if some or is_random or (one.b, UNKNOWN, apart) in known:
        return
    known.add((one.b, UNKNOWN, apart))
    tried = TRIED.get(scene.kind, "all known reasons")
    message = f"The two part at {name_of_step(apart)}{NO_REASON} Tried: {tried}."
    reason = Reason(UNKNOWN, apart, None, None, message, _given(scene, apart), tuple(skipped))
    yield Found(one.a, one.b, reason, relative=relative(scene, apart))


def _given(scene: Scene, step: str) -> tuple[Patch, ...]:
    """A's own tensor at a step, or at the first one after it that parts and can be replaced in B.

    What follows is compared as if the difference were undone.
    """
    after = _ORDER.index(step if step in _ORDER else "logits")
    for name in dict.fromkeys((step, *_ORDER[after:])):
        both = scene.both(name)
        if both is None or scene.is_same(name) or both[0][0].shape != both[1][0].shape:
            continue
        if patches := scene.b.patch(name, "set", value=both[0][0]):
            return patches
    return ()


def _tried(file: Callable[[Scene], Reasons], scene: Scene, skipped: list[str]) -> list[Reason]:
    """The reasons of a file; none where it cannot use the tensors' shapes, with a sentence in `skipped`."""
    try:
        return list(file(scene))
    except (RuntimeError, ValueError, IndexError) as error:
        name = file.__module__.rpartition(".")[2]
        skipped.append(f'The reasons of "{name}" could not be tried here: {describe(error)}.')
        return []


def relative(scene: Scene, step: str) -> float:
    """Relative difference at a step."""
    both = scene.both(step)
    return 1.0 if both is None else distance(both[0][0], both[1][0])


_ORDER = (
    *("embedding", "embedding norm in", "embedding norm", "entry", "norm 0"),
    *("logits", "probabilities", "mixed", "o", "act", "down", "norm 1", "output", "sum"),
    *("final norm", "hidden", OUTPUT),
)


def first_apart(scene: Scene, elsewhere: Collection[Site] = ()) -> str | None:
    """First step at which the scene's sides part, among those that every implementation shares."""
    if not placement.is_alike(scene):
        end = placement.end_of(scene.b)
        return None if placement.is_same_end(scene) or _site(scene, end) in elsewhere else "sum"
    pooled = ("final norm", "hidden") if pooling.is_pooled_once(scene) else ()
    names = [
        name
        for name in _ORDER
        if scene.both(name) is not None and not scene.is_same(name) and _site(scene, name) not in elsewhere
        if name not in pooled
    ]
    ends = {"embedding": ("entry",), "head": ("hidden", OUTPUT)}.get(scene.kind)
    if ends is None:  # the added term alone may stand before or after a scale
        end = placement.end_of(scene.b)
        is_whole = scene.both(end) is not None and (scene.is_same(end) or not _is_shared(scene))
        ends = (end,) if is_whole else ("output",)
    return names[0] if any(name in ends for name in names) else None


def _is_shared(scene: Scene) -> bool:
    """Whether the sum has terms of parallel branches that are judged first."""
    others = {*scene.a.parallel, *scene.b.parallel}
    return bool(scene.a.after or scene.b.after) or not all(scene.is_same(name) for name in others)


def _site(scene: Scene, name: str) -> Site | None:
    return scene.b.places[name].site if name in scene.b.places else None


def explained(a: Walked, b: Sequence[Step], to_a: Mapping[Number, Number], tolerance: float) -> bool:
    """Whether the streams at all entries, and the outputs, agree."""
    left = {step.key: step.value for step in a.steps}
    for step in b:
        partner = to_a.get(step.key[:3])
        if partner is None or step.value is None or step.key[3] not in ("entry", "hidden", OUTPUT):
            continue
        if partner[2] >= 0:
            continue  # branches may be parallel on one side
        value = left.get((*partner, step.key[3]))
        if value is not None and step.key[3] == "hidden" and value.numel() != step.value.numel():
            continue  # one side pools before its final norm: the outputs decide
        if value is not None and distance(*(real_rows(t, a.real) for t in (value, step.value))) > tolerance:
            return False
    return True


def grouped(found: Sequence[Found]) -> list[list[Found]]:
    """Reasons that say the same at several places, together; in the order of the first."""
    groups: dict[tuple[str, str, str], list[Found]] = {}
    for each in found:
        reason = each.reason
        groups.setdefault((reason.name, reason.step, reason.message), []).append(each)
    return list(groups.values())
