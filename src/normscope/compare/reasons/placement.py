"""Placement of a branch's norms: which of its slots hold one."""

from typing import Any

from normscope.compare.reasons.norms import options_of
from normscope.compare.reasons.scene import Half, Reason, Reasons, Scene, tell
from normscope.compare.types import Patch

_FIRST = ("q", "k", "v", "up", "gate")


def reasons(scene: Scene) -> Reasons:
    """A norm that one side has in another slot, or that it lacks."""
    a, b = scene.a.branch, scene.b.branch
    if a is None or b is None or is_alike(scene) or is_same_end(scene):
        return
    message = tell("The placement of the norms", a.placement, b.placement)
    yield Reason("placement", "entry", a.placement, b.placement, message, _patches(scene))


def is_alike(scene: Scene) -> bool:
    """Whether both sides have norms in the same slots."""
    return set(scene.a.slots) == set(scene.b.slots)


def end_of(half: Half) -> str:
    """Name of the step that is the stream after the branch, and after a norm on the stream."""
    return half.slots.get("stream", "sum")


def is_same_end(scene: Scene) -> bool:
    """Whether the stream after the branch, and after a norm on the stream, is the same."""
    return scene.is_same(end_of(scene.a), end_of(scene.b))


def _patches(scene: Scene) -> tuple[Patch, ...]:
    here, there = scene.a.slots, scene.b.slots
    patches: list[Patch] = []
    for slot in ("in", "out", "stream"):
        if slot in there and slot not in here:
            patches += scene.b.patch(there[slot], "affine", (f"{there[slot]} in",))
        elif slot in here and slot not in there:
            options = options_of(scene.a, here[slot])
            if slot == "in":
                patches += fed_by(scene, ("entry",), options)
            else:
                patches += scene.b.patch("output" if slot == "out" else "sum", "norm_of_itself", **options)
    return tuple(patches)


def fed_by(scene: Scene, sources: tuple[str, ...], options: dict[str, Any]) -> list[Patch]:
    """B's first projections read the norm of the sources' sum."""
    branch = scene.b.branch
    assert branch is not None
    read = scene.b.slots.get("in", "entry")
    first: dict[str, tuple[str, int]] = {}
    for projection in branch.projections:
        role = next((r for r in projection.roles if r in _FIRST), None)
        if role is not None:
            first.setdefault(projection.parameter, (role, projection.feature_axis))
    return [
        patch
        for parameter, (role, axis) in first.items()
        for patch in scene.b.patch(
            f"whole {role}",
            "linear",
            (read, *sources),
            parameters={"matrix": parameter},
            feature_axis=axis,
            **options,
        )
    ]
