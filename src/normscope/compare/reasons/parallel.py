"""Branches that are parallel on one side, and one after the other on the other."""

from collections.abc import Sequence

from normscope.compare.reasons.norms import options_of
from normscope.compare.reasons.placement import fed_by, is_alike
from normscope.compare.reasons.scene import Reason, Reasons, Scene
from normscope.compare.types import Patch


def reasons(scene: Scene) -> Reasons:
    """A branch that reads the stream before the other branches of its block on one side alone."""
    if is_mixed(scene) and (scene.a.before or scene.b.before):
        words = ["parallel" if half.parallel else "one after the other" for half in (scene.a, scene.b)]
        message = f"The branches of the block are {words[0]} in A and {words[1]} in B."
        yield Reason("parallel", "sum", words[0], words[1], message, tuple(_patches(scene)))


def is_mixed(scene: Scene) -> bool:
    """Whether the branch is parallel to others on one side alone."""
    return bool(scene.a.parallel) != bool(scene.b.parallel)


def _patches(scene: Scene) -> Sequence[Patch]:
    """B's first projections read what A's do."""
    if not is_alike(scene):
        return ()
    sources = ("block entry",) if scene.a.parallel else ("entry", *scene.b.before)
    norm = scene.a.slots.get("in")
    return fed_by(scene, sources, {} if norm is None else options_of(scene.a, norm))
