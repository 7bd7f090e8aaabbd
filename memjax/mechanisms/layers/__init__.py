"""Parts of mechanisms: projections, gates, RoPE and attention."""
