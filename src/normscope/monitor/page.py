"""Page of a run: one HTML document, and the figures that it asks for while it is open."""

import base64
import hashlib
import threading
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from markupsafe import Markup

from normscope.monitor.against import Comparison
from normscope.monitor.condense import Held, condense
from normscope.monitor.scene import COLOURS, Scene, Watcher
from normscope.monitor.store import Grid
from normscope.report.page import environment
from normscope.report.report import strict

SCALARS = ("loss", "lr", "loss-scale")
"""Quantities of the whole model whose last value the page shows."""
_OF_SCENE = ("state", "reason", "silence", "last_step", "rank", "ranks", "first_wrong_value")


@dataclass(frozen=True)
class Document:
    """The page, without any figure of the run.

    Attributes:
        html: the document.
        policy: its content security policy: only its own script runs, and it may ask only its own server.
    """

    html: str
    policy: str


def document(name: str) -> Document:
    """The page of the run `name`; every word in it is escaped."""
    script = _template("watch.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    html = (
        environment("normscope.monitor")
        .get_template("watch.html")
        .render(
            name=name,
            style=Markup(_template("watch.css")),
            script=Markup(script),
            script_hash=digest,
            colours=" ".join(COLOURS),
        )
    )
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return Document(html, policy)


class Figures:
    """Answers to the page, each with what it does not hold yet; threads may ask at once.

    Args:
        path: the run's store.
        quantity: the quantity of the heat map where the page names none.
        rank: the rank whose figures are read where the page names none.
        against: store of a run to compare with.
    """

    def __init__(
        self,
        path: Path,
        quantity: str | None = None,
        rank: int | None = None,
        against: Path | None = None,
    ) -> None:
        self._path, self._quantity, self._rank, self._against = path, quantity, rank, against
        self._watchers: dict[int | None, Watcher] = {}
        self._lock = threading.Lock()

    def answer(self, asked: Mapping[str, str]) -> dict[str, Any]:
        """The figures of this moment as JSON can hold them.

        Args:
            asked: "quantity" and "rank" to show, and what the page holds: "version" of the last answer,
                "loss", "heat", "good" and "ratio" as "WIDTH.ROWS", number of "alarms" and "events". All may
                be missing.

        Raises:
            UsageError: the store cannot be read, or lacks the quantity or the rank.
        """
        rank = _number(asked.get("rank"), self._rank)
        with self._lock:
            watcher = self._watchers.get(rank) or Watcher(self._path, rank=rank, against=self._against)
            watcher.quantity = asked.get("quantity") or self._quantity
            scene = watcher.look()
            self._watchers[rank] = watcher  # only now: any rank may be asked for
            version = _version(watcher, scene)
        same = asked if asked.get("version") == version else {}
        first_alarm, first_event = (
            min(_number(same.get(name), 0) or 0, len(records))
            for name, records in (("alarms", scene.alarms), ("events", scene.events))
        )
        whole = scene.to_dict()
        return {name: whole[name] for name in _OF_SCENE} | strict(
            {
                "version": version,
                "model": scene.notes.get("model"),
                "planned": scene.notes.get("steps"),
                "entropy": scene.notes.get("entropy"),
                "notes": scene.notes.get("notes") or [],
                "figures": {name: scene.figure(name) for name in SCALARS},
                "step_seconds": scene.step_seconds,
                "tokens_per_second": scene.tokens_per_second,
                "quantity": scene.quantity,
                "quantities": scene.quantities,
                "sites": [] if scene.heat is None else scene.heat.sites,
                "loss": _columns(scene.loss, same.get("loss")),
                "heat": _columns(scene.heat, same.get("heat")),
                "against": None if scene.against is None else _beside(scene.against, same),
                "alarms": whole["alarms"][first_alarm:],
                "events": [_short(event) for event in whole["events"][first_event:]],
                "first_alarm": first_alarm,
                "first_event": first_event,
            }
        )


def _short(event: dict[str, Any]) -> dict[str, Any]:
    """An event without its lists: a look at the model holds all that it measured."""
    data = {name: value for name, value in event["data"].items() if isinstance(value, str | int | float)}
    return event | {"data": data}


def _beside(against: Comparison, same: Mapping[str, str]) -> dict[str, Any]:
    """The other run, with the losses and ratios that the page lacks."""
    return {
        "name": against.path.name,
        "last_step": against.last_step,
        "parting": against.parting.to_dict(),
        "is_linear": against.is_linear,
        "loss": _columns(against.loss, same.get("good")),
        "heat": _columns(against.heat, same.get("ratio")),
        "sites": [] if against.heat is None else against.heat.sites,
    }


def _columns(grid: Grid | None, held: str | None) -> dict[str, Any] | None:
    if grid is None:
        return None
    width, _, rows = (held or "").partition(".")
    return condense(grid, Held(_number(width, 0) or 0, _number(rows, 0) or 0)).to_dict()


def _version(watcher: Watcher, scene: Scene) -> str:
    """Name of what the rows that were read before belong to; another one makes them invalid."""
    ratios = None if scene.against is None else scene.against.heat
    sites = [None if each is None else each.sites for each in (scene.heat, ratios)]
    of = (watcher.version, watcher.rank, scene.rank, scene.quantity, sites)
    return f"{zlib.crc32(repr(of).encode()):08x}"


def _number(text: str | None, default: int | None) -> int | None:
    return int(text) if text and text.isascii() and text.isdecimal() and len(text) < 10 else default


def _template(name: str) -> str:
    return files("normscope.monitor").joinpath("templates", name).read_text(encoding="utf-8")
