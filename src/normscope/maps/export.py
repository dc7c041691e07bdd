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
    """`to_dict` as text; values that are not finite are null."""
    return json.dumps(to_dict(sheet), indent=1, ensure_ascii=False, allow_nan=False)


def write_parquet(sheet: Sheet, path: Path) -> None:
    """Write every cell with its curve, its config as JSON, and the versions of the software.

    Raises:
        UsageError: pyarrow is not installed, or the file cannot be written.
    """
    require_pyarrow()
    import pyarrow
    import pyarrow.parquet

    curves = [None if r.result is None else list(r.result.losses) for r in sheet.records]
    schema = pyarrow.schema([(name, pyarrow.type_for_alias(kind)) for name, kind in _TYPES.items()])
    columns = {
        **pyarrow.Table.from_pylist([_row(record) for record in sheet.records], schema=schema).to_pydict(),
        "config": [json.dumps(record.cell.config.to_dict()) for record in sheet.records],
        "versions": [r.result and json.dumps(dict(r.result.versions)) for r in sheet.records],
    }
    table = pyarrow.table(columns).append_column(
        "losses", pyarrow.array(curves, type=pyarrow.list_(pyarrow.float64()))
    )
    try:
        pyarrow.parquet.write_table(table, path)
    except OSError as error:
        raise UsageError(
            f"--parquet {path} ({error})", "a file that can be written", "name another file"
        ) from error


def require_pyarrow() -> None:
    """UsageError, before the long work, where pyarrow is not installed."""
    try:
        import pyarrow  # noqa: F401
    except ImportError as error:
        raise UsageError(
            "--parquet without pyarrow", "pyarrow to be installed", 'pip install "normscope[parquet]"'
        ) from error


_TYPES = {
    "key": "string", "scheme": "string", "init": "string", "depth": "int64", "lr": "double",
    "warmup": "int64", "seed": "int64", "state": "string", "reason": "string", "verdict": "string",
    "loss": "double", "unigram_entropy": "double", "steps": "int64", "certain_at": "int64",
    "certain": "string", "stopped": "bool", "seconds": "double", "stack": "int64",
}  # fmt: skip
"""Columns of the cells with their types in Parquet."""


def _row(record: Record) -> dict[str, Any]:
    """The values of `_TYPES`; None for values that a cell without a result lacks."""
    cell, result = record.cell, record.result
    row: dict[str, Any] = {"state": record.state, "reason": record.reason}
    row |= {name: getattr(cell, name) for name in _TYPES if hasattr(cell, name)}
    if result is not None:
        loss = last_loss(result.losses)
        row |= {name: getattr(result, name) for name in _TYPES if hasattr(result, name)}
        row |= {"loss": loss if math.isfinite(loss) else None, "steps": len(result.losses)}
    return {name: row.get(name) for name in _TYPES}
