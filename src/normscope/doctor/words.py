"""A diagnosis as text."""

from collections.abc import Iterator

import normscope
from normscope.doctor.diagnosis import Diagnosis
from normscope.doctor.packages import Found

_WIDTH = 14


def text_diagnosis(diagnosis: Diagnosis) -> str:
    """The diagnosis as plain text: packages, machine, and the result at the end."""
    return "\n".join(_lines(diagnosis)) + "\n"


def _lines(diagnosis: Diagnosis) -> Iterator[str]:
    python = diagnosis.python
    yield f"normscope {normscope.__version__}, Python {python['version']} on {python['platform']}"
    yield f"({python['executable']})"
    for title, optional in (("needed", False), ("optional", True)):
        yield ""
        yield title
        for found in diagnosis.packages:
            if bool(found.package.extra) is optional:
                yield _labelled(found.package.name, _package(found))
    yield ""
    yield "machine"
    yield from (_labelled(name, words) for name, words in _machine(diagnosis))
    yield ""
    yield from (f"problem: {problem}" for problem in diagnosis.problems)
    yield _result(diagnosis)


def _package(found: Found) -> str:
    if found.status == "ok":
        return found.version or ""
    disabled = f"; without it: no {found.package.enables}" if found.package.enables else ""
    too_old = f" (expected {found.package.minimum} or newer)" if found.status == "too old" else ""
    state = found.status if found.version is None else f"{found.version}, {found.status}{too_old}"
    return f"{state}{disabled}; {found.package.install}"


def _machine(diagnosis: Diagnosis) -> Iterator[tuple[str, str]]:
    if (devices := diagnosis.devices) is not None:
        yield "PyTorch", f"{devices['build']} build, {devices['threads']} threads"
        usable = f" ({devices['usable_cpus']} usable)" if devices["usable_cpus"] != devices["cpus"] else ""
        yield "CPU", f"{devices['cpus']} cores{usable}"
        for device in devices["found"][1:]:
            memory = device["memory_bytes"]
            size = "" if memory is None else f", {memory / 2**30:.0f} GiB"
            yield device["device"], f"{device['name']}{size}. {devices['measured']}"
        if len(devices["found"]) == 1:
            yield "GPU", f"none that PyTorch can use. {devices['measured']}"
    if diagnosis.flush_denormal is not None:
        slow = "not supported: forecasts of collapsed runs are slower"
        yield "denormals", "flushed to zero in forecasts" if diagnosis.flush_denormal else slow
    encoding = diagnosis.terminal["encoding"]
    spelled = "" if diagnosis.terminal["unicode"] else ": signs that it lacks are spelled out (-> for →)"
    yield "terminal", f"{encoding}{spelled}"
    if diagnosis.fonts is not None:
        missing = "missing: pictures use another font"
        yield "font", f"{diagnosis.fonts['name']}" if diagnosis.fonts["found"] else missing
    for folder in diagnosis.folders:
        state = "writable" if folder["writable"] else "not writable"
        yield folder["use"].split()[0], f"{folder['path']} ({folder['use']}, {state})"


def _result(diagnosis: Diagnosis) -> str:
    absent = [found for found in diagnosis.packages if found.status != "ok" and found.package.extra]
    if diagnosis.problems:
        return "normscope cannot be used until the problems above are fixed."
    if not absent:
        return "Everything is there."
    return (
        f"Everything needed is there; without {', '.join(found.package.name for found in absent)}, see above."
    )


def _labelled(label: str, words: str) -> str:
    return f"  {label:<{_WIDTH}}{words}"
