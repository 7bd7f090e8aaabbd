"""Writes GGUF files by the reference library."""

import pytest

gguf = pytest.importorskip("gguf", reason="needs the optional package gguf")


def write(path, tensors, entries=(), architecture="llama", tensors_a_part=0):
    """Writes a file by the library; a tensor is an array or (raw bytes, type)."""
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=tensors_a_part)
    for name, value in dict(entries).items():
        match value:
            case bool():
                writer.add_bool(name, value)
            case int():
                writer.add_uint32(name, value)
            case float():
                writer.add_float32(name, value)
            case str():
                writer.add_string(name, value)
            case _:
                writer.add_array(name, value)
    for name, value in tensors.items():
        raw, kind = value if isinstance(value, tuple) else (value, None)
        writer.add_tensor(name, raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
