"""The launches of the CUDA kernels of csrc/codecs from Python, compiled by NVRTC."""
