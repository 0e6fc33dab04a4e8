"""Configurations: what is accepted, what each refusal says, and what the integers mean."""

from __future__ import annotations

import math
import string
from pathlib import Path
from typing import get_args

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mfun.config import (
    PRESETS,
    SECTIONS,
    Config,
    ConfigError,
    ModelConfig,
    OptimConfig,
    ParallelConfig,
    TrainConfig,
    check,
    from_toml,
    load,
    mesh,
    microbatch_sizes,
    override,
    resolve,
    schedule_name,
    stage_layers,
    to_toml,
)
from mfun.config.sections import Schedule
from mfun.schedule import SCHEDULES

FIELDS = [(section, name) for section, kind in SECTIONS.items() for name in attrs.fields_dict(kind)]


def ids(pair: tuple[str, str]) -> str:
    return ".".join(pair)


def misspellings(name: str, known: set[str]) -> list[str]:
    """The name with one letter changed, at each place, never hitting another known name."""
    found = []
    for i, old in enumerate(name):
        for new in "qzjx_" + string.ascii_lowercase:
            changed = name[:i] + new + name[i + 1 :]
            if new != old and changed not in known and not changed.startswith("_"):
                found.append(changed)
                break
    return found


ALL_KEYS = {name for _, name in FIELDS} | set(SECTIONS)


# names


@pytest.mark.parametrize("pair", FIELDS, ids=ids)
def test_a_misspelt_key_is_refused_with_the_right_one(pair: tuple[str, str]) -> None:
    """Bug row 125: one letter changed in any key is refused in TOML, override and constructor."""
    section, name = pair
    wrong = misspellings(name, ALL_KEYS)
    assert wrong
    for changed in wrong:
        for use in (
            lambda key=changed: from_toml(f"[{section}]\n{key} = 1\n"),
            lambda key=changed: load(None, [f"{section}.{key}=1"]),
        ):
            with pytest.raises(ConfigError) as caught:
                use()
            assert f"{section}.{changed}" in str(caught.value)
            assert f"'{name}'" in str(caught.value).partition("did you mean")[2]
        with pytest.raises(TypeError, match=changed):
            SECTIONS[section](**{changed: 1})


@pytest.mark.parametrize("section", SECTIONS)
def test_a_misspelt_section_is_refused_with_the_right_one(section: str) -> None:
    """Bug row 125 at the top level: one letter changed in a section's name."""
    for changed in misspellings(section, ALL_KEYS):
        for use in (
            lambda name=changed: from_toml(f"[{name}]\n"),
            lambda name=changed: load(None, [f"{name}.layers=1"]),
        ):
            with pytest.raises(ConfigError) as caught:
                use()
            assert repr(changed) in str(caught.value)
            assert repr(section) in str(caught.value).partition("did you mean")[2]


def test_a_key_in_the_wrong_place_is_shown_its_own() -> None:
    """A key of another section, or without one, is answered with its full path."""
    with pytest.raises(ConfigError, match=r"unknown key model\.lr.*optim\.lr"):
        load(None, ["model.lr=1"])
    with pytest.raises(ConfigError, match=r"section\.key=value.*parallel\.tp"):
        load(None, ["tp=2"])
    with pytest.raises(ConfigError, match=r"unknown section 'steps'.*train\.steps"):
        from_toml("steps = 3")
    with pytest.raises(ConfigError, match=r"write parallel\.tp=VALUE"):
        load(None, ["parallel.tp"])
    with pytest.raises(ConfigError, match="'gpt2'"):
        load("gtp2")
    with pytest.raises(ConfigError, match="table"):
        from_toml("model = 3")
    with pytest.raises(ConfigError, match="not valid TOML"):
        from_toml("[model")


# values


def kind_of(pair: tuple[str, str]) -> str:
    """The declared type, as written."""
    return str(attrs.fields_dict(SECTIONS[pair[0]])[pair[1]].type)


