"""Hugging Face's formats: the hub, `config.json`, tensor names, safetensors."""
