"""Counts of an optimized program, read from its text, and the time that they predict.

XLA:GPU has no cost analysis without a GPU, and on a TPU XLA's "bytes accessed" includes the memory on the chip. Here a
kernel reads each of its operands once and writes its results once, and only the device's main memory counts. Of an
array that a kernel only slices, gathers from or updates in place, it reads and writes these elements, not the rest.
"""

import math
import re
from collections import Counter
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
FREE_CALLS = '"ConcatBitcast"', '"AllocateBuffer"'
SLICES, UPDATES = ("slice", "dynamic-slice", "gather"), ("dynamic-update-slice", "scatter")
# An element of their result needs more than the element at its place of an operand with as many elements.
MIXING = ("dot", "convolution", "custom-call", "reduce-window", "select-and-scatter", "sort", "fft", *UPDATES)
KERNELS = ("fusion", "custom-call", "copy")
INSTRUCTION = re.compile(r"^ +(?:ROOT )?(%[\w.-]+) = ")
ARRAY = re.compile(r"([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?")
BRANCHES = re.compile(r"(?:branch_computations=\{|true_computation=|false_computation=)([^}]*?)(?:\}|, [a-z]|$)")


class Instruction(NamedTuple):
    name: str
    type: str
    kind: str
    operands: list[str]
    rest: str  # the attributes; of a constant its value, of a parameter its number


Programs = dict[str, list[Instruction]]


def count(text: str) -> Counts:
    """Bytes and kernels of the main program: of a conditional its larger branch, of a loop as often as it runs.

    The retries of `jamp.scaled` are not counted, because they almost never run.
    """
    programs = computations(text)
    return _count(programs["ENTRY"], programs)


def computations(text: str) -> Programs:
    """The instructions of each computation by its name; those of the main program under "ENTRY"."""
    found: Programs = {}
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
            operands, value = re.findall(r"%[\w.-]+", rest[:end_of_operands]), kind in ("constant", "parameter")
            rest = rest[:end_of_operands] if value else rest[end_of_operands + 1 :]
            current.append(Instruction(match[1], text[:end], kind, operands, rest))
    return found


def _closing(text: str) -> int:
    """Where the parenthesis that the text begins with is closed."""
    depth = 0
    for match in re.finditer(r"[()]", text):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.start()
    raise ValueError(f"A parenthesis is not closed: {text[:80]}")


def _count(program: list[Instruction], programs: Programs) -> Counts:
    types = {instruction.name: instruction.type for instruction in program}
    total = Counts()
    for instruction in program:
        _, type_, kind, _, rest = instruction
        if kind == "conditional":
            names = [name for found in BRANCHES.findall(rest) for name in re.findall(r"%[\w.-]+", found)]
            found = max(_count(programs[name], programs) for name in names)
        elif kind == "while" and RETRY in rest:
            continue
        elif kind in ("while", "call"):
            body = re.findall(r"(?:body|to_apply)=(%[\w.-]+)", rest)[0]
            found = Counts(*(_trips(rest, programs) * x for x in _count(programs[body], programs)))
        elif kind in FREE or kind.endswith("-done") or any(name in rest for name in FREE_CALLS):
            continue
        elif kind.endswith("-start"):  # a copy beside the kernels, from or to the memory on the chip
            arrays = [array for array in ARRAY.findall(type_) if array[1]]  # a whole one, and a slice of it
            found = Counts(min(map(size, arrays), default=0.0) * sum(map(_is_main, arrays)))
        elif kind not in KERNELS and not any(dimensions for _, dimensions, _ in ARRAY.findall(type_)):
            continue  # a TPU's core computes with scalars itself
        else:
            found = Counts(_moved(instruction, types, programs), 1)
        total = Counts(*map(sum, zip(total, found, strict=True)))
    return total


def _trips(rest: str, programs: Programs) -> int:
    """How often a loop runs: as the compiler noted it, or up to the limit in its condition, counting from 0.

    Only the latter is in the programs for a TPU. All loops of JAX whose number of iterations is known count from 0.
    """
    if found := re.search(r'known_trip_count[^}]*?"n":"(\d+)"', rest):
        return int(found[1])
    if not (found := re.search(r"condition=(%[\w.-]+)", rest)):
        return 1
    condition = programs[found[1]]
    limits = {x.name: x.rest for x in condition if x.kind == "constant"}
    root = condition[-1]
    return int(limits.get(root.operands[-1], "1")) if root.kind == "compare" and "direction=LT" in root.rest else 1


def _moved(instruction: Instruction, types: dict[str, str], programs: Programs) -> float:
    """The bytes of main memory that a kernel reads and writes."""
    reads, writes = _shares_of(instruction, types, programs)
    read: Counter[str] = Counter()
    for name, part in zip(instruction.operands, reads, strict=True):
        read[name] = min(1.0, read[name] + part)
    results = ARRAY.findall(instruction.type)
    if re.search('target="__cu(blas|dnn)', instruction.rest):  # the library's own workspace is not known to be used
        results = [x for x in results if not (x[0] in ("s8", "u8") and "," not in x[1])]
    writes = writes if len(writes) == len(results) else [1.0] * len(results)
    moved = [(array, part) for name, part in read.items() for array in ARRAY.findall(types[name])]
    moved += zip(results, writes, strict=True)
    return sum(part * size(array) for array, part in moved if _is_main(array))


