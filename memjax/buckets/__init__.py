"""Folders in buckets, gs:// and s3://, and their copies on this machine."""
