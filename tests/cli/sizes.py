"""Sizes of a tiny model for commands; importing them imports nothing else."""

TRANSFORMER = """
    transformer-tiny --model.model-dim 16 --model.hidden-dim 16 --model.num-layers 1
    --model.mechanisms.0.model-dim 16 --model.mechanisms.0.num-heads 2
    --model.mechanisms.0.num-kv-heads 1 --model.mechanisms.0.head-dim 8
    --model.mechanisms.0.window 8
""".split()
