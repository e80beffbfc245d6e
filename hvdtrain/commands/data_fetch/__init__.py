"""``hvdtrain data-fetch``: downloads a public data set, on a node that has network."""
