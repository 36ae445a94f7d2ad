"""Typed access to GGUF metadata, and what families read of it alike: rotary embedding and a window."""

from __future__ import annotations

from typing import Any

import numpy as np

from smcjax.errors import CheckpointError
from smcjax.gguf_file import GGUFFile
from smcjax.model.attention import SlidingWindow
from smcjax.model.config import LinearScaling, ModelConfig, Rope, RopeScaling
from smcjax.model.files.plausible import RANGES, require_integer, require_number

# Without a say in the logits, or decided by the tensors' shapes.
_HARMLESS = frozenset(("vocab_size", "tensor_data_layout", "rope.scaling.finetuned"))
ROPE_FACTORS = "rope_freqs.weight"
# Llama 3.1 to 3.3 differ in the factor alone, and a file holds no more than what comes of these.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class GGUFKeys:
    """Typed access to the architecture's keys that remembers what was asked for, so that the rest can be refused."""

    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.architecture = file.metadata.get("general.architecture")
        self._seen: set[str] = set()

    def refusal(self, key: str, reason: str) -> CheckpointError:
        """Names the key, of the architecture unless it is spelled out, and its value."""
        key = key if key.startswith(("general.", "tokenizer.")) else f"{self.architecture}.{key}"
        shown = repr(self.file.metadata.get(key))
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        return CheckpointError(f"{self.file.path}: {key} is {shown}, but {reason}")

    def raw(self, key: str) -> Any:
        self._seen.add(key)
        return self.file.metadata.get(f"{self.architecture}.{key}")

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive integer; of a list, one a layer, the value that all share."""
        value = self.raw(key)
        if isinstance(value, list) and value:
            if any(other != value[0] for other in value):
                raise self.refusal(key, "only layers that are all alike are implemented")
            value = value[0]
        return require_integer(key, default if value is None else value, self.refusal)

    def number(self, key: str, default: float | None = None) -> float:
        value = self.raw(key)
        return require_number(key, default if value is None else value, self.refusal)

    def refuse_unknown(self) -> None:
        for name, value in self.file.metadata.items():
            key = name.removeprefix(f"{self.architecture}.")
            if key != name and value and key not in self._seen and key not in _HARMLESS:
                raise self.refusal(key, "this decoder does not know that key; use another model")

    def window(self, config: ModelConfig) -> SlidingWindow | None:
        """Attention by attention.sliding_window; None where that is absent or no position of the model can feel it."""
        if self.raw("attention.sliding_window") is None:
            return None
        window = self.integer("attention.sliding_window")
        return SlidingWindow(window) if window < config.max_position_embeddings else None

    def rope(self, config: ModelConfig, *, linear: bool = False) -> Rope:
        """Rotary embedding, stretched as in Llama 3 or, where the family is `linear`, evenly; else it is refused."""
        theta, even = self.number("rope.freq_base", 10_000.0), self._even_scaling(linear)
        return Rope(theta, even or self._llama3_scaling(config, theta))

    def _even_scaling(self, allowed: bool) -> LinearScaling | None:
        kind, factor = self.raw("rope.scaling.type"), self.raw("rope.scaling.factor")
        # These two belong to kinds that are refused.
        self.raw("rope.scaling.original_context_length"), self.raw("rope.scaling.attn_factor")
        scaled = kind != "none" and factor not in (None, 0.0, 1.0)
        if kind not in (None, "none", "linear") or (scaled and not allowed):
            key = "rope.scaling.type" if kind is not None else "rope.scaling.factor"
            raise self.refusal(key, "only Llama 3's scaling is implemented; use another model")
        if self.raw("rope.scale_linear") not in (None, 0.0, 1.0):
            raise self.refusal("rope.scale_linear", "only Llama 3's scaling is implemented; use another model")
        return LinearScaling(self.number("rope.scaling.factor")) if scaled else None

    def _llama3_scaling(self, config: ModelConfig, theta: float) -> RopeScaling | None:
        """Llama 3's scaling, where the file's factors are those that come of it; any other is refused."""
        if ROPE_FACTORS not in self.file.tensors:
            return None
        shape = self.file.tensors[ROPE_FACTORS].shape
        if shape == (config.head_dim // 2,):
            found = self.file.read(ROPE_FACTORS)
            if np.all(found == 1.0):
                return None
            largest = float(found.max())
            if 1 < largest <= RANGES["rope.scaling.factor"][1]:
                scaling = RopeScaling(largest, **_LLAMA3)  # type: ignore[arg-type]
                plain, scaled = (Rope(theta, each).frequencies(config.head_dim) for each in (None, scaling))
                if np.allclose(found, plain / scaled, rtol=1e-5, atol=0):
                    return scaling
        raise CheckpointError(
            f"{self.file.path}: {ROPE_FACTORS} {list(shape)} is not of Llama 3's scaling (low_freq_factor 1, "
            "high_freq_factor 4, of 8192 positions), the only one that is implemented; use another model"
        )
