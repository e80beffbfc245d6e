"""``hvdtrain data-fetch``: download a public dataset, on a node with network access."""
