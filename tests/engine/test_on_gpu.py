"""With the kernels on, on a GPU: the same tokens run after run, the same law as plain XLA, and the kernels do run."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from smcjax import LLM, SMC, Autoregressive, Rejection, RequestOutput, SamplingParams
from smcjax.decoders import Decoding
from smcjax.decoding.drafts.fused_step import fused_step_shape
from smcjax.model import ModelConfig, init_params, load_checkpoint, logits, save_checkpoint
from smcjax.model.params import param_shapes
from smcjax.model.quantize import quantize_params
from smcjax.model.view import BatchView
from smcjax.pallas import active_implementation, implementations

pytestmark = [pytest.mark.gpu, pytest.mark.all_sizes, pytest.mark.compiled_at_once]
TARGET = ModelConfig(256, 1024, 1024, 2, 8, 4, 64, 4096, tie_embeddings=True)  # wide enough for all kernels
DRAFT = ModelConfig(256, 512, 512, 1, 8, 2, 64, 4096, tie_embeddings=True)
PROMPTS = [
    {"prompt_token_ids": np.random.default_rng(i).integers(0, 256, length).tolist()}
    for i, length in enumerate((1, 5, 12, 16, 17, 40, 100, 130))
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Random models of a head_dim that the kernel takes, sharp enough for their laws to differ."""
    return saved(TARGET, 0, tmp_path_factory.mktemp("target")), saved(DRAFT, 1, tmp_path_factory.mktemp("draft"))


def saved(config: ModelConfig, seed: int, path: Path) -> str:
    """A checkpoint of random weights, the norms' too."""
    params = jax.tree.map(
        lambda leaf: (
            leaf * jax.random.uniform(jax.random.key(7), leaf.shape, minval=0.5, maxval=1.5) if leaf.ndim == 1 else leaf
        ),
        init_params(config, jax.random.key(seed)),
    )
    save_checkpoint(config, dataclasses.replace(params, embed=params.embed * 6), str(path), dtype="bfloat16")
    return str(path)


