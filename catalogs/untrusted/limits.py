"""How large, how deep and how long an input may be. Every reader takes its limits from here.

The values are assumed, not measured on users: each is several times the largest input that meshplan's own formats
need, and small enough that one input of a megabyte takes seconds and stays below 2 GiB of memory.
"""

from __future__ import annotations

MAX_JSON_BYTES = 64 * 2**20  # a trace of routing written as JSON
MAX_YAML_BYTES = 2**20  # a spec; pure Python reads a megabyte in seconds
MAX_CATALOG_YAML_BYTES = 16 * 2**20  # an export of the whole catalog has 2 MiB
MAX_TEXT_BYTES = 256 * 2**20  # a log, a CSV or a trace after decompression
MAX_ARRAYS_BYTES = 512 * 2**20  # all arrays of one archive after decompression
MAX_ROWS = 2_000_000  # of a CSV or of a file with one record a line; measured: 8 s and 0.5 GiB as a trace

MAX_ALIASES = 100
MAX_ALIAS_EXPANSION = 2**20  # characters that a YAML document grows by when its aliases are written out
MAX_DEPTH = 50
MAX_DIGITS = 19  # of a whole number: 64 bits
