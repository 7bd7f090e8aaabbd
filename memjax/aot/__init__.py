"""Steps compiled ahead of time: does it fit on a TPU, and what does it cost?"""
