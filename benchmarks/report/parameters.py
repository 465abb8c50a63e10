"""Tables of the memory of optimizers."""

from typing import Any

from benchmarks.report.markdown import names, origin, select, table


def codes(found: dict[str, Any]) -> str:
    """The error of Adam's update by code, of each seed."""
    tasks = names(found["rows"], "task")
    body = []
    for way in names(found["rows"], "way"):
        errors = [select(found["rows"], way=way, task=task)[0]["errors"] for task in tasks]
        body.append([way, *(", ".join(f"{error:.3f}" for error in of_task) for of_task in errors)])
    return f"{table(['moments', *tasks], body)}\n\n{origin(found)}"
