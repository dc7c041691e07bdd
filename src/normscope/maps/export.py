"""A map as JSON and as Parquet."""

import json
import math
from pathlib import Path
from typing import Any

from normscope.errors import UsageError
from normscope.maps.page import Sheet
from normscope.maps.record import Record
from normscope.maps.table import edge
from normscope.train import last_loss

SCHEMA = "normscope.map/1"


def to_dict(sheet: Sheet) -> dict[str, Any]:
    """One object for JSON: settings, counts, edges, and every cell without its curve."""
    table = sheet.table
    edges = [
        {
            "scheme": panel.scheme, "init": panel.init, "warmup": panel.warmup, "depth": row[0].depth,
            "largest_rate": edge(row),
        }
        for panel in table.panels
        for row in panel.points
    ]  # fmt: skip
    counts = sheet.counts
    return {
        "schema": SCHEMA,
        "settings": dict(sheet.settings),
        "command": sheet.command,
        "unigram_entropy": table.unigram_entropy,
        "stack": None if sheet.stack is None else dict(sheet.stack),
        "counts": {
            "total": counts.total, "done": counts.done, "waiting": counts.waiting + counts.claimed,
            "crashed": counts.crashed, "trains": counts.trains, "fails": counts.fails,
        },
        "edges": edges,
        "cells": [_row(record) for record in sheet.records],
    }  # fmt: skip


def to_json(sheet: Sheet) -> str:
    """`to_dict` as text; what is not finite is null."""
    return json.dumps(to_dict(sheet), indent=1, ensure_ascii=False, allow_nan=False)


def write_parquet(sheet: Sheet, path: Path) -> None:
    """Every cell with its curve, its config as JSON, and the versions it was trained with.

    Raises:
        UsageError: pyarrow is not installed, or the file cannot be written.
    """
    require_pyarrow()
    import pyarrow
    import pyarrow.parquet

    curves = [None if r.result is None else list(r.result.losses) for r in sheet.records]
    columns = {
        **pyarrow.Table.from_pylist([_row(record) for record in sheet.records], schema=_schema()).to_pydict(),
        "config": [json.dumps(record.cell.config.to_dict()) for record in sheet.records],
        "versions": [r.result and json.dumps(dict(r.result.versions)) for r in sheet.records],
    }
    table = pyarrow.table(columns).append_column(
        "losses", pyarrow.array(curves, type=pyarrow.list_(pyarrow.float64()))
    )
    try:
        pyarrow.parquet.write_table(table, path)
    except OSError as error:
        raise UsageError(f"--parquet {path} ({error})", "a file to write", "name another") from error


def require_pyarrow() -> None:
    """UsageError, before the long work, where pyarrow is not installed."""
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "--parquet without pyarrow", "pyarrow beside normscope", 'pip install "normscope[parquet]"'
        ) from error


def _row(record: Record) -> dict[str, Any]:
    cell, result = record.cell, record.result
    row: dict[str, Any] = {
        "key": cell.key, "scheme": cell.scheme, "init": cell.init, "depth": cell.depth, "lr": cell.lr,
        "warmup": cell.warmup, "seed": cell.seed, "state": record.state, "reason": record.reason,
    }  # fmt: skip
    if result is None:
        return row | dict.fromkeys(_OF_RESULT)
    loss = last_loss(result.losses)
    return row | {
        "verdict": result.verdict, "loss": loss if math.isfinite(loss) else None,
        "unigram_entropy": result.unigram_entropy, "steps": len(result.losses),
        "certain_at": result.certain_at, "certain": result.certain, "stopped": result.stopped,
        "seconds": result.seconds, "stack": result.stack,
    }  # fmt: skip


_OF_RESULT = (
    *("verdict", "loss", "unigram_entropy", "steps", "certain_at", "certain", "stopped", "seconds", "stack"),
)


def _schema() -> Any:
    import pyarrow

    text, whole, real = pyarrow.string(), pyarrow.int64(), pyarrow.float64()
    types = {
        "key": text, "scheme": text, "init": text, "depth": whole, "lr": real, "warmup": whole, "seed": whole,
        "state": text, "reason": text, "verdict": text, "loss": real, "unigram_entropy": real,
        "steps": whole, "certain_at": whole, "certain": text, "stopped": pyarrow.bool_(), "seconds": real,
        "stack": whole,
    }  # fmt: skip
    return pyarrow.schema(list(types.items()))
