"""The baseline: the cycle that `smcjax bench cycle` times, in PyTorch with torch.compile and one CUDA graph.

    smcjax bench cycle --compare                                      # beside ours, in one run, at the same shapes
    smcjax bench cycle --compare --torch-python env/bin/python        # where torch has an environment of its own
    python scripts/benchmarks/torch_cycle.py --mode eager <shapes.json     # alone, with PyTorch's own kernels

The same work on the same shapes, random weights and random KV: draft head over [prev, frontier], K − 1 draft steps,
one target forward of K + 1 tokens, weights, ESS, systematic resampling, fork of the KV. Choices are those that make
PyTorch fast: projections stacked as ours are; one region per layer, compiled once per shape, with the residual add of
the layer before inside it, so that nothing is lost at the seam; dense KV per row, whose fork moves only what was
generated, only in rows that are replaced, by one Triton kernel a model; the whole cycle replayed as one graph, without
the host. Attention reads all `--max-model-len` slots under a mask, as dense caches do.

Needs torch, triton on a GPU, and nothing of smcjax; on a CPU it runs the same code without a graph. Standard input is
JSON, `{"target": {...}, "draft": {...}}` with the fields of `Shape`; `--save FILE` writes
what `smcjax bench cycle --save` does, but for what would need smcjax.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # torch for CPUs comes without it
    triton = None

WARMUP = 4  # cycles before every timed window, as in `smcjax bench cycle`


class Shape(NamedTuple):
    """The sizes of a Llama, as `smcjax.bench.compare` writes them."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    tie_embeddings: bool
    rms_norm_eps: float
    dtype: str
    rope_frequencies: list[float]  # [head_dim / 2]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) · weight, in f32, returned in x's dtype."""
    x32 = x.float()
    return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)).to(x.dtype) * weight


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [R, T, heads, D]."""
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def prepare(
    embed: Tensor, tokens: Tensor, positions: Tensor, frequencies: Tensor, slots: int, group: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Embeddings [R, T, E], cos and sin [R, T, 1, D/2], and the additive mask [R, 1, group·T, S]."""
    angles = positions.float()[..., None] * frequencies
    visible = torch.arange(slots, device=tokens.device) <= positions[..., None]  # [R, T, S]
    mask = torch.where(visible, 0.0, -math.inf).to(embed.dtype)
    mask = mask[:, None, None].expand(-1, 1, group, -1, -1).reshape(tokens.shape[0], 1, -1, slots)
    return embed[tokens], angles.cos()[:, :, None], angles.sin()[:, :, None], mask.contiguous()


