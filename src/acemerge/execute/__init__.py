"""Carrying out plans: passes before, shards, engines, the whole way to a published folder."""
