"""From names to models: the target, the draft, their tokenizer, one vocabulary."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from smcjax.autoregressive import AutoregressiveDecoder
from smcjax.decoders import SMC, Autoregressive, Decoding, Rejection
from smcjax.decoding.decoder import Decoder
from smcjax.decoding.drafts.eagle import Eagle
from smcjax.decoding.drafts.ngram import NGRAM, NGram
from smcjax.decoding.drafts.proposer import Proposer
from smcjax.device import on_cpu
from smcjax.engine.run.memory import require_room_for_weights, weight_bytes
from smcjax.engine.run.settings import own_settings
from smcjax.engine.run.sharded_programs import DisaggregatedPrograms, ShardedPrograms
from smcjax.model.config import ModelConfig
from smcjax.model.dropping import drop_layers, dropped_config
from smcjax.model.eagle import EagleConfig, EagleParams, eagle_bytes
from smcjax.model.files.checkpoint import load_checkpoint, load_config, resolve_model_path, weights_dtype
from smcjax.model.files.eagle_files import is_eagle, load_eagle, load_eagle_config
from smcjax.model.files.hub import bundled_model
from smcjax.model.folding import fold_for_kernels, widen_params
from smcjax.model.parallel import AXIS, TensorParallel, check_split, held_by_one
from smcjax.model.params import Params
from smcjax.model.vocabulary import common_vocabulary, trim_vocabulary, trimmed_config
from smcjax.pallas.dispatch import implementations
from smcjax.rejection import RejectionDecoder
from smcjax.smc import SMCDecoder
from smcjax.sparse.scratch import stored_scores_bytes
from smcjax.sparse.verification import SparseVerification
from smcjax.tokenizer.tokenizer import Tokenizer

DEFAULT_PAGE_SIZE = 16  # tokens

DECODERS: dict[type[Decoding], type[Decoder[Any, Any, Any]]] = {
    SMC: SMCDecoder,
    Rejection: RejectionDecoder,
    Autoregressive: AutoregressiveDecoder,
}


def make_decoder(
    decoding: Decoding,
    target: ModelConfig,
    draft: Proposer | ModelConfig | None,
    max_model_len: int,
    page_size: int = DEFAULT_PAGE_SIZE,
    implementation: str = "auto",
    *,
    disaggregated: bool = False,
) -> Decoder[Any, Any, Any]:
    """The decoder that computes what `decoding` asks for; the other arguments are fields of `Program`.

    `disaggregated`: the decoder runs on two devices; if it is pipelined, one of them drafts and the other scores.
    """
    decoder = DECODERS[type(decoding)](
        decoding, target, draft if decoding.drafts else None, max_model_len, page_size, implementation
    )
    return dataclasses.replace(decoder, disaggregated_axis=AXIS) if disaggregated and decoding.overlaps else decoder


@dataclasses.dataclass(frozen=True)
class Models:
    """The models that `LLM` runs. Draft fields are None where no draft model is needed.

    `shared` layers are those that the target has beyond the draft where the draft's arrays are the target's. With
    `parallel` several devices hold the target together, and where `draft_divided` the draft as well, which each has
    whole otherwise. Each of two `disaggregated` devices has both models whole. Configs are those of whole models.
    """

    tokenizer: Tokenizer | None
    target: ModelConfig
    target_params: Params
    draft: ModelConfig | None = None
    draft_params: Params | EagleParams | None = None
    shared: tuple[int, ...] | None = None
    proposes: Proposer | None = None  # instead of a draft model
    parallel: TensorParallel | None = None
    draft_divided: bool = False
    disaggregated: TensorParallel | None = None

    @property
    def devices(self) -> int:
        """The number of devices that run the models."""
        several = self.parallel or self.disaggregated
        return 1 if several is None else several.size

    @property
    def sharded(self) -> ShardedPrograms | None:
        """How programs run on several devices; None on one."""
        if self.disaggregated is not None:
            return DisaggregatedPrograms(self.disaggregated, self.target)
        if self.parallel is None:
            return None
        return ShardedPrograms(self.parallel, self.target, self.draft if self.draft_divided else None)

    @property
    def local_target(self) -> ModelConfig:
        """The target as one device computes it."""
        return self.target if self.parallel is None else self.parallel.local(self.target)

    @property
    def local_proposer(self) -> Proposer | ModelConfig | None:
        """The proposer as one device computes it."""
        if self.parallel is None or self.draft is None or not self.draft_divided:
            return self.proposer
        return self.parallel.local(self.draft)

    @property
    def proposer(self) -> Proposer | ModelConfig | None:
        """The proposer, or the config of the draft model; None where nothing drafts."""
        return self.draft if self.proposes is None else self.proposes

    def keeping(self, dtype: str) -> Models:
        """Returns the models with configs that say that weights and KV are kept in `dtype`."""
        target = dataclasses.replace(self.target, dtype=dtype)
        draft = None if self.draft is None else dataclasses.replace(self.draft, dtype=dtype)
        proposes = self.proposes.keeping(dtype) if isinstance(self.proposes, Eagle) else self.proposes
        return dataclasses.replace(self, target=target, draft=draft, proposes=proposes)

    @property
    def max_position_embeddings(self) -> int:
        """The longest sequence that every model was made for."""
        return min(config.max_position_embeddings for config in (self.target, self.draft) if config is not None)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The EOS ids of the target's configs and of the tokenizer; ids that no logit stands for are left out.

        The two may differ: of chat models the config often names what ends a text, the tokenizer what ends a turn.
        """
        ids = [*self.target.eos_token_ids]
        if self.tokenizer is not None and self.tokenizer.eos_token_id is not None:
            ids.append(self.tokenizer.eos_token_id)
        return tuple(token for token in dict.fromkeys(ids) if token < self.target.vocab_size)


