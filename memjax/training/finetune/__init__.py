"""Fine-tuning a pretrained backbone with a memory."""
