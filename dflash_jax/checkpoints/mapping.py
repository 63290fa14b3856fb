"""Conversion plans as plain data: the tensors of each parameter, and every problem that prevents the conversion.

    plan = make_plan(parameters, canonical, tensors, dtype="float16")
    plan.problems, plan.nbytes, plan.table()

Nothing is read or written here; a plan with problems is still a plan, and can be printed.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from dflash_jax.checkpoints.converted import MIN_GROUP_BYTES
from dflash_jax.checkpoints.safetensors import CHUNK_BYTES, DTYPES, UNREAD_BITS, Tensor, unread_dtypes
from dflash_jax.models import Parameter
from dflash_jax.models.parameters import Source
from dflash_jax.options import FLOAT_DTYPES

KEEP = "keep"
# What Orbax takes beside the arrays themselves, measured; tests/convert/test_memory.py holds the whole to its bound.
_OVERHEAD_BYTES = 100 << 20


@dataclass(frozen=True)
class Step:
    """One parameter and the tensors, or runs of their rows, that it is made of, in order.

    Attributes:
      dtype: of the parameter, by numpy's name.
    """

    parameter: Parameter
    tensors: tuple[Tensor, ...]
    dtype: str

    @property
    def op(self) -> str:
        """`copy`, or what is done of `dequantize`, `stack` and `cast`, joined by `+`."""
        made = any(tensor.stored_name != tensor.dtype_name for tensor in self.tensors)
        casts = not made and any(DTYPES[tensor.dtype] != jnp.dtype(self.dtype) for tensor in self.tensors)
        done = (("dequantize", made), ("stack", len(self.tensors) > 1), ("cast", casts))
        return "+".join(word for word, used in done if used) or "copy"

    @property
    def nbytes(self) -> int:
        return self.parameter.size * jnp.dtype(self.dtype).itemsize


@dataclass(frozen=True)
class Plan:
    """A conversion of one checkpoint.

    Attributes:
      steps: in the order of the family's table.
      ignored: tensors that are left out on purpose.
      tied: tensors left out because they repeat another one, with that other one; equality is for the reader to check.
      missing: names in the family's table that no tensor has.
      unexpected: tensors that the family does not know.
      problems: everything that makes the conversion impossible, `missing` and `unexpected` included.
    """

    steps: tuple[Step, ...]
    ignored: tuple[str, ...]
    tied: tuple[tuple[Tensor, Tensor], ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    problems: tuple[str, ...]

    @property
    def nbytes(self) -> int:
        return sum(step.nbytes for step in self.steps)

    @property
    def narrowed(self) -> bool:
        """Whether a floating point tensor loses bits."""
        return any(
            not np.can_cast(DTYPES[tensor.dtype], jnp.dtype(step.dtype), "safe")
            for step in self.steps
            for tensor in step.tensors
            if jnp.issubdtype(DTYPES[tensor.dtype], jnp.floating)
        )

    @property
    def peak_bytes(self) -> int:
        """Host memory a conversion will take beyond the interpreter and its imports.

        Reading an array back for verification holds it twice: as stored, and as an array.
        """
        largest = max([step.nbytes for step in self.steps], default=0)
        return 2 * max(MIN_GROUP_BYTES, largest) + 2 * CHUNK_BYTES + _OVERHEAD_BYTES

    def rows(self) -> list[dict[str, Any]]:
        """One row for each tensor: where it comes from, where it goes, and how."""
        rows = []
        for step in self.steps:
            first = 0
            for tensor in step.tensors:
                rows.append(
                    {
                        "source": tensor.name,
                        "file": tensor.path.name,
                        "parameter": step.parameter.name,
                        "row": first,
                        "shape": list(tensor.shape),
                        "stored": tensor.stored_name,
                        "from": tensor.kept_name,
                        "to": step.dtype,
                        "op": step.op,
                        "bytes": tensor.size * jnp.dtype(step.dtype).itemsize,
                    }
                )
                first += tensor.shape[0] if tensor.shape else 0
        return rows

    def table(self) -> list[str]:
        """The plan as aligned lines of text."""
        header = ("source", "parameter", "row", "shape", "dtype", "op", "bytes")
        lines: list[tuple[str, ...]] = [header]
        for row in self.rows():
            dtype = row["to"] if row["stored"] == row["to"] else f"{row['stored']}->{row['to']}"
            shape = "x".join(map(str, row["shape"])) or "scalar"
            lines.append(
                (row["source"], row["parameter"], str(row["row"]), shape, dtype, row["op"], f"{row['bytes']:,}")
            )
        widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
        text = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        ]
        text += [f"left out: {name} (not needed here)" for name in self.ignored]
        text += [f"left out: {tensor.name} (repeats {other.name})" for tensor, other in self.tied]
        text += [f"missing: {name}" for name in self.missing]
        text += [f"unexpected: {name}" for name in self.unexpected]
        tensors = sum(len(step.tensors) for step in self.steps)
        text.append(
            f"{tensors} tensors -> {len(self.steps)} parameters, {self.nbytes:,} bytes; "
            f"peak memory about {self.peak_bytes / 2**20:,.0f} MiB beyond the interpreter"
        )
        return text


def make_plan(
    parameters: Sequence[Parameter],
    canonical: Callable[[str], str | None],
    tensors: Mapping[str, Tensor],
    *,
    dtype: str = KEEP,
    tied: Mapping[str, str] | None = None,
    unreadable: Sequence[str] = (),
) -> Plan:
    """Matches a checkpoint's tensors with a family's parameters.

    Args:
      parameters: the family's table.
      canonical: a tensor's name as the table has it; None for one that is ignored on purpose.
      tensors: the checkpoint's tensors by their own names.
      dtype: `keep`, or the dtype of every parameter that the table does not fix.
      tied: canonical names of tensors that may be present as copies of another canonical name.
      unreadable: tensors known to exist in files that could not be read; they are not reported as missing.
    """
    found, ignored, problems = {}, [], []
    for name, tensor in tensors.items():
        known = canonical(name)
        if known is None:
            ignored.append(name)
        elif known in found:
            problems.append(f"tensors {found[known].name!r} and {name!r} both stand for {known}; keep one of them")
        else:
            found[known] = tensor
    lost = {canonical(name) for name in unreadable}
    wanted = {source.name for parameter in parameters for source in parameter.sources}
    copies = {
        name: other for name, other in (tied or {}).items() if name in found and other in found and name not in wanted
    }
    missing = tuple(source for source in sorted(wanted) if source not in found and source not in lost)
    unexpected = tuple(found[name].name for name in sorted(set(found) - wanted - set(copies)))
    problems += [f"tensor {name} is missing" for name in missing]
    problems += [
        f"tensor {name} is not one that this configuration has; is config.json the right one?" for name in unexpected
    ]
    steps = []
    for parameter in parameters:
        if all(source.name in found for source in parameter.sources):
            whole = [found[source.name] for source in parameter.sources]
            wrong = _shape_problems(parameter, whole)
            pairs = () if wrong else zip(parameter.sources, whole, strict=True)
            pieces = tuple(piece for source, tensor in pairs for piece in _taken(source, tensor))
            target, refused = _target_dtype(parameter, whole, dtype)
            problems += wrong + refused
            if not wrong and not refused:
                steps.append(Step(parameter, pieces, target))
    pairs = tuple((found[name], found[other]) for name, other in copies.items())
    return Plan(tuple(steps), tuple(ignored), pairs, missing, unexpected, tuple(problems))


def _taken(source: Source, tensor: Tensor) -> list[Tensor]:
    """Pieces of the file that a source reads from its tensor: one for each run of rows."""
    if source.runs is None:
        return [tensor if source.kept is None else tensor.part(0, source.kept)]
    row = tensor.size // tensor.shape[0]
    return [tensor.part(first * row, (count, *tensor.shape[1:])) for first, count in source.runs]


def _shape_problems(parameter: Parameter, tensors: Sequence[Tensor]) -> list[str]:
    wrong = [
        f"tensor {tensor.name} has shape {list(tensor.shape)}, expected {list(source.shape)}; is config.json the right one?"
        for source, tensor in zip(parameter.sources, tensors, strict=True)
        if tensor.shape != source.shape
    ]
    return list(dict.fromkeys(wrong))


def _target_dtype(parameter: Parameter, tensors: Sequence[Tensor], dtype: str) -> tuple[str, list[str]]:
    """The parameter's dtype, or what is wrong with its tensors' dtypes."""
    integer = parameter.dtype is not None and jnp.issubdtype(jnp.dtype(parameter.dtype), jnp.integer)
    problems = []
    for tensor in tensors:
        name = tensor.dtype_name
        if tensor.dtype in UNREAD_BITS:
            problems += unread_dtypes([tensor])
        elif integer and not jnp.issubdtype(DTYPES[tensor.dtype], jnp.integer):
            problems.append(f"tensor {tensor.name} has dtype {name}, expected integers")
        elif not integer and name not in FLOAT_DTYPES:
            advice = (
                "take the bfloat16 release: config.json says nothing of scales (quantization_config)"
                if name.startswith("float8")
                else ""
            )
            advice = advice or "write the checkpoint again in one of these"
            problems.append(f"tensor {tensor.name} has dtype {name}, expected {', '.join(FLOAT_DTYPES)}; {advice}")
    kinds = {tensor.kept_name for tensor in tensors}
    if parameter.dtype is not None:
        return parameter.dtype, problems
    if dtype != KEEP:
        return dtype, problems
    if len(kinds) > 1 and not problems:
        names = ", ".join(tensor.name for tensor in tensors)
        problems.append(f"tensors {names} form one array but have dtypes {', '.join(sorted(kinds))}; give --dtype")
    return min(kinds), problems
