"""Device kernels, one operation per file, and `reference`, their definition in plain PyTorch."""
