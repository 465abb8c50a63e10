"""The table of REINFORCE in float16 and in bfloat16."""

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.record import Rows
from benchmarks.report.markdown import select, table

Found = dict[str, Any]


def rows(found: Found, setup: str) -> Rows:
    return select(found["rows"], setup=setup)


def of(found: Found, setup: str, way: str) -> np.ndarray:
    """The mean mismatch at the end of each seed's run."""
    return np.array([row["end"][way]["mean"] for row in rows(found, setup)])


def spread(values: np.ndarray, form: str = ".2g") -> str:
    return f"{values.mean():{form}} ({values.min():{form}} to {values.max():{form}})"


def factors(found: Found) -> str:
    """The mean mismatch after training in each dtype, by the pair of sampler and trainer."""
    body = []
    for way in rows(found, "float16")[0]["end"]:
        means = (f"{of(found, setup, way).mean():.1e}" for setup in ("bfloat16", "float16"))
        ratios = of(found, "bfloat16", way) / of(found, "float16", way)
        form = ".2g" if ratios.min() < 100 else ".0f"
        body.append([way, *means, "below 1" if ratios.max() < 1 else spread(ratios, form)])
    return table(["sampler / trainer", "bfloat16", "float16", "times"], body)


TABLES: dict[str, Callable[[Found], str]] = {"factors": factors}
