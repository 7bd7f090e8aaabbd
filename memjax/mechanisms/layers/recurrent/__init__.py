"""The block around a recurrent memory: its style, projections and flow."""
