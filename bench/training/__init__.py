"""Training of a small language model with each method of averaging gradients."""
