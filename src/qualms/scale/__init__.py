"""Scores of any number of images, in a folder of .parquet files: by one process, or on Ray.

`shard_folder` is the folder, `shards` fills it in one process, `cluster` on Ray, whose workers run
a `BatchScorer` (`batch`).
"""