WHOLES = [pair for pair in FIELDS if kind_of(pair) == "int"]
REALS = [pair for pair in FIELDS if kind_of(pair) == "float"]
FLAGS = [pair for pair in FIELDS if kind_of(pair) == "bool"]
TUPLES = [pair for pair in FIELDS if kind_of(pair).startswith("tuple")]
TEXTS = [pair for pair in FIELDS if kind_of(pair) == "str"]
TABLES = [pair for pair in FIELDS if kind_of(pair).startswith("dict")]
CHOICES = [p for p in FIELDS if p not in WHOLES + REALS + FLAGS + TUPLES + TEXTS + TABLES]

WRONG_TOML = (
    [
        (pair, value)
        for pair in WHOLES
        for value in ("1.5", "2.0", "true", '"2"', "[2]", "nan", "-1")
    ]
    + [(p, v) for p in REALS for v in ("true", '"1"', "[1.0]", "nan", "inf", "-inf", "-0.5")]
    + [(pair, value) for pair in FLAGS for value in ("1", "0", '"true"', "nan")]
    + [(pair, value) for pair in TUPLES for value in ("1", "true", "nan", "[nan]", "[-1]", "[[1]]")]
    + [(pair, value) for pair in TEXTS for value in ("1", "true", "nan", '["a"]')]
    + [(pair, value) for pair in CHOICES for value in ("1", "true", "nan", '"nothing"', '""')]
    + [(p, v) for p in TABLES for v in ("1", "[]", "{w = 1}", "{w = {lr = -1}}", "{w = {x = 1}}")]
    + [(p, v) for p in TABLES for v in ("{w = {}}", "{w = {lr = nan}}", "{w = {lr = true}}")]
)
WRONG_OVERRIDE = (
    [(pair, value) for pair in WHOLES for value in ("1.5", "2.0", "true", "two", "nan", "-1", "")]
    + [(pair, value) for pair in REALS for value in ("true", "nan", "inf", "-0.5", "1,2", "")]
    + [(pair, value) for pair in FLAGS for value in ("1", "0", "yes", "True", "")]
    + [(("parallel", "layers_per_stage"), value) for value in ("1.5", "a", "2,-1", "nan", "[true]")]
    + [(("data", "path"), value) for value in ("[1]", '["a"', '[""]')]
    + [(pair, value) for pair in CHOICES for value in ("nothing", "", "1")]
    + [(pair, value) for pair in TABLES for value in ("w", "1", "{w = {lr = -1}}", "{w = ")]
)


def test_every_field_is_of_a_known_kind() -> None:
    """The tables of wrong values leave no field out."""
    assert len(FIELDS) > 60
    words = {"tuple[int, ...]", "tuple[float, ...]", "tuple[str, ...]"}
    assert {kind_of(p) for p in TUPLES if p != ("data", "reset")} == words
    assert len(CHOICES) == 20 and TABLES == [("optim", "overrides")]


@pytest.mark.parametrize("pair", FIELDS, ids=ids)
def test_wrong_values_are_refused_by_key(pair: tuple[str, str]) -> None:
    """Bug row 125: another type, NaN, infinity or a negative size is refused and the key named."""
    section, name = pair
    toml = [value for where, value in WRONG_TOML if where == pair]
    assert toml
    for value in toml:
        with pytest.raises(ConfigError, match=rf"\b{section}\.{name} is "):
            from_toml(f"[{section}]\n{name} = {value}\n")
    for value in [value for where, value in WRONG_OVERRIDE if where == pair]:
        with pytest.raises(ConfigError, match=rf"\b{section}\.{name} is "):
            load(None, [f"{section}.{name}={value}"])
    with pytest.raises(ConfigError, match=rf"\b{section}\.{name} is "):
        SECTIONS[section](**{name: None})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("model.layers", 0),
        ("model.vocab", 0),
        ("parallel.tp", 0),
        ("model.dropout", 1.0),
        ("model.rope_theta", 0.0),
        ("model.rope_factor", 0.5),
        ("optim.b2", 1.0),
        ("train.steps", 0),
        ("data.val_fraction", 1.0),
    ],
)
def test_values_at_the_edge_are_refused(key: str, value: float) -> None:
    """Bounds are where they should be: sizes start at 1, probabilities stay below 1."""
    with pytest.raises(ConfigError, match=key):
        load(None, [f"{key}={value}"])


