"""Report on a run from its store, also while it goes on: `check_run("run.db")`."""

from normscope.monitor.after.report import RunReport, check_run

__all__ = ["RunReport", "check_run"]
