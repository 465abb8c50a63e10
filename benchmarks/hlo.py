"""Counts of an optimized program, read from its text, and the time that they predict.

XLA:GPU has no cost analysis without a GPU, and on a TPU XLA's "bytes accessed" includes the memory on the chip. Here a
kernel reads each of its operands once and writes its results once, and only the device's main memory counts.
"""

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from jamp._step.retry import RETRY


class Counts(NamedTuple):
    """What one run of a program does."""

    bytes: float = 0.0  # read from and written to main memory
    kernels: float = 0.0  # fusions, calls of libraries, and copies that the program waits for


@dataclass(frozen=True)
class Device:
    bandwidth: float  # bytes a second, as published
    launch: float  # seconds to start a kernel

    def milliseconds(self, counts: Counts) -> float:
        """A step that only moves memory. That copies overlap with kernels is not modelled."""
        return 1e3 * (counts.bytes / self.bandwidth + counts.kernels * self.launch)


# NVIDIA's data sheet of the H200: 4.8 TB/s. Google Cloud's documentation of the TPU v5e: 819 GB/s. A microsecond for a
# kernel is what XLA's performance model of GPUs assumes (kKernelLaunchOverhead). For a TPU it is only a guess.
DEVICES = {"h200": Device(4.8e12, 1e-6), "tpu": Device(819e9, 1e-6)}

SIZES = {"pred": 1, "s4": 0.5, "u4": 0.5, "token": 0}  # bytes. Of other types the name holds the bits.
FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "opt-barrier", "partition-id")
KERNELS = ("fusion", "custom-call", "copy")
INSTRUCTION = re.compile(r"^ +(?:ROOT )?(%[\w.-]+) = ")
ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?")
BRANCHES = re.compile(r"(?:branch_computations=\{|true_computation=|false_computation=)([^}]*?)(?:\}|, [a-z]|$)")


class Instruction(NamedTuple):
    name: str
    type: str
    kind: str
    operands: list[str]
    rest: str  # the attributes


def count(text: str) -> Counts:
    """Bytes and kernels of the main program: of a conditional its larger branch, of a loop as often as it runs.

    The retries of `jamp.scaled` are not counted, because they almost never run.
    """
    programs = computations(text)
    return _count(programs["ENTRY"], programs)


def computations(text: str) -> dict[str, list[Instruction]]:
    """The instructions of each computation by its name; those of the main program under "ENTRY"."""
    found: dict[str, list[Instruction]] = {}
    current: list[Instruction] = []
    for line in text.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            first = line.split(" ")[0]
            current = found.setdefault("ENTRY" if first == "ENTRY" else first.split("(")[0], [])
        elif match := INSTRUCTION.match(line):
            text = line[match.end() :]
            end = _closing(text) + 1 if text.startswith("(") else text.index(" ")
            kind, _, rest = text[end:].strip().partition("(")
            end_of_operands = _closing("(" + rest) - 1
            operands = list(dict.fromkeys(re.findall(r"%[\w.-]+", rest[:end_of_operands])))
            current.append(Instruction(match[1], text[:end], kind, operands, rest[end_of_operands + 1 :]))
    return found


def _closing(text: str) -> int:
    """Where the parenthesis that the text begins with is closed."""
    depth = 0
    for match in re.finditer(r"[()]", text):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    raise ValueError(f"A parenthesis is not closed: {text[:80]}")


def _count(program: list[Instruction], programs: dict[str, list[Instruction]]) -> Counts:
    types = {instruction.name: instruction.type for instruction in program}
    total = Counts()
    for _, type_, kind, operands, rest in program:
        if kind == "conditional":
            names = [name for found in BRANCHES.findall(rest) for name in re.findall(r"%[\w.-]+", found)]
            found = max(_count(programs[name], programs) for name in names)
        elif kind == "while" and RETRY in rest:
            continue
        elif kind in ("while", "call"):
            body = re.findall(r"(?:body|to_apply)=(%[\w.-]+)", rest)[0]
            found = Counts(*(_trips(rest) * x for x in _count(programs[body], programs)))
        elif kind in FREE or kind.endswith("-done") or '"ConcatBitcast"' in rest:
            continue
        elif kind.endswith("-start"):  # a copy beside the kernels, from or to the memory on the chip
            arrays = [array for array in ARRAY.findall(type_) if array[1]]  # a whole one, and a slice of it
            found = Counts(min(map(size, arrays), default=0.0) * sum(map(_is_main, arrays)))
        elif kind not in KERNELS and not any(dimensions for _, dimensions, _ in ARRAY.findall(type_)):
            continue  # a TPU's core computes with scalars itself
        else:
            arrays = ARRAY.findall(" ".join((type_, *(types[name] for name in operands))))
            found = Counts(sum(size(array) for array in arrays if _is_main(array)), 1)
        total = Counts(*map(sum, zip(total, found, strict=True)))
    return total


def _trips(rest: str) -> int:
    found = re.search(r'known_trip_count[^}]*?"n":"(\d+)"', rest)
    return int(found[1]) if found else 1


def _is_main(array: tuple[str, str, str]) -> bool:
    return not re.search(r"S\([1-9]\)", array[2])


def size(array: tuple[str, str, str]) -> float:
    """The bytes of a match of `ARRAY`."""
    name, dimensions, _ = array
    bits = re.search(r"\d+", name)
    each = SIZES[name] if name in SIZES else int(bits[0]) / 8 if bits else 0.0
    return each * math.prod(int(n) for n in dimensions.split(",") if n)


def running(
    programs: dict[str, list[Instruction]], name: str = "ENTRY", times: int = 1
) -> Iterator[tuple[str, int, bool]]:
    """The computations that run, how often, and whether they are the inside of a fusion."""
    yield name, times, False
    for _, _, kind, _, rest in programs[name]:
        inner = re.findall(r"(?:body|condition|to_apply|calls|[a-z]+_computation)=(%[\w.-]+)", rest)
        if kind == "fusion":
            yield from ((name, times, True) for name in inner)
        elif branches := re.search(r"branch_computations=\{([^}]*)\}", rest):
            inner += re.findall(r"%[\w.-]+", branches[1])
        if kind in ("while", "call", "conditional", "async-start"):
            for body in inner:
                yield from running(programs, body, times * _trips(rest))


def products(text: str) -> dict[str, int]:
    """Matrix products and convolutions of an optimized program by the dtypes of their operands; a loop's count once."""
    dtype_of = dict(re.findall(r"(%[\w.-]+) = (\w+)\[", text))
    found: Counter[str] = Counter()
    for kind, operands, rest in re.findall(r" (dot|convolution|custom-call)\(([^)]*)\)(.*)", text):
        if kind != "custom-call" or "__cublas" in rest or "__cudnn$conv" in rest:
            found[" x ".join(dtype_of.get(name, "?") for name in re.findall(r"%[\w.-]+", operands)[:2])] += 1
    return dict(found.most_common())
