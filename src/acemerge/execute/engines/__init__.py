"""Engines: who carries out the shards. A file here with `check` and `open_engine` is all it takes."""
