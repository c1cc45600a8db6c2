"""Writing files that are there whole or not at all."""

import os
import secrets
from pathlib import Path


def write_whole(file: Path, content: bytes) -> None:
    """Writes beside `file` and renames: a file of the final name is whole. An OSError leaves nothing behind."""
    temporary = file.with_name(f".{file.name}.writing-{secrets.token_hex(4)}")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, file)
    finally:
        temporary.unlink(missing_ok=True)
