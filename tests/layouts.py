"""Layouts and features whose pairs must all equal one device, and the rows that cover them."""

from __future__ import annotations

from mfun import config as cfg
from mfun.config import Config
from tests.pairwise import Row, covering

FIELDS: dict[str, tuple[str, ...]] = {
    "tp": ("1", "2", "4"),
    "pp": ("1", "2", "4"),
    "dp": ("1", "2"),
    "order": ("tp-cp-ep-dp-pp", "pp-dp-tp", "dp-pp-tp"),
    "pipeline": ("gpipe", "1f1b"),
    "recompute": ("none", "full"),
    "sequence_parallel": ("false", "true"),
    "microbatches": ("1", "3", "5"),
    "microbatch_sizes": ("equal", "unequal"),
    "stage_sizes": ("equal", "unequal"),
    "tied": ("true", "false"),
    "kv_heads": ("4", "2", "1"),  # of 4: with tp 4 the last two are held several times
    "vocab": ("16", "19"),
    "dropout": ("0.0", "0.1"),
    "packed": ("false", "true"),
    "sliding_window": ("0", "3"),
    "position": ("learned", "none", "rotary", "linear", "llama3", "yarn"),
    "activation": ("gelu", "gelu_tanh", "swiglu"),
    "bias": ("none", "qkv", "all"),
    "qk_norm": ("false", "true"),
    "norm": ("layernorm", "rmsnorm"),
    "label_smoothing": ("0.0", "0.1"),
    "z_loss": ("0.0", "0.01"),
    "loss_norm": ("tokens", "microbatch"),
    "clip": ("0.0", "0.05"),
    "optimizer": ("adamw", "sgd"),
    "rate": ("constant", "linear", "cosine", "inverse_sqrt", "wsd"),
}
STEP = {"tp", "pp", "dp", "microbatches", "clip", "optimizer"}  # what a learning rate may meet
SMALL = (
    "model.hidden=16 model.heads=4 model.ffn=12 model.seq_len=8 model.init_std=0.3 "
    "model.rope_theta=100 model.rope_beta_fast=4 precision.policy=fp64 optim.eps=1e-4 "
    "optim.lr=0.01 optim.min_lr=0.001 optim.warmup=1 optim.decay_steps=4 optim.wsd_decay=0.6 "
    "train.steps=2"
)
ROPE = {"linear": "0", "llama3": "64", "yarn": "16"}  # the scalings, with their `rope_original`
ROWS: tuple[str, ...] = (  # grid(2) as digits
    "111210020012101130211000102",
    "020001111100010012110111011",
    "201111100001110141000010004",
    "210100011111001021001101110",
    "020010000010011152101000103",
    "101201021002000000200101013",
    "020210111112100140211110114",
    "111201120100111022110011101",
    "201000000011101010211100000",
    "020110000112111101010011112",
    "200111111000000032101001102",
    "121101121101100051210111010",
    "110000021100010040010001014",
    "220201100111110032010111011",
    "011000110001101101101000103",
    "001010021002010120111100000",
    "210210120100011111200000103",
    "200211010002000150010011101",
    "111111000102101010010011012",
    "220201000002001022200010013",
    "100210110012011142100010100",
    "201110111010110002211111014",
    "011010111010001131010110113",
    "210000021011000152100001103",
)


def allowed(row: Row) -> bool:
    """One stage and one microbatch have nothing to be unequal to."""
    one_stage = row.get("pp") == "1" and row.get("stage_sizes") == "unequal"
    one_batch = row.get("microbatches") == "1" and row.get("microbatch_sizes") == "unequal"
    return not one_stage and not one_batch


def related(a: str, b: str) -> bool:
    """The learning rate is a number a step: it has nothing to do with the model."""
    return "rate" not in (a, b) or bool({a, b} & STEP)


def grid(seed: int) -> list[Row]:
    """Rows that cover every pair."""
    return covering(FIELDS, allowed, related, seed, tries=40)


def packed_row(row: Row) -> str:
    """A row as digits: the place of each field's value in `FIELDS`."""
    return "".join(str(FIELDS[name].index(value)) for name, value in row.items())


def unpacked(digits: str) -> Row:
    """The row of some digits."""
    values = zip(FIELDS.items(), digits, strict=True)
    return {name: options[int(digit)] for (name, options), digit in values}


def config_of(row: Row) -> Config:
    """The smallest configuration of a row, resolved."""
    tp, pp, dp, count = (int(row[name]) for name in ("tp", "pp", "dp", "microbatches"))
    per_rank = count + (row["microbatch_sizes"] == "unequal")
    layers = pp + (row["stage_sizes"] == "unequal")
    scaling = row["position"] if row["position"] in ROPE else "none"
    sections = {
        "model": "tied kv_heads vocab dropout sliding_window activation bias qk_norm norm",
        "parallel": "tp pp dp order recompute sequence_parallel",
        "train": "microbatches label_smoothing z_loss loss_norm",
        "data": "packed",
        "optim": "clip",
    }
    settings = [f"{s}.{name}={row[name]}" for s in sections for name in sections[s].split()]
    settings += [
        f"model.layers={layers}",
        f"model.position={'rotary' if scaling != 'none' else row['position']}",
        f"model.rope_scaling={scaling}",
        f"model.rope_factor={1 if scaling == 'none' else 4}",
        f"model.rope_original={ROPE.get(scaling, 0)}",
        f"parallel.schedule={row['pipeline']}",
        f"train.global_batch={dp * per_rank}",
        f"optim.name={row['optimizer']}",
        f"optim.schedule={row['rate']}",
    ]
    config = cfg.override(Config(), [*SMALL.split(), *settings])
    return cfg.resolve(config, tp * pp * dp)
