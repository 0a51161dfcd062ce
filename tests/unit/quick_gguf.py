"""Importing this makes the package gguf read the fields of a file several times as fast, with the same result.

Its reader slices a memory map once for each of 100,000 texts of a vocabulary, which numpy makes expensive; transformers
reads each file twice, and makes the table of tensors' names once for each layer and tensor.
"""
import functools
import types

import gguf
import gguf.gguf_reader
import numpy

gguf.gguf_reader.np = types.SimpleNamespace(**vars(numpy) | {"memmap": lambda path, mode: numpy.fromfile(path, dtype=numpy.uint8)})
gguf.GGUFReader = functools.lru_cache(gguf.GGUFReader)
gguf.get_tensor_name_map = functools.lru_cache(gguf.get_tensor_name_map)
