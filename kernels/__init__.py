"""Device kernels, one operation per file; `reference` implements them in plain PyTorch."""
