"""``hvdtrain scaling``: how well a training scales, and why not better."""
