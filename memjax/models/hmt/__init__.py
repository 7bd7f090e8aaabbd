"""HMT and RMT: segment memory over any pretrained backbone."""
