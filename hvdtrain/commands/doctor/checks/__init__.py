"""What ``hvdtrain doctor`` looks at: each module finds facts, and judges them by pure rules."""
