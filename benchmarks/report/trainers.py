"""The table of the mismatch of Tunix's sampler and trainer."""

from typing import Any

import numpy as np

from benchmarks.report.accuracy import interval
from benchmarks.report.markdown import origin, select, table


def mismatch(found: dict[str, Any]) -> str:
    """Mean absolute differences of the log-probabilities of tokens, over seeds, before training."""
    dtypes = "float16", "bfloat16"
    body = []
    for name, suffix in (("sampler and loss", ""), ("the loss alone", " loss")):
        cells = []
        for dtype in dtypes:
            apart = np.array([row["mean_abs"] for row in select(found["rows"], way=dtype + suffix, updates=0)])
            cells.append("{:.1e} ({:.1e} to {:.1e})".format(apart.mean(), *interval(apart)))
        body.append([name, *cells])
    return f"{table(['in 16 bit', *dtypes], body)}\n\n{origin(found)}"
