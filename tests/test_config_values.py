"""What every number and switch of a configuration is by default and at its limits; the presets."""

from __future__ import annotations

import math
from typing import NamedTuple

import attrs
import pytest

from mfun.config import PRESETS, SECTIONS, Config, ConfigError, override
from mfun.config.fields import did_you_mean

# key, default, limits: "1.." from 1, "0<" above 0, "0..<1" from 0 and below 1.
NUMBERS = """
model.layers 4 1..            parallel.tp 1 1..              optim.lr 1e-3 0..
model.hidden 128 1..          parallel.cp 1 1..              optim.min_lr 0 0..
model.heads 4 1..             parallel.ep 1 1..              optim.warmup 0 0..
model.kv_heads 0 0..          parallel.etp 0 0..             optim.decay_steps 0 0..
model.head_dim 0 0..          parallel.dp 0 0..              optim.wsd_decay 0.1 0<..<1
model.ffn 0 0..               parallel.pp 1 1..              optim.b1 0.9 0..<1
model.vocab 256 1..           parallel.chunks 0 0..          optim.b2 0.95 0..<1
model.seq_len 128 1..         parallel.microbatch_group 0 0..  optim.eps 1e-8 0<
model.dropout 0 0..<1         parallel.in_flight 0 0..       optim.momentum 0.9 0..<1
model.rope_theta 1e4 0<       parallel.shard_copies 1 1..    optim.ns_steps 5 1..
model.rope_factor 1 1..       parallel.prefetch 1 0..        optim.weight_decay 0.1 0..
model.rope_low 1 0<           parallel.bucket_size 0 0..     optim.clip 1 0..
model.rope_high 4 0<          parallel.bucket_pad 128 1..    optim.clip_value 0 0..
model.rope_original 0 0..     parallel.recompute_layers 0 0..  data.val_fraction 0.05 0..<1
model.rope_beta_fast 32 0<    parallel.offload 0 0..         data.samples 0 0..
model.rope_beta_slow 1 0<     precision.initial_scale 4294967296 0<
model.norm_eps 1e-5 0<        precision.growth 2 1<          precision.growth_every 1000 1..
model.sliding_window 0 0..    precision.backoff 0.5 0<..<1   precision.hysteresis 2 1..
model.init_std 0.02 0<        precision.min_scale 1 0<
train.steps 200 1..           train.seed 0 0..               train.global_batch 16 1..
train.microbatches 4 1..      train.label_smoothing 0 0..<1  train.z_loss 0 0..
train.large_gradient 0 0..    train.eval_every 50 0..        train.eval_batches 4 1..
train.checkpoint_every 100 0.. train.keep 0 0..              train.log_every 1 1..
train.timeout_s 120 1..
"""
ON = {"model.tied", "parallel.split_backward", "train.malloc_tuning"}


class Number(NamedTuple):
    """A field: its default and its limits."""

    key: str
    default: float
    least: float
    open_: bool
    below: float


def numbers() -> list[Number]:
    words = iter(NUMBERS.split())
    found = []
    for key, default, limits in zip(words, words, words, strict=True):
        low, _, high = limits.partition("..")
        below = float(high.removeprefix("<") or math.inf)
        found.append(Number(key, float(default), float(low.strip("<")), "<" in low, below))
    return found


def value_of(config: Config, key: str) -> object:
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


def test_the_tables_name_every_number_and_switch() -> None:
    """A field that is added is added here."""
    default = Config()
    keys = [f"{part}.{name}" for part, kind in SECTIONS.items() for name in attrs.fields_dict(kind)]
    kinds = {key: type(value_of(default, key)) for key in keys}
    assert {key for key, kind in kinds.items() if kind in (int, float)} == {
        n.key for n in numbers()
    }
    switches = {key for key, kind in kinds.items() if kind is bool}
    assert {key for key in switches if value_of(default, key)} == ON


