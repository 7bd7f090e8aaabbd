"""Steps of decoding: kernels of one token, writes in place, and open chunks."""
