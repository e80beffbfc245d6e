"""``hvdtrain report``: a run or a study as one page."""