def _shares_of(instruction: Instruction, types: dict[str, str], programs: Programs) -> tuple[list[float], list[float]]:
    """The shares of its operands that an instruction reads, and those of its results that it writes."""
    if instruction.kind == "fusion":
        return _shares(programs[re.findall(r"calls=(%[\w.-]+)", instruction.rest)[0]], programs)
    is_update = instruction.kind in UPDATES
    places = range(len(instruction.operands))
    writes = [_updated(instruction, types)] if is_update else []
    return [_share(instruction, place, 1.0, types, programs, is_update) for place in places], writes


def _shares(program: list[Instruction], programs: Programs) -> tuple[list[float], list[float]]:
    """The shares of its parameters that the inside of a fusion reads, and those of its results that it writes.

    Backwards through the program: an instruction reads of its operands what is needed of its own result.
    """
    types = {instruction.name: instruction.type for instruction in program}
    by_name = {instruction.name: instruction for instruction in program}
    root = program[-1]
    results = root.operands if root.kind == "tuple" else [root.name]
    chains = [_in_place(by_name[name], by_name) or [] for name in results]
    in_place = {update.name for chain in chains for update in chain}
    writes = [min(1.0, sum(_updated(x, types) for x in chain)) if chain else 1.0 for chain in chains]
    needed = Counter(dict.fromkeys(results, 1.0))
    for instruction in reversed(program):
        for place, name in enumerate(instruction.operands if instruction is not root or root.kind != "tuple" else ()):
            part = _share(instruction, place, needed[instruction.name], types, programs, instruction.name in in_place)
            needed[name] = min(1.0, needed[name] + part)
    parameters = sorted((int(x.rest), x.name) for x in program if x.kind == "parameter")
    return [needed[name] for _, name in parameters], writes


def _in_place(instruction: Instruction, by_name: dict[str, Instruction]) -> list[Instruction] | None:
    """The updates that make an array of a parameter, whose buffer it shares. None where it is made in another way."""
    if instruction.kind == "parameter":
        return []
    if instruction.kind not in ("bitcast", *UPDATES):
        return None
    before = _in_place(by_name[instruction.operands[0]], by_name)
    return None if before is None else before + [instruction] * (instruction.kind in UPDATES)


def _updated(update: Instruction, types: dict[str, str]) -> float:
    """The share of an array that an update changes."""
    place = 1 if update.kind == "dynamic-update-slice" else 2
    return min(1.0, _elements(types[update.operands[place]]) / _elements(update.type))


def _share(
    user: Instruction, place: int, needed: float, types: dict[str, str], programs: Programs, in_place: bool
) -> float:
    """The share of an operand that an instruction reads, if a share of its own result is needed."""
    operand = _elements(types[user.operands[place]])
    if not needed or not operand:
        return needed
    if user.kind == "fusion":
        return needed * _shares_of(user, types, programs)[0][place]
    if user.kind in UPDATES and place == 0:
        added = _updated(user, types) if user.kind == "scatter" else 0.0  # a sum reads what it adds to
        return added if in_place else needed
    if user.kind in SLICES and place == 0:
        return min(1.0, needed * _elements(user.type) / operand)
    return needed if user.kind not in MIXING and _elements(user.type) == operand else 1.0


def _elements(type_: str) -> int:
    return sum(math.prod(int(n) for n in dimensions.split(",") if n) for _, dimensions, _ in ARRAY.findall(type_))


def _is_main(array: tuple[str, str, str]) -> bool:
    return not re.search(r"S\([1-9]\)", array[2])


def size(array: tuple[str, str, str]) -> float:
    """The bytes of a match of `ARRAY`."""
    name, dimensions, _ = array
    bits = re.search(r"\d+", name)
    each = SIZES[name] if name in SIZES else int(bits[0]) / 8 if bits else 0.0
    return each * math.prod(int(n) for n in dimensions.split(",") if n)


def products(text: str) -> dict[str, int]:
    """Matrix products and convolutions of an optimized program by the dtypes of their operands; a loop's count once."""
    dtype_of = dict(re.findall(r"(%[\w.-]+) = (\w+)\[", text))
    found: Counter[str] = Counter()
    for kind, operands, rest in re.findall(r" (dot|convolution|custom-call)\(([^)]*)\)(.*)", text):
        if kind != "custom-call" or "__cublas" in rest or "__cudnn$conv" in rest:
            found[" x ".join(dtype_of.get(name, "?") for name in re.findall(r"%[\w.-]+", operands)[:2])] += 1
    return dict(found.most_common())
