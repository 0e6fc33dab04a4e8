"""The peers' model: an ordinary nn.Module GPT, and how each peer parallelises it.

The same maths as mfun's `gpt` with learned positions, LayerNorm, biases, exact GELU and an untied
head; written as a PyTorch user would write it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

Sizes = dict[str, int]


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.head = d // heads
        self.q, self.k, self.v = (nn.Linear(d, d) for _ in range(3))
        self.out = nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (f(x).view(b, s, -1, self.head).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, s, -1))


class FusedAttention(nn.Module):
    """The same with one product for q, k and v: the fastest single-device form."""

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.head, self.qkv, self.out = d // heads, nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        q, k, v = (
            t.view(b, s, -1, self.head).transpose(1, 2) for t in self.qkv(x).split(d, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(b, s, d))


class Mlp(nn.Module):
    """Two layers with GELU."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    """Pre-norm block."""

    def __init__(self, d: int, heads: int, fused: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attn = (FusedAttention if fused else Attention)(d, heads)
        self.mlp = Mlp(d)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Embedding(nn.Module):
    """Token and position table."""

    def __init__(self, vocab: int, seq: int, d: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, d), nn.Embedding(seq, d)

    def forward(self, tokens: Tensor) -> Tensor:
        at = torch.arange(tokens.shape[1], device=tokens.device)
        return self.tokens(tokens) + self.positions(at)


class Gpt(nn.Module):
    """The whole model, or one pipeline stage's blocks of it."""

    def __init__(
        self, sizes: Sizes, *, fused: bool = True, stage: int = 0, stages: int = 1
    ) -> None:
        super().__init__()
        d, layers = sizes["hidden"], sizes["layers"]
        first, last = stage == 0, stage == stages - 1
        self.embed = Embedding(sizes["vocab"], sizes["seq"], d) if first else nn.Identity()
        self.blocks = nn.ModuleList(
            Block(d, sizes["heads"], fused) for _ in range(layers // stages)
        )
        self.norm = nn.LayerNorm(d) if last else nn.Identity()
        self.head = nn.Linear(d, sizes["vocab"], bias=False) if last else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean token loss."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def fused_adamw(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW as mfun's: decay on matrices and tables only. A fused call takes one kind of tensor."""
    groups: dict[tuple[bool, type], dict[str, Any]] = {}
    for p in model.parameters():
        decays = p.ndim > 1
        fresh = {"params": [], "weight_decay": 0.1 if decays else 0.0}
        groups.setdefault((decays, type(p.data)), fresh)["params"].append(p)
    return torch.optim.AdamW(list(groups.values()), lr=1e-3, betas=(0.9, 0.95), fused=True)


def stepper(model: nn.Module, x: Tensor, y: Tensor) -> Any:
    """A training step of a model, as a function without arguments."""
    optimizer = fused_adamw(model)

    def step() -> float:
        value = loss(model(x), y)
        value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return value.item()

    return step


def one_device(sizes: Sizes, tokens: Tensor, labels: Tensor) -> Any:
    """Eager, one process: returns a function that runs a step."""
    model = Gpt(sizes)
    return stepper(model, tokens, labels)


def ddp(sizes: Sizes, tokens: Tensor, labels: Tensor) -> Any:
    """DistributedDataParallel over all ranks."""
    model = nn.parallel.DistributedDataParallel(Gpt(sizes), gradient_as_bucket_view=True)
    rank, world = dist.get_rank(), dist.get_world_size()
    return stepper(model, tokens.chunk(world)[rank], labels.chunk(world)[rank])


def fsdp2(sizes: Sizes, tokens: Tensor, labels: Tensor) -> Any:
    """FSDP2: `fully_shard` of each block and of the rest, over all ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    model = Gpt(sizes)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return stepper(model, tokens.chunk(world)[rank], labels.chunk(world)[rank])


def dtensor_tp(sizes: Sizes, tokens: Tensor, labels: Tensor) -> Any:
    """DTensor tensor parallelism with loss parallel, PyTorch's documented plan."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        ParallelStyle,
        RowwiseParallel,
        loss_parallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = Gpt(sizes, fused=False)
    plan: dict[str, ParallelStyle] = {"embed.tokens": RowwiseParallel(input_layouts=Replicate())}
    plan["head"] = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    for i in range(sizes["layers"]):
        for name in ("attn.q", "attn.k", "attn.v", "mlp.up"):
            plan[f"blocks.{i}.{name}"] = ColwiseParallel()
        for name in ("attn.out", "mlp.down"):
            plan[f"blocks.{i}.{name}"] = RowwiseParallel()
    parallelize_module(model, mesh, plan)
    optimizer = fused_adamw(model)

    def step() -> float:
        with loss_parallel():
            value = loss(model(tokens), labels)
            value.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return (value.full_tensor() if isinstance(value, DTensor) else value).item()

    return step


def pipeline_1f1b(sizes: Sizes, tokens: Tensor, labels: Tensor, microbatches: int) -> Any:
    """torch.distributed.pipelining's Schedule1F1B."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    rank, world = dist.get_rank(), dist.get_world_size()
    model = Gpt(sizes, stage=rank, stages=world)
    optimizer = fused_adamw(model)
    stage = PipelineStage(model, rank, world, torch.device("cpu"))
    schedule = Schedule1F1B(stage, microbatches, loss_fn=loss)

    def step() -> float:
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(tokens)
        else:
            schedule.step(target=labels, losses=losses)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return sum(x.item() for x in losses) / max(len(losses), 1)

    return step