def test_overrides_have_the_fields_types() -> None:
    """A text becomes what its field holds, the later one wins, and the rest stays."""
    config = override(
        Config(),
        [
            "parallel.tp=4",
            "parallel.tp=2",
            "model.tied=false",
            "data.path=a.txt,b c",
            "parallel.layers_per_stage=2,0,3",
            "optim.lr=1",
            "optim.eps=1e-9",
            "precision.policy=fp64",
            "data.hash=12",
        ],
    )
    assert config.parallel.tp == 2
    assert config.model.tied is False
    assert config.data.path == ("a.txt", "b c")
    assert config.parallel.layers_per_stage == (2, 0, 3)
    assert type(config.optim.lr) is float
    assert config.optim.eps == 1e-9
    assert config.precision.policy == "fp64"
    assert config.data.hash == "12"
    assert config.train == TrainConfig()
    assert override(config, ["data.path="]).data.path == ()
    assert override(config, ['data.path=["a,b"]']).data.path == ("a,b",)
    assert override(config, ["parallel.layers_per_stage=[4, 1]"]).parallel.layers_per_stage == (
        4,
        1,
    )


def test_load_reads_presets_and_files(tmp_path: Path) -> None:
    """None is tiny; a file may leave out what it does not change."""
    assert load(None) == PRESETS["tiny"] == load("tiny", [])
    path = tmp_path / "mine.toml"
    path.write_text("[model]\nlayers = 3\n[data]\npath = ['x']\n", encoding="utf-8")
    config = load(str(path), ["model.layers=5"])
    assert config.model.layers == 5
    assert config.data.path == ("x",)
    assert config.parallel == ParallelConfig()
    text = path.read_text(encoding="utf-8").replace("\n", "\r\n")
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert load(str(path), ["model.layers=5"]) == config
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"mine\.toml is not a text file"):
        load(str(path))


@pytest.mark.parametrize("name", PRESETS)
def test_presets_load_resolve_and_survive_toml(name: str) -> None:
    """Every preset passes the checks, and TOML gives back exactly what was written."""
    config = resolve(load(name), None)
    assert config.parallel.dp == 1
    assert from_toml(to_toml(config)) == config
    assert to_toml(from_toml(to_toml(config))) == to_toml(config)


def test_toml_keeps_every_field_that_differs_from_its_default() -> None:
    """Tuples, small floats and flags come back with their types; a diff shows the changed line."""
    changes = ["optim.eps=1e-12", "data.path=a,b", "model.tied=false", "optim.lr=0.1"]
    config = override(Config(), [*changes, "parallel.layers_per_stage=1,3", "parallel.pp=2"])
    assert from_toml(to_toml(config)) == config
    before, after = (
        to_toml(Config()).splitlines(),
        to_toml(override(Config(), ["model.tied=false"])),
    )
    assert [line for line in after.splitlines() if line not in before] == ["tied = false"]


def test_configs_are_frozen_and_hashable() -> None:
    """A configuration is a value: it cannot be written to and can be a key."""
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        ModelConfig().layers = 3  # pyright: ignore[reportAttributeAccessIssue]
    assert hash(load("tiny")) == hash(load("tiny"))


