"""Properties of conversion and inspection for planted faults: small folders written by hand."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mfun import optim
from mfun.checkpoint import CheckpointError, Order, Piece
from mfun.comm import ProcessWorld, single_groups
from mfun.config import Config, load, resolve, to_toml
from mfun.convert import HFError, from_hf, read_config, to_hf
from mfun.inspect import compare, open_source, statistics
from mfun.train import starting
from mfun.train.plan import plan
from mfun.train.ranks import Peers, Place
from mfun.train.step import State, Trainer
from tests.properties import Broken, named

D, H, G, K, F, V, S = 8, 4, 2, 2, 6, 11, 5
LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": V, "hidden_size": D, "num_hidden_layers": 1,
    "num_attention_heads": H, "num_key_value_heads": G, "intermediate_size": F,
    "max_position_embeddings": S, "rms_norm_eps": 0.25, "rope_theta": 7.0,
    "rope_scaling": {"type": "linear", "factor": 3.0},
}  # fmt: skip
GPT2: dict[str, Any] = {
    "model_type": "gpt2", "vocab_size": V, "n_embd": D, "n_layer": 1, "n_head": H, "n_inner": F,
    "n_positions": S,
}  # fmt: skip
LLAMA_SHAPES = {
    "model.embed_tokens.weight": (V, D),
    "model.layers.0.input_layernorm.weight": (D,),
    "model.layers.0.self_attn.q_proj.weight": (H * K, D),
    "model.layers.0.self_attn.k_proj.weight": (G * K, D),
    "model.layers.0.self_attn.v_proj.weight": (G * K, D),
    "model.layers.0.self_attn.o_proj.weight": (D, H * K),
    "model.layers.0.post_attention_layernorm.weight": (D,),
    "model.layers.0.mlp.gate_proj.weight": (F, D),
    "model.layers.0.mlp.up_proj.weight": (F, D),
    "model.layers.0.mlp.down_proj.weight": (D, F),
    "model.norm.weight": (D,),
    "lm_head.weight": (V, D),
}
GPT2_SHAPES = {
    "transformer.wte.weight": (V, D),
    "transformer.wpe.weight": (S, D),
    **{f"transformer.h.0.{n}.{p}": (D,) for n in ("ln_1", "ln_2") for p in ("weight", "bias")},
    "transformer.h.0.attn.c_attn.weight": (D, 3 * D),
    "transformer.h.0.attn.c_attn.bias": (3 * D,),
    "transformer.h.0.attn.c_proj.weight": (D, D),
    "transformer.h.0.attn.c_proj.bias": (D,),
    "transformer.h.0.mlp.c_fc.weight": (D, F),
    "transformer.h.0.mlp.c_fc.bias": (F,),
    "transformer.h.0.mlp.c_proj.weight": (F, D),
    "transformer.h.0.mlp.c_proj.bias": (D,),
    "transformer.ln_f.weight": (D,),
    "transformer.ln_f.bias": (D,),
}


@contextmanager
def folders(
    options: dict[str, Any], shapes: dict[str, Any], change: Callable[..., Any] = lambda t: None
) -> Iterator[tuple[Path, dict[str, Tensor]]]:
    """A folder with `theirs` in it, and its tensors."""
    generator = torch.Generator().manual_seed(0)
    held = {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in shapes.items()}
    change(held)
    with tempfile.TemporaryDirectory() as name:
        theirs = Path(name) / "theirs"
        theirs.mkdir()
        (theirs / "config.json").write_text(json.dumps(options))
        save_file(held, theirs / "model.safetensors")
        yield Path(name), held


def converted(root: Path) -> dict[str, Tensor]:
    from_hf(root / "theirs", root / "ours")
    return {n[7:]: x.read() for n, x in open_source(root / "ours").tensors.items()}


def equal(what: str, have: Tensor, want: Tensor) -> None:
    if have.shape != want.shape or float((have - want).abs().max()) > 1e-12:
        raise Broken(f"{what} is another")


@named
def llama_is_read() -> None:
    """queries, keys, values, gate and up of a Llama are what its matrices give."""
    with folders(LLAMA, LLAMA_SHAPES) as (root, t):
        ours = converted(root)
        x = torch.randn(D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        at = "model.layers.0.self_attn."
        equal("q", ours["blocks.0.attn.q"] @ x, (t[f"{at}q_proj.weight"] @ x).view(H, K))
        for i, name in enumerate("kv"):
            right = (t[f"{at}{name}_proj.weight"] @ x).view(G, K)
            equal(name, ours["blocks.0.attn.kv"][i] @ x, right)
        for i, name in enumerate(("gate", "up")):
            right = t[f"model.layers.0.mlp.{name}_proj.weight"] @ x
            equal(name, ours["blocks.0.mlp.up"][i] @ x, right)
        y = torch.randn(H, K, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        right = t[f"{at}o_proj.weight"] @ y.flatten()
        equal("o", torch.einsum("dhk,hk->d", ours["blocks.0.attn.out"], y), right)


@named
def gpt2_is_read() -> None:
    """c_attn of a GPT-2 multiplies from the right and gives q, then k, then v, by head."""
    with folders(GPT2, GPT2_SHAPES) as (root, t):
        ours = converted(root)
        x = torch.randn(D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        at = "transformer.h.0."
        three = x @ t[f"{at}attn.c_attn.weight"] + t[f"{at}attn.c_attn.bias"]
        for i, right in enumerate(three.split(D)):
            have = ours["blocks.0.attn.qkv"][i] @ x + ours["blocks.0.attn.qkv_bias"][i]
            equal("qkv"[i], have, right.view(H, D // H))
        equal("c_fc", ours["blocks.0.mlp.up"] @ x, x @ t[f"{at}mlp.c_fc.weight"])


@named
def bits_come_back() -> None:
    """what goes in comes out with every bit, and config.json with every option."""
    for options, shapes in ((LLAMA, LLAMA_SHAPES), (GPT2, GPT2_SHAPES)):
        with folders(options, shapes) as (root, held):
            converted(root)
            to_hf(root / "ours", root / "back", shard=600)
            back: dict[str, Tensor] = {}
            for file in (root / "back").glob("*.safetensors"):
                back |= load_file(file)
            wrong = [n for n in held if n not in back or not torch.equal(back[n], held[n])]
            if wrong or back.keys() != held.keys():
                raise Broken(f"tensors differ: {wrong}")
            a, b = (read_config(json.loads((root / n / "config.json").read_text()))[1]
                    for n in ("theirs", "back"))  # fmt: skip
            if a != b:
                raise Broken("the options differ")


@named
def options_are_read() -> None:
    """epsilon, base and stretching of the angles are the file's."""
    model = read_config(LLAMA)[1]
    for key, want in (("norm_eps", 0.25), ("rope_theta", 7.0), ("rope_scaling", "linear"),
                      ("rope_factor", 3.0), ("kv_heads", G)):  # fmt: skip
        if getattr(model, key) != want:
            raise Broken(f"{key} is {getattr(model, key)!r}, not {want!r}")


