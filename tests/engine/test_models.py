"""Model directories through `LLM`: vocabularies that differ by padding, and directories that cannot be used."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

from smcjax import LLM, SMC, Autoregressive, CheckpointError, Rejection, SamplingParams
from smcjax.engine.load.loading import load_models
from smcjax.model import LayerSpec
from tests.checkpoints import Pair, write_model, write_tokenizer
from tests.engine.conftest import llm_arguments


def test_padded_vocabularies_are_cut_to_the_common_ids(llm: LLM) -> None:
    assert (llm.models.target.vocab_size, llm.models.draft.vocab_size) == (264, 264)
    with pytest.raises(ValueError, match="ids of this model are 0 to 263"):
        llm.generate({"prompt_token_ids": [270]})


def test_equal_sizes_with_other_tokens_are_refused(pair: Pair, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(pair.draft, other)
    write_tokenizer(other, bos_token="<begin>")  # a token more
    with pytest.raises(ValueError, match="the tokenizers differ: token '<begin>'"):
        LLM(pair.target, draft_model=other, decoding=SMC(2, 2))


def test_sizes_that_differ_by_more_than_padding_are_refused(pair: Pair, tmp_path: Path) -> None:
    large = write_model(tmp_path / "large", 1024, 3)
    (tmp_path / "large" / "tokenizer.json").unlink()
    (tmp_path / "large" / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match="draft_model has 1024 tokens and the target has 272"):
        LLM(pair.target, draft_model=large)


def test_a_directory_without_tokenizer_works_with_token_ids(pair: Pair, plain: LLM, tmp_path: Path) -> None:
    """The model has the sizes of `plain`, whose programs it shares."""
    shutil.copytree(pair.target, path := tmp_path / "target", ignore=shutil.ignore_patterns("tokenizer*"))
    given = llm_arguments(pair, model=path, draft_model=None, decoding=Autoregressive(), max_num_seqs=2)
    with LLM(**given) as llm:  # a Path is as good as text
        assert llm.tokenizer is None
        answer = llm.generate({"prompt_token_ids": [5, 6]}, SamplingParams(max_tokens=3, seed=0), use_tqdm=False)[0]
        assert len(answer.outputs[0].token_ids) >= 1
        assert answer.outputs[0].text == ""
        with pytest.raises(ValueError, match=r"^request 0: the model directory has no tokenizer; pass"):
            llm.generate("text")
        with pytest.raises(ValueError, match="chat needs its chat template"):
            llm.chat([{"role": "user", "content": "hi"}])
        with pytest.raises(ValueError, match=r"^request 0: stop needs a tokenizer"):
            llm.generate({"prompt_token_ids": [5]}, SamplingParams(stop="x"))


def test_eos_of_the_tokenizer_where_the_configs_name_none(tmp_path: Path) -> None:
    path = write_model(tmp_path / "no-eos", 264, 1, eos_token_ids=())
    models = load_models(path, None, needs_draft=False, dtype="float32")
    assert models.target.eos_token_ids == ()
    assert models.eos_token_ids == (257,)
    assert models.draft is None


def test_a_model_that_names_no_end_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, eos in (("no-end", ()), ("end", (5,))):
        path = Path(write_model(tmp_path / name, 264, 1, eos_token_ids=eos))
        (path / "tokenizer.json").unlink()
        (path / "tokenizer_config.json").unlink()
        caplog.clear()
        with LLM(path, decoding=Autoregressive(), max_model_len=32, max_num_seqs=1):
            lines = [
                record.getMessage() for record in caplog.records if "names a token that ends" in record.getMessage()
            ]
        assert len(lines) == (not eos)


def without(name: str) -> Callable[[Path], None]:
    return lambda directory: (directory / name).unlink()


def rewritten(name: str, content: bytes) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        (directory / name).write_bytes(content)

    return change


def config_with(**changes: object) -> Callable[[Path], None]:
    def change(directory: Path) -> None:
        path = directory / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return change


def truncate(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


# Of either directory; what weights and configs can lack besides is in `tests/model/files`.
BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "nothing there": (shutil.rmtree, "does not exist"),
    "truncated weights": (truncate, "model.safetensors"),
    "tokenizer corrupt": (rewritten("tokenizer.json", b"{"), "tokenizer files"),
    "vocabulary only by name": (without("tokenizer.json"), "no vocabulary"),
    "size of another model": (config_with(hidden_size=32), "hidden_size|another shape|missing"),
    "EOS outside the vocabulary": (config_with(eos_token_id=100_000), "eos_token_id"),
}


@pytest.mark.parametrize("role", ["model", "draft_model"])
@pytest.mark.parametrize("kind", BROKEN)
def test_directories_that_cannot_be_used(kind: str, role: str, pair: Pair, tmp_path: Path) -> None:
    damage, reason = BROKEN[kind]
    broken = tmp_path / "broken"
    shutil.copytree(pair.target if role == "model" else pair.draft, broken)
    damage(broken)
    paths = {"model": pair.target, "draft_model": pair.draft, role: str(broken)}
    with pytest.raises(CheckpointError, match=reason) as caught:
        LLM(decoding=SMC(2, 2), max_model_len=32, **paths)
    message = str(caught.value)
    assert "\n" not in message
    assert str(broken) in message


@pytest.mark.parametrize("name", ["", "no/such/directory", "no-such-org/no-such-model", "\0"])
def test_names_of_nothing(name: str, pair: Pair) -> None:
    with pytest.raises(CheckpointError, match=r"pass a .*directory") as caught:
        LLM(name, draft_model=pair.draft)
    assert "\n" not in str(caught.value)


def test_the_bundled_pair_is_the_default() -> None:
    """Nothing but `LLM()`; `tests/examples` has its answers."""
    with LLM(max_model_len=64, max_num_seqs=1) as llm:
        assert llm.models.draft is not None
        assert llm.decoding == SMC()


@pytest.mark.slow
@pytest.mark.parametrize("quantizations", [("int8", "int8"), (None, "int8")])
def test_a_draft_made_of_its_target_shares_what_is_kept_alike(
    quantizations: tuple[str | None, str | None], tmp_path: Path
) -> None:
    path = write_model(tmp_path / "three", 264, 1, num_layers=3)
    target, draft = quantizations
    decoding, kinds = Rejection(2), {"quantization": target, "draft_quantization": draft}
    with LLM(path, draft_drop_layers=[1], decoding=decoding, max_model_len=32, max_num_seqs=1, **kinds) as llm:
        models = llm.models
        assert (models.target.num_layers, models.draft.num_layers) == (3, 2)
        kept = {id(leaf) for leaf in jax.tree.leaves(models.target_params)}
        shared = [id(leaf) in kept for leaf in jax.tree.leaves(models.draft_params)]
        assert all(shared) if target == draft else not any(shared)


@pytest.mark.slow
def test_an_olmo_2_pair_answers_as_its_target_alone(tmp_path: Path) -> None:
    """Greedily, by exact rejection."""
    layer = LayerSpec(qk_norm="all", pre_norms=False, post_norms=True)
    olmo: dict[str, Any] = {"layers": (layer,), "float32_norms": True}
    target, draft = (write_model(tmp_path / str(seed), 264, seed, **olmo) for seed in (1, 2))

    def tokens(draft_model: str | None, decoding: Any) -> list[list[int]]:
        sizes = {"max_model_len": 48, "max_num_seqs": 2, "page_size": 4}
        params = SamplingParams(max_tokens=16, ignore_eos=True, temperature=0)
        with LLM(target, draft_model=draft_model, decoding=decoding, **sizes) as llm:
            assert llm.models.target.layers == (layer,)
            return [output.outputs[0].token_ids for output in llm.generate(["abc", "tom has"], params, use_tqdm=False)]

    alone = tokens(None, Autoregressive())
    assert all(len(set(answer)) > 2 for answer in alone)
    assert tokens(draft, Rejection(3)) == alone


def test_layers_that_cannot_be_dropped(pair: Pair) -> None:
    with pytest.raises(ValueError, match=r"^draft_drop_layers: layers to drop are \[4\], but the model's end at 0"):
        LLM(pair.target, draft_drop_layers=[4])
    for wrong in ([], "3", 3, [1.5], [True]):
        with pytest.raises(ValueError, match=r"^draft_drop_layers must be numbers of layers such as \(3, 12\)"):
            LLM(pair.target, draft_drop_layers=wrong)
    with pytest.raises(ValueError, match="has no draft; omit it"):
        LLM(pair.target, draft_drop_layers=[0], decoding=Autoregressive())