@own_settings()
def prepared(params: Params, config: ModelConfig, implementation: str) -> Params:
    """Returns weights as the engine keeps them, and frees what it replaces.

    On a GPU they are folded for kernels, on a CPU kept as the same numbers in float32.
    """
    with implementations(implementation):
        return widen_params(params) if on_cpu() else fold_for_kernels(params, config)


def _prepared_head(params: EagleParams) -> EagleParams:
    """The head's own weights as the engine keeps them: on a CPU the same numbers in float32."""
    if not on_cpu():
        return params
    wide = widen_params(dataclasses.replace(params, token_ids=None))
    return dataclasses.replace(wide, token_ids=params.token_ids)


def prepared_models(models: Models, implementation: str) -> Models:
    """`models` with the weights of each `prepared`, and configs that say so; what they share, once on each device.

    A head that several devices divide gets what it shares with the target in its programs alone.
    """
    parallel, several = models.parallel, models.parallel or models.disaggregated

    def placed(config: ModelConfig, params: Params, divisor: TensorParallel | None) -> Params:
        """Divided by `divisor`, else whole on each device."""
        if divisor is not None:
            return divisor.placed(config, params)
        return params if several is None else several.whole(params)

    target_params = prepared(models.target_params, models.target, implementation)
    target_params = placed(models.target, target_params, parallel)
    draft_params: Any = models.draft_params
    if models.shared is not None:
        draft_params = drop_layers(models.target, target_params, models.shared)[1]
    elif isinstance(draft_params, EagleParams):
        draft_params = _prepared_head(draft_params)
        if parallel is None:
            draft_params = draft_params.joined(target_params.embed, target_params.unembed)
        draft_params = draft_params if several is None else several.whole(draft_params)
    elif models.draft is not None:
        draft_params = prepared(draft_params, models.draft, implementation)
        divisor = parallel.by_layers if parallel is not None and models.draft_divided else None
        draft_params = placed(models.draft, draft_params, divisor)
    kept = models.keeping(jnp.dtype(target_params.embed.dtype).name)
    return dataclasses.replace(kept, target_params=target_params, draft_params=draft_params)


def models_for(decoding: Decoding, models: Models, page_size: int | None) -> Models:
    """Returns what `decoding` needs of models that another decoder runs on, whose arrays are shared.

    Raises ValueError where they have no draft that it can use, or attention that pages or `sparse` do not fit.
    """
    check_pages(models.target, page_size)
    if decoding.speculation.sparse is not None:
        decoding.speculation.sparse.check(models.target.selecting.values())
    if not decoding.drafts:
        return dataclasses.replace(models, draft=None, draft_params=None, shared=None, proposes=None)
    if models.proposer is None:
        raise ValueError(
            f"decoding is {decoding} and the models to share have no draft; load them with one, or use "
            "decoding=Autoregressive()."
        )
    if models.draft is not None:
        check_pages(models.draft, page_size)
    if models.proposes is not None:
        decoding.check_draft(models.proposes)
    return models


