"""Checkpoints: one safetensors file a rank and a JSON index, atomic, bitwise, without pickle."""

from mfun.checkpoint.disk import Disk
from mfun.checkpoint.folder import clean, is_whole, latest, saved, step_folder
from mfun.checkpoint.index import CheckpointError, Entry, File, Index, Piece, read_index
from mfun.checkpoint.reader import Loaded, check_files, load
from mfun.checkpoint.writer import save

__all__ = [
    "CheckpointError",
    "Disk",
    "Entry",
    "File",
    "Index",
    "Loaded",
    "Piece",
    "check_files",
    "clean",
    "is_whole",
    "latest",
    "load",
    "read_index",
    "save",
    "saved",
    "step_folder",
]
