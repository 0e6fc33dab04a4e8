"""Compiles the theorems, looks at what they assume, and compares their models with the code."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from proofs import instances
from proofs.claims import Claim

HERE = Path(__file__).parent
FILES = (
    "Collectives",
    "Linear",
    "Softmax",
    "Buckets",
    "Mesh",
    "Sync",
    "Ring",
    "Network",
    "Fifo",
    "OneFOneB",
)
"""In the order in which they need each other."""

PACKAGES = "coq libcoq-mathcomp-ssreflect libcoq-mathcomp-algebra libcoq-mathcomp-zify"
INSTALL = f"""Rocq (Coq 8.16 or newer) with mathcomp is not here, so NOTHING IS PROVED by this run.
Install it, then run this again:
  Debian, Ubuntu:  apt-get install {PACKAGES}
  elsewhere:       opam install coq coq-mathcomp-ssreflect coq-mathcomp-algebra coq-mathcomp-zify"""
CLOSED = "Closed under the global context"


def theorems() -> dict[str, list[str]]:
    """The theorems of each file, in order.

    Example:
        >>> theorems()["Collectives"][:2]
        ['dual_types', 'dual_involutive']
    """
    return {name: re.findall(r"^Theorem (\w+)", source(name), re.M) for name in FILES}


def source(name: str) -> str:
    """The text of a file of theorems."""
    return (HERE / f"{name}.v").read_text()


def missing() -> str | None:
    """What to install; None if all is there."""
    if shutil.which("coqc") is None or shutil.which("coqchk") is None:
        return INSTALL
    with tempfile.TemporaryDirectory() as folder:
        modules = "all_ssreflect all_algebra zify"
        (Path(folder) / "There.v").write_text(f"From mathcomp Require Import {modules}.\n")
        return INSTALL if compile_("There", Path(folder)).returncode else None


def compile_(name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Compile one file of a folder."""
    return _run(["coqc", "-q", "-w", "none", "-Q", ".", "Mfun", f"{name}.v"], folder)


def _run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def claims() -> Iterator[Claim]:
    """Every file, its assumptions, the independent checker, and the models against the code."""
    if wrong := missing():
        yield Claim("the theorems are checked", wrong)
        return
    with tempfile.TemporaryDirectory() as name:
        yield from _claims(Path(name))


def _claims(folder: Path) -> Iterator[Claim]:
    for name, found in theorems().items():
        (folder / f"{name}.v").write_text(source(name))
        done = compile_(name, folder)
        yield Claim(f"{name}.v, {len(found)} theorems", done.stderr if done.returncode else None)
    yield assumptions(folder)
    yield checked_again(folder)
    for what in instances.FILES:
        yield instance(what, folder)


def assumptions(folder: Path) -> Claim:
    """`Print Assumptions` of every theorem says that there are none."""
    names = [f"{file}.{theorem}" for file, found in theorems().items() for theorem in found]
    lines = [f"From Mfun Require {' '.join(FILES)}."]
    lines += [f'Goal True. idtac "{name}". Abort. Print Assumptions {name}.' for name in names]
    (folder / "Assumptions.v").write_text("\n".join([*lines, ""]))
    done = compile_("Assumptions", folder)
    says = f"no axioms: {len(names)} theorems closed under the global context"
    if done.returncode:
        return Claim(says, done.stderr)
    expected = [line for name in names for line in (name, CLOSED)]
    printed = [line for line in done.stdout.splitlines() if line.strip()]
    return Claim(says, None if printed == expected else done.stdout)


def checked_again(folder: Path) -> Claim:
    """The independent checker reads the compiled files and finds no axiom in them.

    Of a module that mathcomp or ssreflect has sealed, coqchk lists the constants as axioms, since
    it does not look behind the seal (`Print Assumptions` does, and finds them defined).
    """
    modules = [f"Mfun.{name}" for name in FILES]
    norec = [word for module in modules for word in ("-norec", module)]
    done = _run(["coqchk", "-silent", "-o", "-Q", ".", "Mfun", *norec], folder)
    said = done.stdout + done.stderr
    listed = re.search(r"\* Axioms:(.*?)\n\s*\n", said, re.S)
    unsafe = re.findall(r"(?:relying on|assumed).*?:\s*(?!<none>)(\S+)", said)
    names = [] if listed is None else listed[1].replace("<none>", "").split()
    ours = [name for name in names if not name.startswith(("mathcomp.", "Coq.ssr."))]
    fine = not done.returncode and listed is not None and not ours and not unsafe
    return Claim("coqchk accepts the compiled files, no axiom in them", None if fine else said)


def instance(what: str, folder: Path) -> Claim:
    """The code computes what the model of the theorem computes."""
    says = f"mfun's {what} are the model's"
    try:
        text, about = instances.text(what)
    except Exception as error:
        return Claim(says, f"{type(error).__name__}: {error}")
    says += f", {len(about)} goals"
    name = f"Instances_{what}"
    (folder / f"{name}.v").write_text(text)
    done = compile_(name, folder)
    if not done.returncode:
        return Claim(says)
    at = re.search(r"line (\d+)", done.stderr)
    where = about.get(int(at[1]), "the file") if at else "the file"
    return Claim(says, f"not so: {where}\n{done.stderr[:1500]}")


if __name__ == "__main__":  # for make: what to install, if anything
    if missing():
        sys.exit(print(PACKAGES) or 1)
