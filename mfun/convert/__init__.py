"""Hugging Face folders as mfun checkpoints and back: dense models, bitwise, tensor by tensor."""

from mfun.convert.exporting import to_hf
from mfun.convert.families import FAMILIES, Family, HFError, Row
from mfun.convert.folder import tokenizer_file
from mfun.convert.importing import Converted, from_hf
from mfun.convert.read_config import read_config
from mfun.convert.write_config import family_of, write_config

__all__ = [
    "FAMILIES",
    "Converted",
    "Family",
    "HFError",
    "Row",
    "family_of",
    "from_hf",
    "read_config",
    "to_hf",
    "tokenizer_file",
    "write_config",
]
