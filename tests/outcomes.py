"""A line for each test as it ends (`pytest --outcomes=FILE`): a run that is ended has told what it found.

A line is JSON: the test, its outcome ("error" where it failed before it began or after it ended), its seconds with those of its
fixtures, and of one that failed what pytest says.
"""

import json
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path, metavar="FILE", help="gets a line of JSON for each test as it ends")


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption("--outcomes")
    if path is not None and not hasattr(config, "workerinput"):  # a process of pytest-xdist tells the first one
        config.pluginmanager.register(Outcomes(path))


class Outcomes:
    def __init__(self, path: Path) -> None:
        self.path, self.before = path, dict[str, float]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.passed and report.when != "call":
            self.before[report.nodeid] = report.duration
            return
        outcome = "error" if report.failed and report.when != "call" else report.outcome
        seconds = report.duration + self.before.pop(report.nodeid, 0.0)
        line = {"test": report.nodeid, "outcome": outcome, "seconds": round(seconds, 1)}
        with open(self.path, "a", encoding="utf-8") as file:
            print(json.dumps(line | ({"said": report.longreprtext} if report.failed else {})), file=file)
