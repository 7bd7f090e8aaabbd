"""One process at a time writes in a folder, on a disk or in a bucket."""
