"""What ``hvdtrain VERB`` does, a folder for each verb."""