# parts that do not fit


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        # bug row 123
        ("model.heads=6 model.hidden=48 model.kv_heads=2 parallel.tp=4", "model.heads is 6|tp = 4"),
        (
            "model.heads=6 model.hidden=48 model.kv_heads=4 parallel.tp=2",
            "heads is 6|kv_heads is 4",
        ),
        ("model.heads=33 model.hidden=66 model.kv_heads=2", "heads is 33|kv_heads is 2"),
        (
            "model.heads=12 model.hidden=48 model.kv_heads=3 parallel.tp=2",
            "kv_heads is 3|parallel.tp is 2",
        ),
        ("model.heads=5", "model.hidden is 128|model.heads = 5|head_dim"),
        # bug row 124
        (
            "model.seq_len=15 parallel.tp=2 parallel.sequence_parallel=true",
            "model.seq_len = 15|parallel.tp = 2",
        ),
        ("model.seq_len=18 parallel.cp=4", "model.seq_len is 18|parallel.cp = 8"),
        # bug row 126
        ("train.global_batch=6 parallel.dp=4", "global_batch is 6|parallel.dp = 4"),
        ("train.global_batch=4 parallel.dp=2 train.microbatches=3", "microbatches is 3|than the 2"),
        # bug row 57
        ("parallel.pp=5", "model.layers is 4|5 stages"),
        ("parallel.pp=2 parallel.layers_per_stage=1,2", "1, 2|model.layers is 4"),
        ("parallel.pp=2 parallel.layers_per_stage=1,1,2", "3 stages|2 stages"),
        ("model.ffn=10 parallel.tp=4", "model.ffn is 10|parallel.tp = 4"),
        (
            "model.position=rotary model.head_dim=3",
            "model.position is rotary|has 3|model.head_dim",
        ),
        ("model.rope_scaling=yarn", "model.rope_scaling is yarn|model.position is learned"),
        (
            "model.position=rotary model.rope_scaling=llama3 model.rope_low=4",
            "rope_low is 4|rope_high is 4",
        ),
        (
            "model.position=rotary model.rope_scaling=yarn model.rope_theta=1",
            "rope_theta is 1|above 1",
        ),
        ("parallel.schedule=none parallel.pp=2", "schedule is none|pp is 2"),
        ("parallel.pp=2 parallel.chunks=2", "1 chunks|chunks is 2|parallel.chunks=0"),
        ("parallel.pp=2 parallel.schedule=zbv model.layers=3", "layers is 3|4 slices|2 chunks"),
        ("optim.lr=1e-4 optim.min_lr=1e-3", "min_lr is 0.001|lr = 0.0001"),
        ("parallel.order=tp-pp parallel.dp=2", "parallel|'dp'|add it to the order"),
        # not built yet, by name
        ("parallel.cp=2", "parallel.cp is 2|not built"),
        ("parallel.ep=2 parallel.dp=2", "parallel.ep is 2|not built"),
        ("parallel.ep=3", "parallel.ep is 3|not built"),
        ("parallel.etp=2", "parallel.etp is 2|not built"),
        ("parallel.shard_copies=2", "shard_copies is 2|sharding is no_shard"),
        (
            "parallel.sharding=optim parallel.shard_copies=2 parallel.dp=3 train.global_batch=6 "
            "train.microbatches=2",
            "parallel.dp|3|parallel.shard_copies|2",
        ),
        ("precision.policy=bf16 precision.grads=fp16", "precision.grads is fp16|compute is bf16"),
        (
            "precision.policy=bf16 precision.params=fp32 parallel.sharding=optim_grads_params",
            "precision.params is fp32|precision.compute is bf16|sharding=optim_grads",
        ),
        ("precision.loss_scale=dynamic", "precision.loss_scale is dynamic|use none"),
    ],
)
def test_parts_that_do_not_fit_are_refused_with_both_numbers(
    tmp_path: Path, changes: str, words: str
) -> None:
    """Each refusal comes when the whole is built and names the keys and numbers that disagree."""
    plain = tmp_path / "plain.toml"
    plain.write_text("", encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load(str(plain), changes.split())
    for word in words.split("|"):
        assert word in str(caught.value)


def test_every_problem_is_listed_at_once() -> None:
    """Two faults give two lines."""
    with pytest.raises(ConfigError) as caught:
        check(Config(model=ModelConfig(heads=6, hidden=48, kv_heads=4, ffn=9, dropout=0.1)))
    assert str(caught.value).count("\n") == 0
    with pytest.raises(ConfigError) as caught:
        check(override(Config(), ["model.ffn=9", "parallel.tp=2", "parallel.pp=9"]))
    assert str(caught.value).count("\n") == 1


@pytest.mark.parametrize(
    "changes",
    [
        "model.kv_heads=1 parallel.tp=4",
        "model.kv_heads=2 parallel.tp=4",
        "model.seq_len=15 parallel.tp=2",
        "model.vocab=257 parallel.tp=4",
        "parallel.pp=4 parallel.layers_per_stage=4,0,0,0",
        "train.global_batch=6 parallel.dp=2 train.microbatches=3",
        "parallel.tp=4 parallel.etp=4",
        "model.head_dim=7 model.heads=5",
    ],
)
def test_what_is_right_is_let_through(tmp_path: Path, changes: str) -> None:
    """Repeated kv heads, odd vocabulary, an odd sequence without SP and empty stages are fine."""
    plain = tmp_path / "plain.toml"
    plain.write_text("", encoding="utf-8")
    check(load(str(plain), changes.split()))


# sizes and the world


@pytest.mark.parametrize(
    ("changes", "world", "words"),
    [
        (
            ["parallel.tp=3", "model.heads=3", "model.ffn=9", "model.hidden=9"],
            4,
            "4 ranks|3 * 1 * 1",
        ),
        (["parallel.tp=2", "parallel.pp=2", "parallel.dp=2"], 4, "2 * 1 * 2 = 4|dp = 2|8|4 ranks"),
        (["parallel.tp=2", "parallel.pp=2", "parallel.dp=2"], 16, "dp=4|8 ranks"),
        (["parallel.tp=2", "parallel.pp=2"], 2, "2 ranks|= 4"),
        (["train.global_batch=6"], 4, "train.global_batch is 6|parallel.dp = 4"),
    ],
)
def test_sizes_must_multiply_to_the_world(changes: list[str], world: int, words: str) -> None:
    """Bug row 126: a world that the layout does not fill is refused with all its sizes."""
    with pytest.raises(ConfigError) as caught:
        resolve(override(Config(), changes), world)
    for word in words.split("|"):
        assert word in str(caught.value)


def test_dp_fills_the_world() -> None:
    """dp 0 becomes world / (tp * cp * pp), or 1 where no world is known; nothing else changes."""
    config = override(Config(), ["parallel.tp=2", "parallel.pp=2"])
    assert resolve(config, 16).parallel.dp == 4
    assert resolve(config, None).parallel.dp == 1
    assert mesh(resolve(config, 16)).groups("dp")[0] == (0, 2, 4, 6)
    same = attrs.evolve(config, parallel=attrs.evolve(config.parallel, dp=4))
    assert resolve(config, 16) == same == resolve(same, None)
    assert mesh(override(config, ["parallel.order=pp-tp-dp-cp-ep"])).order == "pp-tp-dp-cp-ep"


def test_schedule_auto() -> None:
    """auto is none for one stage and 1f1b for more; a named schedule stays."""
    names = [["parallel.pp=1"], ["parallel.pp=2"], ["parallel.pp=2", "parallel.schedule=gpipe"]]
    assert [schedule_name(override(Config(), n)) for n in names] == ["none", "1f1b", "gpipe"]


# stages and microbatches


def split(layers: int, pp: int, *custom: int) -> list[int]:
    config = Config(
        model=ModelConfig(layers=layers), parallel=ParallelConfig(pp=pp, layers_per_stage=custom)
    )
    check(config)
    return [len(stage) for stage in stage_layers(config)]


def test_uneven_layers_by_hand() -> None:
    """Bug row 57: no block is lost, and the end stages are the lighter ones."""
    assert split(7, 2) == [4, 3]
    assert split(5, 4) == [1, 1, 2, 1]
    assert split(30, 4) == [7, 8, 8, 7]
    assert split(11, 4) == [3, 3, 3, 2]
    assert split(4, 1) == [4]
    assert split(3, 4, 1, 0, 2, 0) == [1, 0, 2, 0]


def test_embedding_and_loss_count_as_blocks() -> None:
    """8 blocks and the loss over 3 stages: 3, 3, 2; with the embedding too: 10 as 3, 4, 3."""
    config = override(Config(), ["model.layers=8", "parallel.pp=3", "parallel.count_loss=true"])
    assert [len(stage) for stage in stage_layers(config)] == [3, 3, 2]
    config = override(config, ["parallel.count_embedding=true"])
    assert [len(stage) for stage in stage_layers(config)] == [2, 4, 2]
    config = override(config, ["model.layers=2", "parallel.pp=4"])  # standalone at both ends
    assert [len(stage) for stage in stage_layers(config)] == [0, 1, 1, 0]


def test_schedules_of_the_configuration_are_those_that_exist() -> None:
    """Every name of the option is a schedule, and every schedule has its name."""
    assert {*get_args(Schedule)} - {"auto"} == {*SCHEDULES}


@given(layers=st.integers(1, 130), pp=st.integers(1, 40))
def test_stages_hold_each_block_once_in_order(layers: int, pp: int) -> None:
    """The stages joined are 0 .. layers-1, their sizes within one; or it is refused."""
    config = Config(model=ModelConfig(layers=layers), parallel=ParallelConfig(pp=pp))
    if pp > layers:
        with pytest.raises(ConfigError, match=rf"layers is {layers} but there are {pp} stages"):
            check(config)
        return
    check(config)
    stages = stage_layers(config)
    assert len(stages) == pp
    assert [block for stage in stages for block in stage] == list(range(layers))
    sizes = [len(stage) for stage in stages]
    assert max(sizes) - min(sizes) <= 1
    assert sizes[-1] == layers // pp


@given(sizes=st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any))
def test_custom_stages_are_taken_as_given(sizes: list[int]) -> None:
    """layers_per_stage gives exactly these consecutive runs."""
    config = Config(
        model=ModelConfig(layers=sum(sizes)),
        parallel=ParallelConfig(pp=len(sizes), layers_per_stage=tuple(sizes)),
    )
    check(config)
    stages = stage_layers(config)
    assert [len(stage) for stage in stages] == sizes
    assert [block for stage in stages for block in stage] == list(range(sum(sizes)))


