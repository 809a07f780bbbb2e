"""Stands in for llama-quantize where llama.cpp is not installed: writes matrices as Q8_0, with the
package gguf.
"""

import sys

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter
from gguf.quants import dequantize, quantize

source, target, kind = sys.argv[1:]
reader = GGUFReader(source)
writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
for tensor in reader.tensors:
    values = dequantize(np.asarray(tensor.data), tensor.tensor_type).astype(np.float32)
    if len(tensor.shape) > 1 and values.shape[-1] % 32 == 0:
        writer.add_tensor(
            tensor.name, quantize(values, GGMLQuantizationType[kind]), raw_dtype=GGMLQuantizationType[kind]
        )
    else:
        writer.add_tensor(tensor.name, values)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
