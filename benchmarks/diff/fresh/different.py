"""Set `fresh`: published models, ports and refactorings, with one or two planted mistakes each."""

from benchmarks.diff.fresh.configurations import configurations
from benchmarks.diff.fresh.mistakes import OTHERS, ROWS, TWO
from benchmarks.diff.fresh.own import recipes, rewrites, starts
from benchmarks.diff.fresh.planting import GITHUB, other, port
from benchmarks.diff.plants import Case


def cases() -> list[Case]:
    """All of them."""
    return [
        *(port(name, style, *mistakes) for name, style, mistakes in (*ROWS, *TWO)),
        *(other(name, *mistakes) for name, mistakes in OTHERS),
        *configurations(),
        *rewrites(),
        *starts(),
        *recipes(),
    ]


def sources() -> set[str]:
    """Addresses of the reports that the mistakes follow, but for those in comments."""
    held = [m for _, _, found in (*ROWS, *TWO) for m in found] + [m for _, found in OTHERS for m in found]
    return {f"{GITHUB}{m.source}" for m in held if m.source}
