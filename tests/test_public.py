"""The public names are listed once, exist, and are known to type checkers."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import mfun


def test_every_public_name_exists():
    """Each name of __all__ can be had, and a wrong one says what there is."""
    for name in mfun.__all__:
        assert getattr(mfun, name) is not None
    with pytest.raises(AttributeError, match="simulate"):
        mfun.simulat  # noqa: B018


def test_type_checkers_see_the_same_names():
    """The TYPE_CHECKING block imports exactly the names of __all__, from the same homes."""
    body = ast.parse(Path(mfun.__file__).read_text()).body
    block = next(n for n in body if isinstance(n, ast.If))
    found = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    homes = {name: home for home, names in mfun._HOMES.items() for name in names.split()}
    assert found == homes and set(mfun.__all__) == {*homes, "__version__"}


def test_importing_mfun_does_not_import_torch():
    """`import mfun` is quick: torch comes with the first name that needs it."""
    code = "import sys, mfun; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
