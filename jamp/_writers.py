"""Where a `History` is written to: files of comma-separated values or JSON, TensorBoard."""

import csv
import importlib
import json
import math
import os
from pathlib import Path
from typing import Any

Row = dict[str, int | float]


class _FileWriter:
    """Keeps rows until `flush`, which appends them to a file: nothing stays open between."""

    def __init__(self, path: str | os.PathLike[str]):
        self._path = Path(path)
        self._rows: list[Row] = []

    def __call__(self, step: int, row: Row) -> None:
        self._rows.append({"step": step, **row})

    def flush(self) -> None:
        """Append the rows so far to the file."""
        if self._rows:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", newline="") as file:
                self._dump(file, self._rows)
            self._rows = []

    def _dump(self, file: Any, rows: list[Row]) -> None:
        raise NotImplementedError


class CsvWriter(_FileWriter):
    """Writes a `History` as comma-separated values: a column for the step and one for each name.

    Args:
      path: The file. Rows are appended to it if it exists.

    Examples:
      >>> from jamp.history import CsvWriter, History
      >>> history = History(write=CsvWriter("scale.csv"))
    """

    def _dump(self, file: Any, rows: list[Row]) -> None:
        writer = csv.DictWriter(file, list(rows[0]))
        if file.tell() == 0:
            writer.writeheader()
        writer.writerows(rows)


class JsonLinesWriter(_FileWriter):
    """Writes a `History` as JSON, an object a line. JSON has no inf and no nan: they are strings, which `float` reads.

    Args:
      path: The file. Lines are appended to it if it exists.

    Examples:
      >>> from jamp.history import History, JsonLinesWriter
      >>> history = History(write=JsonLinesWriter("scale.jsonl"))
    """

    def _dump(self, file: Any, rows: list[Row]) -> None:
        for row in rows:
            line = {name: x if math.isfinite(x) else str(x) for name, x in row.items()}
            file.write(json.dumps(line, allow_nan=False) + "\n")


class TensorBoardWriter:
    """Writes a `History` for TensorBoard, a chart for each name.

    Args:
      writer: A directory to write to, which needs `pip install tensorboardX`; or a writer that you have, of
        `torch.utils.tensorboard` or tensorboardX: anything with `add_scalar(name, value, step)` and `flush()`.

    Raises:
      ImportError: If `writer` is a directory and tensorboardX is not installed.

    Examples:
      >>> from jamp.history import History, TensorBoardWriter
      >>> class Writer:
      ...     def add_scalar(self, name, value, step): ...
      ...     def flush(self): ...
      >>> history = History(write=TensorBoardWriter(Writer()))
    """

    def __init__(self, writer: Any):
        if isinstance(writer, (str, os.PathLike)):
            try:
                tensorboard_x = importlib.import_module("tensorboardX")
            except ImportError:
                raise ImportError(
                    "TensorBoardWriter(directory) needs tensorboardX: `pip install tensorboardX`, or hand in a writer "
                    "that you have, such as torch.utils.tensorboard.SummaryWriter(directory)."
                ) from None
            writer = tensorboard_x.SummaryWriter(str(writer))
        self._writer = writer

    def __call__(self, step: int, row: Row) -> None:
        """Write a step."""
        for name, value in row.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        """Flush the writer."""
        self._writer.flush()

    def close(self) -> None:
        """Close the writer; tensorboardX writes in the background until then."""
        self._writer.close()