@pytest.mark.parametrize("number", numbers(), ids=lambda number: number.key)
def test_a_number_has_its_default_and_its_limits(number: Number) -> None:
    """What is documented; the least value is taken or refused, one below it refused."""
    key, default, least, open_, below = number
    found = value_of(Config(), key)
    assert found == default
    step = 1 if type(found) is int else 2.0**-40
    shown = (lambda v: str(int(v))) if type(found) is int else repr

    def taken(value: float) -> bool:
        try:
            return value_of(override(Config(), [f"{key}={shown(value)}"]), key) == value
        except ConfigError:
            return False

    assert taken(least + step) and taken(least) != open_ and not taken(least - step)
    if below < math.inf:
        assert taken(below - step) and not taken(below)
    else:
        assert taken(least + 1000)


# From the models' published configurations: blocks, width, heads, key and value heads, width of a
# head, feed-forward width, tokens, base of the rotary angles, epsilon of the norms.
PUBLISHED = {
    "gpt2": (12, 768, 12, 12, 64, 3072, 50257, None, 1e-5),
    "llama3-8b": (32, 4096, 32, 8, 128, 14336, 128256, 5e5, 1e-5),
    "llama3-70b": (80, 8192, 64, 8, 128, 28672, 128256, 5e5, 1e-5),
    "llama3.1-8b": (32, 4096, 32, 8, 128, 14336, 128256, 5e5, 1e-5),
    "qwen2-7b": (28, 3584, 28, 4, 128, 18944, 152064, 1e6, 1e-6),
    "qwen3-0.6b": (28, 1024, 16, 8, 128, 3072, 151936, 1e6, 1e-6),
    "qwen3-8b": (36, 4096, 32, 8, 128, 12288, 151936, 1e6, 1e-6),
    "mistral-7b": (32, 4096, 32, 8, 128, 14336, 32000, 1e4, 1e-5),
}
OWN = {"tiny", "megatron-2.8b"}


def test_presets_have_the_sizes_that_their_models_publish() -> None:
    """A preset with another width or vocabulary is another model under the same name."""
    assert set(PUBLISHED) | OWN == set(PRESETS)
    for name, published in PUBLISHED.items():
        m = PRESETS[name].model
        sizes = (m.layers, m.hidden, m.heads, m.kv, m.head_size, m.ffn_size, m.vocab)
        theta = m.rope_theta if m.position == "rotary" else None
        assert (*sizes, theta, m.norm_eps) == published, name
        assert m.tied == (name in ("gpt2", "qwen3-0.6b")) and m.qk_norm == ("qwen3" in name)
        assert m.seq_len % 1024 == 0 and m.dropout == (0.1 if name == "gpt2" else 0.0)
    long = PRESETS["llama3.1-8b"].model
    assert (long.seq_len, long.rope_factor, long.rope_original) == (131072, 8.0, 8192)
    assert PRESETS["mistral-7b"].model.sliding_window == 4096


def test_presets_train_as_their_comments_say() -> None:
    """Sequences, microbatches, warm-up: four sequences a microbatch so that dp up to 4 fits."""
    for name, config in PRESETS.items():
        train, large = config.train, name not in ("tiny", "gpt2")
        assert train.global_batch == train.microbatches * (8 if name == "gpt2" else 4)
        assert train.steps == (240 if name == "tiny" else 100_000)
        assert not large or train.eval_every == 1000
        assert config.optim.warmup == (40 if name == "tiny" else 2000)
        assert config.optim.min_lr == pytest.approx(config.optim.lr / 10)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("ab", "did you mean 'abcd'?"),  # two letters away
        ("abcx", "did you mean 'abcd'?"),
        ("zzz", "the known names are abcd, abxyefgh."),  # three
        ("abxyefg", "did you mean 'abxyefgh'?"),
        ("zbxyefgzzzzz", "the known names are abcd, abxyefgh."),
        ("zbxyefghzzz", "the known names are abcd, abxyefgh."),
        ("zbxyefghzz", "did you mean 'abxyefgh'?"),  # three of ten letters
    ],
)
def test_a_wrong_name_is_told_the_nearest(given: str, said: str) -> None:
    """Up to two letters, or a third of them; otherwise all names are listed."""
    assert did_you_mean(given, ["abcd", "abxyefgh"]) == said
