"""Parameter groups: multipliers by path, in every optimizer, in the configuration and in a run."""

from __future__ import annotations

import pytest
import torch

from mfun.config import Config, ConfigError, OptimConfig, from_toml, load, override, to_toml
from mfun.optim import Transform, build, groups_of
from mfun.train.plan import plan
from mfun.verify.run import verify_in_process
from mfun.verify.shrink import shrink
from tests.properties import small
from tests.test_optim import MASK, leaves, run

PATHS = {
    "embed.tokens": True,
    "blocks.0.norm1.weight": False,
    "blocks.0.attn.qkv": True,
    "blocks.1.attn.qkv": True,
}


def test_overrides_are_taken_in_order() -> None:
    """A glob crosses dots; a later one replaces only what it says; the rest keeps its default."""
    overrides = {
        "blocks.*": {"lr": 0.5},
        "blocks.1.*": {"lr": 2.0, "decay": 0.25},
        "*norm?.weight": {"decay": 1.0},
        "embed.tokens": {"decay": 0.0},
    }
    assert groups_of(PATHS, OptimConfig(overrides=overrides)) == {
        "embed.tokens": (1.0, 0.0),
        "blocks.0.norm1.weight": (0.5, 1.0),
        "blocks.0.attn.qkv": (0.5, 1.0),
        "blocks.1.attn.qkv": (2.0, 0.25),
    }
    assert groups_of(["w"], OptimConfig()) == {"w": (1.0, 1.0)}


def test_a_pattern_that_matches_nothing_is_refused_with_paths_near_it() -> None:
    """A misspelt pattern, or a path without its glob, is named; its neighbours come first."""
    config = OptimConfig(overrides={"blocks.*": {"lr": 1.0}, "blocks.*.atn.qkv": {"lr": 0.1}})
    with pytest.raises(ConfigError, match=r"'blocks\.\*\.atn\.qkv' matches no .* blocks\.\d\.attn"):
        groups_of(PATHS, config)
    with pytest.raises(ConfigError, match=r"'embed' matches no parameter; .* embed\.tokens"):
        groups_of(PATHS, OptimConfig(overrides={"embed": {"lr": 0.1}}))
    with pytest.raises(ConfigError, match=r"'Embed\.\*' matches no parameter"):
        groups_of(PATHS, OptimConfig(overrides={"Embed.*": {"lr": 0.1}}))


def test_a_plan_refuses_it_before_anything_runs() -> None:
    """The whole model is asked, not a stage: the last stage's head may be named."""
    config = override(small("pp=2 layers=2 tied=false"), ['optim.overrides={"head.*"={lr=0.5}}'])
    assert plan(config).groups["head.weight"] == (0.5, 1.0)
    wrong = override(config, ['optim.overrides={"haed.*"={lr=0.5}}'])
    with pytest.raises(ConfigError, match=r"'haed\.\*'.* head\.weight"):
        plan(wrong)


def test_toml_and_command_line_say_the_same() -> None:
    """A table in a file, an inline table in an override, and back to TOML."""
    there = from_toml('[optim.overrides."*.bias"]\nlr = 2\ndecay = 0.5\n')
    here = override(Config(), ['optim.overrides={"*.bias" = {lr = 2, decay = 0.5}}'])
    assert there == here != Config() and from_toml(to_toml(here)) == here
    assert here.optim.overrides == {"*.bias": {"lr": 2.0, "decay": 0.5}}
    assert override(here, ["optim.overrides={}"]) == Config()
    given = {"w": {"lr": 1.0}}
    config = OptimConfig(overrides=given)
    given["w"]["lr"] = 5.0
    assert config.overrides == {"w": {"lr": 1.0}}
    with pytest.raises(ConfigError, match=r"optim\.overrides .* of lr and decay only"):
        load("tiny", ['optim.overrides={"*"={lr=1, momentum=0}}'])


