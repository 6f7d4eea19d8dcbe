"""Engines: how a plan's shards are carried out."""
