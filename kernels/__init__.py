"""Device kernels, one operation a file, and `reference`, their meaning in plain PyTorch."""