CONFIGS = {
    "adamw": OptimConfig(eps=1e-6, clip=0),
    "lion": OptimConfig(name="lion", clip=0),
    "sgd": OptimConfig(name="sgd", momentum=0.7, clip=0),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_group_is_the_optimizer_with_its_own_numbers(name: str) -> None:
    """A leaf with multipliers (r, d) moves as under lr r, min_lr r and weight_decay d alone."""
    base = CONFIGS[name]
    groups = {"embed.tokens": (0.5, 3.0), "blocks.0.norm1.weight": (2.0, 0.0)}
    groups |= {"scale": (0.0, 1.0), "empty": (1.0, 1.0)}
    lr, floor, decay = 0.05, 0.01, 0.2

    def made(rate: float, wd: float, groups: dict | None) -> Transform:
        numbers = {"lr": lr * rate, "min_lr": floor * rate, "weight_decay": wd, "warmup": 3}
        fields = {"name": base.name, "eps": base.eps, "momentum": base.momentum, "clip": 0.0}
        return build(OptimConfig(**fields, schedule="cosine", **numbers), 12, groups)

    mixed, state = run(made(1.0, decay, groups), leaves(0), 14, donate=True)
    for path, (rate, d) in groups.items():
        alone, _ = run(made(rate, decay * d, None), leaves(0), 14)
        torch.testing.assert_close(mixed[path], alone[path], rtol=1e-13, atol=1e-13)
    assert torch.equal(mixed["scale"], leaves(0)["scale"])
    assert state[name].get("lr", 0) == pytest.approx(floor) or name == "sgd"


@pytest.mark.parametrize("name", CONFIGS)
def test_flat_buckets_with_groups_are_their_leaves(name: str) -> None:
    """One flat leaf a group, as a sharded optimizer sees them, equals the leaves one by one."""
    config = CONFIGS[name]
    split, _ = run(build(config, 10, MASK), leaves(0), 5)
    buckets = {
        "bucket.0": ("embed.tokens", "empty"),
        "bucket.1": ("blocks.0.norm1.weight", "scale"),
    }

    def flat(tree: dict) -> dict:
        return {b: torch.cat([tree[p].flatten() for p in paths]) for b, paths in buckets.items()}

    opt = build(config, 10, {"bucket.0": (1.0, 1.0), "bucket.1": (1.0, 0.0)})
    params, state = flat(leaves(0)), opt.init(flat(leaves(0)))
    for step in range(5):
        params, state = opt.update(flat(leaves(100 + step)), state, params, donate=True)
    for bucket, want in flat(split).items():
        torch.testing.assert_close(params[bucket], want, rtol=1e-14, atol=1e-14)


def test_the_small_twin_keeps_the_overrides_it_has_parameters_for() -> None:
    """`mfun verify` shrinks the depth: a pattern of a block beyond it is left out, no other."""
    given = '{"blocks.11.*"={lr=0.5},"blocks.0.*"={lr=0.1},"embed.*"={decay=0.0}}'
    config = override(small("layers=12 pp=2"), [f"optim.overrides={given}"])
    twin = shrink(config, steps=2)
    assert twin.model.layers < 12
    assert twin.optim.overrides == {"blocks.0.*": {"lr": 0.1}, "embed.*": {"decay": 0.0}}
    assert verify_in_process(twin).ok


OVERRIDDEN = (
    'optim.overrides={"embed.*"={lr=0.3},"*.attn.*"={decay=2.0},"*norm*"={lr=0.0,decay=1.0}}'
)


@pytest.mark.parametrize(
    "settings",
    [
        "tp=2 steps=3 lr=0.1 weight_decay=0.5",
        "pp=2 layers=2 name=sgd steps=3 weight_decay=0.5",
        "dp=2 sharding=optim steps=3 lr=0.1 weight_decay=0.5",
        "dp=2 tp=2 sharding=optim_grads_params steps=3 lr=0.1 weight_decay=0.5",
    ],
)
def test_overrides_in_every_layout(settings: str) -> None:
    """Multipliers by path give the reference's weights, whatever a bucket or stage holds."""
    report = verify_in_process(override(small(settings), [OVERRIDDEN]))
    assert report.ok, report
