"""The diagnosis: packages and machine together, and what is wrong."""

import platform
import sys
from collections.abc import Iterator
from typing import Any

import normscope
from normscope.doctor import machine
from normscope.doctor.packages import PACKAGES, look_up
from normscope.errors import describe


def diagnose() -> dict[str, Any]:
    """This machine, in the schema "normscope.doctor/1". Nothing is installed, downloaded or changed.

    `problems` are needed things that are missing or broken, each with what to do; `devices` is None where
    PyTorch cannot be asked.
    """
    packages = [look_up(package) for package in PACKAGES]
    problems = [
        f"{each['name']} {_package(each)}" for each in packages if each["needed"] and each["status"] != "ok"
    ]
    if (temporary := machine.temporary()) is None:
        problems.append("temporary files cannot be written: set TMPDIR to a folder that can be")
    devices = None
    if any(each["name"] == "torch" and each["status"] == "ok" for each in packages):
        try:
            devices = machine.devices()
        except Exception as error:  # a driver that does not fit, a device that is gone
            problems.append(f"devices cannot be read ({describe(error)}): check the drivers")
    python = {
        "version": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
    }
    return {
        "schema": "normscope.doctor/1",
        "normscope": normscope.__version__,
        "python": python,
        "packages": packages,
        "devices": devices,
        "terminal": machine.terminal(),
        "temporary": temporary,
        "problems": problems,
    }


def text_diagnosis(diagnosis: dict[str, Any]) -> str:
    """The diagnosis as plain text: packages, machine, and the result at the end."""
    python, packages, problems = diagnosis["python"], diagnosis["packages"], diagnosis["problems"]
    lines = [f"normscope {diagnosis['normscope']}, Python {python['version']} on {python['platform']}"]
    lines.append(f"({python['executable']})")
    sections = {
        "needed": [(each["name"], _package(each)) for each in packages if each["needed"]],
        "optional": [(each["name"], _package(each)) for each in packages if not each["needed"]],
        "machine": list(_machine(diagnosis)),
    }
    for title, rows in sections.items():
        lines += ["", title, *(f"  {label:<14}{words}" for label, words in rows)]
    absent = [each["name"] for each in packages if each["status"] != "ok"]
    result = "Everything is there."
    if problems:
        result = "normscope cannot be used until the problems above are fixed."
    elif absent:
        result = f"Everything needed is there; without {', '.join(absent)}, see above."
    return "\n".join([*lines, "", *(f"problem: {each}" for each in problems), result]) + "\n"


def _package(package: dict[str, Any]) -> str:
    """The version, or what is wrong, what that disables and the command that repairs it."""
    status = package["status"]
    if status == "ok":
        return str(package["version"])
    state = status if package["version"] is None else f"{package['version']}, {status}"
    why = {"too old": f" (expected {package['minimum']} or newer)", "broken": f" ({package['reason']})"}
    disabled = f"; without it: no {package['disables']}" if package["disables"] else ""
    return f"{state}{why.get(status, '')}{disabled}; {package['install']}"


def _machine(diagnosis: dict[str, Any]) -> Iterator[tuple[str, str]]:
    devices, terminal = diagnosis["devices"], diagnosis["terminal"]
    if devices is not None:
        yield "PyTorch", f"{devices['build']} build, {devices['threads']} threads"
        yield "CPU", f"{devices['cpus']} cores ({devices['usable_cpus']} usable)"
        for device in devices["found"][1:]:
            size = f", {device['memory_bytes'] / 2**30:.0f} GiB" if device["memory_bytes"] else ""
            yield device["device"], f"{device['name']}{size}. {devices['measured']}"
        if len(devices["found"]) == 1:
            yield "GPU", f"none that PyTorch can use. {devices['measured']}"
        slow = "not supported: forecasts of collapsed runs are slower"
        yield "denormals", "flushed to zero in forecasts" if devices["flush_denormal"] else slow
    spelled = "" if terminal["unicode"] else ": signs that it lacks are spelled out (-> for →)"
    yield "terminal", f"{terminal['encoding']}{spelled}"
    yield "temporary", diagnosis["temporary"] or "no folder can be written"