def layer(
    x: Tensor,
    delta: Tensor,
    weights: tuple[Tensor, ...],
    keys: Tensor,
    values: Tensor,
    rows: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    mask: Tensor,
    heads: int,
    eps: float,
    attention: str,
) -> tuple[Tensor, Tensor]:
    """One layer; `delta` is what the layer before adds to the residual stream. Returns both again."""
    attn_norm, qkv_weight, o_weight, mlp_norm, gate_up_weight, down_weight = weights
    r, t, _ = x.shape
    kv_heads, dim = keys.shape[1], keys.shape[3]
    x = x + delta
    qkv = F.linear(rms_norm(x, attn_norm, eps), qkv_weight).view(r, t, heads + 2 * kv_heads, dim)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=2)
    keys[rows, :, positions] = rotate(k, cos, sin)
    values[rows, :, positions] = v
    # The query heads of one key-value head are rows of one product: [R, Hkv, group·T, D].
    q = rotate(q, cos, sin).view(r, t, kv_heads, heads // kv_heads, dim)
    q = q.permute(0, 2, 3, 1, 4).reshape(r, kv_heads, -1, dim)
    if attention == "sdpa":
        attended = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask.expand(-1, kv_heads, -1, -1))
    else:
        scores = torch.matmul(q, keys.transpose(-1, -2)).float() / math.sqrt(dim) + mask
        attended = torch.matmul(scores.softmax(-1).to(values.dtype), values)
    attended = attended.view(r, kv_heads, heads // kv_heads, t, dim).permute(0, 3, 1, 2, 4).reshape(r, t, -1)
    x = x + F.linear(attended, o_weight)
    gate, up = F.linear(rms_norm(x, mlp_norm, eps), gate_up_weight).chunk(2, dim=-1)
    return x, F.linear(F.silu(gate) * up, down_weight)


def logits_of(x: Tensor, delta: Tensor, norm: Tensor, unembed: Tensor, eps: float) -> Tensor:
    """Logits in f32."""
    return F.linear(rms_norm(x + delta, norm, eps), unembed).float()


def gumbel_max(logits: Tensor) -> Tensor:
    """One categorical draw from the last axis."""
    uniform = torch.rand_like(logits).clamp_min(1e-20)
    return (logits - torch.log(-torch.log(uniform))).argmax(-1)


def sample(
    x: Tensor, delta: Tensor, norm: Tensor, unembed: Tensor, eps: float, temperature: Tensor
) -> tuple[Tensor, Tensor]:
    """A token from the last column, and its log-probability."""
    logits = logits_of(x[:, -1], delta[:, -1], norm, unembed, eps) / temperature[:, None]
    token = gumbel_max(logits)
    return token, logits.gather(1, token[:, None])[:, 0] - logits.logsumexp(-1)


def score(
    x: Tensor, delta: Tensor, norm: Tensor, unembed: Tensor, eps: float, temperature: Tensor, drafts: Tensor
) -> tuple[Tensor, Tensor]:
    """log p_T of the drafts [R, K], and the bonus token from the last column [R]."""
    logits = logits_of(x, delta, norm, unembed, eps) / temperature[:, None, None]
    chosen = logits[:, :-1].gather(2, drafts[..., None])[..., 0]
    return chosen - logits[:, :-1].logsumexp(-1), gumbel_max(logits[:, -1])


def resample(
    log_weight: Tensor, log_evidence: Tensor, increment: Tensor, threshold: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Systematic resampling where ESS < threshold·N: new weights, log evidence, and the row that each row copies."""
    groups, n = log_weight.shape
    log_weight = log_weight + increment
    total = log_weight.logsumexp(-1, keepdim=True)
    weights = (log_weight - total).exp()
    needed = 1.0 / weights.square().sum(-1, keepdim=True) < threshold * n
    own = torch.arange(n, device=log_weight.device)
    points = (own + torch.rand(groups, 1, device=log_weight.device)) / n
    ancestors = torch.searchsorted(weights.cumsum(-1), points).clamp(max=n - 1)
    ancestors = torch.where(needed, ancestors, own)
    source = (torch.arange(groups, device=own.device)[:, None] * n + ancestors).view(-1)
    log_evidence = log_evidence + torch.where(needed, total - math.log(n), 0.0)[:, 0]
    return torch.where(needed, 0.0, log_weight), log_evidence, source


def make_forker(caches: list[Tensor], n: int, first: int) -> Callable[[Tensor, Tensor], None]:
    """fork(source, end): row r of every cache becomes a copy of row source[r] in slots `first` … end − 1."""
    rows, heads, slots, dim = caches[0].shape
    if not caches[0].is_cuda:

        def fork_plainly(source: Tensor, end: Tensor) -> None:
            for cache in caches:
                cache[:, :, first:] = cache[source, :, first:]

        return fork_plainly

    pointers = torch.tensor([cache.data_ptr() for cache in caches], dtype=torch.int64, device=caches[0].device)
    block = 8
    grid = (len(caches), rows // n * heads, triton.cdiv(slots - first, block))

    def fork(source: Tensor, end: Tensor) -> None:
        fork_kernel[grid](pointers, source, end, first, heads, slots, n, triton.next_power_of_2(n), dim, block)

    return fork


if triton is not None:

    @triton.jit  # which looks annotations up as globals, and knows those of its own alone
    def fork_kernel(  # type: ignore[no-untyped-def]
        pointers,  # of the caches, [rows, heads, slots, DIM]
        source,
        end,
        first,
        heads,
        slots,
        n,
        N: tl.constexpr,
        DIM: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        """A program owns one (cache, group, head, block of slots) in all rows of the group: it reads, then writes."""
        begin = first + tl.program_id(2) * BLOCK
        last = tl.load(end)
        if begin < last:
            cache = tl.load(pointers + tl.program_id(0)).to(tl.pointer_type(tl.bfloat16))
            head = tl.program_id(1) % heads
            member = tl.arange(0, N)
            row = tl.program_id(1) // heads * n + member
            origin = tl.load(source + row, mask=member < n, other=0)
            slot = begin + tl.arange(0, BLOCK)
            moves = ((member < n) & (origin != row))[:, None, None] & (slot < last)[None, :, None]
            inside = slot[None, :, None] * DIM + tl.arange(0, DIM)[None, None, :]
            origin_at = ((origin.to(tl.int64) * heads + head) * slots * DIM)[:, None, None] + inside
            row_at = ((row.to(tl.int64) * heads + head) * slots * DIM)[:, None, None] + inside
            moved = tl.load(cache + origin_at, mask=moves)
            tl.debug_barrier()
            tl.store(cache + row_at, moved, mask=moves)


class Model:
    """Random weights, and random KV of every slot."""

    def __init__(self, config: Shape, rows: int, slots: int, device: str) -> None:
        self.config, self.slots = config, slots
        dtype = getattr(torch, config.dtype)

        def random(*shape: int, scale: float) -> Tensor:
            return (torch.randn(shape, device=device, dtype=torch.float32) * scale).to(dtype)

        def ones() -> Tensor:
            return torch.ones(config.hidden_size, device=device, dtype=dtype)

        e, f, d = config.hidden_size, config.intermediate_size, config.head_dim
        qkv = (config.num_heads + 2 * config.num_kv_heads) * d
        self.layers = [
            (
                ones(),
                random(qkv, e, scale=e**-0.5),
                random(e, config.num_heads * d, scale=e**-0.5),
                ones(),
                random(2 * f, e, scale=e**-0.5),
                random(e, f, scale=f**-0.5),
            )
            for _ in range(config.num_layers)
        ]
        self.embed = random(config.vocab_size, e, scale=0.02)
        self.unembed = self.embed if config.tie_embeddings else random(config.vocab_size, e, scale=e**-0.5)
        self.norm = ones()
        self.caches = [
            tuple(torch.randn(rows, config.num_kv_heads, slots, d, device=device, dtype=dtype) for _ in range(2))
            for _ in range(config.num_layers)
        ]
        self.rows = torch.arange(rows, device=device)[:, None]
        self.frequencies = torch.tensor(config.rope_frequencies, dtype=torch.float32, device=device)


class Cycle:
    """State in fixed buffers, and `__call__`, which advances it by one cycle without asking the host anything."""

    def __init__(self, args: argparse.Namespace, target: Shape, draft: Shape, device: str) -> None:
        self.alone = args.decoding == "autoregressive"
        self.n: int = 1 if self.alone else args.n_particles
        self.k: int = 0 if self.alone else args.gamma
        self.groups, self.context, self.attention = args.requests, args.context, args.attention
        rows = self.groups * self.n
        self.target = Model(target, rows, args.max_model_len, device)
        models = [self.target]
        if not self.alone:
            self.draft = Model(draft, rows, args.max_model_len, device)
            models.append(self.draft)
        caches = [[cache for pair in model.caches for cache in pair] for model in models]
        self.forks = [] if self.alone else [make_forker(each, self.n, self.context) for each in caches]

        self.block = torch.arange(self.k + 1, device=device)
        self.tokens = torch.zeros(rows, args.max_model_len + self.k + 1, dtype=torch.int64, device=device)
        self.position = torch.zeros(rows, dtype=torch.int64, device=device)  # of the frontier
        self.temperature = torch.ones(rows, device=device)
        self.log_weight = torch.zeros(self.groups, self.n, device=device)
        self.log_evidence = torch.zeros(self.groups, device=device)

        compiled = (lambda f: f) if args.mode == "eager" else self._compiler(args.mode)
        self.prepare, self.layer = compiled(prepare), compiled(layer)
        self.sample, self.score, self.resample = compiled(sample), compiled(score), compiled(resample)

    @staticmethod
    def _compiler(mode: str) -> Callable[[Any], Any]:
        return lambda function: torch.compile(function, mode=mode, dynamic=False, fullgraph=True)

    def reset(self) -> None:
        """A fresh prompt of `context` random tokens and a first token after it."""
        self.tokens.random_(0, self.target.config.vocab_size)
        self.position.fill_(self.context)
        self.log_weight.zero_()
        self.log_evidence.zero_()

    def forward(self, model: Model, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The residual stream after the last layer, as two summands."""
        config = model.config
        x, cos, sin, mask = self.prepare(
            model.embed,
            tokens,
            positions,
            model.frequencies,
            model.slots,
            config.num_heads // config.num_kv_heads,
        )
        delta = torch.zeros_like(x)
        for weights, (keys, values) in zip(model.layers, model.caches, strict=True):
            x, delta = self.layer(
                x,
                delta,
                weights,
                keys,
                values,
                model.rows,
                positions,
                cos,
                sin,
                mask,
                config.num_heads,
                config.rms_norm_eps,
                self.attention,
            )
        return x, delta

    def draw(self, model: Model, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """A next token a row and its log-probability."""
        x, delta = self.forward(model, tokens, positions)
        return self.sample(x, delta, model.norm, model.unembed, model.config.rms_norm_eps, self.temperature)

    def __call__(self) -> None:
        """One cycle, or one step of the target alone."""
        at = self.position[:, None]
        frontier = self.tokens.gather(1, at)
        if self.alone:
            token, _ = self.draw(self.target, frontier, at)
            self.tokens.scatter_(1, at + 1, token[:, None])
            self.position += 1
            return
        head = torch.cat([self.tokens.gather(1, at - 1), frontier], dim=1)
        drawn = [self.draw(self.draft, head, torch.cat([at - 1, at], dim=1))]
        for column in range(1, self.k):
            drawn.append(self.draw(self.draft, drawn[-1][0][:, None], at + column))
        drafts = torch.stack([token for token, _ in drawn], dim=1)
        log_q = torch.stack([logprob for _, logprob in drawn], dim=1)

        x, delta = self.forward(self.target, torch.cat([frontier, drafts], dim=1), at + self.block)
        eps = self.target.config.rms_norm_eps
        log_p, bonus = self.score(x, delta, self.target.norm, self.target.unembed, eps, self.temperature, drafts)
        self.tokens.scatter_(1, at + 1 + self.block, torch.cat([drafts, bonus[:, None]], dim=1))

        increment = (log_p - log_q).sum(1).view(self.groups, self.n)
        log_weight, log_evidence, source = self.resample(self.log_weight, self.log_evidence, increment, 0.5)
        self.log_weight.copy_(log_weight)
        self.log_evidence.copy_(log_evidence)
        self.tokens.copy_(self.tokens[source])
        self.position += self.k + 1
        for fork in self.forks:
            fork(source, self.position)


def captured(cycle: Cycle) -> Callable[[], None]:
    """The cycle as one CUDA graph; on a CPU the cycle itself."""
    cycle.reset()
    if not cycle.tokens.is_cuda:
        cycle()  # compiles
        return cycle
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # compiles, and lets libraries take their workspaces
            cycle()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cycle()
    return graph.replay


def synchronize() -> None:
    """Waits for the device."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def time_window(cycle: Cycle, replay: Callable[[], None], cycles: int) -> float:
    """Milliseconds a cycle, from a fresh prompt, after warm-up."""
    cycle.reset()
    for _ in range(WARMUP):
        replay()
    synchronize()
    began = time.perf_counter()
    for _ in range(cycles):
        replay()
    synchronize()
    elapsed = time.perf_counter() - began
    if not torch.isfinite(cycle.log_weight).all():
        raise SystemExit("the weights broke, so the timing means nothing")
    return elapsed / cycles * 1e3


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The options of `smcjax bench cycle` that make sense here."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decoding", choices=("smc", "autoregressive"), default="smc")
    parser.add_argument("-N", "--n-particles", type=int, default=8)
    parser.add_argument("-K", "--gamma", type=int, default=8)
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--max-model-len", type=int, default=1024, help="S, slots of the dense KV (1024)")
    parser.add_argument("--mode", choices=("default", "max-autotune-no-cudagraphs", "eager"), default="default")
    parser.add_argument("--attention", choices=("sdpa", "matmul"), default="sdpa")
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--cycles", type=int, default=16, help="cycles a window (16)")
    parser.add_argument("--save", type=Path, metavar="FILE", help="the figures as JSON")
    args = parser.parse_args(argv)
    advance = 1 if args.decoding == "autoregressive" else args.gamma + 1
    if args.context + 1 + (WARMUP + max(args.cycles, 3)) * advance > args.max_model_len:
        parser.error(f"--max-model-len {args.max_model_len} is too short for the windows; raise it")
    return args


@torch.no_grad()
def main() -> None:
    """Times and prints."""
    args = arguments()
    shapes = {name: Shape(**fields) for name, fields in json.load(sys.stdin).items()}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    began = time.perf_counter()
    cycle = Cycle(args, shapes["target"], shapes["draft"], device)
    replay = captured(cycle)
    synchronize()
    ready = time.perf_counter() - began
    windows = [time_window(cycle, replay, args.cycles) for _ in range(args.windows)]
    ms = statistics.median(windows)
    result = {
        "implementation": f"torch {torch.__version__} {args.mode} {args.attention}",
        "device": name,
        "decoding": args.decoding,
        "groups": args.requests,
        "n_particles": cycle.n,
        "gamma": cycle.k,
        "context": args.context,
        "max_model_len": args.max_model_len,
        "ms": ms,
        "ms_windows": windows,
        "tokens_per_second": args.requests * (cycle.k + 1) / ms * 1e3,
        "compile_seconds": ready,
    }
    print(f"{name}, {result['implementation']}: {ms:.2f} ms a cycle, {result['tokens_per_second']:,.0f} tokens/s")
    print(f"windows {', '.join(f'{each:.2f}' for each in windows)}; ready after {ready:.1f} s")
    if args.save is not None:
        args.save.write_text(json.dumps({"machine": None, "rows": [result]}))


if __name__ == "__main__":
    main()
