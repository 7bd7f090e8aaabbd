"""What mechanisms are made of: projections, gates, RoPE and attention."""
