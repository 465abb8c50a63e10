"""Parts of a measurement, each in a process of its own with a time-out: a compiler that hangs ends with its process."""

import importlib
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

COMPILING = "compiling"  # the outcome of a row while its program compiles


class Part(NamedTuple):
    """A function `(quick, send)` by its name, so that only its process imports what it needs."""

    seconds: int
    module: str
    function: str


def run(part: Part, quick: bool, save: Callable[[dict[str, Any]], None]) -> None:
    """Run a part, and save its rows and its outcome whenever a row arrives and when it ends."""
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(sending, part, quick), daemon=True)
    start = last = time.monotonic()
    process.start()
    sending.close()
    rows: dict[int, dict[str, Any]] = {}
    found: dict[str, Any] = {"outcome": "running", "rows": []}
    while found["outcome"] == "running":
        try:
            if receiving.poll(max(0.0, start + part.seconds - time.monotonic())):
                number, row = receiving.recv()
                rows[number], last = row, time.monotonic()
            else:
                process.kill()
                found["outcome"] = f"stopped after {part.seconds} s"
        except EOFError:
            process.join()
            found["outcome"] = f"exit code {process.exitcode}" if process.exitcode else "complete"
        if found["outcome"] != "running":
            now = time.monotonic()
            found["seconds"] = round(now - start, 1)
            for row in rows.values():
                if row.get("outcome") == COMPILING:
                    row["outcome"] = f"did not compile in {now - last:.0f} s"
        found["rows"] = list(rows.values())
        save(found)
    process.join()


def _child(sending: Connection, part: Part, quick: bool) -> None:
    send = lambda number, row: sending.send((number, row))
    getattr(importlib.import_module(part.module), part.function)(quick, send)
