"""Inputs of any number to shards of scores on disk."""
