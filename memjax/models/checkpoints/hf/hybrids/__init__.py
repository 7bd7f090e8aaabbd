"""Published models with recurrent layers: their configurations and tensor names."""
