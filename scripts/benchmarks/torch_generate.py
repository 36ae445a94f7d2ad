"""The cases of `bench_cpu.py` by transformers' `generate` on PyTorch: python torch_generate.py MODEL DTYPE.

Answers each line of the input, the name of a case, with the seconds that it takes.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from bench_cpu import CASES
from transformers import AutoModelForCausalLM

path, dtype = Path(sys.argv[1]), getattr(torch, sys.argv[2])
model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=dtype).eval()
generator = torch.Generator().manual_seed(0)
with torch.inference_mode():
    for line in sys.stdin:
        case = CASES[line.strip()]
        tokens = torch.randint(10, 49_000, (case.requests, case.prompt), generator=generator)
        began = time.perf_counter()
        model.generate(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=case.answer,
            min_new_tokens=case.answer,
            do_sample=False,
            pad_token_id=2,
        )
        print(time.perf_counter() - began, flush=True)
