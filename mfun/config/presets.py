"""Named configurations, as data. Every one can be printed and planned; ``tiny`` runs anywhere."""

from __future__ import annotations

from typing import Any

import attrs

from mfun.config.sections import Config, ModelConfig, OptimConfig, ParallelConfig, TrainConfig

LLAMA = ModelConfig(position="rotary", norm="rmsnorm", activation="swiglu", bias="none", tied=False)
"""What the models after Llama share."""

PRETRAIN = OptimConfig(lr=3e-4, min_lr=3e-5, schedule="cosine", warmup=2000)


def _large(
    model: ModelConfig, *, batch: int, optim: OptimConfig = PRETRAIN, **layout: Any
) -> Config:
    """A model of billions of parameters: four sequences a microbatch, so that dp up to 4 fits."""
    train = TrainConfig(steps=100_000, global_batch=batch, microbatches=batch // 4, eval_every=1000)
    return Config(model=model, parallel=ParallelConfig(**layout), optim=optim, train=train)


DEFAULT = "tiny"
"""The preset of a command line that names none."""

PRESETS: dict[str, Config] = {
    "tiny": Config(
        model=ModelConfig(
            layers=4,
            hidden=128,
            heads=4,
            vocab=256,
            seq_len=128,
            position="rotary",
            init_std=0.05,
        ),
        parallel=ParallelConfig(tp=2, pp=2),
        optim=OptimConfig(lr=2e-3, min_lr=2e-4, schedule="cosine", warmup=40),
        train=TrainConfig(steps=240, global_batch=16, microbatches=4),
    ),
    "gpt2": Config(
        model=ModelConfig(
            layers=12,
            hidden=768,
            heads=12,
            vocab=50257,
            seq_len=1024,
            dropout=0.1,
            activation="gelu_tanh",
            bias="all",
        ),
        optim=OptimConfig(lr=6e-4, min_lr=6e-5, schedule="cosine", warmup=2000),
        train=TrainConfig(steps=100_000, global_batch=512, microbatches=64, eval_every=1000),
    ),
    "megatron-2.8b": _large(
        ModelConfig(
            layers=12, hidden=4096, heads=8, vocab=50257, seq_len=1024, tied=False, bias="all"
        ),
        batch=512,
        tp=2,
        pp=2,
    ),
    "llama3-8b": _large(
        attrs.evolve(
            LLAMA,
            layers=32,
            hidden=4096,
            heads=32,
            kv_heads=8,
            ffn=14336,
            vocab=128256,
            seq_len=8192,
            rope_theta=500000.0,
        ),
        batch=128,
        tp=4,
        pp=2,
        sequence_parallel=True,
    ),
    "llama3-70b": _large(
        attrs.evolve(
            LLAMA,
            layers=80,
            hidden=8192,
            heads=64,
            kv_heads=8,
            ffn=28672,
            vocab=128256,
            seq_len=8192,
            rope_theta=500000.0,
        ),
        batch=128,
        tp=8,
        pp=8,
        sequence_parallel=True,
    ),
    "llama3.1-8b": _large(
        attrs.evolve(
            LLAMA,
            layers=32,
            hidden=4096,
            heads=32,
            kv_heads=8,
            ffn=14336,
            vocab=128256,
            seq_len=131072,
            rope_theta=500000.0,
            rope_scaling="llama3",
            rope_factor=8.0,
            rope_original=8192,
        ),
        batch=32,
        tp=8,
        sequence_parallel=True,
    ),
    "qwen2-7b": _large(
        attrs.evolve(
            LLAMA,
            bias="qkv",
            layers=28,
            hidden=3584,
            heads=28,
            kv_heads=4,
            ffn=18944,
            vocab=152064,
            seq_len=4096,
            rope_theta=1000000.0,
            norm_eps=1e-6,
        ),
        batch=128,
        tp=4,
        sequence_parallel=True,
    ),
    "qwen3-0.6b": _large(
        attrs.evolve(
            LLAMA,
            tied=True,
            layers=28,
            hidden=1024,
            heads=16,
            kv_heads=8,
            head_dim=128,
            ffn=3072,
            vocab=151936,
            seq_len=4096,
            rope_theta=1000000.0,
            norm_eps=1e-6,
            qk_norm=True,
        ),
        batch=128,
    ),
    "qwen3-8b": _large(
        attrs.evolve(
            LLAMA,
            layers=36,
            hidden=4096,
            heads=32,
            kv_heads=8,
            head_dim=128,
            ffn=12288,
            vocab=151936,
            seq_len=4096,
            rope_theta=1000000.0,
            norm_eps=1e-6,
            qk_norm=True,
        ),
        batch=128,
        tp=4,
        pp=2,
        sequence_parallel=True,
    ),
    "mistral-7b": _large(
        attrs.evolve(
            LLAMA,
            layers=32,
            hidden=4096,
            heads=32,
            kv_heads=8,
            ffn=14336,
            vocab=32000,
            seq_len=8192,
            sliding_window=4096,
        ),
        batch=128,
        tp=4,
        pp=2,
        sequence_parallel=True,
    ),
}
"""Configurations that ``load`` knows by name."""