@given(dp=st.integers(1, 6), local=st.integers(1, 30), data=st.data())
def test_microbatches_share_the_local_batch(dp: int, local: int, data: st.DataObject) -> None:
    """Sizes add up to global_batch / dp, differ by at most one, and the larger come first."""
    count = data.draw(st.integers(1, local))
    config = Config(
        parallel=ParallelConfig(dp=dp),
        train=TrainConfig(global_batch=dp * local, microbatches=count),
    )
    sizes = microbatch_sizes(config)
    assert len(sizes) == count
    assert sum(sizes) == local
    assert sizes[0] == math.ceil(local / count)
    assert list(sizes) == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


def test_model_sizes_worked_out_from_zero() -> None:
    """0 stands for the usual size, and a given one is kept."""
    model = ModelConfig(hidden=96, heads=6)
    assert (model.kv, model.head_size, model.ffn_size, model.gated) == (6, 16, 384, False)
    model = ModelConfig(hidden=96, heads=6, kv_heads=2, head_dim=10, ffn=50, activation="swiglu")
    assert (model.kv, model.head_size, model.ffn_size, model.gated) == (2, 10, 50, True)


def test_whole_numbers_do_for_real_fields() -> None:
    """A whole number is stored as a float, so that equal settings compare equal."""
    assert OptimConfig(lr=1) == OptimConfig(lr=1.0)
    assert type(OptimConfig(lr=1).lr) is float
