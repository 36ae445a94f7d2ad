"""Writes the bundled draft with noise on its layers' matrices, as a draft that is wrong more often.

    python scripts/training/damage_draft.py damaged --noise 0.3
    smcjax bench decoders -n 200 --decoding 'Rejection(gamma=8)' 'SMC(control='{0,0.1,0.5}')' \\
        --draft-model damaged --model words

Every matrix gets Gaussian noise of `--noise` times the standard deviation of its own numbers.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
from pathlib import Path

import jax
import jax.numpy as jnp

from smcjax.model import load_checkpoint
from smcjax.model.files.export import save_checkpoint
from smcjax.model.files.hub import bundled_model
from smcjax.noise import key_of
from smcjax.tokenizer.tokenizer import Tokenizer


def main() -> None:
    """Damages and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="to write to")
    parser.add_argument("--noise", type=float, default=0.3, metavar="S", help="over a matrix's standard deviation (.3)")
    parser.add_argument("--seed", type=int, default=0, help="(0)")
    args = parser.parse_args()
    if not (math.isfinite(args.noise) and args.noise >= 0):
        parser.error(f"--noise must be a number of at least 0, got {args.noise}.")
    source = bundled_model("draft")
    config, params = load_checkpoint(source)
    leaves, tree = jax.tree.flatten(params.layers)
    keys = jax.random.split(key_of(args.seed), len(leaves))
    damaged = [
        leaf + args.noise * jnp.std(leaf) * jax.random.normal(key, leaf.shape, leaf.dtype) if leaf.ndim == 2 else leaf
        for leaf, key in zip(leaves, keys, strict=True)
    ]
    save_checkpoint(config, dataclasses.replace(params, layers=jax.tree.unflatten(tree, damaged)), args.directory)
    tokenizer = Tokenizer.load(source)
    assert tokenizer is not None
    tokenizer.save(args.directory)


if __name__ == "__main__":
    main()