def scores_bytes(
    target: ModelConfig, decoding: Decoding, *, requests: int, max_model_len: int, page_size: int, implementation: str
) -> int:
    """Bytes that kernels keep to rank blocks in a cycle of `requests`, the target as one device computes it."""
    speculation = decoding.speculation
    sizes = {"requests": requests, "queries": speculation.rows * speculation.scored}
    with implementations(implementation):
        return stored_scores_bytes(
            target, speculation.sparse, **sizes, max_model_len=max_model_len, page_size=page_size
        )


def check_pages(config: ModelConfig, page_size: int | None) -> None:
    """Raises ValueError for pages of `page_size` tokens that the model's attention cannot use, before weights are."""
    if page_size is not None:
        for layer in config.layers:
            layer.attention.cache(config).check_page_size(page_size)


@own_settings()
def load_models(
    model: str | os.PathLike[str] | None,
    draft_model: str | os.PathLike[str] | None,
    *,
    needs_draft: bool,
    dtype: str,
    draft_drop_layers: Sequence[int] | None = None,
    quantization: str | None = None,
    draft_quantization: str | None = None,
    page_size: int | None = None,
    sparse: SparseVerification | None = None,
    accepts: Callable[[Proposer], None] = lambda _: None,
    parallel: TensorParallel | None = None,
    draft_divided: bool | None = None,
    implementation: str = "auto",
) -> Models:
    """Loads what the decoder needs; None names the bundled pair, for the draft with layers to drop the target.

    Padded vocabularies are cut to the ids that both models share. A draft from the target's own path is loaded once
    with it, unless the two are to be quantised differently. A directory of an EAGLE-3 head is known by its config;
    `accepts` raises ValueError for a head that the decoder cannot use, before weights are read. With `parallel` its
    devices hold the target together, and where `draft_divided` the draft; None: a draft that shares the target's
    weights, or that programs of `implementation` are quicker with so (`ShardedPrograms.divides`). Raises ValueError for
    a pair that is only half given, whose vocabularies differ or whose attention cannot use pages of `page_size` tokens,
    and for a target that cannot be verified by `sparse`; CheckpointError for a directory that cannot be used.
    """
    if draft_model is None and draft_drop_layers is not None:
        draft_model = model
    if needs_draft and draft_model != NGRAM and (model is None) != (draft_model is None):
        if model is None:
            raise ValueError("draft_model is set and model is not; pass both, or neither for the bundled pair.")
        raise ValueError(
            "model is set and draft_model is not, and this decoder drafts; give draft_model (for Rejection also "
            f"{NGRAM!r}) or draft_drop_layers, or use decoding=Autoregressive(), the target alone."
        )

    path = bundled_model("target") if model is None else resolve_model_path(model)
    target = _Target(path, Tokenizer.load(path), load_config(path), dtype, quantization, parallel)
    check_pages(target.config, page_size)
    if parallel is not None:
        check_split(target.config, parallel.size, "the target", "tensor_parallel_size", quantization=quantization)
    if sparse is not None:
        sparse.check(target.config.selecting.values())
    if not needs_draft or draft_model == NGRAM:
        target.require_room({})
        return Models(target.tokenizer, *target.load(), proposes=NGram() if needs_draft else None, parallel=parallel)
    draft_path = bundled_model("draft") if draft_model is None else resolve_model_path(draft_model)
    if not is_eagle(draft_path):
        dropped = tuple(draft_drop_layers or ())
        draft = _Draft(draft_path, load_config(draft_path), dropped, draft_quantization, draft_divided)
        check_pages(draft.config, page_size)
        return _with_draft(target, draft, implementation)
    of_models = {
        "draft_quantization": draft_quantization,
        "draft_drop_layers": draft_drop_layers,
        "draft_tensor_parallel_size": target.devices if draft_divided else None,
    }
    for name, value in of_models.items():
        if value is not None:
            raise ValueError(
                f"{name} is {value!r} and draft_model is an EAGLE-3 head, which is kept as it is; omit it."
            )
    return _with_head(target, draft_path, accepts)


