"""The eight steps for PyTorch."""
