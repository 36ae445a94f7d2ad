"""The kernels that decoding launches on a GPU, lowered without one, each as a digest of its code.

Cases are whole programs at the shapes of Llama-3.1-8B and 3.2-1B, two layers of each: what is digested is what users
run, with the arguments that they run it with. Names of files and lines are left out, so moved code keeps its digest.

    uv run python -m tests.pallas.seal      # writes the digests as they are now, and prints what has changed
"""

from __future__ import annotations

import dataclasses
import gc
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir import ir
from jax.interpreters import mlir

from smcjax import autoregressive, rejection, smc
from smcjax.bench.shapes import SHAPES
from smcjax.decoding.drafts.ngram import NGram
from smcjax.decoding.sequences import Requests
from smcjax.model.folding import folded_shapes
from smcjax.model.params import param_shapes
from smcjax.model.quantize import quantize_params

STORED = Path(__file__).parent.parent / "data" / "sealed_kernels.json"
TARGET, DRAFT = (dataclasses.replace(SHAPES[name], num_layers=2) for name in ("llama-3.1-8b", "llama-3.2-1b"))
PAGES = 600


@dataclasses.dataclass(frozen=True)
class Case:
    """A program: its decoder, requests at once, the longest sequence, and what of it is lowered."""

    decoder: Any  # the module
    decoding: Any
    groups: int = 1
    max_model_len: int = 1280
    draft_quantization: str | None = None
    looks_up: bool = False  # drafts are looked up, so that there is no draft model
    chunk: int | None = None  # a prompt's chunk of so many tokens; None: a step

    @property
    def program(self) -> Any:
        """The decoder's static program, with kernels."""
        geometry = {"max_model_len": self.max_model_len, "implementation": "mosaic"}
        draft: Any = NGram() if self.looks_up else DRAFT
        return self.decoder.Program(self.decoding, TARGET, draft if self.decoding.drafts else None, **geometry)

    def params(self) -> Any:
        """Shapes of the weights as the engine keeps them on a GPU."""
        target, draft = (folded_shapes(config, jnp.bfloat16) for config in (TARGET, DRAFT))
        if self.draft_quantization is not None:
            draft = jax.eval_shape(quantize_params, param_shapes(DRAFT, jnp.bfloat16))
        return smc.PairParams(target, draft if self.decoding.drafts and not self.looks_up else None)

    def lower(self) -> Any:
        """The program for CUDA, as a module of StableHLO."""
        program, params, groups = self.program, self.params(), self.groups

        def begin() -> Any:
            zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), params)
            memory = program.create_memory(zeros, PAGES)
            asked = Requests.alike(
                jax.random.key(0), jnp.full(groups, 5), vocab_size=TARGET.vocab_size, max_tokens=program.max_model_len
            )
            return self.decoder.begin(program, memory, jnp.zeros((groups, 5), jnp.int32), asked, jnp.ones(groups, bool))

        def run(params: Any, state: Any) -> Any:
            if self.chunk is None:
                return self.decoder.step(program, params, state)
            hidden = jnp.zeros((groups, TARGET.hidden_size), jnp.bfloat16)
            return self.decoder.prefill(program, params, state, jnp.zeros(groups, jnp.int32), self.chunk, hidden)

        traced = jax.jit(run, donate_argnums=1).trace(params, jax.eval_shape(begin))
        return traced.lower(lowering_platforms=("cuda",)).compiler_ir()


PUBLISHED = smc.SMC(8, 8, control=0)
CASES = {
    "smc, 1 request": Case(smc, PUBLISHED),
    "smc, 4 requests": Case(smc, PUBLISHED, groups=4),
    "smc, 8 requests": Case(smc, PUBLISHED, groups=8),
    "smc, 32,768 tokens": Case(smc, PUBLISHED, max_model_len=33024),
    "smc, int8 draft": Case(smc, PUBLISHED, draft_quantization="int8"),
    "rejection, 8 candidates": Case(rejection, rejection.Rejection(8, n_candidates=8)),
    "target alone": Case(autoregressive, autoregressive.Autoregressive()),
    "prompt, 512 tokens": Case(smc, PUBLISHED, chunk=512),
    "rejection, 1 request": Case(rejection, rejection.Rejection(8)),
    "rejection, drafts looked up": Case(rejection, rejection.Rejection(8), looks_up=True),
}


def digests(case: Case) -> list[str]:
    """Digests of the program's kernels, each once, in the order of their first launch."""
    found = dict.fromkeys(hashlib.sha256(text.encode()).hexdigest()[:16] for text in kernels(case.lower()))
    return list(found)


def kernels(module: Any) -> Iterator[str]:
    """The code of each Mosaic kernel that a module calls, without debug information."""
    with mlir.make_ir_context() as context:
        mgpu.dialect.register_dialect(context)
        context.allow_unregistered_dialects = True
        for operation in _operations(module.operation):
            if operation.name != "stablehlo.custom_call":
                continue
            if "mosaic_gpu" not in str(operation.attributes["call_target_name"]):
                continue
            config = operation.attributes["mhlo.backend_config"]
            code = ir.Module.parse(ir.StringAttr(config["module"]).value_bytes)
            yield code.operation.get_asm(enable_debug_info=False)


def _operations(operation: Any) -> Iterator[Any]:
    yield operation
    for region in operation.regions:
        for block in region:
            for inner in block:
                yield from _operations(inner.operation)


def write(compute: Callable[[Case], list[str]] = digests) -> None:
    """Stores all digests; prints the names of the cases whose kernels have changed."""
    before = json.loads(STORED.read_text()) if STORED.exists() else {}
    now = {name: compute(case) for name, case in CASES.items()}
    for name, some in now.items():
        if before.get(name) != some:
            print(f"{name}: {len(some)} kernels, {len(set(some) - set(before.get(name, [])))} of them new")
    STORED.write_text(json.dumps(now, indent=1) + "\n")


if __name__ == "__main__":
    gc.set_threshold(100_000, 50, 100)  # as in `tests/conftest.py`
    if sys.argv[1:] == ["--print"]:
        print(json.dumps({name: digests(case) for name, case in CASES.items()}))
    else:
        write()
