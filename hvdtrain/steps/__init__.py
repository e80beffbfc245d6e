"""The framework-free half of the eight steps: *what* each must do, as plain functions."""