@dataclasses.dataclass(frozen=True)
class _Target:
    """The target before its weights are read, and how devices will hold them."""

    path: Path
    tokenizer: Tokenizer | None
    config: ModelConfig
    dtype: str
    quantization: str | None
    parallel: TensorParallel | None

    @property
    def devices(self) -> int:
        """The number of devices that hold it together."""
        return 1 if self.parallel is None else self.parallel.size

    def require_room(self, draft: dict[str, tuple[ModelConfig, str | None]], head: EagleConfig | None = None) -> None:
        """Raises ValueError where its weights, beside those of a draft or head, exceed a device; reads none of them.

        A draft is its config, of what one device of several holds, and the quantisation in which it is loaded.
        """
        kept = weights_dtype(self.dtype).name
        models = {"model": (held_by_one(self.config, self.devices), self.quantization), **draft}
        weights = {
            name: weight_bytes(dataclasses.replace(config, dtype=kept), quantization)
            for name, (config, quantization) in models.items()
        }
        if head is not None:
            weights["draft_model"] = eagle_bytes(head, kept)
        mend = "use smaller models"
        if not on_cpu() and kept == "float32":
            mend = "use dtype='bfloat16', or smaller models"
        elif not on_cpu() and None in {quantization for _, quantization in models.values()}:
            mend = "use quantization='int8' or 'float8', or smaller models"
        require_room_for_weights(weights, mend, self.devices)

    def load(self) -> tuple[ModelConfig, Params]:
        """Reads the weights; the config then says their dtype."""
        return load_checkpoint(self.path, self.dtype, self.quantization, self.parallel)


@dataclasses.dataclass(frozen=True)
class _Draft:
    """A draft model before its weights are read; `divided` None: among the target's devices where that is quicker."""

    path: Path
    config: ModelConfig
    dropped: tuple[int, ...]
    quantization: str | None
    divided: bool | None


def _with_head(target: _Target, path: Path, accepts: Callable[[Proposer], None]) -> Models:
    """Loads the target and an EAGLE-3 head."""
    head = load_eagle_config(path, target.config)
    accepts(Eagle(head))
    target.require_room({}, head)
    config, params = target.load()
    head, head_params = load_eagle(path, config, target.dtype)
    return Models(
        target.tokenizer, config, params, draft_params=head_params, proposes=Eagle(head), parallel=target.parallel
    )


def _with_draft(target: _Target, draft: _Draft, implementation: str) -> Models:
    """Loads the target and a draft model, cut to the ids that both have. A draft of the same weights shares them."""
    tokenizer = Tokenizer.load(draft.path)
    try:
        dropped_config(draft.config, draft.dropped)
    except ValueError as error:
        raise ValueError(f"draft_drop_layers: {error}.") from None
    shares = target.quantization == draft.quantization and draft.path.resolve() == target.path.resolve()
    divisor = _draft_divisor(target, draft, shares, implementation)
    drafts: dict[str, tuple[ModelConfig, str | None]] = {}
    if not shares:
        held = draft.config if divisor is None else held_by_one(draft.config, target.devices, vocabulary=False)
        drafts["draft_model"] = held, draft.quantization
    target.require_room(drafts)
    config, params = target.load()
    whole, whole_params = (
        (config, params) if shares else load_checkpoint(draft.path, target.dtype, draft.quantization, divisor)
    )
    draft_config, draft_params = drop_layers(whole, whole_params, draft.dropped)
    size = common_vocabulary(config, draft_config, target.tokenizer, tokenizer)
    # In place of the uncut ones, which nothing keeps in memory then.
    config, params = _trimmed(config, params, size, target.parallel)
    draft_config, draft_params = _trimmed(draft_config, draft_params, size, divisor)
    return Models(
        target.tokenizer,
        config,
        params,
        draft_config,
        draft_params,
        shared=draft.dropped if shares else None,
        parallel=target.parallel,
        draft_divided=divisor is not None,
    )


def _draft_divisor(target: _Target, draft: _Draft, shares: bool, implementation: str) -> TensorParallel | None:
    """The devices that divide the draft; None: each has all of it, or there is one."""
    parallel, divided = target.parallel, draft.divided
    if parallel is None:
        return None
    if shares and divided is False:
        raise ValueError(
            f"draft_tensor_parallel_size is 1 and the draft has the weights of the target, which {target.devices} "
            "devices hold together; omit it."
        )
    if divided is None:
        divided = draft.quantization is None and ShardedPrograms(parallel, target.config).divides(
            draft.config, weights_dtype(target.dtype), implementation
        )
    if not (divided or shares):
        return None
    option = "draft_tensor_parallel_size"
    check_split(draft.config, target.devices, "the draft", option, quantization=draft.quantization)
    return parallel if shares else parallel.by_layers


def _trimmed(
    config: ModelConfig, params: Params, size: int, parallel: TensorParallel | None
) -> tuple[ModelConfig, Params]:
    """The model with `size` token ids. Divided among devices, the rows beyond stay, and are no tokens'."""
    if parallel is None or not parallel.vocabulary:
        return trim_vocabulary(config, params, size)
    return trimmed_config(config, size), params
