"""`python -m mfun`: the same as the command `mfun`."""

from __future__ import annotations

from mfun.cli import main

if __name__ == "__main__":
    main(prog_name="mfun")
