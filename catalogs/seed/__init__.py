"""Facts, constants and fitted tables that ship with meshplan: YAML and JSON files, each entry with its source."""

from pathlib import Path

SEED_FOLDER = Path(__file__).parent
