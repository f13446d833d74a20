"""Training data: which samples each rank of a trial sees."""
