"""Confidence intervals of differences that are paired by their seed."""

import numpy as np

from benchmarks.record import Rows

T = {
    2: 6.314,
    3: 2.920,
    4: 2.353,
    5: 2.132,
    6: 2.015,
}  # of Student's distribution: 95 % lie below, by the number of seeds


def interval(differences: np.ndarray) -> tuple[float, float]:
    """The 90 % confidence interval of a mean."""
    half = T[len(differences)] * differences.std(ddof=1) / len(differences) ** 0.5
    return float(differences.mean() - half), float(differences.mean() + half)


def show_intervals(rows: Rows, base: str, label: str = "way") -> None:
    """Print, for each task and way, the interval of its differences to the loss of the base. One seed has none."""
    for task in dict.fromkeys(row.get("task", "") for row in rows):
        losses: dict[str, dict[int, float]] = {}
        for row in rows:
            if row.get("task", "") == task:
                losses.setdefault(row[label], {})[row["seed"]] = row["loss"]
        of_base = losses.pop(base)
        mean = np.mean(list(of_base.values()))
        for way, of_way in losses.items():
            differences = np.array([loss - of_base[seed] for seed, loss in of_way.items() if seed in of_base])
            if len(differences) in T:
                low, high = interval(differences)
                print(f"{task} {way}: {low:+.4f} to {high:+.4f}, {100 * low / mean:+.2f} to {100 * high / mean:+.2f} %")
