"""Passes over moments by kernels of a device (csrc/optim/moments.cu), which wait for nothing.

What a step decides by numbers (the coefficient of the momentum, how much of a gradient counts, how
far second moments decay) is on the device: the host queues a step before it knows them. The bits
are those of the passes on the CPU.
"""
