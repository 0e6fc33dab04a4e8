"""Checkpoints: safetensors and a JSON index, atomic, for any layout, bitwise, without pickle."""

from mfun.checkpoint.background import Background
from mfun.checkpoint.disk import Disk
from mfun.checkpoint.folder import clean, damaged, is_whole, latest, saved, step_folder
from mfun.checkpoint.format import CheckpointError, Stored, read_header
from mfun.checkpoint.index import Entry, File, Index, read_index
from mfun.checkpoint.pieces import Piece
from mfun.checkpoint.reader import (
    Opened,
    Rules,
    check_files,
    fill,
    load,
    open_checkpoint,
)
from mfun.checkpoint.writer import Order, save

__all__ = [
    "Background",
    "CheckpointError",
    "Disk",
    "Entry",
    "File",
    "Index",
    "Opened",
    "Order",
    "Piece",
    "Rules",
    "Stored",
    "check_files",
    "clean",
    "damaged",
    "fill",
    "is_whole",
    "latest",
    "load",
    "open_checkpoint",
    "read_header",
    "read_index",
    "save",
    "saved",
    "step_folder",
]