def answers(
    pair: tuple[str, str], decoding: Decoding, implementation: str, max_num_seqs: int, count: int, **asked: Any
) -> list[RequestOutput]:
    """The answers to so many seeded requests."""
    with LLM(
        pair[0],
        draft_model=pair[1],
        draft_quantization=asked.pop("draft_quantization", None),
        decoding=decoding,
        max_model_len=256,
        max_num_seqs=max_num_seqs,
        implementation=implementation,
        compile_at_start=False,
    ) as llm:
        params = [SamplingParams(max_tokens=24, seed=seed, **asked) for seed in range(count)]
        return llm.generate(PROMPTS * (count // len(PROMPTS)), params, use_tqdm=False)


plain_answers = functools.cache(answers)


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def evidence(output: RequestOutput) -> float:
    assert output.smc is not None
    return output.smc.log_evidence


def assert_alike(figure: Callable[[RequestOutput], float], *runs: list[RequestOutput]) -> None:
    """The means of two runs' figures agree."""
    mine, other = (np.array([figure(output) for output in run]) for run in runs)
    z = (mine - other).mean() / np.hypot(mine.std(), other.std()) * np.sqrt(len(mine))
    assert abs(z) < 4
    assert mine.std() > 0


@pytest.mark.parametrize(
    # `together`: rows that the persistent step reads together, by new tokens a row
    ("implementation", "n_particles", "max_num_seqs", "together", "draft_quantization"),
    [
        ("auto", 8, 32, (None, None), None),  # drafts layer by layer, and draws in the head's kernel
        ("auto", 8, 4, (8, None), None),
        ("auto", 8, 1, (8, 8), None),
        ("auto", 16, 1, (16, 8), None),
        ("auto", 8, 1, (8, 8), "int8"),
        ("triton", 8, 4, (None, None), None),
        ("triton", 8, 1, (None, None), "int8"),
    ],
)
def test_repeatable_and_of_the_same_law_as_plain_xla(
    pair: tuple[str, str],
    implementation: str,
    n_particles: int,
    max_num_seqs: int,
    together: tuple[int | None, ...],
    draft_quantization: str | None,
) -> None:
    """Twice the same tokens; log Ẑ, whose mean over seeds is a property of the law, agrees with plain XLA's."""
    draft = param_shapes(DRAFT, "bfloat16")
    draft = draft if draft_quantization is None else jax.eval_shape(quantize_params, draft)
    for columns, rows in enumerate(together, 1):
        table = jax.ShapeDtypeStruct((max_num_seqs * n_particles, 16), jnp.int32)
        unread: Any = None
        view = BatchView(unread, unread, table, unread, unread, unread, rows=n_particles, page_size=16)
        with implementations(implementation):
            shape = fused_step_shape(DRAFT, draft, view, columns)
        assert (None if shape is None else shape.rows) == rows
    decoding = SMC(n_particles=n_particles, gamma=4, ess_threshold=0.9, control=0)
    how = {"draft_quantization": draft_quantization}
    first, second = (answers(pair, decoding, implementation, max_num_seqs, 512, **how) for _ in range(2))
    assert tokens_of(first) == tokens_of(second)
    assert_alike(evidence, first, plain_answers(pair, decoding, "xla", 64, 512, **how))
    # Only after a resampling do pages diverge from the prompt's sharing; most requests must have had one.
    assert np.mean([o.metrics.resamples > 0 for o in first]) > 0.5


@pytest.mark.parametrize(("kernels", "n_candidates"), [("auto", 1), ("auto", 8), ("triton", 8)])
def test_rejection_is_repeatable_and_of_the_same_law_as_plain_xla(
    pair: tuple[str, str], kernels: str, n_candidates: int
) -> None:
    """Drafted by the persistent step, whose laws are made again from what it leaves: accepted and judged alike."""
    decoding = Rejection(gamma=4, n_candidates=n_candidates)
    first, second = (answers(pair, decoding, kernels, 2, 256, logprobs=0) for _ in range(2))
    assert tokens_of(first) == tokens_of(second)
    plain = answers(pair, decoding, "xla", 32, 256, logprobs=0)
    assert_alike(lambda output: sum(output.outputs[0].logprobs or []), first, plain)
    assert_alike(lambda output: output.metrics.mean_accepted_length or 0.0, first, plain)


@pytest.mark.parametrize(("kernels", "control"), [("auto", 0.1), ("auto", 1.0), ("triton", 0.1)])
def test_controlled_populations_are_of_the_same_law_as_plain_xla(
    pair: tuple[str, str], kernels: str, control: float
) -> None:
    """No request fails, log Ẑ agrees with plain XLA's, and at control 1 every weight is exactly 1."""
    decoding = SMC(8, 4, control=control, ess_threshold=0.9)
    runs = [answers(pair, decoding, kernels, 2, 256), answers(pair, decoding, "xla", 32, 256)]
    assert not [output.error for run in runs for output in run if output.error is not None]
    if control == 1.0:
        assert {evidence(output) for output in runs[0]} == {0.0}
    else:
        assert_alike(evidence, *runs)


@pytest.mark.parametrize("kernels", ["auto", "triton"])
def test_log_probabilities_equal_the_dense_forward(pair: tuple[str, str], kernels: str) -> None:
    """Token by token through pages and kernels, against the dense forward in float32: bf16 rounding apart, equal."""
    how: dict[str, Any] = {"max_model_len": 256, "implementation": kernels, "compile_at_start": False}
    with LLM(pair[0], decoding=Autoregressive(), **how) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(max_tokens=60, seed=5, logprobs=0), use_tqdm=False)
    config, params = load_checkpoint(pair[0], "float32")
    dense = jax.jit(lambda ids: jax.nn.log_softmax(logits(config, params, ids)))
    padded = np.zeros((len(outputs), 256), np.int32)
    for row, output in zip(padded, outputs, strict=True):
        row[: len(output.prompt_token_ids) + 60] = output.prompt_token_ids + output.outputs[0].token_ids
    for output, law in zip(outputs, np.asarray(dense(padded)), strict=True):
        begin, tokens = len(output.prompt_token_ids), output.outputs[0].token_ids
        want = law[np.arange(begin - 1, begin + len(tokens) - 1), tokens]
        # Relative rounding 2^-8 of logits of size ~10, through two layers.
        np.testing.assert_allclose(output.outputs[0].logprobs, want, atol=0.25)


KERNELS = ("paged_attention", "add_rms_norm", "rotate_and_write", "swiglu", "copy_pages", "shared_attention")
KERNELS += ("decode_step", "conclude_step", "sampled_head", "find_sharing")


def test_a_profile_names_the_kernels(pair: tuple[str, str], tmp_path: Path) -> None:
    """A plain `LLM.generate` runs them: by default on a Hopper GPU, and not with implementation="xla"."""
    assert active_implementation() == "mosaic"
    seen: dict[str, set[str]] = {"auto": set(), "xla": set()}
    for implementation, max_model_len, requests in (("auto", 256, 1), ("auto", 2048, 8), ("xla", 2048, 1)):
        with LLM(
            pair[0],
            draft_model=pair[1],
            decoding=SMC(8, 4, control=0),
            max_model_len=max_model_len,
            implementation=implementation,
            compile_at_start=False,
        ) as llm:
            llm.generate(PROMPTS[:requests], SamplingParams(max_tokens=10), use_tqdm=False)
            directory = tmp_path / f"{implementation}-{max_model_len}"
            with jax.profiler.trace(str(directory)):
                llm.generate(PROMPTS[:requests], SamplingParams(max_tokens=10), use_tqdm=False)
        file = next(directory.rglob("*.trace.json.gz"))
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
        names = {event["name"] for event in events if event.get("ph") == "X"}
        seen[implementation] |= {kernel for kernel in KERNELS if any(kernel in name for name in names)}
    assert seen == {"auto": set(KERNELS), "xla": set()}
