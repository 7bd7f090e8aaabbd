"""Folders in buckets, gs:// and s3://, and their local copies."""
