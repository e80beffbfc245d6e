"""The problems: data, network and loss, without ranks."""
