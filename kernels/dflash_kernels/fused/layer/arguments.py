"""Arguments of a decoder layer after its attention, as `layer_chain` and `attention_chain` hand them to implementations."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxtyping import Array, Float, Shaped

from dflash_kernels.core.layouts import ColumnBlocks, as_stored
from dflash_kernels.core.validation import check_axes, check_floats


class Layer(NamedTuple):
    """Residual stream and weights of a layer; see `layer_chain`."""

    stream: Float[Array, "D n"]
    o: Shaped[Array, "D A"] | ColumnBlocks
    post_norm: Float[Array, "D"]
    gate_up: Shaped[Array, "twoF D"] | ColumnBlocks
    down: Shaped[Array, "D F"] | ColumnBlocks
    next_norm: Float[Array, "D"] | None = None
    following: Shaped[Array, "G D"] | ColumnBlocks | None = None
    scales: Sequence[Array | None] | None = None

    def check(self, rows: int, heads: int) -> None:
        """Raises ValueError where shapes do not agree, for outputs of attention `[rows, heads]`."""
        matrices = {"o": self.o, "gate_up": self.gate_up, "down": self.down, "following": self.following}
        given = {name: weight for name, weight in matrices.items() if weight is not None}
        check_axes(stream=(self.stream, "D n"), **{name: (weight, "rows columns") for name, weight in given.items()})
        vectors = {"post_norm": self.post_norm, "next_norm": self.next_norm}
        check_floats(stream=self.stream, **{name: norm for name, norm in vectors.items() if norm is not None})
        if self.scales is None:
            check_floats(**given)
        (hidden, columns), inner = self.stream.shape, self.down.shape[1]
        shapes = (self.o.shape, self.gate_up.shape, self.down.shape)
        if shapes != ((hidden, heads), (2 * inner, hidden), (hidden, inner)):
            raise ValueError(
                f"o {self.o.shape}, gate_up {self.gate_up.shape} and down {self.down.shape} do not fit {heads} columns of heads "
                f"and stream {self.stream.shape}"
            )
        following = self.following
        if (self.next_norm is None) != (following is None) or (following is not None and following.shape[1] != hidden):
            raise ValueError(f"following must be [G, {hidden}] and come with the weight of its norm")
        norms = [None if norm is None else norm.shape for norm in (self.post_norm, self.next_norm)]
        if any(shape not in (None, (hidden,)) for shape in norms):
            raise ValueError(f"weights of norms {norms} must be one for each of {hidden} rows of the stream")
        weights = (self.o, self.gate_up, self.down, following)
        if self.scales is not None and any(isinstance(weight, ColumnBlocks) for weight in weights):
            raise ValueError("weights in eight bits have their columns in pairs, not in blocks")
        for weight, scale in zip(weights, self.scales or (None,) * 4, strict=True):
            if weight is not None and scale is not None and scale.shape != weight.shape[:1]:
                raise ValueError(f"scales {scale.shape} must be one for each row of a weight {weight.shape}")
        if columns < rows:
            raise ValueError(f"stream {self.stream.shape} must have a column for each of {rows} rows")

    def sizes(self) -> dict[str, Any]:
        """Sizes that `plan` takes."""
        (hidden, heads_width), inner = self.o.shape, self.down.shape[1]
        next_width = None if self.following is None else self.following.shape[0]
        widths = {"hidden": hidden, "heads_width": heads_width, "inner": inner, "next_width": next_width}
        return widths | {"itemsize": self.o.dtype.itemsize}

    def inputs(self) -> dict[str, Array]:
        """Kernel inputs that are not None, by name; weights in their stored layout."""
        weights = {"o": self.o, "gate_up": self.gate_up, "down": self.down, "next": self.following}
        stored = {name: as_stored(weight) for name, weight in weights.items()}
        given = {"before": self.stream, "post_norm": self.post_norm, "next_norm": self.next_norm, **stored}
        if self.scales is not None:
            pairs = zip(weights, self.scales, strict=True)
            given |= {f"{name}_scales": scale for name, scale in pairs if weights[name] is not None}
        return {name: array for name, array in given.items() if array is not None}
