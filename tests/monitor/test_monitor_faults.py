"""Random faults in running loops, a sample of `benchmarks.monitor.fault_runs`, through the store."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.monitor.fault_runs import case, is_in_time, judged, records_of, run, shown, summary

SEED, COUNT = 7, 14


@pytest.fixture(autouse=True)
def quiet() -> Any:
    """The faults warn, as they do in a run."""
    logger = logging.getLogger("normscope")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


@pytest.mark.filterwarnings("ignore")
def test_a_sample_of_faults_is_found_in_time_and_named(tmp_path: Path) -> None:
    file = tmp_path / "faults.jsonl"
    run(file, "seen", SEED, COUNT, None)
    records = records_of(file)
    assert len(records) == COUNT
    for record in records:
        said = (
            f"{record['architecture']} {record['loop']} {record['what']} {record['where']} {record['answer']}"
        )
        assert record["failure"] is None, said
        assert record["found"] is None or record["found"] >= record["step"], said
        if record["first_bad"] is not None:
            assert record["is_right"], said
        if shown(record) is not None:
            assert is_in_time(record, shown(record)), said
    assert sum(shown(record) is not None for record in records) >= 0.8 * COUNT
    assert len(next(summary(records))) > 100
    run(file, "seen", SEED, COUNT, None)
    assert len(records_of(file)) == COUNT, "faults that the file has are not run again"


@pytest.mark.filterwarnings("ignore")
def test_a_fault_in_a_compiled_model(tmp_path: Path) -> None:
    store = tmp_path / "run.db"
    record = judged([case("seen", 1, 5, "compiled", store)], store)
    json.dumps(record)
    assert record["first_bad"] is not None
    assert record["is_right"], record["answer"]
    torch._dynamo.reset()
