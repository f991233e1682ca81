"""libpycomm.so with CUDA kernels, compiled by CUDA 13. `import pycomm` loads it from here."""
