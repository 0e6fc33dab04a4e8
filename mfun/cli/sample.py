"""`mfun sample`: text from a run's newest checkpoint."""

from __future__ import annotations

from pathlib import Path

import click


@click.command(
    short_help="Write text with what a run has learned.",
    epilog="""
\b
EXAMPLES
  mfun sample runs/tiny-20250131-120000 --prompt "def "
  mfun sample runs/second --prompt "import " --temperature 0.5 --tokens 400 --seed 3
  mfun sample runs/second --prompt "class A" --temperature 0
""",
)
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--prompt", default="", help="Text to go on from; by default a new line.")
@click.option("--tokens", default=200, show_default=True, type=click.IntRange(1), help="How many.")
@click.option(
    "--temperature",
    default=0.8,
    show_default=True,
    type=click.FloatRange(0),
    help="Below 1 the likelier is favoured; 0 always takes the likeliest.",
)
@click.option(
    "--top-k",
    default=0,
    show_default=True,
    type=click.IntRange(0),
    help="Draw among so many of the likeliest; 0 among all.",
)
@click.option("--seed", default=0, show_default=True, type=int, help="Another seed, another text.")
@click.option(
    "--tokenizer", default="", help="bytes or a tokenizer.json; by default the run's own."
)
def command(
    run: Path,
    prompt: str,
    tokens: int,
    temperature: float,
    top_k: int,
    seed: int,
    tokenizer: str,
) -> None:
    """Write text with the newest checkpoint of the run in folder RUN.

    The checkpoint may be of any layout; it is put together on one device. It may be written while
    the run goes on.
    """
    from mfun.train.failure import EXPECTED
    from mfun.train.sampling import generate, open_model, texts

    try:
        model = open_model(run, tokenizer)
        click.echo(prompt, nl=False)
        drawn = generate(model, prompt, tokens, temperature=temperature, top_k=top_k, seed=seed)
        for text in texts(model.tokenizer, drawn):
            click.echo(text, nl=False)
        click.echo()
    except EXPECTED as error:
        raise click.ClickException(str(error)) from error