@named
def strange_folders_are_refused() -> None:
    """an unknown option, a tensor too many, and a second table that differs are named."""
    tables = {**GPT2_SHAPES, "lm_head.weight": (V, D)}
    for options, shapes, says in (
        ({**LLAMA, "softcap": 3.0}, LLAMA_SHAPES, "softcap"),
        (LLAMA, {**LLAMA_SHAPES, "adapter": (3,)}, "adapter"),
        (GPT2, tables, "lm_head.weight"),
    ):
        with folders(options, shapes) as (root, _):
            try:
                converted(root)
            except HFError as error:
                if says not in str(error):
                    raise Broken(f"{says} is not named: {error}") from error
            else:
                raise Broken(f"{says} is accepted")


def start_from(root: Path, *settings: str) -> tuple[Config, State]:
    asked = [f"train.init_from={root / 'ours'}", f"model.vocab={V}", *settings]
    config = resolve(load(str(root / "ours" / "config.toml"), asked), 1)
    trainer = Trainer(plan(config), ProcessWorld(single_groups()))
    return config, starting.start(trainer, Peers(Place()))


@named
def masters_are_of_the_weights() -> None:
    """a run that starts from weights has masters of these; another model does not start."""
    with folders(LLAMA, LLAMA_SHAPES) as (root, held):
        converted(root)
        _, state = start_from(root, "precision.policy=bf16")
        right = held["lm_head.weight"].bfloat16()
        equal("head", state.params["head"]["weight"].float(), right.float())
        masters = {n: x for n, x in optim.state_tensors(state.opt).items() if "master" in n}
        (found,) = (x for n, x in masters.items() if n.endswith("head.weight"))
        equal("the head's master", found, right.float())
        try:
            start_from(root, "model.rope_theta=9")
        except CheckpointError as error:
            if "rope_theta" not in str(error):
                raise Broken(f"rope_theta is not named: {error}") from error
        else:
            raise Broken("another model is started from")


@named
def numbers_are_right() -> None:
    """norm, deviation and dead rows of a tensor that is cut, read a little at a time."""
    x = torch.tensor([[3.0, 4.0, 0.0, 0.0], [0.0] * 4, [0.0, 0.0, 0.0, 5.0]])
    halves = (x[:, :2], x[:, 2:])
    with tempfile.TemporaryDirectory() as name:
        orders = [
            Order(
                run_dir=Path(name),
                step=0,
                tensors={"x": half},
                pieces={"x": Piece(global_shape=(3, 4), start=(0, 2 * i), box=(3, 2))},
                rank=i,
                world=2,
                config=to_toml(Config()),
            )
            for i, half in enumerate(halves)
        ]
        orders[0].prepare()
        for order in orders:
            order.write()
        orders[0].commit()
        source = open_source(Path(name))
        found = statistics(source.tensors["x"], 3)
        want = {"norm": 50**0.5, "mean": 1.0, "std": (50 / 12 - 1) ** 0.5, "dead": 1, "zeros": 9}
        for key, value in want.items():
            if abs(getattr(found, key) - value) > 1e-12:
                raise Broken(f"{key} is {getattr(found, key)}, not {value}")
        save_file({"x": x.clone()}, Path(name) / "same.safetensors")
        save_file({"x": x + 1e-3 * (x == 5)}, Path(name) / "other.safetensors")
        for file, want_kind in (("same", "equal"), ("other", "values")):
            (one,) = compare(source, open_source(Path(name) / f"{file}.safetensors"))
            if one.kind != want_kind or one.count != (want_kind == "values"):
                raise Broken(f"{file} is {one.kind} in {one.count} elements")
